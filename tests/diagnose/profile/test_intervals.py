"""Interval arithmetic against sets of whole numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.diagnose.profile.reading import NONE, common, length, minus, union

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def cells(pairs):
    return {cell for begin, end in pairs for cell in range(int(begin), int(end))}


def is_set(spans):
    flat = spans.reshape(-1)
    return bool((flat[1:] > flat[:-1]).all())


@given(PAIRS, PAIRS)
def test_they_are_sets(one, other):
    a, b = union(one), union(other)
    for found, wanted in (
        (a, cells(one)),
        (union(a, b), cells(one) | cells(other)),
        (common(a, b), cells(one) & cells(other)),
        (minus(a, b), cells(one) - cells(other)),
    ):
        assert is_set(found)
        assert cells(found) == wanted
        assert length(found) == len(wanted)


@given(PAIRS, PAIRS)
def test_what_is_common_and_what_is_left_make_the_whole(one, other):
    a, b = union(one), union(other)
    assert length(common(a, b)) + length(minus(a, b)) == length(a)


def test_nothing_is_a_set_too():
    assert length(NONE) == 0
    assert union().shape == (0, 2)
    assert np.array_equal(minus(NONE, union([(0, 1)])), NONE)
