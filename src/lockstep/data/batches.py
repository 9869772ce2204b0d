"""Cut the data into steps and micro-batches, and load those of this rank.

    batches = Batches(task, dataset, order, step_plan, world, seed=0)
    for step, micro in batches.from_step(500):      # starts at any step at once: the order is arithmetic

The content of micro-batch m of step k depends on (seed, k, m) alone; the world size only decides which rank computes
it. `StepPlan` cuts the stream of samples, `StepLoader` loads steps ahead, `MicroBatchCosts` estimates each
micro-batch's cost from `Task.work` without loading it.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise, takewhile
from typing import Any, NamedTuple, Protocol, Self, final, runtime_checkable

from lockstep.clock import trace_mark
from lockstep.counts import Exact, total
from lockstep.data.device import SideStream, mover
from lockstep.data.loader import Drawing, Fetch, Fetching, Key, Loader, Loading, blame, draws, seed_everything
from lockstep.distributed.balance import Shares, ShareSchedule, equal_shares
from lockstep.distributed.exchange import Turns
from lockstep.distributed.world import World
from lockstep.errors import DataError, LockstepError
from lockstep.run_state import Position, StreamState
from lockstep.task import Order, Task, has_mean_loss

__all__ = [
    "START",
    "Batches",
    "EpochStarts",
    "Loading",
    "MicroBatch",
    "MicroBatchCosts",
    "Origin",
    "StepLoader",
    "StepPlan",
    "draws",
    "seed_everything",
]


# Number of steps that are searched for a micro-batch with items.
_SEARCH_STEPS = 16


@dataclass(slots=True)
class MicroBatch:
    """The samples of one forward on this rank.

    Attributes:
        held: the result of the task's `collate`, in host memory.
        index: m, its index in the step; its randomness depends on (seed, step, m).
        items: number of items that the loss sums over; an int if whole.
        weight: 1.0; 0.0 for an empty slot, which repeats a micro-batch only to keep collectives aligned.
        replaced: a batch without items in whose place `held` is computed, with weight 0; None: there is none.
        move: moves `held` to the device; None if it is there.
    """

    held: Any
    index: int
    items: float
    weight: float
    move: Callable[[Any], Any] | None = None
    replaced: Any = None
    _coming: Callable[[], Any] | None = field(default=None, repr=False, compare=False)
    _next: "MicroBatch | None" = field(default=None, repr=False, compare=False)
    _used: bool = field(default=False, repr=False, compare=False)

    @property
    def data(self) -> Any:
        """The batch on the device, copied there on each access to save device memory.

        Only the next batch is copied early, starting at this access, if the device has a stream for it.
        """
        if self.move is None:
            return self.held
        coming = self._coming
        following = self._next
        self._coming = None
        self._next = None
        self._used = True
        data = self.move(self.held) if coming is None else coming()
        if following is not None:
            following.begin()
        return data

    def begin(self) -> None:
        """Start the copy to the device for the next access of `data`."""
        if self._coming is None and isinstance(self.move, SideStream):
            self._coming = self.move.begin(self.held)

    def lead_to(self, following: "MicroBatch") -> None:
        """Copy `following` early: when this batch is used, or now if it has been."""
        if self._used:
            following.begin()
        else:
            self._next = following


class Slot(NamedTuple):
    """One forward of a rank in a step: the micro-batch to compute and its weight."""

    micro: int
    weight: float


def slots(shares: Shares, rank: int, present: int) -> list[Slot]:
    """Return the rank's consecutive slots of a step, in order.

    Slots past the last of the `present` micro-batches repeat that one with weight 0. A short last step keeps its M
    slots, so that every rank still owns the same part of the exact tree.
    """
    start, _ = shares.runs[rank]
    count = shares.slots[rank]
    last_present = present - 1
    return [Slot(min(micro, last_present), float(micro <= last_present)) for micro in range(start, start + count)]


class Origin(NamedTuple):
    """Start of the current cut of the stream.

    A step, and the position of its first sample.
    """

    step: int
    position: int


START = Origin(0, 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Cuts the stream of positions into steps and micro-batches.

    Each step has `size` samples, in micro-batches of `micro_size`, where the last may be shorter. Only the run's
    last step can be shorter: it ends at `total`. Steps before `origin` were cut differently; their positions are
    undefined here.
    """

    size: int
    micro_size: int
    total: int
    origin: Origin = START

    @property
    def steps(self) -> int:
        """The run's number of steps, from step 0 until `total` is used up."""
        return self.origin.step + max(0, -(-(self.total - self.origin.position) // self.size))

    def start(self, step: int) -> int:
        """Return the position of the first sample of `step`; `total` past the last one."""
        first_step, position = self.origin
        start = position + (step - first_step) * self.size
        if 0 <= start <= self.total:
            return start
        if start < 0:
            return 0
        return self.total

    def samples(self, step: int) -> int:
        """Return the number of samples in `step`, over all ranks."""
        return self.start(step + 1) - self.start(step)

    @property
    def micro_batches(self) -> int:
        """M: slots in every step, over all ranks."""
        return -(-self.size // self.micro_size)

    def present(self, step: int) -> int:
        """Return the number of micro-batches of `step` with samples.

        M, except in a short last step.
        """
        return -(-self.samples(step) // self.micro_size)

    def positions(self, step: int, index: int) -> tuple[int, int]:
        """Return the first and past-the-last position of micro-batch `index` of `step`."""
        start = self.start(step) + index * self.micro_size
        end = self.start(step + 1)
        return min(start, end), min(start + self.micro_size, end)


class EpochStarts(NamedTuple):
    """The steps with which epochs begin, and what is called before their data are loaded.

    An epoch begins with the first step whose first sample belongs to it.

    Attributes:
        call: epoch -> None; may change the dataset.
        samples: of an epoch.
    """

    call: Callable[[int], None]
    samples: int

    def epoch(self, plan: StepPlan, step: int) -> int:
        """Return the epoch of a step."""
        return plan.start(step) // self.samples

    def end(self, plan: StepPlan, step: int) -> int:
        """Return the first step of the next epoch; at most the plan's number of steps.

        The next one after the epoch of `step`.
        """
        first_step, position = plan.origin
        boundary = (self.epoch(plan, step) + 1) * self.samples
        return min(first_step - (position - boundary) // plan.size, plan.steps)


@runtime_checkable
class Sharing(Protocol):
    """An order that mixes several sources."""

    def shares(self, start: int, stop: int) -> dict[str, float]:
        """Return each source's share of the positions start .. stop - 1, by name."""


class Batches:
    """A dataset, cut into steps and micro-batches, as one rank loads it.

    Attributes:
        step_plan: the steps.
        sharing: which rank computes which micro-batch.
        loader: creates the micro-batches; counts restarts of loader processes.
        leads: a micro-batch's copy to the device starts when the previous one is used.
        size: samples of the dataset.
        epoch_starts: what is called before an epoch's data are loaded; None: nothing.
        task, rank: as given.
        dp_rank, dp_size: this rank and the number of ranks in the data-parallel group, which divides the steps.
        move: copies a batch to the device; None on a CPU.
    """

    def __init__(
        self,
        task: Task,
        dataset: Any,
        order: Order,
        step_plan: StepPlan,
        world: World,
        *,
        seed: int = 0,
        loading: Loading | None = None,
        sharing: ShareSchedule | None = None,
    ) -> None:
        self._order = order
        self.size = len(dataset)
        # Asked once: `isinstance` of a protocol is slow.
        self._mixture = order if isinstance(order, Sharing) else None
        fetch = Fetch(dataset, task, seed, world.rank)
        self.set_up(task, fetch, step_plan, world, loading or Loading(), sharing)

    def set_up(
        self,
        task: Task,
        fetch: Fetch,
        step_plan: StepPlan,
        world: World,
        loading: Loading,
        sharing: ShareSchedule | None,
    ) -> None:
        """Set what batches of any kind of dataset have."""
        self.task = task
        self.step_plan = step_plan
        # All ranks of a replica load the same micro-batches.
        peers = world.data_parallel
        self.rank = world.rank
        self.dp_rank = peers.rank
        self.dp_size = peers.size
        equal = equal_shares(step_plan.micro_batches, peers.size)
        self.sharing = sharing or ShareSchedule(lambda step: equal)
        self._fetch = fetch
        self._loading = loading
        self.epoch_starts: EpochStarts | None = None
        self.move = mover(world.device)
        self.leads = isinstance(self.move, SideStream)
        self.loader = Loader(fetch, loading, world.rank, world.device.type == "cuda")

    def shares(self, first: int, last: int) -> dict[str, float]:
        """Return each source's share of the samples of some steps, by name.

        Of steps first .. last - 1; {} without a mixture.
        """
        start = self.step_plan.start(max(first, self.step_plan.origin.step))
        if self._mixture:
            return self._mixture.shares(start, self.step_plan.start(last))
        return {}

    @property
    def slots(self) -> int:
        """This rank's forwards in the first step, with those of empty slots.

        The same in every step unless shares change.
        """
        return self.slots_of(self.step_plan.origin.step)

    def slots_of(self, step: int) -> int:
        """Return this rank's number of forwards in a step, with empty slots."""
        return self.sharing.at(step).slots[self.dp_rank]

    @property
    def slots_in_all(self) -> int:
        """This rank's forwards in all steps, with empty slots; for fixed shares."""
        first_step = self.step_plan.origin.step
        return self.slots_of(first_step) * (self.step_plan.steps - first_step)

    def from_step(self, start: int) -> "StepLoader":
        """Iterate over (step, this rank's micro-batches) from step `start` on."""
        return StepLoader(self, start)

    def micro(self, start: int) -> Generator[tuple[int, MicroBatch], None, None]:
        """Yield (step, micro-batch) from step `start` on, exactly as in the data."""
        with closing(self.loader.stream(self._keys(start))) as stream:
            for key, data, items in stream:
                yield key.step, self._micro_batch(key, data, items)

    def start_epoch(self, step: int) -> int:
        """Call `epoch_starts` for the epoch of a step; return the next epoch's first step."""
        if self.epoch_starts is None:
            return self.step_plan.steps
        self.epoch_starts.call(self.epoch_starts.epoch(self.step_plan, step))
        return self.epoch_starts.end(self.step_plan, step)

    def replace_empty(self, start: int, stop: int) -> Generator[tuple[int, MicroBatch], None, None]:
        """Yield `micro` before step `stop`, but replace micro-batches whose mean would be 0 / 0.

        `from_step` groups this stream by step. A micro-batch without items has nothing to learn from, but its forward
        and backward must run for their collectives. If the loss is a mean, it would be NaN, and so would every
        gradient, at any weight. So another micro-batch is computed in its place, with weight 0, as in an empty slot.
        """
        spare: Any = None
        replaces = has_mean_loss(self.task)
        # Loader processes read ahead of this generator, so the keys themselves must end at `stop`.
        keys = takewhile(lambda key: key.step < stop, self._keys(start))
        with closing(self.loader.stream(keys)) as stream:
            for key, data, items in stream:
                if items or not replaces:
                    spare = data
                    yield key.step, self._micro_batch(key, data, items)
                else:
                    spare = self.with_items(key.step) if spare is None else spare
                    batch = self._micro_batch(key._replace(weight=0.0), spare, 0)
                    batch.replaced = data if key.weight else None
                    yield key.step, batch

    def samples(self, step: int, index: int) -> list[int]:
        """Return the sample indices of micro-batch `index` of `step`."""
        return self._key(step, index).samples

    def own_samples(self, step: int) -> int:
        """Return the number of samples in this rank's first micro-batch of `step`."""
        return len(self._first_key(step).samples)

    def least_samples(self, step: int) -> int:
        """Return the number of samples in the smallest micro-batch of `step`, on any rank."""
        return min(len(self._key(step, micro).samples) for micro in range(self.step_plan.present(step)))

    def parts(self, step: int, cuts: list[tuple[int, int]]) -> list[tuple[MicroBatch, bool]]:
        """Load slices of samples, counted from this rank's first micro-batch of `step`.

        Loads in the same kind of process as all others: a file that a dataset opens must not be open already when
        loader processes are forked.

        Args:
            step: gives the first sample.
            cuts: (a, b) for the samples a .. b - 1; may go past the micro-batch.

        Returns:
            For each cut, the batch, and whether its collation drew random numbers, which would differ for another cut.

        Raises:
            DataError: the order names a sample that is not in the dataset.
        """
        first_key = self._first_key(step)
        start, _ = self.step_plan.positions(step, first_key.micro)
        keys = []
        for a, b in cuts:
            epochs, samples = (array.tolist() for array in self._order.at(start + a, start + b))
            keys.append(first_key._replace(weight=1.0, epochs=epochs, samples=samples))
        loader = Loader(Drawing(self._fetch), Loading(min(self._loading.workers, 1)), self.rank, False)
        entries = []
        for key, (data, drew), items in loader.stream(iter(keys)):
            entries.append((self._micro_batch(key, data, items), drew))
        return entries

    def read_apart(self, wrap: Callable[[Fetching], Fetching]) -> Generator[tuple[Key, Any, float], None, None]:
        """Yield (key, batch, items) from step 0 on, through a wrapped fetch.

        One loader process makes them.
        """
        return Loader(wrap(self._fetch), Loading(1), self.rank, False).stream(self._keys(0))

    def _first_key(self, step: int) -> Key:
        return self._key(step, slots(self.sharing.at(step), self.dp_rank, self.step_plan.present(step))[0].micro)

    def known_items(self, each: int | None) -> Callable[[int], int] | None:
        """Return a function for the items of any step over all ranks.

        It needs `each` items in all samples. None: they must be counted.
        """
        return None if not each else lambda step: each * self.step_plan.samples(step)

    def describe(self) -> list[str]:
        """Return lines for the log about how the data are read."""
        return []

    def place(self, place: Position) -> Position:
        """Correct a position of the plan, if the data decide it."""
        return place

    def stream_state(self, done: int, world: World) -> StreamState | None:
        """Return the position in a stream after `done` steps. Collective for a stream.

        None: not a stream.
        """
        return None

    def runs_of(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return, by rank, the first and the past-the-last of its micro-batches in a step.

        For a future step they may still change (`--shares auto`).
        """
        return self.sharing.guess(step).runs

    def again(self, places: Iterator[tuple[int, int]]) -> Generator[tuple[int, MicroBatch], None, None]:
        """Yield (step, micro-batch) for each (step, index), whichever rank computes it in training.

        Loads like all others: if there are loader processes, in one of its own, a micro-batch ahead.
        """
        # `epoch_starts` may change the dataset, and a loader process would keep it as it was when the process started.
        workers = 0 if self.epoch_starts else min(self._loading.workers, 1)
        loading = Loading(workers, 1, self._loading.retries)
        loader = Loader(self._fetch, loading, self.rank, False)
        with closing(loader.stream(self._key(*micro_batch) for micro_batch in places)) as stream:
            for key, data, items in stream:
                yield key.step, self._micro_batch(key, data, items)

    def alone(self, step: int, index: int) -> MicroBatch:
        """Load a micro-batch of any rank in this process."""
        key = self._key(step, index)
        return self._micro_batch(key, *self._fetch[key])

    def _micro_batch(self, key: Key, data: Any, items: float) -> MicroBatch:
        return MicroBatch(data, key.micro, items if key.weight else 0, key.weight, self.move)

    def with_items(self, step: int) -> Any:
        """Return a batch that has items, from this step or soon after, of any rank.

        Raises:
            DataError: there is none.
        """
        last_step = min(step + _SEARCH_STEPS, self.step_plan.steps)
        for near in range(step, last_step):
            for micro in range(self.step_plan.present(near)):
                data, items = self._fetch[self._key(near, micro)]
                if items:
                    return data
        raise DataError(
            f"no micro-batch of steps {step + 1} to {last_step} has an item to train on; check the labels and the "
            "task's `count`"
        )

    def _key(self, step: int, micro: int) -> Key:
        epochs, samples = self._order.at(*self.step_plan.positions(step, micro))
        return Key(step, micro, 1.0, epochs.tolist(), samples.tolist())

    def _keys(self, start: int) -> Iterator[Key]:
        """Yield keys of this rank's micro-batches.

        Looks up the samples of many steps at once, since a single look-up is slow.
        """
        step_plan = self.step_plan
        size = self.step_plan.micro_size
        # One look-up of at least 4096 samples: numpy's overhead per call is then negligible.
        block = max(1, 4096 // step_plan.size)
        shares = None
        full = list[Slot]()
        for first_step in range(start, step_plan.steps, block):
            end_step = min(first_step + block, step_plan.steps)
            origin = step_plan.start(first_step)
            epochs, samples = self._order.at(origin, step_plan.start(end_step))
            end = origin
            for step in range(first_step, end_step):
                begin = end
                end = step_plan.start(step + 1)
                # Shares rarely change, so the slots of a full step are computed once.
                if (current_shares := self.sharing.at(step)) is not shares:
                    shares = current_shares
                    full = slots(current_shares, self.dp_rank, step_plan.micro_batches)
                short = end - begin < step_plan.size
                own_slots = slots(current_shares, self.dp_rank, step_plan.present(step)) if short else full
                if not own_slots:
                    continue
                stop = min(begin + (own_slots[-1].micro + 1) * size, end)
                run = slice(begin - origin + own_slots[0].micro * size, stop - origin)
                own_epochs = epochs[run].tolist()
                own_samples = samples[run].tolist()
                for micro, weight in own_slots:
                    # The samples of a rank are consecutive, so each slot takes a slice.
                    a = (micro - own_slots[0].micro) * size
                    yield Key(step, micro, weight, own_epochs[a : a + size], own_samples[a : a + size])


class StepLoader:
    """Iterates over (step, micro-batches), and can load ahead to count items of future steps.

    Batches loaded ahead stay in host memory (see `MicroBatch.data`); only the next one is already copied to a CUDA
    device.
    """

    def __init__(self, batches: Batches, start: int) -> None:
        self._source = batches
        self._stream = batches.replace_empty(start, start)
        # The step before which the current stream of batches ends.
        self._stream_end = start
        self._steps = batches.step_plan.steps
        self._slots_of = batches.slots_of
        self._sharing = batches.sharing
        self._leads = batches.leads
        self._next = start
        self._ready: deque[list[MicroBatch]] = deque()
        self._present: list[MicroBatch] = []

    @property
    def turns(self) -> Turns | None:
        """The turns of a stream, which the step exchange settles; None without one."""
        return None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, list[MicroBatch]]:
        if not self._ready and not self._load():
            raise StopIteration
        self._sharing.step = self._next
        self._next += 1
        self._present = self._ready.popleft()
        if self._leads:
            for batch, following in pairwise(self._present):
                batch.lead_to(following)
            self._lead()
        return self._next - 1, self._present

    @property
    def readable_before(self) -> Callable[[int], int] | None:
        """Map a step to a later one whose data must not be read before.

        None: there is no such step.
        """
        starts = self._source.epoch_starts
        if starts is None:
            return None
        return partial(starts.end, self._source.step_plan)

    @property
    def present(self) -> list[MicroBatch]:
        """This rank's micro-batches of the last step returned."""
        return self._present

    def items(self, step: int) -> Exact:
        """Return this rank's items in the current or a future step, not rounded.

        0 past the last step.
        """
        if step < self._next:
            return total(batch.items for batch in self._present)
        while step - self._next >= len(self._ready):
            if not self._load():
                return 0
        return total(batch.items for batch in self._ready[step - self._next])

    def close(self) -> None:
        """End the loader processes at once, and wait for them. No step follows."""
        self._steps = 0
        self._ready.clear()
        self._stream.close()

    def _load(self) -> bool:
        step = self._next + len(self._ready)
        if step >= self._steps:
            return False
        if step >= self._stream_end:
            # The running loader processes have the dataset as it was in the epoch before.
            self._stream.close()
            self._stream_end = self._source.start_epoch(step)
            self._stream = self._source.replace_empty(step, self._stream_end)
        with trace_mark("load"):
            self._ready.append([batch for _, batch in islice(self._stream, self._slots_of(step))])
        if self._leads and len(self._ready) == 1:
            self._lead()
        return True

    def _lead(self) -> None:
        """Link the current step's last micro-batch to the next step's first, once it is loaded."""
        if self._present and self._ready and self._ready[0]:
            self._present[-1].lead_to(self._ready[0][0])


# Number of steps whose costs are kept.
_CACHED_STEPS = 256
# Number of samples that are looked up at a time, since a single look-up is slow.
_LOOKUP_SAMPLES = 4096


@final
class MicroBatchCosts:
    """Estimated costs: step -> the work of its M micro-batches.

    Empty slots repeat the last micro-batch with samples.

    Args:
        task: gives the estimates, by its `work`.
        dataset: the result of the task's `dataset("train")`.
        order: of the samples.
        step_plan: cuts them.
    """

    def __init__(self, task: Task, dataset: Any, order: Order, step_plan: StepPlan) -> None:
        self._task = task
        self._dataset = dataset
        self._order = order
        self._plan = step_plan
        self._cache: dict[int, tuple[float, ...]] = {}

    def is_estimated(self) -> bool:
        """Whether the task estimates costs, by its first micro-batch. Raises what `work` raises."""
        first_step = self._plan.origin.step
        a, b = self._plan.positions(first_step, 0)
        return self._estimate(self._order.at(a, b)[1].tolist(), first_step) is not None

    def __call__(self, step: int) -> tuple[float, ...]:
        """Return the costs of a step.

        Raises DataError if `work` fails or is not above 0.
        """
        if step not in self._cache:
            self._look_up(step)
        return self._cache[step]

    def _look_up(self, first: int) -> None:
        plan = self._plan
        end_step = max(first + 1, min(first + _LOOKUP_SAMPLES // plan.size, plan.steps))
        origin = plan.start(first)
        samples = self._order.at(origin, plan.start(end_step))[1].tolist()
        for step in range(first, end_step):
            costs = []
            for micro in range(plan.present(step)):
                a, b = plan.positions(step, micro)
                costs.append(self._cost(samples[a - origin : b - origin], step))
            costs += [costs[-1]] * (plan.micro_batches - len(costs))
            self._cache[step] = tuple(costs)
        # Drop the oldest steps: the schedule of shares asks for steps in ascending order.
        for step in sorted(self._cache)[: max(0, len(self._cache) - max(_CACHED_STEPS, end_step - first))]:
            if step != first:
                del self._cache[step]

    def _estimate(self, samples: list[int], step: int) -> float | None:
        try:
            cost = self._task.work(self._dataset, samples)
            if cost is None:
                return None
            return float(cost)
        except LockstepError:
            raise
        except Exception as error:
            raise blame("work", error, f"step {step + 1}, samples {samples[:8]}") from error

    def _cost(self, samples: list[int], step: int) -> float:
        cost = self._estimate(samples, step)
        if cost is None or not (math.isfinite(cost) and cost > 0.0):
            raise DataError(
                f"the task's `work` returned {cost} for the samples {samples[:8]} of step {step + 1}; return a finite "
                "number above 0, the cost of a micro-batch with these samples"
            )
        return cost
