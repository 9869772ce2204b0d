"""Read data without an index: streams in parts, each read in order.

The order does not depend on the number of ranks and loader processes.

    lanes = Lanes(parts=64, micro_batches=8, micro_size=4, seed=0)
    lane, first = lanes.read_of(turn=17, micro=3)           # which samples micro-batch 3 of this turn has
    reader = LaneReader(source, lanes)
    samples, cursor = reader.read(lane, first, 4, epoch=0)  # reopens at `cursor` in another process or start

A lane is a list of parts, read one after the other; its samples are numbered in each epoch. A *turn* of an epoch is
what a step computes: M micro-batches, each with the next samples of a lane. Everything is a function of the data, the
seed and M: which rank or process reads a lane changes nothing. `data/stream_adapters.py` opens the parts.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np
from torch.utils.data._utils import worker

from lockstep.data.loader import seed_everything
from lockstep.data.sampler import Indices, permute
from lockstep.distributed.progress import rank_label
from lockstep.errors import DataError, LockstepError, SampleError, error_line
from lockstep.seeds import derive

__all__ = [
    "START",
    "Cursor",
    "LaneReader",
    "Lanes",
    "Opened",
    "SampleBlock",
    "StreamSource",
    "lanes_of",
]

_LOG = logging.getLogger("lockstep")
# Largest number of lanes of a slot, so that several loader processes can read for one slot.
_MAX_TURNS = 8
# A mixture's source may have this many times as many parts without samples in a row. Parts are dealt at random: if one
# of them has a sample, it is missed with a probability of 1 in 10^8.
_MAX_BARREN = 20
# Seconds before a part is opened again: a network may need them.
_PAUSE = 0.05


class Opened(NamedTuple):
    """An open part, and the number of its next sample.

    That number is at most the requested one.
    """

    iterator: Iterator[Any]
    number: int


class StreamSource(ABC):
    """Parts of a stream, however the library behind them opens and resumes one.

    Args:
        inner: the user's object.
        parts: their number.
        has_state: its iterators have a `state`.

    Attributes:
        name: type of the user's object, for messages.
        draws_random: reading may draw random numbers, so they are seeded.
        seeks: it promises that a part can be opened at any sample.
        carries: the state at a part's end is that with which the next epoch begins.
        sizes: of the parts, in any unit, if they are known and uneven.
        note: why it has fewer parts than its library could give it.

    Raises:
        DataError: there are no parts.
    """

    seeks = False

    def __init__(self, inner: Any, parts: int, *, has_state: bool = False) -> None:
        self.inner = inner
        self.parts = parts
        self.has_state = has_state
        self.name = type(inner).__name__
        self.draws_random = bool(getattr(inner, "draws_random", True))
        self.carries = False
        self.sizes = list[int]()
        self.note = ""
        if not isinstance(parts, int) or parts < 1:
            raise DataError(
                f"the training set {self.name} has parts = {parts!r}; a stream has at least 1; look at its path"
            )

    @abstractmethod
    def open(self, part: int, epoch: int, start: int, state: Any) -> Opened:
        """Open a part at sample `start`, or before it if it cannot seek.

        Args:
            state: of `state`, after `start` samples, or at the end of the epoch before; None: unknown.
        """

    @property
    def plan(self) -> int | dict[str, Any]:
        """The number of parts, for a resume; with their sizes, if these decide the lanes."""
        if self.sizes:
            return {"parts": self.parts, "sizes": derive(0, "sizes", *self.sizes)}
        return self.parts

    def state(self, opened: Iterator[Any]) -> Any:
        """Return what `open` needs to continue after the last sample, as JSON; None: nothing."""
        return None

    def worker_info(self, part: int) -> Any:
        """Return what `torch.utils.data.get_worker_info()` returns while a part is read."""
        return None


# --- lanes


@dataclass(frozen=True, slots=True)
class Lanes:
    """Which samples of a stream each micro-batch has.

    Attributes:
        parts: F, of the stream.
        micro_batches: M, of a step.
        micro_size: samples of a micro-batch.
        seed: the run's.
        min_samples: of a micro-batch; a shorter one at the end of a lane is left out. 2 with trainable BatchNorm.
        divided_by: number of parts that decides the number of lanes; 0: `parts`. In a mixture all sources have as many.
        turns: lanes of each slot, which take turns: a power of two up to 8, so that loader processes share the work.
        slots: slots that read one lane in each turn: 1, or more if there are fewer parts than slots.
    """

    parts: int
    micro_batches: int
    micro_size: int
    seed: int
    min_samples: int = 1
    divided_by: int = 0
    turns: int = field(init=False)
    slots: int = field(init=False)

    def __post_init__(self) -> None:
        parts = self.divided_by or self.parts
        object.__setattr__(self, "turns", _turns(parts, self.micro_batches))
        object.__setattr__(self, "slots", _slots(parts, self.micro_batches))

    @property
    def count(self) -> int:
        """Number of lanes."""
        return self.micro_batches * self.turns // self.slots

    def read_of(self, turn: int, micro: int) -> tuple[int, int]:
        """Return the lane of a micro-batch in a turn, and its first sample's number."""
        # Fewer parts than micro-batches: several micro-batches take turns within one lane.
        if self.slots > 1:
            return micro // self.slots, (turn * self.slots + micro % self.slots) * self.micro_size
        return micro * self.turns + turn % self.turns, turn // self.turns * self.micro_size

    def parts_of(self, epoch: int, lane: int) -> list[int]:
        """Return the parts of a lane in an epoch, in the order of reading.

        Each epoch deals them again. Lanes from `count` on are for trials before step 1: lane count + n has all parts,
        beginning with those of lane n.
        """
        deal = _deal(self.parts, derive(self.seed, "parts", epoch))
        trial_lane = lane - self.count
        dealt = deal[lane :: self.count] if trial_lane < 0 else np.roll(deal, -trial_lane)
        parts: list[int] = dealt.tolist()
        return parts


