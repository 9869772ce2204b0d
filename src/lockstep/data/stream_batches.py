"""Cut a stream into steps and micro-batches, and load those of this rank.

    batches = StreamBatches(task, StreamData(source_of(dataset)), lanes, step_plan, world)
    for step, micro in batches.from_step(0): ...
    state = batches.stream_state(done, world)           # for a checkpoint: each lane's position

A turn of an epoch has M micro-batches (`data/streams.py`). Turns without a sample on any rank take no step, and the
epoch is over when no lane has samples. The ranks learn both from the step exchange.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self, final

from torch import Tensor

from lockstep.clock import trace_mark
from lockstep.counts import Exact, total
from lockstep.data.batches import Batches, MicroBatch, StepLoader, StepPlan
from lockstep.data.loader import Drawing, Fetch, Key, Loader, Loading
from lockstep.data.shared_memory import shared_zeros
from lockstep.data.stream_mixture import LaneMixture, MixtureSource, reader_of
from lockstep.data.stream_trial import StreamTrial, TrialPlace, preserve, sources_of
from lockstep.data.streams import START, Cursor, Lanes, StreamSource
from lockstep.distributed.balance import ShareSchedule
from lockstep.distributed.exchange import NO_TURN, Turn
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import DataError, LockstepError
from lockstep.run_state import Position, StreamState
from lockstep.task import Task, has_mean_loss

__all__ = ["StreamBatches", "StreamData", "StreamLoader"]

_LOG = logging.getLogger("lockstep")
_ADVICE = ": so its last steps were small; give parts of like length, and more of them"
# Number of micro-batches of a lane that are searched for an item.
_SEARCHED = 16
# Number of steps whose positions are kept, for records that come late.
_REMEMBERED = 64
# A read of nothing: this rank has no micro-batch in the turn.
_NO_LANE = -1


class StreamData:
    """A stream, and the counts of what was repaired while it was read.

    Args:
        source: the stream, or the mixture.
        retries: how often a part that fails is opened again.

    Attributes:
        fetches: shards fetched from a store, which `lockstep.shards` alone counts.
        counts: [retries, skipped samples] so far on this rank, including loader processes; a stream skips none.
    """

    fetches = 0

    def __init__(self, source: StreamSource | MixtureSource, retries: int = 0) -> None:
        self.source = source
        self.retries = retries
        self.counts: Tensor = shared_zeros(2)

    def count_retry(self) -> None:
        """Count a further try of a part."""
        self.counts[0] += 1


class _Read(NamedTuple):
    """Samples of a stream that a micro-batch reads.

    Attributes:
        lane, first, size: samples of a lane; _NO_LANE: nothing.
        epoch, turn: of the stream.
        generation: of the loader's plan; reads of an earlier plan are dropped.
        slots: forwards of the rank in this turn.
        last: it is the rank's last of the turn.
        cursor: the nearest known place of the lane.
    """

    lane: int
    first: int
    size: int
    epoch: int
    turn: int = 0
    generation: int = 0
    slots: int = 1
    last: bool = True
    cursor: Cursor | None = None


class _StreamBatch(NamedTuple):
    """A collated batch of a lane, its number of samples, and the position after them.

    The batch is None if there are no samples.
    """

    batch: Any
    samples: int
    cursor: Cursor


class _StreamPosition(NamedTuple):
    """A position in the stream, as `StreamState` without the lanes.

    A NamedTuple is made in a fifth of the time.
    """

    epoch: int
    turn: int = 0
    epoch_steps: int = 0
    epoch_samples: int = 0
    epoch_empty: int = 0
    samples: int = 0
    last_steps: int = 0


class _LoadedTurn(NamedTuple):
    """This rank's micro-batches of a turn.

    Attributes:
        slots: number of its forwards.
        batches: (micro-batch, content, items) of each.
        cursors: lane -> epoch, and its place after them.
        part: what the step exchange adds up.
    """

    epoch: int
    number: int
    slots: int
    batches: list[tuple[int, _StreamBatch, float]]
    cursors: dict[int, tuple[int, Cursor]]
    part: Turn


def _read_of(key: Key) -> _Read:
    """Return what a key reads; it keeps its type through queues and pinned memory."""
    assert isinstance(key.read, _Read)
    return key.read


# (content, whether the collation drew), items
_Probed = tuple[tuple[_StreamBatch, bool], float]
_NONE: list[int] = []
# For a loader process that does not read the lane of the next key.
_PADDING = Key(-1, -1, 0.0, _NONE, _NONE)
# Epoch and position of a lane that nobody has read.
_UNKNOWN = (-1, START)


@final
class StreamFetch(Fetch):
    """Builds micro-batches of a stream: Key -> (_StreamBatch, items)."""

    def __init__(self, data: StreamData, lanes: Lanes, task: Task, rank: int) -> None:
        super().__init__(data.source, task, lanes.seed, rank)
        self._reader = reader_of(data.source, lanes, data.retries, rank, data.count_retry)
        self._min_samples = lanes.min_samples

    def load(self, key: Key) -> tuple[list[Any], Cursor]:
        """Read the samples of a micro-batch. Collation continues with their random numbers."""
        read: Any = key.read
        if read is None or read[0] == _NO_LANE:
            return [], START
        lane, first, size, epoch, _, _, _, _, cursor = read
        return self._reader.read(lane, first, size, epoch=epoch, cursor=cursor, step=key.step)

    def finish(self, loaded: Any, key: Key) -> tuple[Any, float]:
        samples, after = loaded
        count = len(samples)
        if count < self._min_samples:
            return _StreamBatch(None, 0, after), 0
        data, items = self.collate(samples, count, key)
        return _StreamBatch(data, count, after), items

    def close(self) -> None:
        """Close the parts that are open in this process."""
        self._reader.close()

    def _location(self, key: Key) -> str:
        read = _read_of(key)
        last_sample = read.first + read.size - 1
        return f"{rank_label(self._rank)}, step {key.step + 1}, lane {read.lane}, samples {read.first} to {last_sample}"


class StreamBatches(Batches):
    """A stream, cut into steps and micro-batches, as one rank loads it.

    Args:
        lanes: which samples each micro-batch has.
        place: (step, state) of the checkpoint to resume from; None: the stream's beginning.

    Attributes:
        lanes: as given.
        start, initial: the first step, and the place in the stream before it.
    """

    def __init__(
        self,
        task: Task,
        data: StreamData,
        lanes: Lanes,
        step_plan: StepPlan,
        world: World,
        *,
        loading: Loading | None = None,
        sharing: ShareSchedule | None = None,
        place: tuple[int, StreamState] | None = None,
    ) -> None:
        self.lanes = lanes
        # Unknown: a number above any that a run reaches.
        self.size = 2**62
        self._source = data.source
        self._make_fetch = partial(StreamFetch, data, lanes, task, world.rank)
        fetch = self._make_fetch()
        self.close = fetch.close
        self.set_up(task, fetch, step_plan, world, loading or Loading(), sharing)
        self._asked_workers = self._loading.workers
        # A lane stays in one process, so more processes than lanes would idle.
        self._loading = dataclasses.replace(self._loading, workers=min(self._loading.workers, self._own_lanes()))
        self.loader = Loader(self._fetch, self._loading, world.rank, world.device.type == "cuda")
        self.start, self.initial = place or (step_plan.origin.step, StreamState())
        self._current: StreamLoader | None = None
        self._own_samples = 0

    def _own_lanes(self) -> int:
        """Return the number of lanes that this rank reads; of all, if shares change."""
        if self.sharing.varies:
            return self.lanes.count
        first_micro, stop = self.sharing.at(self.start_step).runs[self.dp_rank]
        return len(
            {self.lanes.read_of(turn, m)[0] for turn in range(self.lanes.turns) for m in range(first_micro, stop)}
        )

    @property
    def start_step(self) -> int:
        """The first step of the plan."""
        return self.step_plan.origin.step

    @property
    def workers(self) -> int:
        """Loader processes that read lanes."""
        return self._loading.workers

    def shares(self, first: int, last: int) -> dict[str, float]:
        """Return each source's share of the samples of some steps, by name.

        Of steps first .. last - 1; {} without a mixture.
        """
        source = self._source
        if not isinstance(source, MixtureSource):
            return {}
        return LaneMixture(self.lanes, source.points).shares(max(first, self.start_step), last, source.names)

    def describe(self) -> list[str]:
        """Return a line about each thing that makes the stream slower than it could be."""
        lanes = self.lanes
        lines = list[str]()
        source = self._source
        if isinstance(source, MixtureSource):
            smallest = source.smallest
        else:
            smallest = source
        if self._asked_workers > self.workers:
            lines.append(
                f"--data.workers {self._asked_workers}: this rank reads {self.workers} lane"
                f"{'s' * (self.workers != 1)} of the stream, so {self.workers} of its loader processes are started"
            )
        if lanes.slots > 1:
            uneven = "; more would be empty, as its parts differ in length" * (lanes.parts >= lanes.micro_batches)
            lines.append(
                f"the stream {smallest.name} is read in {lanes.count} lane{'s' * (lanes.count > 1)} for "
                f"{lanes.micro_batches} micro-batches: each is read by up to {lanes.slots} ranks, which read past what "
                f"others train on; {lanes.micro_batches} parts of like length, or more, avoid that{uneven}"
            )
        for part_source in sources_of(source):
            if part_source.note:
                lines.append(f"the stream {part_source.name}: {part_source.note}")
        return lines

    def from_step(self, start: int) -> "StreamLoader":
        if start != self.start:
            raise LockstepError(
                f"from_step({start}): a stream starts at its place, which is {self.start}; a bug in lockstep"
            )
        self._current = StreamLoader(self, start)
        return self._current

    def micro(self, start: int) -> Generator[tuple[int, MicroBatch], None, None]:
        raise NotImplementedError("a stream is trained on, and not evaluated")

    def samples(self, step: int, index: int) -> list[int]:
        """Return the numbers of a micro-batch's samples in their lane.

        For a step that was not trained yet: the numbers of the lane's parts.
        """
        position = self._current.place(step + 1) if self._current else None
        if position is None:
            return self.lanes.parts_of(self.initial.epoch, self.lanes.read_of(0, index)[0])
        first_sample = self.lanes.read_of(position.turn - 1, index)[1]
        return list(range(first_sample, first_sample + self.lanes.micro_size))

    def own_samples(self, step: int) -> int:
        """Return the number of samples that a trial of this rank gets.

        Raises:
            DataError: the stream has none.
        """
        if not self._own_samples:
            (((content, _), _),) = self._probe([_Read(self._trial_lane, 0, self.lanes.micro_size, 0)])
            self._own_samples = content.samples
        if not self._own_samples:
            raise DataError(
                f"the training set is empty: none of the {self.lanes.parts} parts of the task's dataset('train') "
                "yields a sample"
            )
        return self._own_samples

    def least_samples(self, step: int) -> int:
        # What the other micro-batches have is known when they are read.
        return self.own_samples(step)

    @property
    def _trial_lane(self) -> int:
        first_micro = self.sharing.at(self.start_step).runs[self.dp_rank][0]
        return self.lanes.count + self.lanes.read_of(0, min(first_micro, self.lanes.micro_batches - 1))[0]

    def parts(self, step: int, cuts: list[tuple[int, int]]) -> list[tuple[MicroBatch, bool]]:
        """Load slices of samples for a trial; the run's stream keeps its position.

        Raises:
            DataError: the stream has fewer samples.
        """
        probed = self._probe([_Read(self._trial_lane, a, b - a, 0) for a, b in cuts])
        for (a, b), ((content, _), _) in zip(cuts, probed, strict=True):
            if content.samples < b - a:
                raise DataError(f"the training set has fewer than {b} samples")
        micro_batches = []
        for (content_of_cut, drew), items in probed:
            micro_batches.append((MicroBatch(content_of_cut.batch, 0, items, 1.0, self.move), drew))
        return micro_batches

    def alone(self, step: int, index: int) -> MicroBatch:
        """Load a micro-batch of the stream's first turn."""
        lane, first = self.lanes.read_of(0, index)
        (((content, _), items),) = self._probe([_Read(lane, first, self.lanes.micro_size, 0)])
        return MicroBatch(content.batch, index, items, 1.0, self.move)

    def again(self, places: Iterator[tuple[int, int]]) -> Generator[tuple[int, MicroBatch], None, None]:
        raise NotImplementedError("--guards.audit is not supported for a stream")

    def try_reading(self, digest: Callable[[Any], Any], alike: Callable[[Any, Any], bool]) -> None:
        """Try seeks, a second epoch and a checkpoint's position.

        The trial runs in the kind of process that the run has.

        Raises:
            DataError: two readings differ.
        """
        trial = StreamTrial(sources_of(self._source), self.lanes.seed, digest, alike, self._place_in_part())
        loader = Loader(trial, Loading(min(self._loading.workers, 1), 1), self.rank, False)
        with preserve(self._source), closing(loader.stream(iter([_PADDING]))) as stream:
            next(stream)

    def _place_in_part(self) -> TrialPlace | None:
        """Return a position of the checkpoint that is within a part.

        None: there is none, or the stream is a mixture.
        """
        if isinstance(self._source, MixtureSource):
            return None
        for lane, stored_cursor in sorted(self.initial.cursors.items()):
            if (cursor := Cursor(*stored_cursor)).offset:
                return TrialPlace(self.lanes, int(lane), self.initial.epoch, cursor)
        return None

    def first_samples(self) -> Any:
        """Load the first samples of the stream, collated; the same on every rank."""
        (((content, _), _),) = self._probe([_Read(self.lanes.count, 0, self.lanes.micro_size, 0)])
        return content.batch

    def with_items(self, step: int) -> Any:
        """Return a batch that has items, of any lane.

        Raises:
            DataError: there is none.
        """
        lane = self._trial_lane
        size = self.lanes.micro_size
        for (content, _), items in self._probe([_Read(lane, size * n, size, 0) for n in range(_SEARCHED)]):
            if items:
                return content.batch
        raise DataError(
            f"no micro-batch of the first {_SEARCHED} of the stream has an item to train on; check the labels and the "
            "task's `count`"
        )

    def _probe(self, reads: list[_Read]) -> list[_Probed]:
        """Read independently of the run; return ((content, drew), items) of each.

        In the same kind of process as the run's.
        """
        fetch = self._make_fetch()
        loader = Loader(Drawing(fetch), Loading(min(self._loading.workers, 1), 1), self.rank, False)
        probed = list[_Probed]()
        with preserve(self._source):
            with closing(loader.stream(Key(0, 0, 1.0, [], [], read) for read in reads)) as stream:
                for _, (content, drew), items in stream:
                    probed.append(((content, drew), items))
            fetch.close()
        return probed

    def stream_state(self, done: int, world: World) -> StreamState:
        """Return the stream's position after `done` steps, on all ranks. Collective."""
        current = self._current
        if current:
            position = current.place(done)
        else:
            position = self.initial if done == self.start else None
        cursors = current.cursors(done) if current else []
        # All ranks: each lane's position is known only where it was read last.
        gathered = world.gather([position.to_json() if position else None, cursors])  # collective
        position = StreamState.from_json(
            next(row_or_entry for row_or_entry, _ in gathered if row_or_entry), "the stream's state"
        )
        merged: dict[str, Any] = dict(self.initial.cursors) if position.epoch == self.initial.epoch else {}
        for lane, epoch, cursor in (row_or_entry for _, row in gathered for row_or_entry in row):
            if epoch == position.epoch and (str(lane) not in merged or cursor[0] > merged[str(lane)][0]):
                merged[str(lane)] = cursor
        # A lane may move to another rank later, when shares change.
        if current:
            current.learn(position.epoch, merged)
        return dataclasses.replace(position, cursors=merged)

    def place(self, place: Position) -> Position:
        """Correct a position of the plan, which does not know the stream's epochs."""
        stream_state = (self._current and self._current.place(place.global_step)) or self.initial
        if stream_state.last_steps:
            progress = min(stream_state.epoch_steps / stream_state.last_steps, 1.0)
        else:
            progress = None
        return dataclasses.replace(
            place,
            epoch=stream_state.epoch,
            epoch_step=stream_state.epoch_steps,
            epoch_progress=progress,
            num_batches_remaining=None,
            position=stream_state.samples,
        )


