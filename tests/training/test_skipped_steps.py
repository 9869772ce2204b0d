"""Where the parts meet: steps that are left out, beside exact sums, BatchNorm, loading, resumes and late answers."""

import gc
import json
import math
import os
import weakref
from pathlib import Path

import pytest
import torch
from ranks import run
from refusals import refuses
from torch import nn
from torch.nn import functional as F
from toys import taken

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.read import open_tensors
from lockstep.config.schema import Config
from lockstep.config.sections import Data, Guards, Optim
from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World
from lockstep.engines.registry import engine
from lockstep.errors import ConfigError, LockstepError
from lockstep.guards import spike
from lockstep.guards.nonfinite import DeferredReader
from lockstep.logging.jsonl import read as records

BAD = int(Shuffled(96, 0).at(43, 44)[1][0])  # the sample that spoils its step, which is step 5


class Rows(torch.utils.data.Dataset):
    draws_random = False

    def __init__(self, count, bad=None, factor=math.nan):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.labels = torch.randn(count, generator=generator)
        if bad is not None:  # behind BatchNorm a large input is none
            (self.inputs if math.isnan(factor) else self.labels)[bad] *= factor

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Average(nn.Module):
    """Keeps a moving average of its inputs, which it does not use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x


class Regress(lockstep.Task):
    items_per_sample = 1
    reduction = "sum"

    def __init__(self, bad=None, factor=math.nan, first=nn.Identity):
        self.bad, self.factor, self.first = bad, factor, first

    def model(self):
        return nn.Sequential(self.first(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split):
        return Rows(96, self.bad, self.factor) if split == "train" else None

    def collate(self, samples):
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))

    def count(self, batch):
        return len(batch[1])

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0])[:, 0], batch[1], reduction="sum")


def config(folder, name="r", guards=None, **changes):
    settings = {
        "batch_size": 8,
        "micro_batch_size": 2,
        "max_steps": 12,
        "log_freq": 10,
        "ckpt_freq": 2,
        "lr": 0.01,
        "exact": True,
    }
    settings["optim"] = Optim(warmup_steps=0, beta2=0.95, weight_decay=0.1)
    guards = Guards(**{"nonfinite": "skip", "desync_freq": 1} | (guards or {}))
    return Config(**settings | {"experiment_name": name, "save_dir": str(folder), "guards": guards} | changes)


def bits(path):
    """One mark for everything that a checkpoint holds."""
    newest = checkpoint.newest(Path(path), say=print)
    if newest is None:
        return []
    return [checkpoint.fingerprint(newest, prefix) for prefix in ("model/", "optimizer/")]


def go(world, settings, task, leave_at=None):
    """Trains, and returns the bits of what was saved last."""
    taken(settings, task, world, leave_at)
    if settings.exact:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
    return bits(Path(settings.save_dir) / settings.experiment_name)


def several(world, cases):
    return [go(world, *case) for case in cases]


def left_out(folder, name="r"):
    return json.loads((folder / name / "checkpoints" / "skips.json").read_text())["skipped"]


def test_a_bad_step_leaves_no_trace_whatever_leaves_it_out(tmp_path, monkeypatch):
    """Skipped, rolled back, resumed behind it, on one rank or two, read at once or late: all the same bits."""
    task = Regress(BAD)
    wanted = go(None, config(tmp_path), task)
    (step,) = left_out(tmp_path)
    cases = {
        "rollback": config(tmp_path, "rollback", {"nonfinite": "rollback"}),
        "rarely saved": config(tmp_path, "rarely", {"nonfinite": "rollback"}, ckpt_freq=0),
        "workers": config(tmp_path, "workers", {"nonfinite": "rollback"}, data=Data(workers=2)),
    }
    for settings in cases.values():
        assert go(None, settings, task) == wanted
    for name in ("skip", "rollback"):  # left when the bad step was seen, before it was in a checkpoint
        settings = config(tmp_path, f"left-{name}", {"nonfinite": name}, ckpt_freq=step + 3)
        go(None, settings, task, leave_at=step + 2)
        assert left_out(tmp_path, f"left-{name}") == [step]
        assert go(None, settings, task) == wanted
    for lag in (1, 2):
        monkeypatch.setattr(DeferredReader, "lag", lag)
        for name in ("skip", "rollback"):
            assert go(None, config(tmp_path, f"late-{lag}-{name}", {"nonfinite": name}), task) == wanted
    monkeypatch.undo()
    two = [(config(tmp_path, f"two-{name}", {"nonfinite": name}), task) for name in ("skip", "rollback")]
    assert run(several, 2, two) == [[wanted, wanted]] * 2
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "rollback", say=print))
    assert (state["steps_left_out"], state["running_missed"]) == (1, 0)
    for name in ("r", "rollback", "workers"):  # the window of steps 1 to 10 has the mean of the other nine
        first, _ = [r for r in records(tmp_path / name / "metrics.jsonl") if "running_loss" in r]
        assert math.isfinite(first["running_loss"])


def test_a_bad_step_moves_no_statistics(tmp_path):
    go(None, config(tmp_path), Regress(BAD))
    tensors = checkpoint_tensors(tmp_path / "r")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert int(tensors["model/2.num_batches_tracked"]) == 11 * 4


def checkpoint_tensors(path):
    with open_tensors(checkpoint.newest(path, say=print)) as whole:
        return {name: whole.read(name).clone() for name in whole.contents}


def few_norms(monkeypatch):
    """A spike is judged after a few steps."""
    for name, value in (("_LEAST", 4), ("_EVERY", 2), ("_WINDOW", 8)):
        monkeypatch.setattr(spike, name, value)


def test_a_spike_is_left_out_alike_after_a_resume_and_read_late(tmp_path, monkeypatch):
    few_norms(monkeypatch)
    task = Regress(BAD, 1e4, Average)  # the average shows that the forward's trace is gone too
    plain = {"exact": False, "max_steps": 24, "ckpt_freq": 5}
    wanted = go(None, config(tmp_path, guards={"spike": "skip"}, **plain), task)
    (first, *_) = found = left_out(tmp_path)
    assert first == 6  # four norms make an estimate, which holds from two steps later on
    assert go(None, config(tmp_path, "rolled", {"spike": "rollback"}, **plain), task) == wanted
    go(None, config(tmp_path, "resumed", {"spike": "skip"}, **plain), task, leave_at=first)
    assert go(None, config(tmp_path, "resumed", {"spike": "skip"}, **plain), task) == wanted
    assert left_out(tmp_path, "resumed") == found
    monkeypatch.setattr(DeferredReader, "lag", 1)
    assert go(None, config(tmp_path, "late", {"spike": "skip"}, **plain), task) == wanted
    assert go(None, config(tmp_path, "warned", {"spike": "warn"}, **plain), task) != wanted
    assert checkpoint_tensors(tmp_path / "r")["model/0.mean"].abs().max() < 1.0


def test_the_estimate_of_a_spike_is_in_the_checkpoint(tmp_path, monkeypatch):
    few_norms(monkeypatch)
    settings = config(tmp_path, guards={"spike": "skip"})
    go(None, settings, Regress())
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "r", say=print))["spike"]
    norms = [r["grad_norm"] for r in records(tmp_path / "r" / "metrics.jsonl") if "grad_norm" in r]
    assert state["count"] == 12
    assert len(state["norms"]) == 8
    assert [state["norms"][-3], state["norms"][-1]] == norms  # the records of steps 10 and 12
    assert len(state["limits"]) == 2


class Once(Regress):
    """Remembers the models that it made, and whether one was there when the next was asked for."""

    def __init__(self):
        super().__init__(BAD)
        self.made, self.alive = [], []

    def model(self):
        self.alive.append([reference() is not None for reference in self.made])
        model = super().model()
        self.made.append(weakref.ref(model))
        return model


def children():
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


def test_a_rollback_closes_what_it_leaves(tmp_path):
    gc.collect()
    before, task = set(children()), Once()
    go(None, config(tmp_path, guards={"nonfinite": "rollback"}, data=Data(workers=2)), task)
    assert task.alive == [[], [False]]
    assert set(children()) <= before


def test_steps_left_out_go_with_the_checkpoints(tmp_path, capsys):
    settings = config(tmp_path, guards={"nonfinite": "rollback"}, ckpt_freq=0)
    wanted = go(None, settings, Regress(BAD))
    assert len(left_out(tmp_path)) == 1
    (tmp_path / "r" / "checkpoints").rename(tmp_path / "away")
    repaired = go(None, settings, Regress())
    assert not (tmp_path / "r" / "checkpoints" / "skips.json").exists()
    assert repaired == go(None, config(tmp_path, "fresh", ckpt_freq=0), Regress()) != wanted


class Queue(Regress):
    """Has a tensor of its own that decides bits."""

    def __init__(self):
        super().__init__()
        self.shift = torch.zeros(1)

    def loss(self, model, batch):
        self.shift += 0.01
        return F.mse_loss(model(batch[0])[:, 0] + self.shift, batch[1], reduction="sum")

    def state_dict(self):
        return {"shift": self.shift}

    def load_state_dict(self, state):
        assert state["shift"] is self.shift


def test_the_tasks_own_state_is_in_the_checkpoint(tmp_path):
    wanted = go(None, config(tmp_path, "whole", exact=False), Queue())
    go(None, config(tmp_path, exact=False), Queue(), leave_at=7)
    assert go(None, config(tmp_path, exact=False), Queue()) == wanted
    assert checkpoint_tensors(tmp_path / "r")["task/shift"] == pytest.approx(0.01 * 48)


def halves(world, name, folder):
    """Four steps of a model whose forward moves a buffer: what each rank holds of it after each."""
    settings = config(folder, f"{name}-{world.size}", exact=False, engine=name, max_steps=4)
    task = Regress(first=Average)
    go(world, settings, task)
    return checkpoint_tensors(Path(folder) / f"{name}-{world.size}")["model/0.mean"].tolist()


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_buffer_moved_by_the_forward_is_equal_on_all_ranks(name, tmp_path):
    """The guard against replicas that differ looks after every step here, and finds nothing."""
    one, two = run(halves, 2, name, str(tmp_path), timeout=90.0)
    assert one == two
    assert any(one)


@pytest.mark.parametrize("size", [1, 2])
def test_exact_refuses_a_buffer_that_the_forward_moves(size, tmp_path):
    settings = config(tmp_path, engine="ddp")
    with pytest.raises(AssertionError, match="--exact .*the buffer 0.mean"):
        run(go, size, settings, Regress(first=Average))
    with pytest.raises(ConfigError, match="--exact"):
        go(None, config(tmp_path, "alone"), Regress(first=Average))


class Table(nn.Module):
    """Makes a table when it is first needed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.ready = True
            self.table.fill_(2.0)
        return x * self.table


