"""Assign the positions of a mixture to its sources, by arithmetic.

    schedule = Schedule([(0, [700_000, 300_000])])      # millionths, from position 0 on
    sources, numbers = Draws(seed=0).at(0, schedule, np.arange(32))

Positions are cut into blocks. How many samples of each source a block has follows from the integral of the weights: at
the end of each block the counts are within 1 of it. The sources of its positions are in a random order; each source's
samples are in their own.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from lockstep.data.sampler import Indices, permute
from lockstep.seeds import derive

__all__ = ["UNIT", "Draws", "PositionBlock", "Schedule", "SourceBlock"]

# Weights are rounded to millionths, so that constant ones repeat after a whole number of blocks.
UNIT = 1_000_000
# Fewest positions of a block.
_BLOCK = 1000
# About the number of blocks of a curriculum.
_BLOCKS = 1000


class PositionBlock(NamedTuple):
    """A block of positions.

    Attributes:
        start, stop: its positions.
        before: samples of each source before it. int64 [sources]
        counts: samples of each source in it. int64 [sources]
    """

    start: int
    stop: int
    before: Indices
    counts: Indices


class _ScheduleSegment:
    """A part of the schedule with linear weights, or, at its end, constant ones.

    Args:
        start: its first position.
        length: its positions; 0: it is the last, which repeats without end.
        first, last: shares in millionths at its ends.
        before: samples of each source before it. int64 [sources]
        blocks: about how many blocks it may have.
    """

    def __init__(
        self, start: int, length: int, first: list[int], last: list[int], before: Indices, blocks: int = _BLOCKS
    ) -> None:
        self.start = start
        self.length = length
        self._before = before
        # The last part repeats. After this many positions all counts are whole numbers.
        if not length:
            length = _BLOCK * (UNIT // _BLOCK // math.gcd(UNIT // _BLOCK, *first))
        size = max(_BLOCK, -(-length // blocks))
        self._bounds = [*range(0, length, size), length]
        # The integral of the weights at each bound, in units of 1 / (2 * UNIT * length). Python integers do not
        # overflow.
        rows = []
        for bound in self._bounds:
            rows.append([2 * length * a * bound + (b - a) * bound * bound for a, b in zip(first, last, strict=True)])
        targets = np.array(rows, dtype=object)
        unit = 2 * UNIT * length
        self._counts = _round(self._bounds, targets // unit, -(-targets // unit))

    @property
    def after(self) -> Indices:
        """Samples of each source at its end, or at the end of its first period.

        int64 [sources]
        """
        counts: Indices = self._before + self._counts[-1]
        return counts

    def block(self, position: int) -> PositionBlock:
        """Return the block of a position."""
        periods, offset = divmod(position - self.start, self._bounds[-1])
        number = bisect_right(self._bounds, offset) - 1
        start = position - offset + self._bounds[number]
        before = self._before + periods * self._counts[-1] + self._counts[number]
        counts = self._counts[number + 1] - self._counts[number]
        return PositionBlock(start, start + self._bounds[number + 1] - self._bounds[number], before, counts)


def _round(bounds: list[int], floors: NDArray[Any], ceilings: NDArray[Any]) -> Indices:
    """Round the sources' counts at each bound to integers.

    They never fall, and add up to the bound.

    A count stays between floor and ceiling of its exact value. Of the sources that may get one more, the one whose
    floor demands it first gets it: with this rule, earliest deadline first, none comes too late (Liu and Layland, 1973;
    Tijdeman, 1980). The largest remainder at each bound alone would let counts fall.

    Args:
        bounds: positions.
        floors, ceilings: of the exact counts. [bounds, sources]

    Returns:
        int64 [bounds, sources].
    """
    low = floors.astype(np.int64)
    high = ceilings.astype(np.int64)
    counts = np.zeros_like(low)
    for number in range(1, len(bounds)):
        current = np.maximum(counts[number - 1], low[number])
        missing = bounds[number] - int(current.sum())
        may = np.flatnonzero(current < high[number]).tolist()
        due = {}
        for source in may:
            due[source] = int(np.searchsorted(low[:, source], current[source] + 1))
        current[sorted(may, key=lambda source: due[source])[:missing]] += 1
        counts[number] = current
    return counts


class Schedule:
    """Assignment of the positions of an endless sequence to sources and their samples.

    Args:
        points: (position, shares in millionths), ascending; of two at a position the last holds.
    """

    def __init__(self, points: Sequence[tuple[int, list[int]]]) -> None:
        before = np.zeros(len(points[0][1]), dtype=np.int64)
        points = [(0, points[0][1]), *points]
        blocks = max(10, _BLOCKS // len(points))
        self._parts: list[_ScheduleSegment] = []
        for (start, first_shares), (following, last_shares) in pairwise(points):
            if start < following:
                self._parts.append(
                    _ScheduleSegment(start, following - start, first_shares, last_shares, before, blocks)
                )
                before = self._parts[-1].after
        start, last_shares = points[-1]
        self._parts.append(_ScheduleSegment(start, 0, last_shares, last_shares, before))
        self._starts = [schedule_part.start for schedule_part in self._parts]

    def block(self, position: int) -> PositionBlock:
        """Return the block of a position."""
        return self._parts[bisect_right(self._starts, position) - 1].block(position)


class SourceBlock(NamedTuple):
    """The source of each position of a block, in a random order.

    Attributes:
        start, stop: its positions.
        before: samples of each source before it. int64 [sources]
        sources: of its positions. int64 [stop - start]
        numbers: of the samples in their sources, which each source counts in the order of positions. int64
    """

    start: int
    stop: int
    before: Indices
    sources: Indices
    numbers: Indices


@final
class Draws:
    """Draws the sources of the positions of several lanes; keeps the last block of each.

    Args:
        seed: the run's.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._blocks: dict[int, SourceBlock] = {}

    def block(self, lane: int, schedule: Schedule, position: int) -> SourceBlock:
        """Return the block of a position of a lane. A lane has one schedule."""
        known = self._blocks.get(lane)
        if known is None or not known.start <= position < known.stop:
            block = schedule.block(position)
            known = self._blocks[lane] = _draw(block, derive(self._seed, "mixture", lane, block.start))
        return known

    def at(self, lane: int, schedule: Schedule, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source of each position of a lane, and its sample's number there.

        Two int64 arrays.

        Args:
            positions: ascending.
        """
        sources = np.empty_like(positions)
        numbers = np.empty_like(positions)
        offset = 0
        while offset < len(positions):
            block = self.block(lane, schedule, int(positions[offset]))
            end = int(np.searchsorted(positions, block.stop))
            inside = positions[offset:end] - block.start
            sources[offset:end], numbers[offset:end] = block.sources[inside], block.numbers[inside]
            offset = end
        return sources, numbers


def _draw(block: PositionBlock, key: int) -> SourceBlock:
    size = block.stop - block.start
    ends = np.cumsum(block.counts)
    sources = np.searchsorted(ends, permute(np.arange(size), size, key), side="right")
    numbers = np.empty_like(sources)
    numbers[np.argsort(sources, kind="stable")] = np.arange(size) - np.repeat(ends - block.counts, block.counts)
    return SourceBlock(block.start, block.stop, block.before, sources, block.before[sources] + numbers)