@final
class StreamLoader(StepLoader):
    """Iterates over (step, micro-batches) of a stream.

    Attributes:
        cover: step -> None; waits until the ranks know which turn is the step. The step exchange sets it.
    """

    def __init__(self, batches: StreamBatches, start: int) -> None:
        self._batches = batches
        self._steps = batches.step_plan.steps
        self._sharing = batches.sharing
        self._leads = batches.leads
        self._rank = batches.dp_rank
        self._mean = has_mean_loss(batches.task)
        self._next = start
        self._ready: deque[list[MicroBatch]] = deque()
        self._present: list[MicroBatch] = []
        # Position and cursors after each ready step.
        self._settled: deque[tuple[_StreamPosition, dict[int, tuple[int, Cursor]]]] = deque()
        # Turns of which the ranks do not know yet whether they have samples.
        self._loaded: deque[_LoadedTurn] = deque()
        initial = batches.initial
        # The position after the last settled step.
        self._last = _StreamPosition(*(getattr(initial, name) for name in _StreamPosition._fields))
        # Step -> the position before it.
        self._places = {start: self._last}
        # Step -> the lanes' positions after it.
        self._reads: dict[int, dict[int, tuple[int, Cursor]]] = {}
        self._known = {int(lane): (initial.epoch, Cursor(*stored)) for lane, stored in initial.cursors.items()}
        # The newest position of each lane, of everything that was loaded.
        self._newest: dict[int, tuple[int, Cursor]] = {}
        # The turn to request next.
        self._epoch = initial.epoch
        self._turn = initial.turn
        self._generation = 0
        # The step of that turn, unless a turn before it has no samples.
        self._asked = start
        # Turns without samples in a row.
        self._empty = 0
        self._spare: Any = None
        self.cover: Callable[[int], None] = self._cover_alone
        keys = self._keys()
        self._loads = batches.loader.stream(self._at_home(keys) if batches.workers > 1 else keys)

    @property
    def turns(self) -> Self:
        """The turns, which the step exchange settles."""
        return self

    @property
    def readable_before(self) -> None:
        """None: a stream's turns are read ahead over the end of an epoch."""
        return None

    def __next__(self) -> tuple[int, list[MicroBatch]]:
        if self._next >= self._steps:
            raise StopIteration
        if not self._ready:
            # May wait for the other ranks: a turn is a step only if some rank has samples.
            self.cover(self._next)
        step = self._sharing.step = self._next
        self._next += 1
        self._present = self._ready.popleft()
        place, cursors = self._settled.popleft()
        self._places[self._next] = place
        self._places.pop(self._next - _REMEMBERED, None)
        self._reads[step] = cursors
        # A checkpoint may still ask for the step before; earlier steps are complete.
        if cursors_before := self._reads.pop(step - 2, None):
            self._known.update(cursors_before)
        if self._leads:
            for batch, following in pairwise(self._present):
                batch.lead_to(following)
            self._lead()
        return step, self._present

    def items(self, step: int) -> Exact:
        """Return this rank's items in a step; 0 if its turn is not settled.

        The current step, or a future one.
        """
        if step < self._next:
            return total(batch.items for batch in self._present)
        ahead = step - self._next
        if ahead < len(self._ready):
            return total(batch.items for batch in self._ready[ahead])
        return 0

    def close(self) -> None:
        self._steps = 0
        self._ready.clear()
        self._loaded.clear()
        self._loads.close()
        self._batches.close()

    def place(self, step: int) -> StreamState | None:
        """Return the stream's position before a step.

        None: it is not one of the last steps.
        """
        place = self._places.get(step)
        if place is None:
            return None
        return StreamState(*place)

    def ahead(self, turn: int) -> Turn:
        """Return this rank's part of a turn that is not settled; may load it."""
        # The loader was closed.
        if not self._steps:
            return NO_TURN
        while len(self._loaded) <= turn:
            with trace_mark("load"):
                self._loaded.append(self._load_turn())
        return self._loaded[turn].part

    def settle(self, samples: Sequence[int], filled: Sequence[int]) -> list[int]:
        """Make steps of the next turns, if any rank has samples in them.

        Turns without samples are skipped.

        Args:
            samples, filled: of each turn, the samples and the micro-batches with samples, over all ranks.

        Returns:
            The indices of the turns that are steps.

        Raises:
            DataError: a whole epoch has no samples.
        """
        steps = []
        for index, (count, full) in enumerate(zip(samples, filled, strict=True)):
            turn = self._loaded.popleft()
            if count:
                self._empty = 0
                self._make_step(turn, count, full)
                steps.append(index)
                continue
            self._empty += 1
            # Each lane has had a turn without samples, so all lanes have ended.
            if self._empty == self._batches.lanes.turns:
                self._end_epoch()
                break
            # Later turns were divided for another step, whose shares may differ.
            if self._sharing.varies:
                self._go_to(turn.epoch, turn.number + 1)
                break
        return steps

    def cursors(self, done: int) -> list[list[Any]]:
        """Return [lane, epoch, cursor] of the lanes that this rank read, after `done` steps."""
        known = dict(self._known)
        for step, cursors in sorted(self._reads.items()):
            if step < done:
                known |= cursors
        return [[lane, epoch, list(cursor)] for lane, (epoch, cursor) in known.items()]

    def learn(self, epoch: int, cursors: Mapping[str, Any]) -> None:
        """Remember the places that other ranks have come to."""
        for lane, cursor in cursors.items():
            self._known[int(lane)] = epoch, Cursor(*cursor)

    def _cover_alone(self, step: int) -> None:
        if self._batches.dp_size > 1:
            raise LockstepError("a stream is read without a step exchange; a bug in lockstep")
        while not self._ready:
            turn = self.ahead(0)
            self.settle([turn.samples], [turn.filled])

    def _make_step(self, turn: _LoadedTurn, samples: int, filled: int) -> None:
        previous = self._last
        self._last = _StreamPosition(
            previous.epoch,
            turn.number + 1,
            previous.epoch_steps + 1,
            previous.epoch_samples + samples,
            previous.epoch_empty + self._batches.lanes.micro_batches - filled,
            previous.samples + samples,
            previous.last_steps,
        )
        self._ready.append(self._micro_batches(turn))
        self._settled.append((self._last, turn.cursors))
        if self._leads and len(self._ready) == 1:
            self._lead()

    def _end_epoch(self) -> None:
        ended = self._last
        if not ended.epoch_steps:
            raise DataError(
                f"epoch {ended.epoch} of the stream has no samples: none of the {self._batches.lanes.parts} parts of "
                "the task's dataset('train') yields one"
            )
        if not self._rank:
            slots = ended.epoch_steps * self._batches.lanes.micro_batches
            _LOG.info(
                "epoch %d of the stream: %d samples in %d steps; %d of %d micro-batches were empty, as lanes differ in "
                "length%s",
                *(ended.epoch, ended.epoch_samples, ended.epoch_steps, ended.epoch_empty, slots),
                _ADVICE if ended.epoch_empty > slots // 4 else "",
            )
        self._last = _StreamPosition(ended.epoch + 1, samples=ended.samples, last_steps=ended.epoch_steps)
        self._empty = 0
        self._go_to(self._last.epoch, 0)

    def _go_to(self, epoch: int, turn: int) -> None:
        """Ask for this turn next; what was asked for after the settled turns is dropped."""
        self._loaded.clear()
        self._generation += 1
        self._epoch = epoch
        self._turn = turn
        self._asked = self._next + len(self._ready)

    def _micro_batches(self, turn: _LoadedTurn) -> list[MicroBatch]:
        """Return the forwards of a turn.

        One without samples, or without items of a mean loss, repeats another batch with weight 0.
        """
        move = self._batches.move
        mean = self._mean
        missing = turn.slots
        micro_batches = list[MicroBatch]()
        for micro, (batch, samples, _), items in turn.batches:
            if samples and items:
                self._spare = batch
            if samples and (items or not mean):
                missing -= 1
                micro_batches.append(MicroBatch(batch, micro, items, 1.0, move))
            else:
                micro_batches.append(MicroBatch(None, micro, 0, 0.0, move, batch if samples else None))
        if not missing:
            return micro_batches
        if self._spare is None:
            self._spare = self._batches.with_items(0)
        last_micro = self._batches.lanes.micro_batches - 1
        micro_batches += [MicroBatch(None, last_micro, 0, 0.0, move) for _ in range(turn.slots - len(micro_batches))]
        for micro_batch in micro_batches:
            if not micro_batch.weight:
                micro_batch.held = self._spare
        return micro_batches

    def _load_turn(self) -> _LoadedTurn:
        batches = list[tuple[int, _StreamBatch, float]]()
        cursors = dict[int, tuple[int, Cursor]]()
        samples = filled = 0
        for key, content, items in self._loads:
            read: Any = key.read
            if read is None:
                continue
            lane, _, _, epoch, turn, generation, slots, is_last, _ = read
            # Read before the plan changed; the samples will be read again.
            if generation != self._generation:
                continue
            if lane != _NO_LANE:
                _, count, after = content
                cursors[lane] = self._newest[lane] = epoch, after
                batches.append((key.micro, content, items))
                if count:
                    samples = samples + count
                    filled = filled + 1
            if is_last:
                turn_counts = Turn(total(items for _, _, items in batches), samples, filled)
                return _LoadedTurn(epoch, turn, slots, batches, cursors, turn_counts)
        raise LockstepError("the stream's loader ended before the run; a bug in lockstep")

    def _keys(self) -> Iterator[Key]:
        """Yield keys of this rank's micro-batches, turn by turn without end."""
        lanes = self._batches.lanes
        rank = self._rank
        size = self._batches.lanes.micro_size
        while True:
            generation = self._generation
            epoch = self._epoch
            turn = self._turn
            step = self._asked
            self._turn = turn + 1
            self._asked = step + 1
            shares = self._sharing.at(step)
            first, stop = shares.runs[rank]
            slots = shares.slots[rank]
            if first == stop:
                yield Key(step, first, 0.0, _NONE, _NONE, _Read(_NO_LANE, 0, 0, epoch, turn, generation, slots))
            for micro in range(first, stop):
                if generation != self._generation:
                    break
                lane, sample = lanes.read_of(turn, micro)
                at, newest = self._newest.get(lane, _UNKNOWN)
                # Nearly always the lane is read on.
                stands = newest.number == sample and at == epoch
                cursor = newest if stands else self._cursor(epoch, lane, sample)
                read = _Read(lane, sample, size, epoch, turn, generation, slots, micro == stop - 1, cursor)
                yield Key(step, micro, 1.0, _NONE, _NONE, read)

    def _at_home(self, keys: Iterator[Key]) -> Iterator[Key]:
        """Yield the keys so that a lane stays in one loader process.

        The processes take keys in turns, so padding keys fill the gaps.
        """
        workers = self._batches.workers
        homes = dict[int, int]()
        index = 0
        for key in keys:
            home = homes.setdefault(_read_of(key).lane, index % workers)
            while index % workers != home:
                yield _PADDING
                index += 1
            yield key
            index += 1

    def _cursor(self, epoch: int, lane: int, first: int) -> Cursor | None:
        """Return the nearest known place of a lane before a sample."""
        cursors = list[Cursor]()
        for at, known in (self._newest.get(lane, _UNKNOWN), self._known.get(lane, _UNKNOWN)):
            if at == epoch:
                cursors.append(known)
            # Some iterators hand a state over the end of an epoch.
            elif at == epoch - 1 and not known.offset and known.state is not None:
                cursors.append(Cursor(0, 0, 0, known.state))
        return max(
            (each for each in cursors if each.number <= first),
            key=lambda each: each.number,
            default=None,
        )