def test_a_table_that_is_made_when_it_is_needed_is_no_matter(tmp_path):
    go(None, config(tmp_path), Regress(first=Table))


# One's own loop.


def made_with(optimizer, exact=0, size=1, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    return model, engine("single", model, optimizer, World(), exact_micro_batches=exact, **settings)


def test_ones_own_rates_stay_and_a_factor_sets_them():
    optimizer = {}

    def make(held):
        optimizer[0] = torch.optim.SGD(held.parameters(), lr=0.5)
        return optimizer[0]

    model, made = made_with(make)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer[0], step_size=1, gamma=0.1)
    for rate in (0.5, 0.05, 0.005):
        before = model[1].weight.item()
        made.backward(model[1].weight.sum())
        made.step()
        scheduler.step()
        assert before - model[1].weight.item() == pytest.approx(rate)
    made.backward(model[1].weight.sum())
    optimizer[0].param_groups[0]["lr"] = 0.5
    made.step(0.25)
    assert optimizer[0].param_groups[0]["lr"] == 0.125
    optimizer[0].param_groups[0]["lr"] = 0.5
    with refuses(ConfigError, "lr", 0.5, "--optim.schedule none"):
        made.step(0.25)


@pytest.mark.parametrize("exact", [0, 1])
def test_a_group_that_is_added_later_is_clipped_and_cleared(exact):
    optimizer = {}

    def make(held):
        optimizer[0] = torch.optim.SGD(held[0].parameters(), lr=1.0)
        return optimizer[0]

    model, made = made_with(make, exact, clip=1.0)
    made.backward(model[1].weight.sum() * 100 + model[0].weight.sum() * 0)
    assert float(made.step().norm) == 0.0  # what no group has is no part of the step
    optimizer[0].add_param_group({"params": list(model[1].parameters()), "lr": 2.0})
    before = model[1].weight.item()
    for _ in range(2):
        made.backward(model[1].weight.sum() * 100)
        assert float(made.step(0.5).norm) == 100.0
        assert model[1].weight.grad is None
        assert [group["lr"] for group in optimizer[0].param_groups] == [0.5, 1.0]  # each of its own base
    assert before - model[1].weight.item() == pytest.approx(2 * 1.0, rel=1e-6)


