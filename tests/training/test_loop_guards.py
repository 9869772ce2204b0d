"""Whole runs with a bad step in them, against a plain loop that knows nothing of guards and leaves the step out."""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from ranks import run
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from toys import taken

import lockstep
from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.config.sections import Guards, Optim
from lockstep.data.sampler import Shuffled
from lockstep.errors import LockstepError
from lockstep.guards.nonfinite import DeferredReader
from lockstep.logging.jsonl import read
from lockstep.optim.optimizers import adamw
from lockstep.optim.schedule import factor
from lockstep.training.step import guards as run_guards

BATCH, MICRO = 4, 2


class Seen(nn.Module):
    """Two layers, and a buffer that each forward of the training moves: a running mean of what was seen."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.register_buffer("mean", torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, x):
        if self.training:
            self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
        return self.last(self.first(x - 0.01 * self.mean).tanh())


class Rows(torch.utils.data.Dataset):
    """Rows of numbers; those that are named are multiplied by something large, or are NaN."""

    draws_random = False

    def __init__(self, count, bad, times):
        self.rows = torch.randn(count, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for sample in bad:
            self.rows[sample] *= times

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@dataclass
class Task(lockstep.Task):
    """A regression with bad samples; the model's running mean is that of each micro-batch."""

    reduction = "micro-batch"

    size: int
    bad: tuple = ()
    times: float = float("nan")

    def model(self):
        return Seen()

    def dataset(self, split):
        return Rows(self.size, self.bad, self.times) if split == "train" else None

    def collate(self, samples):
        return torch.stack(samples)

    def count(self, batch):
        return len(batch)

    def loss(self, model, batch):
        return (model(batch[:, :3]) - batch[:, 3:]).square().sum() / len(batch)


def samples_of(step, count, seed=0):
    """The samples of a step, in order."""
    return Shuffled(count, seed).at(step * BATCH, (step + 1) * BATCH)[1].tolist()


def settings(folder, steps, **changes):
    guards = Guards(**changes.pop("guards", {}))
    common = {"experiment_name": "r", "save_dir": str(folder), "precision": "float64", "lr": 0.01, "log_freq": 1}
    common |= {"batch_size": BATCH, "micro_batch_size": MICRO, "max_steps": steps, "ckpt_freq": 3}
    return Config(
        **common
        | {"guards": guards, "optim": Optim(warmup_steps=2, clip=1.0, beta2=0.95, weight_decay=0.1, floor=0.1)}
        | changes
    )


def by_hand(task, config, left_out=()):
    """(the model, the norms) of a loop in plain PyTorch that neither computes nor counts the steps left out."""
    torch.manual_seed(config.seed)
    model, optim = task.model().double(), config.optim
    data, steps = task.dataset("train"), config.max_steps
    optimizer = adamw(
        model, lr=config.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay
    )
    norms = []
    for step in range(steps):
        if step in left_out:
            continue
        samples = samples_of(step, len(data))
        for place in range(0, BATCH, MICRO):
            batch = task.collate([data[sample] for sample in samples[place : place + MICRO]])
            (task.loss(model, batch) * MICRO / BATCH).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip).item())
        for group in optimizer.param_groups:
            group["lr"] = config.lr * factor(step, steps, optim.warmup_steps, optim.floor)
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def go(world, config, task):
    """The steps taken, in order: a step may come twice after a rollback; and the exit code."""
    return taken(config, task, world)


def in_the_body(world, config, task, lag):
    """After each step, whether all parameters are as the optimizer has them: split."""
    DeferredReader.lag = lag
    with lockstep.Run(config, task, world) as session:
        return [all(isinstance(p, DTensor) for p in session.model.parameters()) for step in session]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_after_a_step_that_was_left_out_fsdp_is_split_again(tmp_path, lag):
    """The search for the bad sample is a forward that no backward follows, after which torch leaves it gathered."""
    config = settings(tmp_path, 6, guards={"nonfinite": "skip"}, engine="fsdp", ckpt_freq=0)
    assert run(in_the_body, 2, config, Task(24, bad=(samples_of(3, 24)[1],)), lag) == [[True] * 6] * 2


