"""Sets of times: an array [n, 2] of begins and ends, sorted, apart from each other, none empty.

busy, exchanged = union(kernels), union(exchanges)
exposed = length(minus(exchanged, busy))
hidden = length(common(exchanged, busy))
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["NONE", "Spans", "common", "length", "minus", "union"]

Spans = NDArray[np.float64]

NONE: Spans = np.empty((0, 2))


def union(*given: Spans | Sequence[Sequence[float]]) -> Spans:
    """The times that lie in any of the intervals, which may overlap and stand in any order; empty ones are dropped."""
    parts = [np.asarray(each, dtype=np.float64).reshape(-1, 2) for each in given]
    every = np.concatenate(parts) if parts else NONE
    every = every[every[:, 1] > every[:, 0]]
    if not len(every):
        return NONE
    every = every[np.argsort(every[:, 0], kind="stable")]
    ends = np.maximum.accumulate(every[:, 1])
    begins = np.flatnonzero(np.r_[True, every[1:, 0] > ends[:-1]])
    lasts = np.r_[begins[1:] - 1, len(every) - 1]
    return np.stack([every[begins, 0], ends[lasts]], axis=1)


def common(one: Spans, other: Spans) -> Spans:
    """The times that lie in both."""
    if not len(one) or not len(other):
        return NONE
    # Of each interval of `one`, those of `other` that reach into it stand side by side.
    first = np.searchsorted(other[:, 1], one[:, 0], side="right")
    stop = np.searchsorted(other[:, 0], one[:, 1], side="left")
    counts = np.maximum(stop - first, 0)
    mine = np.repeat(np.arange(len(one)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    theirs = np.repeat(first, counts) + np.arange(len(mine)) - before
    found = np.stack([np.maximum(one[mine, 0], other[theirs, 0]), np.minimum(one[mine, 1], other[theirs, 1])], axis=1)
    return union(found)


def minus(one: Spans, other: Spans) -> Spans:
    """The times that lie in `one` and not in `other`."""
    if not len(one) or not len(other):
        return one
    edges = np.concatenate([[-np.inf], other.reshape(-1), [np.inf]]).reshape(-1, 2)
    return common(one, edges)


def length(spans: Spans) -> float:
    """How long they are together, in their own unit."""
    return float((spans[:, 1] - spans[:, 0]).sum())