def test_late_unfreezing_is_refused_where_not_exchanged():
    optimizer = {}

    def make(held):
        held[1].requires_grad_(False)
        optimizer[0] = torch.optim.SGD(held[0].parameters(), lr=1.0)
        return optimizer[0]

    model, made = made_with(make, 1)
    model[1].requires_grad_(True)
    optimizer[0].add_param_group({"params": list(model[1].parameters())})
    made.backward(model(torch.ones(1, 2, dtype=torch.float64)).sum())
    with pytest.raises(LockstepError, match="rebuild the engine"):
        made.step()


def uneven(world, kind, count):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    make = lambda held: torch.optim.SGD(held.parameters(), lr=0.1)  # noqa: E731
    made = engine(kind, model, make, world, exact_micro_batches=8)
    for slot in range(count):
        with made.accumulate(slot == count - 1):
            made.backward(made.model(torch.ones(1, 2)).sum(), 1.0)
    try:
        made.step()
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_number_of_micro_batches_unlike_the_trees_is_refused(kind):
    line = "exact_micro_batches gives this rank 4 micro-batches a step, and this step had 3; for a shorter step"
    assert all(line in said for said in run(uneven, 2, kind, 3))
    assert run(uneven, 2, kind, 4) == ["", ""]


@pytest.mark.parametrize("first", [Average, lambda: nn.BatchNorm1d(4)])
def test_an_empty_slot_moves_no_buffer(first):
    found = []
    for slots in ([(1.0, 1.0), (2.0, 1.0), (9.0, 0.0), (7.0, 0.0)], [(1.0, 1.0), (2.0, 1.0)], [(5.0, 0.0)]):
        model = nn.Sequential(first(), nn.Linear(4, 1))
        made = engine("single", model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1), World())
        for value, weight in slots:
            with made.accumulate(value == slots[-1][0]):
                made.backward(model(torch.full((2, 4), value)).sum(), weight)
        made.step()
        found.append([buffer.tolist() for buffer in model.buffers()])
    assert found[0] == found[1]
    assert found[2] == [buffer.tolist() for buffer in first().buffers()]


