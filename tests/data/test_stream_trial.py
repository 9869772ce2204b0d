"""The trial of a stream before step 1 finds wrong seeks, unequal readings and kept generators, and leaves no mark."""

import random

import numpy as np
import pytest
import torch
from test_streams import Parts
from torch.utils.data import IterableDataset

import lockstep
from lockstep.data.stream_adapters import source_of
from lockstep.data.stream_trial import preserve, sources_of, try_source
from lockstep.errors import DataError
from lockstep.guards.contents import alike, digest


class Late(IterableDataset):
    """Has its first 16 samples in order; `order` gives the rest."""

    def __init__(self):
        self.calls, self.seen = 0, []
        self.torch, self.numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)

    def order(self):
        return list(range(48))

    def __iter__(self):
        self.calls += 1
        for number in (*range(16), *(16 + each for each in self.order())):
            self.seen.append(number)
            yield torch.tensor(number)


class ByGenerator(Late):
    def order(self):
        return torch.randperm(48, generator=self.torch).tolist()


class ByCounter(Late):
    def order(self):
        return random.Random(self.calls).sample(range(48), 48)


class Unread(Late):
    """Its generator decides only what comes later than a trial reads."""

    def __iter__(self):
        self.numpy.random()
        yield from map(torch.tensor, range(1000))


class Reseeded(ByGenerator):
    def set_epoch(self, epoch):
        self.torch.manual_seed(epoch)


class Ignoring(Parts):
    def iter(self, part, start):
        return super().iter(part, 0)


class OneOff(Parts):
    def iter(self, part, start):
        return super().iter(part, start and start - 1)


class Stateful(IterableDataset):
    """Counts its epochs, each with another order, as torchdata's loader keeps such a state; `late` counts too late."""

    def __init__(self, late=False):
        self.at, self.epoch, self.late = 0, 0, late

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(30), 30)
        while self.at < 30:
            number = order[self.at]
            if self.late:
                yield number
            self.at += 1
            if not self.late:
                yield number
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": (self.epoch, torch.tensor([7]), b"x", {1: 2})}

    def load_state_dict(self, state):
        (self.epoch, seven, text, pairs), self.at = state["epoch"], state["at"]
        assert (seven.tolist(), text, pairs) == ([7], b"x", {1: 2})


def attempt(stream):
    source = source_of(stream)
    with preserve(source):
        for each in sources_of(source):
            try_source(each, 1, digest, alike)


def marks(stream):
    values = {name: value for name, value in vars(stream).items() if name not in ("torch", "numpy")}
    return values | {"torch": stream.torch.get_state().tolist(), "numpy": stream.numpy.bit_generator.state}


@pytest.mark.parametrize("kind", [ByGenerator, ByCounter, Unread])
def test_shuffle_that_differs_by_reading_is_refused_unmarked(kind):
    stream = kind()
    before = marks(stream)
    with pytest.raises(DataError, match=kind.__name__):
        attempt(stream)
    assert marks(stream) == before


@pytest.mark.parametrize("kind", [Late, Reseeded])
def test_counters_and_generators_without_effect_pass_unmarked(kind):
    stream = kind()
    before = marks(stream)
    attempt(stream)
    assert marks(stream) == before


@pytest.mark.parametrize("kind", [Ignoring, OneOff])
def test_part_that_begins_elsewhere_is_refused_by_name(kind):
    lengths = [3, 1, 9, 5]
    attempt(Parts(lengths, noise=True))
    with pytest.raises(DataError, match=rf"{kind.__name__}.*`iter\(part, start\)`"):
        attempt(kind(lengths))
    with pytest.raises(DataError, match="source bad"):
        attempt(lockstep.mixture({"good": Parts(lengths), "bad": kind(lengths)}, {"good": 1, "bad": 1}))


def test_a_state_that_leads_elsewhere_is_refused():
    attempt(Stateful())
    with pytest.raises(DataError, match=r"Stateful.*`state_dict\(\)`"):
        attempt(Stateful(late=True))
