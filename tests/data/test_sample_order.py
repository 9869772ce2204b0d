"""The order of samples: a permutation of every epoch, the same however it is asked for."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.sampler import Sequential, Shuffled, permute
from lockstep.errors import DataError

# No deadline: a busy machine is no error. No database: nothing is written beside the tests.
steady = settings(deadline=None, database=None)
KEYS = st.integers(0, 2**64 - 1)


@steady
@given(size=st.integers(1, 5000), key=KEYS)
def test_every_key_gives_a_permutation(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 65537])
def test_sizes_at_the_edges_of_a_domain_are_permuted(size):
    images = permute(np.arange(size), size, key=7)
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(size))


@steady
@given(size=st.integers(1, 2**62), key=KEYS, start=st.integers(0, 2**61))
def test_images_of_a_huge_size_are_distinct_and_inside(size, key, start):
    indices = (np.arange(200) + start) % size
    images = permute(indices, size, key)
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(np.unique(indices))


@steady
@given(size=st.integers(1, 300), seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_any_slicing_gives_the_same_stream(size, seed, cuts):
    order = Shuffled(size, seed)
    epochs, samples = order.at(0, 1000)
    edges = [0, *sorted(cuts), 1000]
    parts = [order.at(start, stop) for start, stop in itertools.pairwise(edges)]
    assert np.array_equal(np.concatenate([part[0] for part in parts]), epochs)
    assert np.array_equal(np.concatenate([part[1] for part in parts]), samples)


@pytest.mark.parametrize("size", [10, 100, 1000])
def test_every_epoch_has_every_sample_once_in_its_own_order(size):
    epochs, samples = Shuffled(size, seed=1).at(0, 5 * size)
    assert np.array_equal(epochs, np.repeat(np.arange(5), size))
    rows = samples.reshape(5, size)
    assert np.array_equal(np.sort(rows), np.tile(np.arange(size), (5, 1)))
    assert len(np.unique(rows, axis=0)) == 5


def test_another_seed_is_another_order():
    first, second = (Shuffled(1000, seed).at(0, 1000)[1] for seed in (0, 1))
    assert (first == second).mean() < 0.01


PINNED = [652377025031, 475608598562, 267912954272, 426766085608]
PINNED_EDGES = {64: [63, 18, 8], 1024: [1021, 378, 399], 4096: [1045, 476, 465]}  # sizes that fill their domain
PINNED_SMALL = [5, 8, 0, 6, 7, 3, 2, 1, 4, 9]


def test_the_order_is_pinned():
    # A change here changes the data of every run that is resumed: raise the checkpoint's format with it.
    assert Shuffled(10**12, seed=0).at(10**12 - 2, 10**12 + 2)[1].tolist() == PINNED
    for size, images in PINNED_EDGES.items():
        assert Shuffled(size, seed=0).at(0, 3)[1].tolist() == images
    assert Shuffled(10, seed=0).at(0, 10)[1].tolist() == PINNED_SMALL


@pytest.mark.parametrize("size", [5, 40, 100])
def test_each_sample_is_equally_likely_at_each_position(size):
    trials = 100_000 // size
    counts = np.zeros((size, size))
    for key in range(trials):
        counts[np.arange(size), permute(np.arange(size), size, key)] += 1
    assert chi_square_sigmas(counts, trials / size, freedom=(size - 1) ** 2) < 4


def test_neighbouring_positions_are_unrelated():
    size, bins = 1 << 18, 16
    images = permute(np.arange(size - 1000), size - 1000, key=3)
    coarse = images * bins // (size - 1000)
    counts = np.zeros((bins, bins))
    np.add.at(counts, (coarse[:-1:2], coarse[1::2]), 1)
    assert chi_square_sigmas(counts, counts.sum() / bins**2, freedom=bins**2 - 1) < 4


def chi_square_sigmas(counts, expected, freedom):
    """How many standard deviations the statistic lies from its mean under uniformity."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    return abs(statistic - freedom) / (2 * freedom) ** 0.5


def test_a_block_of_a_trillion_needs_little_memory():
    order = Shuffled(10**12, seed=0)
    tracemalloc.start()
    try:
        order.at(0, 65_536)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6


def test_an_evaluation_reads_in_order():
    epochs, samples = Sequential(4).at(2, 10)
    assert epochs.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert samples.tolist() == [2, 3, 0, 1, 2, 3, 0, 1]


def test_an_empty_range_has_no_samples():
    assert [len(part) for part in Shuffled(10, 0).at(3, 3)] == [0, 0]


@pytest.mark.parametrize("kind", [lambda size: Shuffled(size, 0), Sequential])
@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_a_size_that_cannot_be_ordered_is_refused(kind, size):
    with pytest.raises(DataError, match=f"has {size} samples"):
        kind(size)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_a_range_that_runs_backwards_is_refused(start, stop):
    with pytest.raises(ValueError, match="positions"):
        Shuffled(10, 0).at(start, stop)
