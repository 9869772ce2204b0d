"""A micro-batch without items that has a loss ends a run at its step; one without a loss is left out."""

from types import SimpleNamespace

import pytest
import torch
from ranks import RankError, run
from small_runs import config
from torch import nn
from torch.nn import functional as F
from toys import Partial

import lockstep
from lockstep.data.batches import MicroBatch
from lockstep.data.sampler import Sequential
from lockstep.errors import DataError
from lockstep.training.step.empty_batches import EmptyBatchCheck

PLAIN = {"name": "sgd", "schedule": "constant", "warmup_steps": 0, "clip": 0.0, "weight_decay": 0.0, "momentum": 0.0}
EMPTY = (28, 29)  # samples without a positive label: the third micro-batch of step 4, at which no proof looks


class Boxes(Partial):
    """A mean over the positive labels, of which `count` counts the number."""

    reduction = "mean"

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Linear(3, 4).double()

    def dataset(self, split):
        if split != "train":
            return None
        draw = torch.Generator().manual_seed(2)
        x, label = torch.randn(48, 3, generator=draw, dtype=torch.float64), torch.zeros(48, 4, dtype=torch.float64)
        label[:, 1] = 1
        label[::3, 2] = 1
        label[list(EMPTY)] = 0
        return [{"x": x[index], "label": label[index]} for index in range(48)]

    def order(self, samples, seed):
        return Sequential(samples)

    def count(self, batch):
        return int(batch["label"].sum())

    def losses(self, model, batch):
        return F.binary_cross_entropy_with_logits(model(batch["x"]), batch["label"], reduction="none")


class Focal(Boxes):
    """The negatives count too, even where there is nothing else."""

    def loss(self, model, batch):
        return self.losses(model, batch).sum() / batch["label"].sum().clamp(min=1)


class Positives(Boxes):
    """Zero where there is none."""

    def loss(self, model, batch):
        return (self.losses(model, batch) * batch["label"]).sum() / batch["label"].sum().clamp(min=1)


class Undefined(Boxes):
    """0 / 0 where there is none."""

    def loss(self, model, batch):
        return (self.losses(model, batch) * batch["label"]).sum() / batch["label"].sum()


class Cancelled(Boxes):
    """Its value is zero where there is none, and its gradient is not."""

    def loss(self, model, batch):
        each = self.losses(model, batch).sum()
        return (each - each.detach()) / batch["label"].sum().clamp(min=1)


class Summed(Focal):
    """What the line advises."""

    reduction = "sum"

    def loss(self, model, batch):
        return self.losses(model, batch).sum()


KINDS = {kind.__name__: kind for kind in (Focal, Positives, Undefined, Cancelled, Summed)}


def empty(task):
    samples = task.dataset("train")
    return {name: torch.stack([samples[index][name] for index in EMPTY]) for name in samples[0]}


def checker(task, seeds=None):
    model = task.model()
    engine = SimpleNamespace(model=model)
    built = SimpleNamespace(task=task, model=model, engine=engine, world=lockstep.World(), pipeline=None)
    built.config = config("x")
    return EmptyBatchCheck(built, lambda *place: seeds.append(place) if seeds is not None else None), model


@pytest.mark.parametrize("kind", ["Focal", "Cancelled"])
def test_a_loss_or_a_gradient_of_no_items_is_one_line(kind):
    task, seeds = KINDS[kind](), []
    check, _ = checker(task, seeds)
    with pytest.raises(DataError) as error:
        check(4, MicroBatch(None, 2, 0, 0.0, replaced=empty(task)))
    text = str(error.value)
    assert all(part in text for part in ("rank 0, step 5", "0 items", "reduction = 'sum'"))
    assert "\n" not in text
    assert seeds == [(4, 2)]  # as the step itself


@pytest.mark.parametrize("kind", ["Positives", "Undefined"])
def test_no_items_without_a_loss_leave_no_trace(kind):
    task = KINDS[kind]()
    check, model = checker(task)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    check(4, MicroBatch(None, 2, 0, 0.0, replaced=empty(task)))
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), before, strict=True))


def settings(folder, name):
    sizes = {"experiment_name": name, "batch_size": 8, "micro_batch_size": 2, "max_steps": 0, "num_epochs": 1}
    return config(folder, **sizes, optim=PLAIN, lr=0.1, ckpt_freq=0, report=False, engine="auto")


def trained(world, folder, kind):
    with lockstep.Run(settings(folder, kind), KINDS[kind](), world) as made:
        for _ in made:
            pass
        return [parameter.tolist() for parameter in made.model.parameters()]


def by_hand(kind):
    """The weights of the plain loop, which takes a step at once."""
    task = KINDS[kind]()
    model, samples = task.model(), task.dataset("train")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for start in range(0, 48, 8):
        batch = torch.utils.data.default_collate(samples[start : start + 8])
        loss = task.loss(model, batch)
        (loss / task.count(batch) if task.reduction == "sum" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_ends_at_the_step_and_names_the_rank(tmp_path, ranks):
    with pytest.raises(RankError, match=f"rank {ranks - 1}, step 4: a micro-batch of 0 items"):
        run(trained, ranks, tmp_path, "Focal")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["Positives", "Undefined", "Summed"])
def test_other_runs_are_the_plain_loop(tmp_path, ranks, kind):
    for found in run(trained, ranks, tmp_path, kind):
        for mine, wanted in zip(found, by_hand(kind), strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(wanted), rtol=0, atol=1e-12)