def test_the_search_for_a_bad_batch_leaves_the_tasks_own_state(tmp_path):
    found = []
    for name in ("skip", "rollback"):
        task = Queue()
        task.bad = BAD
        found.append(go(None, config(tmp_path, name, {"nonfinite": name}, exact=False), task))
        assert checkpoint_tensors(tmp_path / name)["task/shift"] == pytest.approx(0.01 * 44)  # of the applied steps
    assert found[0] == found[1]


def grown(world):
    optimizer = {}

    def make(held):
        optimizer[0] = torch.optim.SGD(held[0].parameters(), lr=0.1)
        return optimizer[0]

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    made = engine("zero", model, make, world)
    optimizer[0].add_param_group({"params": list(model[1].parameters())})
    made.backward(made.model(torch.ones(1, 2)).sum())
    try:
        made.step(1.0)
    except LockstepError as error:
        return str(error)
    return ""


def test_zero_says_that_it_takes_no_group_later():
    assert all("--engine zero does not support parameter groups added later" in said for said in run(grown, 2))


class Replacing(nn.Module):
    """Puts a new tensor in its buffer's place, which may come to lie where the old one was."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count = self.count + 1
        return x


def test_a_buffer_that_is_replaced_is_put_back_too():
    model = nn.Sequential(Replacing(), nn.Linear(4, 1))
    made = engine("single", model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1), World())
    for limit, wanted in ((math.inf, 4), (-math.inf, 4), (math.inf, 8), (-math.inf, 8)):
        for slot in range(4):
            with made.accumulate(slot == 3):
                made.backward(model(torch.ones(2, 4)).sum())
        made.step(1.0, limit)
        assert int(model[0].count) == wanted


def test_a_loop_without_accumulate_puts_buffers_back_too():
    model = nn.Sequential(Average(), nn.Linear(4, 1))
    made = engine("single", model, lambda held: torch.optim.SGD(held.parameters(), lr=0.1), World())
    for value, kept in ((1.0, 0.1), (math.nan, 0.1), (1.0, 0.19), (math.inf, 0.19)):
        made.backward(model(torch.full((2, 4), value)).sum())
        made.step()
        assert model[0].mean.tolist() == pytest.approx([kept] * 4)


class Anchored(torch.optim.Optimizer):
    """Keeps where each parameter began, and counts in its group, as some optimizers do."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["anchor"], state["step"] = parameter.clone(), 0
                state["step"] += 1
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * (parameter.grad + 0.1 * (parameter - state["anchor"])))


