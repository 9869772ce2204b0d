"""Streams: the same samples in the same micro-batches, whoever reads them; seeks, ends, failures, other libraries."""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Partial

from lockstep.data.batches import Loading, StepPlan
from lockstep.data.stream_adapters import is_stream, source_of
from lockstep.data.stream_batches import StreamBatches, StreamData
from lockstep.data.streams import Lanes
from lockstep.distributed.balance import ShareSchedule, Shares, equal_shares
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError


class Parts:
    """Part p has the samples (p, 0), (p, 1), ...; with `noise` each has random numbers too."""

    def __init__(self, lengths, noise=False):
        self.lengths, self.parts, self.draws_random = lengths, len(lengths), noise

    def iter(self, part, start):
        for offset in range(start, self.lengths[part]):
            drawn = (torch.rand(()).item(), np.random.random(), random.random()) if self.draws_random else ()
            yield part, offset, *drawn


class Task(Partial):
    def collate(self, samples):
        return list(samples)

    def count(self, batch):
        return len(batch)


def batches_of(stream, world, *, micro=4, size=2, workers=0, retries=0, place=None, sharing=None, steps=1000, least=1):
    data = StreamData(source_of(stream), retries)
    lanes = Lanes(data.source.parts, micro, size, 3, least)
    plan = StepPlan(micro * size, size, steps * micro * size)
    loading = Loading(workers, 2, retries)
    return StreamBatches(Task(), data, lanes, plan, world, loading=loading, sharing=sharing, place=place)


def play(stream, ranks, steps, **options):
    """Steps as ranks take them that exchange by a loop: [micro-batch -> samples] of each, and the state after them.

    Ranks look different numbers of turns ahead.
    """
    first = options["place"][0] if options.get("place") else 0
    everyone = [batches_of(stream, World(rank=rank, size=ranks), **options) for rank in range(ranks)]
    loaders, found = [each.from_step(first) for each in everyone], []
    for loader in loaders:
        loader.cover = lambda step: cover(loaders, 1 + step % 3)
    for _ in range(steps):
        micro = {}
        for _, present in [next(loader) for loader in loaders]:
            for batch in present:
                if batch.weight:
                    assert batch.index not in micro
                    micro[batch.index] = batch.held
        found.append(micro)
    own = [(each.places[first + steps], each.cursors(first + steps)) for each in loaders]
    state = joined(own)
    for loader in loaders:
        loader.close()
    return found, state


def cover(loaders, ahead):
    while not any(loader._ready for loader in loaders):
        turns = [[loader.ahead(turn) for turn in range(ahead)] for loader in loaders]
        sums = [(sum(t.samples for t in each), sum(t.filled for t in each)) for each in zip(*turns, strict=True)]
        for loader in loaders:
            loader.settle(*zip(*sums, strict=True))


def joined(own):
    """The state of a checkpoint, as `stream_state` gathers it."""
    place = own[0][0]
    assert all(each == place for each, _ in own)
    cursors = {}
    for lane, epoch, cursor in (each for _, row in own for each in row):
        if epoch == place.epoch and (lane not in cursors or cursor[0] > cursors[lane][0]):
            cursors[lane] = cursor
    return SimpleNamespace(place=place, cursors={str(lane): each for lane, each in cursors.items()})


def resumed(state, step):
    from dataclasses import replace

    return step, replace(state.place, cursors=state.cursors)


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(lambda each: sum(each) > 0)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS, micro=st.sampled_from([1, 2, 4, 6]), size=st.integers(1, 3), noise=st.booleans(), data=st.data()
)
def test_the_samples_of_a_step_depend_on_the_data_alone(lengths, micro, size, noise, data):
    """On any number of ranks, with any shares, and after a resume on other ranks."""
    stream, options = Parts(lengths, noise), {"micro": micro, "size": size}
    wanted, _ = play(stream, 1, 12, **options)
    ranks = data.draw(st.integers(1, 4))
    assert play(stream, ranks, 12, **options)[0] == wanted
    stop, others = data.draw(st.integers(1, 11)), data.draw(st.integers(1, 4))
    before, state = play(stream, ranks, stop, **options)
    after, _ = play(stream, others, 12 - stop, **options, place=resumed(state, stop))
    assert before + after == wanted


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, micro=st.sampled_from([1, 2, 4, 6]), size=st.integers(1, 3))
def test_each_sample_comes_once_in_an_epoch(lengths, micro, size):
    total = sum(lengths)
    steps, _ = play(Parts(lengths), 1, 3 * total + 3, micro=micro, size=size)
    flat = [sample for step in steps for batch in step.values() for sample in batch]
    everything = Counter((part, offset) for part, length in enumerate(lengths) for offset in range(length))
    for epoch in range(3):
        assert Counter(flat[epoch * total : (epoch + 1) * total]) == everything


def shifting(micro, ranks):
    """Shares that change with the step."""

    def at(step):
        cuts = sorted(random.Random(step // 3).choices(range(micro + 1), k=ranks - 1))
        runs = tuple(itertools.pairwise([0, *cuts, micro]))
        return Shares(runs, tuple(max(1, stop - start) for start, stop in runs))

    return ShareSchedule(at, lambda step: at(step))


@pytest.mark.parametrize("lengths", [[5, 9, 2, 7, 1, 0, 3, 3, 8, 4, 4, 6, 1, 2, 9, 5, 3], [9, 4], [3, 20, 1]])
def test_slots_change_hands_and_nothing_is_lost_or_doubled(lengths):
    stream = Parts(lengths, noise=True)
    wanted, _ = play(stream, 1, 30)
    assert play(stream, 3, 30, sharing=shifting(4, 3))[0] == wanted


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than cores
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[9, 9, 2, 7, 5, 8, 9, 3, 6], [7, 5]])
def test_loader_processes_read_the_same(workers, lengths):
    stream = Parts(lengths, noise=True)
    wanted, _ = play(stream, 1, 14)
    assert play(stream, 1, 14, workers=workers)[0] == wanted
    before, state = play(stream, 2, 5, workers=workers)
    assert before + play(stream, 1, 9, workers=workers, place=resumed(state, 5))[0] == wanted


def test_unused_imports():
    assert is_stream and equal_shares and ConfigError and DataError