def kept(folder, name="r"):
    """What the newest checkpoint of a single process holds of the model: name -> tensor."""
    path = checkpoint.newest(folder / name, say=print)
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return {key.removeprefix("model/"): value for key, value in found.items() if key.startswith("model/")}


def alike(found, model):
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=key)


def losses(folder, name="r"):
    return {r["global_step"]: r for r in read(folder / name / "metrics.jsonl") if "running_loss" in r}


@pytest.fixture(params=[0, 1, 2], ids=["at once", "late", "later"])
def lag(request, monkeypatch):
    """How late norms are read: 1 stands in for a device."""
    monkeypatch.setattr(DeferredReader, "lag", request.param)
    return request.param


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("bad", [6, 7])  # the step that a rollback resumes at, and the one after
def test_not_finite_step_leaves_weights_and_buffers_unchanged(tmp_path, policy, bad, lag):
    """The forward of the bad step moves the buffer, and so does the second, which looks for the origin."""
    task = Task(48, bad=(samples_of(bad, 48)[2],))
    config = settings(tmp_path, 12, guards={"nonfinite": policy})
    taken, code = go(None, config, task)
    assert code == 0
    # A checkpoint is due after the body of step 8, and none is written before all steps have been looked at.
    assert taken == (list(range(12)) if policy == "skip" else [*range(min(bad + lag, 9)), *range(6, 12)])
    wanted, norms = by_hand(task, config, left_out=(bad,))
    alike(kept(tmp_path), wanted)
    found = losses(tmp_path)
    assert [found[k]["grad_norm"] for k in range(1, bad + 1)] == pytest.approx(norms[:bad])
    assert [found[k]["grad_norm"] for k in range(bad + 2, 13)] == pytest.approx(norms[bad:])
    told = bad + 1 if policy == "skip" else 7  # a resumed run knows of it from its first record on
    assert {k for k, r in found.items() if r.get("steps_left_out")} == set(range(told, 13))
    assert {r["steps_left_out"] for r in found.values() if "steps_left_out" in r} == {1}


def test_not_finite_step_stops_the_run_and_nothing_is_kept(tmp_path, lag):
    task = Task(48, bad=(samples_of(7, 48)[3],))
    config = settings(tmp_path, 12)
    with pytest.raises(LockstepError, match=r"step 8: the gradient is not finite .* micro-batch 1 \(samples"):
        go(None, config, task)
    alike(kept(tmp_path), by_hand(task, settings(tmp_path, 12, stop_at=6), range(6, 12))[0])
    assert list(losses(tmp_path)) == list(range(1, 8))  # the step that stopped it has no record, whenever it was read


def test_one_step_more_than_the_limit_stops_the_run(tmp_path, lag):
    bad = tuple(samples_of(step, 48)[0] for step in (2, 5, 8))
    config = settings(tmp_path, 12, guards={"nonfinite": "skip", "limit": 2})
    with pytest.raises(LockstepError, match="step 9: .*2 steps were skipped before"):
        go(None, config, Task(48, bad))
    assert go(None, settings(tmp_path, 12, guards={"nonfinite": "skip", "limit": 3}), Task(48, bad))[1] == 0
    assert losses(tmp_path)[12]["steps_left_out"] == 3


SPIKE = 37  # 32 norms are known by then


@pytest.mark.parametrize(("policy", "freq"), [("skip", 3), ("rollback", 3), ("rollback", SPIKE)])
def test_a_spike_that_is_left_out_leaves_the_weights(tmp_path, policy, freq, lag):
    """The last: at the very step that the run resumes at, before enough is known again to call anything a spike."""
    task = Task(180, bad=(samples_of(SPIKE, 180)[1],), times=1e3)
    config = settings(tmp_path, 45, guards={"spike": policy}, ckpt_freq=freq)
    assert go(None, config, task)[1] == 0
    wanted, norms = by_hand(task, config, left_out=(SPIKE,))
    assert torch.tensor(norms).median() * 3 > max(norms), "nothing else is a spike"
    alike(kept(tmp_path), wanted)
    assert losses(tmp_path)[45]["steps_left_out"] == 1


