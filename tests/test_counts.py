"""Counts of items: what is one, what a batch shows of its samples, and sums that no grouping changes."""

import dataclasses
import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from lockstep.counts import PARTS, check_count, number, parts, samples_in, total
from lockstep.errors import DataError


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (3, 3),
        (0, 0),
        (2.5, 2.5),
        (3.0, 3),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([4]), 4),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        *((bad, None) for bad in (-1, -0.5, math.nan, math.inf, True, None, "7", 2**60, 1j)),
        *((bad, None) for bad in (torch.ones(2), torch.tensor(True), np.bool_(True), torch.tensor(math.nan))),
    ],
)
def test_a_count_is_one_finite_number_from_0_on(value, count):
    found = check_count(value)
    assert found == count
    assert type(found) is type(count)


_COUNT = st.floats(1e-9, 1e9) | st.integers(0, 10**6).map(float)


@given(st.lists(_COUNT, min_size=1, max_size=20), st.randoms())
def test_any_grouping_of_counts_over_ranks_gives_the_same_bits(counts, random):
    whole = number(total(counts))
    assert abs(whole - math.fsum(counts)) <= math.ulp(whole)
    mixed, ranks = random.sample(counts, len(counts)), random.randint(1, 5)
    rows = [parts(total(mixed[rank::ranks])) for rank in range(ranks)]  # a rank without items sends zeros
    assert all(len(row) == PARTS for row in rows)
    assert number(math.fsum(part for row in rows for part in row)) == whole


@given(st.lists(st.integers(0, 2**40), max_size=20))
def test_whole_counts_stay_whole_and_take_one_part(counts):
    found = total(counts)
    assert type(number(found)) is int
    assert parts(found) == [float(sum(counts)), *[0.0] * (PARTS - 1)]


def test_counts_that_no_sum_can_hold_are_refused():
    with refuses(DataError, "`count`"):
        parts(total([2.0**50, 2.0**-10, 2.0**-80, 2.0**-200]))


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor


class Graphs:
    """A batch of graphs as PyG makes it: three of them, of which one was left out, in tensors of nodes."""

    num_graphs = 3

    def __init__(self):
        self.x, self.batch, self.ptr = torch.ones(9, 2), torch.arange(9) // 3, torch.arange(0, 12, 3)


_IMAGES = [(torch.ones(3, 4 + k, 5), {"label": torch.tensor(k)}) for k in range(4)]
_ALIKE = [torch.ones(3, 5, 5) for _ in range(4)]
_SERIES = [torch.ones(2 + k, 8) for k in range(4)]
_LABELS = torch.arange(4)


@pytest.mark.parametrize(
    ("batch", "samples", "count"),
    [
        (torch.ones(3, 8), [None] * 4, 3),  # one was left out
        ([torch.ones(1, 8), torch.ones(1)], [0] * 2, 1),  # as many fields as samples
        ({"x": torch.ones(8, 2)}, [0] * 4, 8),  # crops
        (Pair(torch.ones(3, 8), torch.ones(3)), [0] * 4, 3),
        (Fields(torch.ones(3, 8), torch.ones(3)), [0] * 4, 3),
        ((torch.ones(4, 8), torch.ones(9)), [0] * 4, 4),
        (tuple(map(list, zip(*_IMAGES, strict=True))), _IMAGES, 4),  # images of many sizes
        (tuple(map(list, zip(*_IMAGES[:3], strict=True))), _IMAGES, 3),
        (_ALIKE[:2], _ALIKE, 2),
        (["a text", "another"], ["a text", "another"], 2),
        ((torch.ones(7, 4, 8), _LABELS), [0] * 4, 4),  # time first
        ((pack_sequence(_SERIES, enforce_sorted=False), _LABELS), [0] * 4, 4),
        ((torch.ones(7, 3, 8), torch.ones(3)), [0] * 4, None),  # time first, and one was left out
        (Graphs(), [0] * 4, 3),  # and as many numbers in `ptr` as samples
        (object(), [0] * 4, None),
        (None, [0] * 4, None),
        (default_collate([torch.ones(2)] * 4)[:0], [0] * 4, 0),
    ],
)
def test_the_samples_of_a_batch_are_those_that_it_shows(batch, samples, count):
    assert samples_in(batch, samples) == count
