"""Read a mixture of streams: each lane mixes its samples from the sources' lanes.

    source = MixtureSource(names, sources, points)
    reader = reader_of(source, lanes)                       # of a single stream too
    samples, cursor = reader.read(lane, first, 4, epoch=0)

The source of the n-th sample of a lane is arithmetic (`mixture_schedule.py`); the sample is the next one of the
source's lane. A source whose lane has ended continues with its parts of its next epoch. So a mixture never ends, and
each turn is a step. The cursor of a lane has those of its sources in its `state`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any, Protocol, final

import numpy as np

from lockstep.data.mixture_schedule import Draws, Schedule, SourceBlock
from lockstep.data.sampler import Indices
from lockstep.data.streams import Cursor, LaneReader, Lanes, SampleBlock, StreamSource
from lockstep.seeds import derive

__all__ = ["LaneMixture", "MixtureReader", "MixtureSource", "Reader", "reader_of"]


@final
class MixtureSource:
    """The sources of a mixture of streams.

    Args:
        names: of the sources.
        sources: the streams.
        points: (step, shares in millionths) of a curriculum.

    Attributes:
        parts: of the source with the fewest; a source that never has a weight does not count.
        name: for messages.
        draws_random: reading may draw random numbers.
        sizes: none: a lane whose parts have ended continues with the next epoch's, so lanes stay full.
    """

    def __init__(self, names: list[str], sources: list[StreamSource], points: list[tuple[int, list[int]]]) -> None:
        self.names = names
        self.sources = sources
        self.points = points
        for name, source in zip(names, sources, strict=True):
            source.name = f"{source.name} (source {name})"
        self.used = [any(shares[number] for _, shares in points) for number in range(len(names))]
        used = []
        for each, has_weight in zip(sources, self.used, strict=True):
            if has_weight:
                used.append(each)
        self.smallest = min(used, key=lambda each: each.parts)
        self.parts = self.smallest.parts
        self.name = f"a mixture of {', '.join(names)}"
        self.draws_random = any(each.draws_random for each in used)
        self.sizes = list[int]()

    @property
    def plan(self) -> dict[str, int]:
        """The parts of each source, for a resume."""
        parts = {}
        for name, source in zip(self.names, self.sources, strict=True):
            parts[name] = source.parts
        return parts


@final
class LaneMixture:
    """Assigns the samples of each lane to sources.

    Args:
        lanes: of the mixture.
        points: (step, shares in millionths).
    """

    def __init__(self, lanes: Lanes, points: Sequence[tuple[int, list[int]]]) -> None:
        self._lanes = lanes
        self._points = points
        self._draws = Draws(lanes.seed)
        # By the turn in which a lane begins.
        self._schedules: dict[int, Schedule] = {}
        # The last block of each lane.
        self._blocks: dict[int, SourceBlock] = {}

    def place(self, lane: int, step: int) -> int:
        """Return the number of a lane's first sample from step `step` on."""
        turns = max(0, -(-(step - self._begin(lane)) // self._lanes.turns))
        return turns * self._lanes.slots * self._lanes.micro_size

    def counts(self, lane: int, number: int) -> list[int]:
        """Return how many of a lane's samples before `number` each source has."""
        block = self._block(lane, number)
        inside = np.bincount(block.sources[: number - block.start], minlength=len(block.before))
        counts: list[int] = (block.before + inside).tolist()
        return counts

    def sources(self, lane: int, first: int, count: int) -> Indices:
        """Return the sources of samples first .. first + count - 1 of a lane.

        int64 [count]
        """
        pieces = list[Indices]()
        while count > 0:
            block = self._block(lane, first)
            pieces.append(block.sources[first - block.start :][:count])
            first = first + len(pieces[-1])
            count = count - len(pieces[-1])
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces)

    def block_of(self, source: int, lane: int, number: int) -> SampleBlock:
        """Return the samples of a source in the same micro-batch as its sample `number`."""

        def before(micro: int) -> int:
            return self.counts(lane, micro * self._lanes.micro_size)[source]

        # Double the bound, then halve the interval: the count of a source never falls.
        low = 0
        high = 1
        while before(high) <= number:
            low = high
            high = 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if before(middle) <= number else (low, middle)
        return SampleBlock(low, before(low), before(high))

    def shares(self, first: int, last: int, names: Sequence[str]) -> dict[str, float]:
        """Return each source's share of the samples of some steps, by name.

        Of steps first .. last - 1.
        """
        counts = np.zeros(len(names), dtype=np.int64)
        total = 0
        for lane in range(self._lanes.count):
            number = self.place(lane, first)
            stop = self.place(lane, last)
            counts += np.subtract(self.counts(lane, stop), self.counts(lane, number))
            total += stop - number
        fractions = {}
        for name, count in zip(names, counts, strict=True):
            fractions[name] = int(count) / max(1, total)
        return fractions

    def _begin(self, lane: int) -> int:
        """Return the first turn of a lane; lanes past the last are for trials."""
        return lane % self._lanes.count % self._lanes.turns

    def _schedule(self, lane: int) -> Schedule:
        begin = self._begin(lane)
        if begin not in self._schedules:
            points = [(self.place(lane, step), shares) for step, shares in self._points]
            self._schedules[begin] = Schedule(points)
        return self._schedules[begin]

    def _block(self, lane: int, number: int) -> SourceBlock:
        block = self._blocks.get(lane)
        if block is None or not block.start <= number < block.stop:
            block = self._blocks[lane] = self._draws.block(lane, self._schedule(lane), number)
        return block


class Reader(Protocol):
    """Reads samples of lanes; see `LaneReader`."""

    def read(
        self, lane: int, first: int, count: int, *, epoch: int, cursor: Cursor | None = None, step: int = 0
    ) -> tuple[list[Any], Cursor]:
        """Read samples of a lane."""

    def close(self) -> None:
        """Close all open parts."""


@final
class MixtureReader:
    """Reads samples of the lanes of a mixture; arguments as `LaneReader`."""

    def __init__(
        self, source: MixtureSource, lanes: Lanes, retries: int, rank: int, count_retry: Callable[[], None]
    ) -> None:
        self._mixture = LaneMixture(lanes, source.points)
        # Lane -> its next sample, and the samples of each source before it.
        self._counts: dict[int, tuple[int, list[int]]] = {}
        self._readers = []
        for number, stream in enumerate(source.sources):
            source_lanes = dataclasses.replace(
                lanes, parts=stream.parts, seed=derive(lanes.seed, "source", number), divided_by=source.parts
            )
            block_of = partial(self._mixture.block_of, number)
            self._readers.append(LaneReader(stream, source_lanes, retries, rank, count_retry, block_of, repeats=True))

    def read(
        self, lane: int, first: int, count: int, *, epoch: int, cursor: Cursor | None = None, step: int = 0
    ) -> tuple[list[Any], Cursor]:
        """Read samples of a lane: those of each source one after the other, then mixed."""
        if cursor is None or cursor.state is None:
            known = [None] * len(self._readers)
        else:
            known = cursor.state
        which = self._mixture.sources(lane, first, count).tolist()
        # The usual case: the lane is read on, and the counts are known.
        number, before = self._counts.get(lane, (-1, []))
        if number != first:
            before = self._mixture.counts(lane, first)
        numbers = [which.count(number) for number in range(len(self._readers))]
        samples_by_source = list[list[Any]]()
        after = list[Cursor]()
        for reader, start, number, source_cursor in zip(self._readers, before, numbers, known, strict=True):
            # A checkpoint has cursors as lists.
            if source_cursor is not None and type(source_cursor) is not Cursor:
                source_cursor = Cursor(*source_cursor)
            if number:
                samples, source_cursor = reader.read(lane, start, number, epoch=epoch, cursor=source_cursor, step=step)
            else:
                samples = []
                source_cursor = reader.nearest(lane, epoch, start, source_cursor)
            samples_by_source.append(samples)
            after.append(source_cursor)
        self._counts[lane] = first + count, list(map(add, before, numbers))
        nexts = [iter(samples).__next__ for samples in samples_by_source]
        return [nexts[number]() for number in which], Cursor(first + count, 0, 0, after)

    def close(self) -> None:
        """Close all open parts."""
        for reader in self._readers:
            reader.close()


def reader_of(
    source: StreamSource | MixtureSource,
    lanes: Lanes,
    retries: int = 0,
    rank: int = 0,
    count_retry: Callable[[], None] = lambda: None,
) -> Reader:
    """Make the reader of a stream or a mixture; arguments as `LaneReader`."""
    if isinstance(source, MixtureSource):
        return MixtureReader(source, lanes, retries, rank, count_retry)
    return LaneReader(source, lanes, retries, rank, count_retry)
