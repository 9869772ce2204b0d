"""The order of shards: a permutation of each epoch, read in lanes, the same however it is asked for."""

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from toys import Partial

from lockstep.data.sampler import Sequential, Shuffled, permute, permute_groups
from lockstep.data.shard_order import Geometry, ShardOrder, place_order, training_order
from lockstep.errors import ConfigError, DataError

steady = settings(deadline=None, database=None, max_examples=40)
SIZES = st.lists(st.integers(0, 90), min_size=1, max_size=12).filter(any)
CUTS = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(lambda cut: Geometry(max(cut), min(cut)))


@steady
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6), seed=st.integers(0, 2**63))
def test_groups_are_permuted_as_each_alone(sizes, seed):
    keys = [seed + number for number in range(len(sizes))]
    groups = np.repeat(np.arange(len(sizes)), sizes)
    indices = np.concatenate([np.arange(size) for size in sizes])
    alone = [permute(np.arange(size), size, key) for size, key in zip(sizes, keys, strict=True)]
    assert np.array_equal(permute_groups(indices, groups, sizes, keys), np.concatenate(alone))


@steady
@given(sizes=SIZES, cut=CUTS, group=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
def test_each_epoch_has_each_sample_once_in_any_slices(sizes, cut, group, seed, data):
    total = sum(sizes)
    count = data.draw(st.integers(1, total))
    order = place_order(ShardOrder(sizes, seed, group), cut, count)
    epochs, samples = order.at(0, 3 * count)
    assert np.array_equal(epochs, np.repeat(np.arange(3), count))
    for row in samples.reshape(3, count):
        assert len(np.unique(row)) == count
        assert row.min() >= 0
        assert row.max() < total
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, 3 * count), max_size=4))), 3 * count]
    parts = [order.at(start, stop)[1] for start, stop in itertools.pairwise(edges)]
    assert np.array_equal(np.concatenate(parts), samples)


def test_a_micro_batch_reads_on_in_its_lane():
    sizes, cut, group = [50] * 64, Geometry(32, 4), 2
    order = place_order(ShardOrder(sizes, 0, group), cut, 0)
    assert order.size % cut.size == 0
    for epoch in range(2):
        samples = order.at(epoch * order.size, (epoch + 1) * order.size)[1].reshape(-1, cut.size)
        for first in range(0, cut.size, cut.micro_size):
            shards = samples[:, first : first + cut.micro_size] // 50
            assert len(np.unique(shards)) <= 64 // 8 + 2 * group - 2  # its share, and the groups that it shares
            for step in range(0, len(shards) - 10, 10):
                assert len(np.unique(shards[step : step + 10])) <= 2 * group


PINNED = [70, 8, 35, 77, 34, 22, 76, 18, 8, 41, 82, 88]


def test_the_order_of_shards_is_pinned():
    # A change here changes the data of every run that is resumed.
    order = place_order(ShardOrder([7, 100, 0, 3], 0, 2), Geometry(8, 2), 0)
    assert order.at(105, 117)[1].tolist() == PINNED


def test_seek_among_a_billion_samples_is_instant_and_small():
    order = ShardOrder(np.full(100_000, 10_000), 0, 8).placed(Geometry(1024, 8), 0)
    tracemalloc.start()
    try:
        began = time.process_time()
        order.at(10**9 - 5000, 10**9 - 904)
        spent, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spent < 1  # the aim; it takes a twentieth
    assert peak < 20e6


class Task(Partial):
    def __init__(self, order=None):
        self.own = order

    def order(self, samples, seed):
        return self.own


class Sharded(list):
    def __init__(self, sizes):
        super().__init__(range(sum(sizes)))
        self.shard_sizes = sizes


def test_who_decides_the_order():
    data = Sharded([4, 6])
    assert isinstance(training_order(Task(), data, 10, 0, 0), Shuffled)
    assert isinstance(training_order(Task(), data, 10, 0, 2), ShardOrder)
    assert training_order(Task(Sequential(10)), data, 10, 0, 0).at(0, 3)[1].tolist() == [0, 1, 2]
    with refuses(ConfigError, "--data.shuffle-shards 2", "order"):
        training_order(Task(Sequential(10)), data, 10, 0, 2)
    with refuses(ConfigError, "--data.shuffle-shards 2", "list", "shard_sizes"):
        training_order(Task(), list(range(10)), 10, 0, 2)
    data.shard_sizes = [4, 5]
    with refuses(ConfigError, "--data.shuffle-shards 2", 9, 10):
        training_order(Task(), data, 10, 0, 2)


@pytest.mark.parametrize("sizes", [[], [0, 0]])
def test_shards_without_samples_are_refused(sizes):
    with refuses(DataError, 0):
        ShardOrder(sizes, 0, 1)