def test_asking_for_state_before_step_1_changes_nothing():
    found = []
    for asked in (False, True):
        model, made = made_with(lambda held: Anchored(held.parameters()))
        if asked:
            assert any(name.endswith("/anchor") for name in made.state_dict())
        for _ in range(3):
            made.backward(model(torch.ones(1, 2, dtype=torch.float64)).sum())
            made.step()
        found.append({name: tensor.tolist() for name, tensor in made.state_dict().items()})
    assert found[0] == found[1]


# float16's loss scale.


def scaled(factor, limit=math.inf, scale=None, count=1):
    """Under SGD, a step whose gradient is `factor`: (norm, applied, scale, good steps, the weight's way)."""
    model = nn.Linear(1, 1, bias=False)
    made = engine("single", model, lambda held: torch.optim.SGD(held.parameters(), lr=1.0), World(), loss_scaling=True)
    before = model.weight.item()
    for _ in range(count):
        made.backward((model.weight * factor).sum())
        result = made.step(1.0, limit)
    state = made.state_dict()
    return (
        float(result.norm),
        result.applied,
        float(state["scaler/scale"]),
        float(state["scaler/good_steps"]),
        before - model.weight.item(),
    )


def test_a_spike_under_float16_is_left_out_and_is_no_overflow():
    assert scaled(4.0)[:4] == (4.0, True, 2.0**16, 1.0)
    assert scaled(4.0)[4] == pytest.approx(4.0)
    assert scaled(4.0, limit=3.0) == (4.0, False, 2.0**16, 0.0, 0.0)
    assert scaled(4.0, limit=-math.inf) == (4.0, False, 2.0**16, 0.0, 0.0)
    norm, applied, scale, good, way = scaled(math.inf)
    assert (math.isfinite(norm), applied, scale, good, way) == (False, False, 2.0**15, 0.0, 0.0)


def test_a_loss_that_is_nan_is_a_fault_in_float16_too(tmp_path):
    settings = {"precision": "fp16", "exact": False, "seed": 19}  # whose gradients do not overflow by themselves
    go(None, config(tmp_path, **settings), Regress(BAD))
    assert len(left_out(tmp_path)) == 1
    tensors = checkpoint_tensors(tmp_path / "r")
    assert float(tensors["scaler/scale"]) == 2.0**15
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    with pytest.raises(LockstepError, match="the gradient is not finite"):
        go(None, config(tmp_path, "stopped", {"nonfinite": "stop"}, **settings), Regress(BAD))


class Overflowing(Regress):
    """Finite losses whose gradients overflow float16 under the first scales."""

    reduction, divisible = "sum", False  # its second part is one of the weights

    def loss(self, model, batch):
        return super().loss(model, batch) + 1e-3 * (model[1].weight.half() * 100.0).float().sum() * 100.0


def test_an_overflow_is_no_fault_and_no_spike(tmp_path, monkeypatch):
    few_norms(monkeypatch)
    settings = config(tmp_path, guards={"spike": "skip", "nonfinite": "stop"}, precision="fp16", exact=False)
    go(None, settings, Overflowing())
    assert not (tmp_path / "r" / "checkpoints" / "skips.json").exists()
    assert float(checkpoint_tensors(tmp_path / "r")["scaler/scale"]) < 2.0**16


class Summed(Regress):
    """A task with a tensor of its own, which each forward moves."""

    def __init__(self, bad=None):
        super().__init__(bad)
        self.total = torch.ones(1)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if model.training:
            self.total += 1
        return loss

    def state_dict(self):
        return {"total": self.total}


class Counter:
    def __init__(self):
        self.steps = torch.zeros(1)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_a_rollback_to_the_very_start_takes_own_tensors_along(tmp_path):
    settings = config(tmp_path, guards={"nonfinite": "rollback"}, ckpt_freq=0, exact=False)
    with lockstep.Run(settings, Summed(BAD)) as session:
        counter = Counter()
        session.keep("counter", counter)
        for _ in session:
            counter.steps += 1
    assert left_out(tmp_path) == [6]
    tensors = checkpoint_tensors(tmp_path / "r")
    assert float(tensors["kept.counter/steps"]) == 12  # of the second way alone
    assert float(tensors["task/total"]) == 1 + 11 * 4  # the step that is left out moves nothing