@pytest.mark.parametrize("policy", ["warn", "off"])
def test_a_spike_that_is_not_left_out_trains(tmp_path, policy, lag, capsys):
    """The first is on screen, and all are counted."""
    task = Task(180, bad=(samples_of(SPIKE, 180)[1], samples_of(42, 180)[1]), times=1e3)
    config = settings(tmp_path, 45, guards={"spike": policy})
    assert go(None, config, task)[1] == 0
    alike(kept(tmp_path), by_hand(task, config)[0])
    said = (tmp_path / "r" / "logs" / "rank-00000.log").read_text()
    seen = capsys.readouterr()
    warns = policy == "warn"
    assert [text.count("the gradient's norm") for text in (said, seen.err)] == ([2, 1] if warns else [0, 0])
    assert f"step {SPIKE + 1}: the gradient's norm" in seen.err or not warns
    assert losses(tmp_path)[45].get("spikes") == (2 if warns else None)
    assert ("gradient spikes  2 " in seen.out) == warns
    assert "steps_left_out" not in losses(tmp_path)[45]


class Flipped(Task):
    """On the rank that is named, the weights change a little before the forward of step 5."""

    def __init__(self, victim):
        super().__init__(48)
        self.first, self.victim = self.dataset("train")[samples_of(5, 48)[MICRO]], victim

    def loss(self, model, batch):
        if self.victim and torch.equal(batch[0], self.first):  # rank 1 has the second micro-batch of two
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-9
        return super().loss(model, batch)


def flipped(world, folder, steps, freq, victim, lag):
    DeferredReader.lag = lag
    task = Flipped(world.rank == victim)
    try:
        guards = {"desync_freq": freq, "straggler": 0.0}
        go(world, settings(folder, 12, stop_at=steps, guards=guards, ckpt_freq=0), task)
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("steps", "freq", "victim", "lag", "line"),
    [
        (12, 4, 1, 0, "after step 8 rank 0 and rank 1 differ"),
        (12, 4, 1, 1, "after step 8 rank 0 and rank 1 differ"),
        (7, 4, 1, 0, "after step 7 rank 0 and rank 1 differ"),  # what is kept at the end is compared too
        (7, 100, 1, 2, "after step 7 rank 0 and rank 1 differ"),
        (7, 0, 1, 0, ""),
        (12, 1, None, 1, ""),
    ],
)
def test_replicas_are_compared_after_the_right_steps(tmp_path, steps, freq, victim, lag, line):
    said = run(flipped, 2, tmp_path, steps, freq, victim, lag)
    assert all(each.startswith(line) and bool(each) == bool(line) for each in said), said
    if line and lag < 2:  # those before it were written, and at the end its own
        assert list(losses(tmp_path)) == list(range(1, int(line.split()[2]) + (steps == 7)))


class Slow(Rows):
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)


class Late(Task):
    """A training set that one rank takes long to load."""

    def dataset(self, split):
        return (Slow if self.slow else Rows)(self.size, (), 1.0) if split == "train" else None


def late(world, folder, ratio):
    """Whether each line on a slow rank is for the log file alone, in a run whose first minute ends after the first."""
    task, shown = Late(200), []
    task.slow = world.rank == 1
    run_guards.time = SimpleNamespace(monotonic=lambda: 61.0 if shown else 0.0)

    def keep(record):
        if "is slow: " in record.getMessage():
            shown.append(record.only_file)
        return True

    run_guards._LOG.addFilter(keep)
    go(world, settings(folder, 40, guards={"straggler": ratio}, ckpt_freq=0), task)
    run_guards._LOG.removeFilter(keep)
    run_guards.time = time
    return shown


@pytest.mark.parametrize("ratio", [1.2, 0.0])
def test_slow_rank_is_in_the_log_and_a_minute_later_on_screen(tmp_path, ratio):
    assert run(late, 2, tmp_path, ratio) == [[True, False] * bool(ratio), []]
    said = (tmp_path / "r" / "logs" / "rank-00000.log").read_text()
    assert said.count("rank 1 is slow: ") == said.count("of loading data, the others") == 2 * bool(ratio)
