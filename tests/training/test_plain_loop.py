"""At the defaults one device is the plain loop, bit for bit, and ranks change it by rounding alone."""

import pytest
import torch
from ranks import RankError, run
from small_runs import config
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep import checkpoint
from lockstep.data.sampler import Sequential
from lockstep.errors import ConfigError

RATE, BATCH, SAMPLES, STEPS = 0.05, 10, 37, 4  # the last step has 7 samples
WEIGHTS = torch.tensor([5.0, 1.0, 0.2], dtype=torch.float64)
PLAIN = {"name": "sgd", "schedule": "constant", "warmup_steps": 0, "clip": 0.0, "weight_decay": 0.0, "momentum": 0.9}


class Rows(torch.utils.data.Dataset):
    """Vectors with a class, which is -100 for every fourth."""

    draws_random = False

    def __init__(self, samples):
        draw = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 5, generator=draw, dtype=torch.float64)
        self.label = torch.randint(3, (samples,), generator=draw)
        self.masked = self.label.where(torch.arange(samples) % 4 > 0, -100)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"index": index, "x": self.x[index], "label": self.label[index], "masked": self.masked[index]}


class Plain(lockstep.Task):
    """A mean whose `reduction` is not declared."""

    samples = SAMPLES

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def dataset(self, split):
        return Rows(self.samples) if split == "train" else None

    def order(self, samples, seed):
        return Sequential(samples)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["label"])


class Sum(Plain):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum")


class Contrastive(Plain):
    """Each sample is compared with all others of its batch."""

    def loss(self, model, batch):
        a, b = (F.normalize(model(x), dim=1) for x in (batch["x"], batch["x"] + 0.3 * batch["x"].roll(1, 1)))
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


class Weighted(Plain):
    """A mean that is divided by the weights of the classes, which `count` does not count."""

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["label"], WEIGHTS)


class Ignored(Plain):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["masked"])


class Zero(Ignored):
    """Its last layer is zero at first."""

    def model(self):
        model = super().model()
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
        return model