@cache
def _turns(parts: int, micro_batches: int) -> int:
    turns = 1
    while 2 * turns <= min(parts // micro_batches, _MAX_TURNS):
        turns *= 2
    return turns


@cache
def _slots(parts: int, micro_batches: int) -> int:
    divisors = (divisor for divisor in range(1, micro_batches + 1) if micro_batches % divisor == 0)
    return next(divisor for divisor in divisors if micro_batches // divisor <= parts)


# Number of deals that are kept, one for each epoch and number of parts.
@lru_cache(maxsize=4)
def _deal(parts: int, key: int) -> Indices:
    return permute(np.arange(parts, dtype=np.int64), parts, key)


# Share of empty micro-batches above which lanes are joined.
_MOST_EMPTY = 0.25
# Number of epochs whose deals are examined.
_MEASURED_EPOCHS = 3


def lanes_of(source: "StreamSource", micro_batches: int, micro_size: int, seed: int, min_samples: int = 1) -> Lanes:
    """Return the lanes of a stream: as many as its parts fill.

    Where the parts are known to be uneven, a step would have empty micro-batches once the short lanes have ended; fewer
    lanes, each read by several micro-batches, stay full.
    """
    lanes = Lanes(source.parts, micro_batches, micro_size, seed, min_samples)
    while source.sizes and lanes.count > 1 and _emptiness(lanes, source.sizes) > _MOST_EMPTY:
        lanes = replace(lanes, divided_by=lanes.count // 2)
    return lanes


def _emptiness(lanes: Lanes, sizes: Sequence[int]) -> float:
    """Return the share of the micro-batches of an epoch that would be empty."""
    shares = list[float]()
    for epoch in range(_MEASURED_EPOCHS):
        loads = []
        for lane in range(lanes.count):
            loads.append(sum(sizes[part] for part in lanes.parts_of(epoch, lane)))
        shares.append(1 - sum(loads) / max(1, len(loads) * max(loads)))
    return max(shares)


class Cursor(NamedTuple):
    """A place in a lane from which it can be opened.

    Attributes:
        number: of the next sample in the lane.
        place: of its part in the lane's list.
        offset: of the sample in its part.
        state: see `StreamSource.state`.
    """

    number: int
    place: int
    offset: int
    state: Any = None


START = Cursor(0, 0, 0)


class _OpenLane:
    """A lane and its open part, in one process.

    Attributes:
        cursor: the place after the last read.
        number, place, offset: of the next sample, see `Cursor`.
        parts: of the lane in an epoch of the source, in order.
        parts_epoch, parts_start: that epoch, and the place of its first part.
        iterator: over the rest of the part; None: not open.
        info: worker info that the part is read with.
        barren: parts without a sample, in a row.
        carried: the state with which the next part begins, see `StreamSource.carries`.
    """

    def __init__(self, epoch: int, lane: int, cursor: Cursor) -> None:
        self.epoch = epoch
        self.lane = lane
        self.cursor = cursor
        self.number, self.place, self.offset, _ = cursor
        self.parts = list[int]()
        self.parts_epoch = epoch
        self.parts_start = 0
        self.iterator: Iterator[Any] | None = None
        self.info: Any = None
        self.barren = 0
        self.carried = None if self.offset else cursor.state

    @property
    def has_ended(self) -> bool:
        return self.place - self.parts_start >= len(self.parts)

    @property
    def part(self) -> int:
        return self.parts[self.place - self.parts_start]


class SampleBlock(NamedTuple):
    """Samples of a lane that are drawn after one seeding.

    Its number, and the numbers of its first sample and of the one after its last.
    """

    number: int
    start: int
    stop: int


@final
class LaneReader:
    """Reads samples of lanes; keeps one open iterator for each lane that this process reads.

    Args:
        source: the stream.
        lanes: its division.
        retries: how often a part that fails is opened again.
        rank: for messages.
        count_retry: called for each further try.
        block_of: (lane, sample) -> the block that it is seeded with; None: that of its micro-batch.
        repeats: a lane that has ended continues with its parts of the source's next epoch.
    """

    def __init__(
        self,
        source: StreamSource,
        lanes: Lanes,
        retries: int = 0,
        rank: int = 0,
        count_retry: Callable[[], None] = lambda: None,
        block_of: Callable[[int, int], SampleBlock] | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        self._source = source
        self._lanes = lanes
        self._seed = lanes.seed
        self._rank = rank
        self._retries = retries
        self._count_retry = count_retry
        self._block_of = block_of or self._micro_block
        self._repeats = repeats
        self._draws = source.draws_random
        self._has_state = source.has_state
        self._open: dict[int, _OpenLane] = {}

    def read(
        self, lane: int, first: int, count: int, *, epoch: int, cursor: Cursor | None = None, step: int = 0
    ) -> tuple[list[Any], Cursor]:
        """Read samples of a lane.

        It continues at its position, or reads past samples of other ranks; otherwise it opens the lane at `cursor`.

        Args:
            first, count: numbers of the samples in the lane.
            epoch: of the stream.
            cursor: a known place of the lane in this epoch.
            step: for messages.

        Returns:
            The samples, fewer or none if the lane ends; and the place after them.

        Raises:
            DataError: a part cannot be read.
        """
        # Private to torch: what `get_worker_info()` returns. A collate function may ask for this process's own
        # afterwards.
        info = worker._worker_info
        try:
            # A trial may begin within a block. Its random numbers depend on the block, so draw the block from its
            # start.
            if self._draws and self._block_of(lane, first).start != first:
                self._drop(lane)
                cursor = None
            opened = self._open.get(lane)
            if opened is None or opened.number != first or opened.epoch != epoch:
                before = self._open.get(lane)
                opened = self._open_lane(lane, epoch, self.nearest(lane, epoch, first, cursor))
                # At the end of an epoch some iterators hand a state over to the next one.
                if before is not None and before.has_ended and before.epoch == epoch - 1:
                    opened.carried = opened.carried or before.carried
            return self._read(opened, first, count, step)
        finally:
            worker._worker_info = info

    def _read(self, opened: _OpenLane, first: int, count: int, step: int) -> tuple[list[Any], Cursor]:
        """Read samples from the lane's position, with retries."""
        lane = opened.lane
        epoch = opened.epoch
        before = opened.cursor
        for attempt in range(self._retries + 1):
            if attempt:
                self._count_retry()
                time.sleep(_PAUSE)
                # A failed iterator is of no use: open the part again at the last known position.
                opened = self._open_lane(lane, epoch, before)
            try:
                if opened.number < first:
                    self._pass(opened, first - opened.number)
                samples = self._take(opened, count)
                return samples, self._mark(opened)
            except LockstepError:
                raise
            except Exception as error:
                problem = error
                self._drop(lane)
        raise self._failure(opened, problem, step) from problem

    def close(self) -> None:
        """Close all open parts."""
        for lane in list(self._open):
            self._drop(lane)

    def _drop(self, lane: int) -> None:
        if opened := self._open.pop(lane, None):
            _close(opened.iterator)

    def nearest(self, lane: int, epoch: int, first: int, known: Cursor | None) -> Cursor:
        """Return the nearest known position before sample `first`.

        The open lane's, the given one, or the lane's start.
        """
        cursors = [START] if known is None else [known, START]
        opened = self._open.get(lane)
        if opened and opened.epoch == epoch:
            # The usual case: the lane is read on.
            if opened.number == first:
                return opened.cursor
            cursors.append(opened.cursor)
        return max((each for each in cursors if each.number <= first), key=lambda each: each.number)

    def _open_lane(self, lane: int, epoch: int, cursor: Cursor) -> _OpenLane:
        """Return the lane, opened at `cursor` unless it is there already."""
        opened = self._open.get(lane)
        if opened is None or (opened.epoch, opened.number) != (epoch, cursor.number):
            self._drop(lane)
            opened = self._open[lane] = _OpenLane(epoch, lane, cursor)
            self._deal(opened)
        return opened

    def _deal(self, opened: _OpenLane) -> None:
        """Set the parts of an open lane, by its place."""
        epoch = opened.epoch
        lane = opened.lane
        opened.parts = self._lanes.parts_of(epoch, lane)
        if self._repeats:
            # A mixture repeats its sources, so the position decides the epoch of the parts.
            opened.parts_epoch = opened.place // len(opened.parts)
            count = len(opened.parts)
            opened.parts_start = opened.parts_epoch * count
            opened.parts = self._lanes.parts_of(opened.parts_epoch, lane)

    def _take(self, opened: _OpenLane, count: int) -> list[Any]:
        """Draw up to `count` samples."""
        samples: list[Any] = []
        while len(samples) < count and not opened.has_ended:
            if opened.iterator is None:
                iterator = self._enter(opened)
            else:
                iterator = opened.iterator
            # Private to torch: a user's iterator asks `get_worker_info()` for its share.
            worker._worker_info = opened.info
            before = len(samples)
            try:
                self._extend(opened, samples, iterator, count - before)
            # Also on an error, so that the message names the right sample.
            finally:
                read = len(samples) - before
                opened.offset += read
                opened.number += read
            if len(samples) < count:
                self._leave_part(opened)
        return samples

    def _extend(self, opened: _OpenLane, samples: list[Any], iterator: Iterator[Any], count: int) -> None:
        """Append up to `count` samples of a part; seed at the start of each block.

        A block has the same samples for every reader, so what they draw depends on the data alone.
        """
        if not self._draws:
            # `extend` keeps what it has read if the iterator fails.
            samples.extend(islice(iterator, count))
            return
        number = opened.number
        end = opened.number + count
        while number < end:
            block = self._block_of(opened.lane, number)
            if number == block.start:
                seed_everything(derive(self._seed, "sample", opened.epoch, opened.lane, block.number))
            stop = min(block.stop, end)
            before = len(samples)
            samples.extend(islice(iterator, stop - number))
            if len(samples) - before < stop - number:
                return
            number = stop

    def _micro_block(self, lane: int, number: int) -> SampleBlock:
        size = self._lanes.micro_size
        block = number // size
        return SampleBlock(block, block * size, (block + 1) * size)

    def _pass(self, opened: _OpenLane, count: int) -> None:
        """Read past samples that others have."""
        # Reads the samples that other ranks train on, since a stream can only be read in order.
        while count > 0 and not opened.has_ended:
            count -= len(self._take(opened, min(count, self._lanes.micro_size)))

    def _enter(self, opened: _OpenLane) -> Iterator[Any]:
        """Open the lane's part at its offset."""
        part_number = opened.part
        epoch = opened.parts_epoch
        worker._worker_info = opened.info = self._source.worker_info(part_number)
        seed_everything(derive(self._seed, "part", epoch, part_number))
        state = opened.cursor.state if opened.offset else opened.carried
        opened_part = self._source.open(part_number, epoch, opened.offset, state)
        opened.iterator = opened_part.iterator
        if opened_part.number < opened.offset:
            self._read_past(opened, opened_part)
        return opened_part.iterator

    def _read_past(self, opened: _OpenLane, found: Opened) -> None:
        """Read past the first samples of a part that cannot seek; log the cost."""
        began = time.monotonic()
        number = opened.number
        target = opened.offset
        opened.offset = found.number
        opened.number = number - (target - found.number)
        while opened.number < number:
            samples: list[Any] = []
            self._extend(opened, samples, found.iterator, min(number - opened.number, self._lanes.micro_size))
            opened.offset += len(samples)
            opened.number += len(samples)
            if not samples:
                raise DataError(
                    f"{rank_label(self._rank)}: part {opened.part} of the stream {self._source.name} ends after "
                    f"{opened.offset} samples, and had at least {target} before; give the data as they were"
                )
        _LOG.info(
            "%s: part %d of the stream %s cannot seek: %d samples were read past in %.2f s",
            *(rank_label(self._rank), opened.part, self._source.name, target - found.number),
            time.monotonic() - began,
        )

    def _leave_part(self, opened: _OpenLane) -> None:
        if self._source.carries and opened.iterator is not None:
            opened.carried = self._copy_state(self._source.state(opened.iterator))
        _close(opened.iterator)
        opened.barren = 0 if opened.offset else opened.barren + 1
        opened.iterator = None
        opened.offset = 0
        opened.place = opened.place + 1
        # A mixture never ends, so parts without any sample must not be searched for ever.
        if self._repeats and opened.has_ended:
            if opened.barren > _MAX_BARREN * self._lanes.parts + 100:
                raise DataError(
                    f"the stream {self._source.name} has no samples: none of its {self._lanes.parts} parts yields one; "
                    "leave it out of the mixture"
                )
            self._deal(opened)

    def _mark(self, opened: _OpenLane) -> Cursor:
        """Return the place of the lane, with its iterator's state."""
        state = opened.carried
        if self._has_state and opened.iterator is not None and opened.offset:
            state = self._copy_state(self._source.state(opened.iterator))
        opened.cursor = Cursor(opened.number, opened.place, opened.offset, state)
        return opened.cursor

    def _copy_state(self, state: Any) -> Any:
        """Return a copy of an iterator's state.

        The iterator may change the state. Raises DataError if it is not JSON.
        """
        if state is None:
            return None
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"state_dict() of an iterator of the stream {self._source.name} is not JSON ({error}); return numbers, "
                "strings, lists and dicts, or leave it out: then `iter` gets `start` alone"
            ) from error

    def _failure(self, opened: _OpenLane, error: Exception, step: int) -> SampleError:
        tries = f" after {self._retries} more tries" if self._retries else ""
        if not opened.has_ended:
            where = f"part {opened.part}, sample {opened.offset}"
        else:
            where = f"lane {opened.lane}"
        return SampleError(
            f"{rank_label(self._rank)}, step {step + 1}: the stream {self._source.name} cannot be read at "
            f"{where}{tries}: {error_line(error)}; repair it, or open it again more often: --guards.retries N"
        )


def _close(iterator: Iterator[Any] | None) -> None:
    close = getattr(iterator, "close", None)
    if callable(close):
        # The iterator may have failed already.
        with suppress(Exception):
            close()
