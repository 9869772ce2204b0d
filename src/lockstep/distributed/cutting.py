"""A step's micro-batches, cut into one run for each rank, so that the last one to end does so as soon as it can.

cut([1.0] * 8, costs=[1.0, 1.9]).slots          # (5, 3): 5 on the first, 3 * 1.9 = 5.7 on the second
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lockstep.distributed.shares import Shares

__all__ = ["cut", "loads"]

_Numbers = NDArray[np.float64]

_BAND = 64  # runs up to this length are all tried; longer ones up to twice what the rank's speed says


def cut(works: Sequence[float], costs: Sequence[float], most: Sequence[int] = ()) -> Shares:
    """The runs of which the longest takes least; of several such cuts the one whose loads are most alike.

    Found by dynamic programming over the ranks, the "linear partition" of Kleinberg and Tardos, twice: first the least
    possible longest load, then among the cuts within it the least sum of squared loads. Only numbers decide, by
    operations that are the same on every processor, so all ranks that are given the same find the same.

    Args:
        works: of each micro-batch, in any unit, above 0; M of them, at least as many as ranks.
        costs: by rank, what a unit of work takes it, above 0.
        most: by rank, micro-batches that it may have at most, M in all or more; (): as many as there are.
    """
    count = len(works)
    ends = np.array(list(itertools.accumulate(works, initial=0.0)))
    widths = _widths(count, costs, most or (count,) * len(costs))
    first = np.full(count + 1, np.inf)
    first[0] = 0.0
    best = first
    for cost, width in zip(costs, widths, strict=True):
        best = np.maximum(_before(best, width), cost * _work(ends, width)).min(axis=1)
    limit, best, choices = best[count], first, []
    for cost, width in zip(costs, widths, strict=True):
        load = cost * _work(ends, width)
        total = _before(best, width) + np.where(load <= limit, load * load, np.inf)
        shortest = total[:, ::-1].argmin(axis=1)  # of equal ones
        best = total[np.arange(count + 1), width - 1 - shortest]
        choices.append(shortest + 1)
    slots, end = [], count
    for lengths in reversed(choices):
        slots.append(int(lengths[end]))
        end -= slots[-1]
    slots.reverse()
    return Shares(tuple(itertools.pairwise(itertools.accumulate(slots, initial=0))), tuple(slots))


def loads(works: Sequence[float], costs: Sequence[float], shares: Shares) -> list[float]:
    """By rank, what its run takes it."""
    return [cost * math.fsum(works[a:b]) for cost, (a, b) in zip(costs, shares.runs, strict=True)]


def _widths(count: int, costs: Sequence[float], most: Sequence[int]) -> list[int]:
    """The longest run that is tried on each rank: for many micro-batches all lengths would take too long."""
    speed = sum(1.0 / cost for cost in costs)
    fair = [math.ceil(2.0 * count / (cost * speed)) for cost in costs]
    found = [min(count, own, max(_BAND, each)) for own, each in zip(most, fair, strict=True)]
    return found if sum(found) >= count else [min(count, own) for own in most]


def _before(values: _Numbers, width: int) -> _Numbers:
    """[count + 1, width]: row j has the values at j - width .. j - 1, where a run that ends at j may begin."""
    return sliding_window_view(np.concatenate([np.full(width, np.inf), values[:-1]]), width)


def _work(ends: _Numbers, width: int) -> _Numbers:
    """[count + 1, width]: the work of the runs that end at j and begin there; inf for what is no run."""
    padded = np.concatenate([np.full(width, -np.inf), ends[:-1]])
    work: _Numbers = ends[:, None] - sliding_window_view(padded, width)
    return work
