"""Exchange the few numbers that all ranks need about the coming steps.

    exchange = StepExchange(world, ahead=step_loader.items, constant=None)
    items = exchange.global_items(step)     # of the whole step, over all ranks
    ...                                     # forward, backward
    exchange.send(step)                     # items of the coming steps, and the stop request
    ...                                     # the optimizer's step, meanwhile
    request = exchange.receive()            # what all ranks do after this step

One all-gather of a few numbers on its own CPU group, while the optimizer steps. It carries the items of the coming
steps, the number of steps, the stop request, and this rank's busy seconds. It runs in every step if items are ragged
and steps are long enough to hide it, else every few steps; all ranks derive the interval from the same numbers. A stop
request before the last backward of a long step ends the run after that step. `gather_rows` and `scatter_rows` move
tensors between shards and their owners.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.counts import Exact, number, parts
from lockstep.distributed import collectives
from lockstep.distributed.membership import lost_peers
from lockstep.distributed.progress import COMPUTING, WAITING, Progress, rank_label
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, PeerError

__all__ = [
    "CONTINUE",
    "INTERRUPT",
    "MOST_STEPS",
    "NO_TURN",
    "REGROUP",
    "SAVE_AND_END",
    "SAVE_FAILED",
    "STOP",
    "BusySeconds",
    "StepExchange",
    "Turn",
    "Turns",
    "assign_owners",
    "gather_rows",
    "scatter_rows",
]


Shapes = Sequence[Sequence[int]]


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign each cost to a rank, largest first, each to the least loaded. Deterministic."""
    loads = [0.0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def gather_rows(
    parts: Sequence[Tensor], shapes: Shapes, owners: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Gather the full tensors that this rank owns, in new memory. One all-to-all.

    Args:
        parts: this rank's rows of every tensor, of one dtype and device.
        shapes: of the full tensors.
        owners: each tensor's owner, a rank within `group`.
        group: the ranks that share the rows; None: all.
    """
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    order = _by_owner(owners, ranks)
    sends = torch.cat([parts[k].reshape(-1) for own in order for k in own])
    lengths = [sum(parts[k].numel() for k in own) for own in order]
    indices = order[rank]
    sizes = []
    for peer in range(ranks):
        sizes.append([_element_count(shapes[k], peer, ranks) for k in indices])
    totals = [sum(each) for each in sizes]
    received = sends.new_empty(sum(totals))
    collectives.all_to_all_single(received, sends, totals, lengths, group=group)  # collective
    chunks = received.split_with_sizes(totals)
    by_rank = []
    for chunk, each in zip(chunks, sizes, strict=True):
        by_rank.append(chunk.split_with_sizes(each))
    return [torch.cat([pieces[k] for pieces in by_rank]).view(*shapes[index]) for k, index in enumerate(indices)]


def scatter_rows(
    tensors: Sequence[Tensor],
    shapes: Shapes,
    owners: Sequence[int],
    like: Tensor,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Scatter the owners' full tensors; return this rank's rows of every tensor. One all-to-all.

    Args:
        tensors: the full ones that this rank owns, in order, of the dtype and device of `like`.
        shapes, owners, group: as for `gather_rows`.
        like: a tensor of the dtype and device, for a rank that owns none.
    """
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    order = _by_owner(owners, ranks)
    sizes = []
    for peer in range(ranks):
        sizes.append([_element_count(shapes[k], peer, ranks) for k in order[rank]])
    flat = [tensor.reshape(-1).split_with_sizes([each[k] for each in sizes]) for k, tensor in enumerate(tensors)]
    if flat:
        sends = torch.cat([pieces[peer] for peer in range(ranks) for pieces in flat])
    else:
        sends = like.new_empty(0)
    counts = [[_element_count(shapes[k], rank, ranks) for k in own] for own in order]
    totals = [sum(each) for each in counts]
    received = like.new_empty(sum(totals))
    collectives.all_to_all_single(received, sends, totals, [sum(each) for each in sizes], group=group)  # collective
    by_index: dict[int, Tensor] = {}
    for own, chunk, each in zip(order, received.split_with_sizes(totals), counts, strict=True):
        by_index |= zip(own, chunk.split_with_sizes(each), strict=True)
    return [by_index[k].view(_rows(shape, rank, ranks), *shape[1:]) for k, shape in enumerate(shapes)]


def _by_owner(owners: Sequence[int], ranks: int) -> list[list[int]]:
    return [[k for k, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]


def _rows(shape: Sequence[int], rank: int, ranks: int) -> int:
    """Return the number of a tensor's rows on `rank`, as torch.chunk cuts."""
    each = -(-shape[0] // ranks)
    return max(0, min(each, shape[0] - rank * each))


def _element_count(shape: Sequence[int], rank: int, ranks: int) -> int:
    """Return the number of a tensor's elements on `rank`."""
    return _rows(shape, rank, ranks) * torch.Size(shape[1:]).numel()


# An exchange wakes a thread, which costs a third of a 2 ms step, so it never runs more often than this.
RAGGED_SECONDS = 0.02
# Without items it only carries stop requests.
STEADY_SECONDS = 0.25
MOST_STEPS = 16
_EXACT = 2.0**53  # up to here float64 has all whole numbers
_HEADER = 6  # stop request, seconds per step, the run's last step on this rank, and its busy seconds


# Requests, least urgent first: REGROUP admits a new process, those after it stop the run.
CONTINUE, REGROUP, STOP, SAVE_AND_END, INTERRUPT, SAVE_FAILED = range(6)


class BusySeconds(NamedTuple):
    """Seconds per step in which a rank was busy, by activity; waits do not count."""

    data: float = 0.0
    computing: float = 0.0
    writing: float = 0.0


class Turn(NamedTuple):
    """A rank's part of a turn of a stream: its items, samples, and micro-batches that have samples."""

    items: Exact
    samples: int
    filled: int


NO_TURN = Turn(0, 0, 0)


class Turns(Protocol):
    """Turns of a stream, of which those without a sample on any rank are no steps.

    Attributes:
        cover: step -> None; set by the exchange, and called before a step whose turn is not settled.
    """

    cover: Callable[[int], None]

    def ahead(self, turn: int) -> Turn:
        """Return this rank's part of a turn, counted from the first that is not settled; may load data."""

    def settle(self, samples: Sequence[int], filled: Sequence[int]) -> list[int]:
        """Return which of the next turns are steps, by their samples and filled micro-batches over all ranks."""


class _PendingExchange(NamedTuple):
    """An exchange in flight.

    Attributes:
        due: its first step.
        length: number of steps that it covers.
        work: its handle.
        rows: the numbers of each rank, one row a rank.
        extra, items: index of the extra numbers and of the items in a row.
    """

    due: int
    length: int
    work: dist.Work
    rows: Tensor
    extra: int
    items: int


class _ExchangeResult(NamedTuple):
    """Items of `length` steps from `first` on, and the length of the next exchange."""

    first: int
    length: int
    items: list[float]
    next_length: int


class StepExchange:
    """The regular exchange of the ranks about their coming steps.

    Args:
        world: the ranks.
        ahead: returns this rank's items in a coming step, summed without rounding, 0 past the last; may load data.
        constant: returns the items of any step over all ranks if known without an exchange; else None.
        last: the step after which this rank has no more work; 0: not known.
        busy: returns the total seconds in which this rank was busy, including waits for others within the data; called
            at each exchange, which sends the seconds per step.
        extra: (step, stop, wait seconds so far) -> more numbers, the same count on every rank, sent with the items
            of the steps step .. stop - 1.
        survives_loss: the run continues after the loss of a rank. If one is lost during the exchange after a step,
            that step is finished first.
        timed_steps: returns the number of steps that the busy seconds cover, if a device reports late; None: all.

    Attributes:
        progress: of this process; updated at every step.
        engine_steps: number of steps in the engine's state; kept by the loop.
        wait_seconds: total seconds spent waiting for other ranks.
        busy_by_rank: busy seconds of each rank from the last exchange; [] in a world of one.
        extra_by_rank: the result of `extra` on each rank.
        count: exchanges received.
    """

    def __init__(
        self,
        world: World,
        ahead: Callable[[int], Exact],
        constant: Callable[[int], int] | None,
        last: int = 0,
        busy: Callable[[], BusySeconds] = BusySeconds,
        extra: Callable[[int, int, float], list[float]] = lambda step, stop, waited: [],
        survives_loss: bool = False,
        timed_steps: Callable[[], int] | None = None,
    ) -> None:
        self._readable_before: Callable[[int], int] | None = None
        self._turns: Turns | None = None
        self._world = world
        self._ahead = ahead
        self._constant = constant
        self._last = last
        self._total_busy = busy
        self._extra = extra
        # busy seconds at the last exchange, and its step
        self._last_total = BusySeconds()
        self._last_total_step = 0
        self._timed_steps = timed_steps
        self._last_busy = BusySeconds()
        self._survives_loss = survives_loss
        self._failed: PeerError | None = None
        self.progress = Progress.of(world.rank)
        self.engine_steps = 0
        self.wait_seconds = 0.0
        self.count = 0
        self.busy_by_rank: list[BusySeconds] = []
        self.extra_by_rank: list[list[float]] = []
        self._group = None
        if world.size > 1:
            self._group = world.new_group()  # collective
        self._stop_request = self._agreed_stop = CONTINUE
        self._pending: _PendingExchange | None = None
        self._rows: Tensor | None = None
        self._rows_by_rank: list[Tensor] = []
        self._result = _ExchangeResult(0, 0, [], 1)
        # over the steps since the last exchange
        self._busy = 0.0
        self._steps = 0
        self._step_start: float | None = None

    def take_turns(self, turns: Turns | None) -> None:
        """Exchange the items of a stream's turns from now on, and settle which of them are steps; None: no stream."""
        self._turns = turns
        if turns:
            self._constant = None
            if self._world.size > 1:
                turns.cover = self.cover

    def limit_reading(self, readable_before: Callable[[int], int] | None) -> None:
        """Do not read items of a coming step whose data are not ready yet.

        Args:
            readable_before: step -> the first later step whose data must not be read before it is reached; None: the
                data of all steps are ready.
        """
        # Constant items need no data
        self._readable_before = None if self._constant else readable_before

    @property
    def horizon(self) -> int:
        """The first step that no exchange has covered; items of earlier steps may have been read."""
        return self._result.first + self._result.length

    def global_items(self, step: int) -> float:
        """Return the items of `step` over all ranks, in the same bits for any sharing.

        Call once for every step.

        Raises:
            PeerError: another rank did not respond within the timeout.
            LockstepError: the ranks have work for different numbers of steps.
        """
        self.progress.at(step, COMPUTING)
        if self._failed:
            raise self._failed
        if self._world.size == 1:
            if self._constant:
                return self._constant(step)
            return number(self._ahead(step))
        self.cover(step)
        now = time.perf_counter()
        if self._step_start is not None:
            self._busy = self._busy + now - self._step_start
            self._steps = self._steps + 1
        self._step_start = now
        if self._constant:
            return self._constant(step)
        return self._result.items[step - self._result.first]

    def cover(self, step: int) -> None:
        """Wait for the exchange that covers a step, which is the first: nothing was sent before it.

        Raises:
            PeerError: another rank did not respond within the timeout.
            LockstepError: the ranks have work for different numbers of steps.
        """
        if self._failed:
            raise self._failed
        if step >= self._result.first + self._result.length:
            self._pending = self._pending or self._issue(step, self._result.next_length)
            self.receive()
            if self._failed:
                raise self._failed

    def send(self, step: int) -> None:
        """Start the exchange for the next steps, if it is due. Does not wait.

        Call once for every step, after its last backward; may load the data of the next.
        """
        ends = self._readable_before is not None and self._readable_before(step) == step + 1
        if self._group is not None and step == self._result.first + self._result.length - 1 and not ends:
            self._pending = self._issue(step + 1, self._result.next_length)

    def receive(self) -> int:
        """Return what all ranks do after this step: CONTINUE, or the most urgent request. Waits.

        Raises:
            PeerError: another rank did not respond within the timeout.
            LockstepError: the ranks have work for different numbers of steps.
        """
        if self._world.size == 1:
            return self._stop_request
        if self._pending:
            at = self.progress.step
            self.progress.at(at, WAITING)
            try:
                result = self._complete(self._pending)
                # No rank has a sample in these turns of a stream
                while not result.length and self._pending.length:
                    self._pending = self._issue(self._pending.due, self._pending.length)
                    result = self._complete(self._pending)
                self._result = result
                self._pending = None
            except PeerError as error:
                if not self._survives_loss:
                    raise
                # the step is applied: what follows may need no other rank
                self._failed = error
                self._pending = None
            self.progress.at(at, COMPUTING)
        return self._agreed_stop

    def stop(self, stop_request: int) -> None:
        """Request that all ranks stop; safe in a signal handler.

        `receive` returns the most urgent request, in the same step on all ranks.
        """
        self._stop_request = max(self._stop_request, stop_request)

    @property
    def stop_request(self) -> int:
        """This rank's request."""
        return self._stop_request

    def totals(self, values: list[float]) -> list[float]:
        """Sum each value over the ranks in float64, in rank order. Waits for all ranks; used for logging."""
        if self._world.size == 1:
            return values
        return [math.fsum(column) for column in zip(*self.rows(values), strict=True)]

    def rows(self, values: list[float]) -> list[list[float]]:
        """Return the values of each rank, in rank order. Waits for all ranks.

        Every rank passes the same number of values.
        """
        if self._world.size == 1:
            return [values]
        rows = self._buffer(len(values))
        own = torch.tensor(values, dtype=torch.float64)
        collectives.all_gather(list(rows.unbind()), own, group=self._group)  # collective
        by_rank: list[list[float]] = rows.tolist()
        return by_rank

    def _issue(self, due: int, length: int) -> "_PendingExchange":
        busy = self._busy / self._steps if self._steps else 0.0
        self._busy = 0.0
        self._steps = 0
        if self._readable_before:
            length = min(length, self._readable_before(due) - due)
        row = [float(self._stop_request), busy, float(self._last), *self._busy_seconds()]
        turns = list[Turn]()
        if self._turns:
            length = max(0, min(length, self._last - due)) if self._last else length
            turns = []
            for k in range(MOST_STEPS):
                if k < length:
                    turns.append(self._turns.ahead(k))
                else:
                    turns.append(NO_TURN)
            row += [float(each.samples) for each in turns] + [float(each.filled) for each in turns]
        start = len(row)
        row += self._extra(due, due + length, self.wait_seconds)
        items = len(row)
        if not self._constant:
            ahead = self._ahead
            counts = [each.items for each in turns] or [ahead(due + k) if k < length else 0 for k in range(MOST_STEPS)]
            coming = [parts(each) for each in counts]
            # MOST_STEPS numbers of each part
            row += [part for column in zip(*coming, strict=True) for part in column]
        # One exchange is in flight, and read before the next
        if self._rows is None or self._rows.shape[1] != len(row):
            self._rows = self._buffer(len(row))
            self._rows_by_rank = list(self._rows.unbind())
        own = torch.tensor(row, dtype=torch.float64)
        work = collectives.all_gather(self._rows_by_rank, own, group=self._group, async_op=True)  # collective
        return _PendingExchange(due, length, work, self._rows, start, items)

    def _busy_seconds(self) -> BusySeconds:
        """Return the busy seconds per step since the last exchange, without waits for others."""
        # Read before the count of steps that it covers
        now = self._total_busy()
        step = self._timed_steps() if self._timed_steps else self.progress.step
        # No step has ended since
        if self._timed_steps and self._last_total_step and step == self._last_total_step:
            return self._last_busy
        now = now._replace(data=now.data - self.wait_seconds)
        steps = max(1, step - self._last_total_step)
        self._last_busy = BusySeconds(
            *(max(0.0, new - old) / steps for new, old in zip(now, self._last_total, strict=True))
        )
        self._last_total = now
        self._last_total_step = step
        return self._last_busy

    def close(self) -> None:
        """Finish the exchange in flight and destroy the group. All ranks must be at the same step."""
        if self._pending:
            with contextlib.suppress(RuntimeError):
                self._pending.work.wait()
            self._pending = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def release_group(self) -> "dist.ProcessGroup | None":
        """Return the group after the loss of a rank, to be dropped by `World.drop_groups`. Does not wait."""
        group = self._group
        self._group = None
        self._pending = None
        return group

    def _complete(self, pending: "_PendingExchange") -> "_ExchangeResult":
        began = time.perf_counter()
        try:
            pending.work.wait()
        except RuntimeError as error:
            raise lost_peers(self._world.rank, f"before step {pending.due + 1}") from error
        self.wait_seconds += time.perf_counter() - began
        rows = pending.rows.numpy()
        self._agreed_stop = int(rows[:, 0].max())
        _check_even(rows[:, 2], pending.due)
        self.busy_by_rank = list(map(BusySeconds._make, rows[:, 3:_HEADER].tolist()))
        extra = pending.items > pending.extra
        if extra:
            self.extra_by_rank = rows[:, pending.extra : pending.items].tolist()
        else:
            self.extra_by_rank = [[]] * len(rows)
        self.count += 1
        items: list[float] = []
        if not self._constant:
            sums = _exact_sums(rows[:, pending.items :].reshape(-1, MOST_STEPS)[:, : pending.length])
            items = [number(each) for each in sums]
        length = pending.length
        next_length = self._interval(float(rows[:, 1].max()))
        if self._turns:
            counts = rows[:, _HEADER : pending.extra].reshape(len(rows), 2, MOST_STEPS).sum(axis=0)[:, :length]
            samples, filled = counts.astype(int).tolist()
            steps = self._turns.settle(samples, filled)
            length = len(steps)
            items = [items[k] for k in steps]
        return _ExchangeResult(pending.due, length, items, next_length)

    def has_failed(self) -> bool:
        """Whether the exchange in flight has failed. For use by another thread."""
        pending = self._pending
        if pending is None or not pending.work.is_completed():
            return False
        try:
            pending.work.wait()  # completed: returns at once, or raises
        except RuntimeError:
            return True
        return False

    def _interval(self, busy: float) -> int:
        target = STEADY_SECONDS if self._constant else RAGGED_SECONDS
        if busy:
            return min(MOST_STEPS, max(1, math.ceil(target / busy)))
        return 1

    def _buffer(self, length: int) -> Tensor:
        """Return memory for `length` numbers of each rank, one row a rank."""
        return torch.empty(self._world.size, length, dtype=torch.float64)


def _exact_sums(values: "np.ndarray[Any, np.dtype[np.float64]]") -> list[float]:
    """Sum each column with one rounding, so that the order of the rows does not count."""
    # Whole numbers: no sum is rounded
    if (values == np.floor(values)).all() and np.abs(values).sum() < _EXACT:
        sums: list[float] = values.sum(axis=0).tolist()
        return sums
    return [math.fsum(column[column != 0].tolist()) for column in values.T]


def _check_even(lasts: "np.ndarray[Any, np.dtype[np.float64]]", step: int) -> None:
    """Raise LockstepError if the ranks plan different numbers of steps."""
    if lasts.min() != lasts.max():
        counts = ", ".join(f"{rank_label(rank)} has {int(last)}" for rank, last in enumerate(lasts))
        raise LockstepError(
            f"uneven work before step {step + 1}: {counts} steps; give every rank the same data and plan"
        )