class Counter(Plain):
    """The loss grows with its calls."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) * min(1.0, self.calls / 3)


KINDS = {kind.__name__: kind for kind in (Plain, Sum, Contrastive, Weighted, Ignored, Zero, Counter)}


def settings(folder, name, **changes):
    sizes = {"batch_size": BATCH, "micro_batch_size": 0, "max_steps": 0, "num_epochs": 1, "ckpt_freq": 0}
    chosen = {"experiment_name": name, "lr": RATE, "optim": PLAIN, "report": False}
    return config(folder, **sizes | chosen | changes)


def by_hand(task):
    """(losses, parameters) of the plain loop."""
    model, data = task.model(), Rows(task.samples)
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE, momentum=0.9), []
    for start in range(0, task.samples, BATCH):
        batch = torch.utils.data.default_collate([data[i] for i in range(start, min(start + BATCH, task.samples))])
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def parameters(folder, name, task):
    return [p.detach() for p in lockstep.load(folder / name, task, "last").parameters()]


def assert_close(found, wanted):
    for mine, each in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, each, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_has_the_bits_of_the_plain_loop(tmp_path, kind):
    with lockstep.Run(settings(tmp_path, "one"), KINDS[kind]()) as made:
        losses = [step.loss for step in made]
        found = [p.detach() for p in made.model.parameters()]
    wanted, weights = by_hand(KINDS[kind]())
    assert losses == pytest.approx(wanted, rel=1e-14)  # a record adds up losses times items
    assert all(torch.equal(mine, each) for mine, each in zip(found, weights, strict=True))
    log = (tmp_path / "one" / "logs" / "rank-00000.log").read_text()
    assert " steps of 10 samples" in log


def trained(world, folder, cases):
    """Losses of each case, of (kind, its run's name, changes)."""
    found = []
    for kind, name, changes in cases:
        with lockstep.Run(settings(folder, name, **changes), KINDS[kind](), world) as made:
            found.append([step.loss for step in made])
    return found


@pytest.mark.parametrize(("ranks", "engines"), [(2, ("ddp", "zero", "fsdp")), (3, ("ddp",)), (4, ("ddp", "fsdp"))])
def test_a_mean_and_a_sum_on_ranks_are_the_plain_loop(tmp_path, ranks, engines):
    """Each rank has one micro-batch, of at most 5, 4 or 3 samples; in the last step, of 7, one has fewer or none."""
    cases = [(kind, f"{kind}-{engine}", {"engine": engine}) for kind in ("Plain", "Sum") for engine in engines]
    found = run(trained, ranks, tmp_path, cases, timeout=120.0)
    for index, (kind, name, _) in enumerate(cases):
        losses, weights = by_hand(KINDS[kind]())
        assert all(each[index] == pytest.approx(losses, rel=1e-12) for each in found)
        assert_close(parameters(tmp_path, name, KINDS[kind]()), weights)
        state = checkpoint.read_state(checkpoint.newest(tmp_path / name, say=print))
        assert state["plan"]["micro_batch_size"] == -(-BATCH // ranks)


def refused(world, folder):
    found = []
    for kind in ("Contrastive", "Weighted"):
        with pytest.raises(ConfigError) as error:
            lockstep.train(settings(folder, kind), KINDS[kind](), world)
        found.append(str(error.value))
    return found


def test_what_no_cut_can_compute_is_refused_on_two_ranks(tmp_path):
    for contrastive, weighted in run(refused, 2, tmp_path):
        assert "step_loss" in contrastive
        assert "count" in weighted
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("micro", [0, 5])
def test_run_on_one_two_and_one_rank_is_the_plain_loop(tmp_path, capfd, micro):
    """At the defaults each start cuts for its own ranks; a size that was chosen stays."""
    kinds, sizes = ("Plain", "Sum"), []
    for ranks, stop in ((1, 1), (2, 3), (1, 0)):
        changes = {"stop_at": stop, "micro_batch_size": micro}
        cases = [(kind, kind, changes) for kind in kinds]
        run(trained, ranks, tmp_path, cases) if ranks > 1 else trained(lockstep.World(), tmp_path, cases)
        state = checkpoint.read_state(checkpoint.newest(tmp_path / "Sum", say=print))
        sizes.append(state["plan"]["micro_batch_size"])
    assert sizes == ([5, 5, 5] if micro else [10, 5, 10])
    for kind in kinds:
        assert_close(parameters(tmp_path, kind, KINDS[kind]()), by_hand(KINDS[kind]())[1])
    said = capfd.readouterr().err  # of this process
    line = "a step is cut into forwards of 10 samples in place of 5"
    assert said.count(line) == (0 if micro else len(kinds))


def test_run_with_an_unproved_loss_resumes_if_no_proof_is_needed(tmp_path):
    """On two ranks it is refused, and on one it is the plain loop still."""
    run(trained, 1, tmp_path, [("Contrastive", "r", {"stop_at": 2})])
    before = checkpoint.newest(tmp_path / "r", say=print)
    with pytest.raises(RankError, match="the run so far computed each step in one forward"):
        run(trained, 2, tmp_path, [("Contrastive", "r", {})])
    assert checkpoint.newest(tmp_path / "r", say=print) == before
    run(trained, 1, tmp_path, [("Contrastive", "r", {})])
    found, weights = parameters(tmp_path, "r", Contrastive()), by_hand(Contrastive())[1]
    assert all(torch.equal(mine, each) for mine, each in zip(found, weights, strict=True))


SEEN = []  # by this rank; what a loss writes to its task must be the same on all ranks


class Tail(Plain):
    """BatchNorm over the five places of each sample; each rank notes the samples that it trains on."""

    def __init__(self, samples):
        self.samples = samples

    def model(self):
        return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(5, 3)).double()

    def loss(self, model, batch):
        if model.training:
            SEEN.extend(batch["index"].tolist())
        return super().loss(model, batch)


def samples_of(world, folder, counts):
    """The samples of each step, on all ranks together."""
    found = []
    for count in counts:
        task, steps = Tail(count), []
        with lockstep.Run(settings(folder, f"{world.size}-{count}"), task, world) as made:
            SEEN.clear()
            for _ in made:
                steps.append(sorted({index for seen in world.gather(list(SEEN)) for index in seen}))
                SEEN.clear()
        found.append(steps)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tail_of_an_epoch_has_the_same_samples_on_any_ranks(tmp_path, ranks):
    """A last sample alone is left out for BatchNorm; nothing else is."""
    counts = (21, 22, 26)
    wanted = [[[*range(10)], [*range(10, 20)]] + [[*range(20, count)]] * (count > 21) for count in counts]
    assert run(samples_of, ranks, tmp_path, counts) == [wanted] * ranks
