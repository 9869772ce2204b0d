"""Streams: the same samples in the same micro-batches, whoever reads them; seeks, ends, failures, other libraries."""

import itertools
import os
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Partial

from lockstep.data.batches import Loading, StepPlan
from lockstep.data.stream_adapters import source_of
from lockstep.data.stream_batches import StreamBatches, StreamData
from lockstep.data.streams import Lanes
from lockstep.distributed.balance import Shares, ShareSchedule
from lockstep.distributed.world import World
from lockstep.errors import DataError
from lockstep.run_state import Position


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


def batches_of(
    stream, world, *, micro=4, size=2, workers=0, retries=0, place=None, sharing=None, steps=1000, least=1, lanes=None
):
    data = StreamData(source_of(stream), retries)
    lanes = lanes or Lanes(data.source.parts, micro, size, 3, least)
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
    own = [(each.place(first + steps), each.cursors(first + steps)) for each in loaders]
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


@pytest.mark.parametrize("lengths", [[5, 9, 2, 7, 1, 0, 3, 3, 8], [9, 4]])
def test_a_resume_between_any_two_numbers_of_ranks_at_any_step(lengths):
    stream, steps = Parts(lengths, noise=True), 11
    wanted, _ = play(stream, 1, steps)
    for ranks, others in itertools.product(range(1, 5), repeat=2):
        stop = 1 + (3 * ranks + others) % (steps - 1)
        before, state = play(stream, ranks, stop)
        assert before + play(stream, others, steps - stop, place=resumed(state, stop))[0] == wanted, (ranks, others)
    for stop in range(1, steps):
        before, state = play(stream, 2, stop)
        assert before + play(stream, 3, steps - stop, place=resumed(state, stop))[0] == wanted, stop


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


class Failing(Parts):
    """Part 2 fails at its third sample, as often as there are files to take away."""

    def __init__(self, lengths, folder, noise=False):
        super().__init__(lengths, noise)
        self.folder = folder

    def iter(self, part, start):
        for sample in super().iter(part, start):
            left = list(self.folder.iterdir())
            if sample[:2] == (2, 2) and left:
                left[0].unlink()
                raise OSError(5, "Input/output error", "2.tar")
            yield sample


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_part_that_fails_is_opened_again_and_nothing_is_lost(tmp_path, workers, noise):
    wanted, _ = play(Parts([9, 9, 9, 9], noise), 1, 6)
    for number in range(2):
        (tmp_path / str(number)).touch()
    assert play(Failing([9, 9, 9, 9], tmp_path, noise), 1, 6, workers=workers, retries=2)[0] == wanted
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_part_that_fails_for_ever_is_one_line(tmp_path, workers):
    for number in range(9):
        (tmp_path / str(number)).touch()
    with pytest.raises(DataError, match=r"rank 0, step \d.*part 2, sample 2.*OSError.*--guards.retries") as caught:
        play(Failing([9, 9, 9, 9], tmp_path), 1, 6, workers=workers, retries=1)
    assert "\n" not in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 7


class Unopened(Parts):
    def iter(self, part, start):
        raise FileNotFoundError(2, "No such file", "a.tar")


def test_a_stream_that_cannot_be_opened_or_is_empty_is_one_line():
    with pytest.raises(DataError, match=r"part \d, sample 0: FileNotFoundError"):
        play(Unopened([3]), 1, 1)
    with pytest.raises(DataError, match="none of the 2 parts"):
        play(Parts([0, 0]), 2, 1)
    with pytest.raises(DataError, match="none of the 2 parts"):
        batches_of(Parts([0, 0]), World()).own_samples(0)


def test_a_part_that_became_shorter_is_one_line():
    class Iterable:
        def __init__(self, size):
            self.size = size

        def __iter__(self):
            return iter(range(self.size))

    _, state = play(Iterable(40), 1, 3, micro=2)
    with pytest.raises(DataError, match="ends after 5 samples"):
        play(Iterable(5), 1, 1, micro=2, place=resumed(state, 3))


class Endless(Parts):
    def iter(self, part, start):
        for offset in itertools.count(start):
            yield part, offset


def test_endless_parts_never_end_also_after_all_others():
    steps, state = play(Endless([0] * 4), 2, 50, workers=1)
    assert state.place.epoch == 0
    assert all(len(step) == 4 for step in steps)

    class Mixed(Endless):
        def iter(self, part, start):
            return super().iter(part, start) if part == 1 else iter([(part, 0)][start:])

    steps, state = play(Mixed([0] * 4), 2, 20)
    assert (state.place.epoch, [len(step) for step in steps[2:]]) == (0, [1] * 18)


def test_a_stream_shorter_than_a_step_is_a_step_an_epoch():
    steps, state = play(Parts([1, 2]), 2, 3, micro=4)
    assert [sorted(sample for batch in step.values() for sample in batch) for step in steps] == [
        [(0, 0), (1, 0), (1, 1)]
    ] * 3
    assert (state.place.epoch, state.place.samples) == (2, 9)


def test_a_micro_batch_too_short_for_batchnorm_is_left_out():
    steps, _ = play(Parts([5, 4]), 1, 3, micro=2, least=2)
    assert [sorted(map(len, step.values())) for step in steps] == [[2, 2], [2, 2], [2, 2]]


def test_the_place_of_a_run_has_epochs_and_samples():
    everyone = batches_of(Parts([5, 4, 6, 3]), World())
    loader = everyone.from_step(0)
    found = [everyone.place(Position(next(loader)[0] + 1)) for _ in range(7)]
    assert [(each.epoch, each.epoch_step, each.position) for each in found[:4]] == [
        (0, 1, 8),
        (0, 2, 15),
        (0, 3, 18),
        (1, 1, 26),
    ]
    assert [each.epoch_progress for each in found[2:4]] == [None, 1 / 3]


def test_trial_reads_parts_and_halves_and_restores_the_stream():
    everyone = batches_of(Parts([1, 5, 3], noise=True), World(rank=1, size=2))
    loader = everyone.from_step(0)
    assert everyone.own_samples(0) == 2
    whole, first, second = (batch.held for batch, _ in everyone.parts(0, [(0, 6), (0, 3), (3, 6)]))
    assert whole == first + second
    with pytest.raises(DataError, match="fewer than 12 samples"):
        everyone.parts(0, [(0, 12)])
    loader.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_lane_stays_in_one_process():
    """Five lanes for three processes: each lane is opened once."""

    class Told(Parts):
        def iter(self, part, start):
            with open(self.file, "a") as file:
                file.write(f"{part} {start} {os.getpid()}\n")
            yield from super().iter(part, start)

    stream = Told([40] * 5)
    with tempfile.TemporaryDirectory() as folder:
        stream.file = f"{folder}/opened"
        play(stream, 1, 12, micro=5, workers=3)
        opened = [line.split() for line in Path(stream.file).read_text().splitlines()]
    assert sorted(part for part, _, _ in opened) == list("01234")
    assert {start for _, start, _ in opened} == {"0"}
    assert len({pid for _, _, pid in opened}) == 3
