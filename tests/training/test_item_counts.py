"""Items that are no whole numbers, and samples that a collate leaves out: as one plain loop over the whole batch."""

import functools
import math

import pytest
import torch
from ranks import run
from small_runs import config
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import lockstep
from lockstep.distributed.world import World
from lockstep.errors import DataError

_SAMPLES, _STEPS, _RATE = 32, 5, 0.1
_WEIGHTS = torch.tensor([10.0, 1.0, 1.0, 0.1])
_LEFT_OUT = (0, 1, 2, 3, 9)


def data():
    x = torch.randn(_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


class Corrupt(torch.utils.data.Dataset):
    def __init__(self, left_out):
        self.samples, self.left_out = list(zip(*data(), strict=True)), left_out

    def __len__(self):
        return _SAMPLES

    def __getitem__(self, index):
        return None if index in self.left_out else self.samples[index]


class Plain(lockstep.Task):
    reduction = "mean"
    left_out = ()

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def dataset(self, split):
        return Corrupt(self.left_out) if split == "train" else None

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    whole = loss


class WeightedCount(Plain):
    """Items are the class weights: what `cross_entropy(weight=...)` divides by."""

    reduction = "sum"

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=_WEIGHTS.to(batch[0].dtype), reduction="sum")

    def count(self, batch):
        return _WEIGHTS[batch[1]].sum()

    def whole(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=_WEIGHTS)


class WeightedMean(WeightedCount):
    reduction = "mean"
    loss = WeightedCount.whole


class NonesMean(Plain):
    left_out = _LEFT_OUT

    def collate(self, samples):
        return default_collate([sample for sample in samples if sample is not None])


class Nones(NonesMean):
    reduction = "sum"

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class NonesCount(Nones):
    def count(self, batch):
        return len(batch[1])


class Crops(Plain):
    """Two of each sample."""

    def collate(self, samples):
        x, y = default_collate(samples)
        return torch.cat([x, x.flip(1)]), torch.cat([y, y])


def trained(world, folder, kind, changes):
    settings = {"batch_size": _SAMPLES, "micro_batch_size": 4, "max_steps": _STEPS, "lr": _RATE, "exact": True}
    optim = {
        "name": "sgd",
        "schedule": "constant",
        "warmup_steps": 0,
        "clip": 0.0,
        "weight_decay": 0.0,
        "momentum": 0.0,
    }
    settings |= {"precision": "float32", "optim": optim, "device": "cpu", "report": False} | changes
    with lockstep.Run(config(folder / f"{kind.__name__}-{world.size}", **settings), kind(), world) as found:
        seen = [(step.items, step.loss) for step in found]
        return seen, [parameter.tolist() for parameter in found.model.parameters()]


@functools.cache
def plain(kind):
    """The losses and the parameters of a loop over the whole batch, without anything of lockstep."""
    task = kind()
    model, dataset = task.model(), task.dataset("train")
    batch = task.collate([sample for sample in (dataset[index] for index in range(_SAMPLES)) if sample is not None])
    optimizer, losses = torch.optim.SGD(model.parameters(), _RATE), []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = task.whole(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.tolist() for parameter in model.parameters()]


_WEIGHT = math.fsum(_WEIGHTS[data()[1]].tolist())
_CASES = [
    (WeightedCount, _WEIGHT),
    (WeightedMean, _WEIGHT),
    (NonesMean, 27),
    (Nones, 27),
    (NonesCount, 27),
    (Crops, 64),
]


def all_trained(world, folder, kinds):
    return [trained(world, folder, kind, {}) for kind in kinds]


def test_items_train_as_a_whole_batch_loop_bitwise_on_any_ranks(tmp_path):
    torch.set_num_threads(1)
    kinds = [kind for kind, _ in _CASES]
    alone = all_trained(World(), tmp_path, kinds)
    for (kind, items), (seen, found) in zip(_CASES, alone, strict=True):
        losses, expected = plain(kind)
        assert [count for count, _ in seen] == pytest.approx([items] * _STEPS, rel=1e-6)
        assert all(type(count) is type(items) for count, _ in seen)
        assert [loss for _, loss in seen] == pytest.approx(losses, rel=2e-6)
        for mine, theirs in zip(found, expected, strict=True):
            theirs = torch.tensor(theirs)
            assert (torch.tensor(mine) - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    for ranks in (2, 3):
        assert run(all_trained, ranks, tmp_path, kinds) == [alone] * ranks


class Odd(WeightedCount):
    """Whose count is what a test says, from the second micro-batch of a step on."""

    value: object = 0
    seen = 0

    def count(self, batch):
        type(self).seen += 1
        return type(self).value if type(self).seen > 9 else super().count(batch)


@pytest.mark.parametrize(("value", "name"), [(-1, "-1"), (math.nan, "nan"), (math.inf, "inf"), (True, "True")])
def test_each_micro_batch_is_counted_and_a_bad_count_is_named(tmp_path, monkeypatch, value, name):
    monkeypatch.setattr(Odd, "value", value)
    monkeypatch.setattr(Odd, "seen", 0)
    with pytest.raises(DataError, match=rf"`count` returned {name} at rank 0, step \d, samples \d"):
        trained(World(), tmp_path, Odd, {})


def test_a_count_of_several_numbers_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Odd, "value", torch.ones(4))
    monkeypatch.setattr(Odd, "seen", 100)
    with pytest.raises(DataError, match=r"`count` returned a tensor of shape \[4\]"):
        trained(World(), tmp_path, Odd, {})


def test_a_micro_batch_of_nothing_but_none_is_named(tmp_path):
    with pytest.raises(DataError, match="`collate`"):
        trained(World(), tmp_path, Nones, {"micro_batch_size": 1})


class Declared(NonesMean):
    """Says that no sample is left out."""

    items_per_sample = 1


def test_collate_that_drops_samples_undeclared_is_named(tmp_path):
    with pytest.raises(DataError, match=r"items_per_sample is 1, .*`collate` .*\d of 4 samples"):
        trained(World(), tmp_path, Declared, {})


def lengths(count=None, collate=None):
    dataset = Corrupt(()).samples
    loader = lockstep.loader(
        *(dataset, World()), batch_size=16, micro_batch_size=4, shuffle=False, count=count, collate=collate
    )
    return [(step.items, [(batch.items, batch.weight) for batch in step]) for step in loader]


def test_a_loader_counts_weights_and_samples_that_are_left_out():
    weighed = lengths(lambda batch: _WEIGHTS[batch[1]].sum())
    for items, found in weighed:
        assert items == math.fsum(count for count, _ in found)
        assert [weight for _, weight in found] == [count / items for count, _ in found]
    one_less = lengths(collate=lambda samples: default_collate(samples[1:]))
    assert one_less == [(12, [(3, 0.25)] * 4)] * 2
    with pytest.raises(DataError, match="`count` returned -0.5 at rank 0, step 1"):
        lengths(lambda batch: -0.5)
