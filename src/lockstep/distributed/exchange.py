"""Exchange the few numbers that all ranks need about the coming steps.

    exchange = StepExchange(world, ahead=step_loader.items, constant=None)
    items = exchange.global_items(step)     # of the whole step, over all ranks
    ...                                     # forward, backward
    exchange.send(step)                     # of the steps to come, and the request to stop
    ...                                     # the optimizer's step, meanwhile
    stop_agreed = exchange.receive()        # what all ranks do after this step

One all-gather of a few numbers on its own CPU group, while the optimizer steps. It carries the items of the coming
steps, the number of steps, the stop request, and the seconds in which this rank was busy. It runs in every step if
items are ragged and steps are long enough to hide it, else every few steps; all ranks derive the interval from the
same numbers. A stop request before the last backward of a long step ends the run after that step. `gather_rows` and
`scatter_rows` move tensors between shards and their owners.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.counts import Exact, number, parts
from lockstep.distributed.membership import lost_peers
from lockstep.distributed.progress import COMPUTING, WAITING, Progress, rank_label
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, PeerError

__all__ = [
    "CONTINUE",
    "INTERRUPT",
    "REGROUP",
    "SAVE_AND_END",
    "SAVE_FAILED",
    "STOP",
    "BusySeconds",
    "StepExchange",
    "gather_rows",
    "scatter_rows",
    "shared_out",
]


Shapes = Sequence[Sequence[int]]


def shared_out(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign each cost to a rank, largest first, each to the least loaded. Deterministic."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def gather_rows(
    parts: Sequence[Tensor], shapes: Shapes, owners: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Return the tensors that this rank owns, whole, in new memory. One all-to-all.

    Args:
        parts: this rank's rows of every tensor, of one dtype and device.
        shapes: of the whole tensors.
        owners: each tensor's owner, a rank within `group`.
        group: the ranks that share the rows; None: all.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    order = _by_owner(owners, ranks)
    sent = torch.cat([parts[k].reshape(-1) for own in order for k in own])
    lengths = [sum(parts[k].numel() for k in own) for own in order]
    mine = order[rank]
    sizes = [[_held(shapes[k], other, ranks) for k in mine] for other in range(ranks)]
    totals = [sum(each) for each in sizes]
    received = sent.new_empty(sum(totals))
    dist.all_to_all_single(received, sent, totals, lengths, group=group)  # collective
    chunks = received.split_with_sizes(totals)
    by_rank = [chunk.split_with_sizes(each) for chunk, each in zip(chunks, sizes, strict=True)]
    return [torch.cat([pieces[k] for pieces in by_rank]).view(*shapes[index]) for k, index in enumerate(mine)]


def scatter_rows(
    wholes: Sequence[Tensor],
    shapes: Shapes,
    owners: Sequence[int],
    like: Tensor,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Return this rank's rows of every tensor, from the owners' whole ones. One all-to-all.

    Args:
        wholes: those that this rank owns, in order, of the dtype and device of `like`.
        shapes, owners, group: as for `gather_rows`.
        like: gives dtype and device, even if this rank owns none.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    order = _by_owner(owners, ranks)
    sizes = [[_held(shapes[k], other, ranks) for k in order[rank]] for other in range(ranks)]
    flat = [whole.reshape(-1).split_with_sizes([each[k] for each in sizes]) for k, whole in enumerate(wholes)]
    sent = torch.cat([pieces[other] for other in range(ranks) for pieces in flat]) if flat else like.new_empty(0)
    held = [[_held(shapes[k], rank, ranks) for k in own] for own in order]
    totals = [sum(each) for each in held]
    received = like.new_empty(sum(totals))
    dist.all_to_all_single(received, sent, totals, [sum(each) for each in sizes], group=group)  # collective
    found: dict[int, Tensor] = {}
    for own, chunk, each in zip(order, received.split_with_sizes(totals), held, strict=True):
        found |= zip(own, chunk.split_with_sizes(each), strict=True)
    return [found[k].view(_rows(shape, rank, ranks), *shape[1:]) for k, shape in enumerate(shapes)]


def _by_owner(owners: Sequence[int], ranks: int) -> list[list[int]]:
    return [[k for k, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]


def _rows(shape: Sequence[int], rank: int, ranks: int) -> int:
    """Return the number of a tensor's rows on `rank`: ceil(n / ranks) each, as torch.chunk cuts."""
    each = -(-shape[0] // ranks)
    return max(0, min(each, shape[0] - rank * each))


def _held(shape: Sequence[int], rank: int, ranks: int) -> int:
    """Return the number of a tensor's elements on `rank`."""
    return _rows(shape, rank, ranks) * torch.Size(shape[1:]).numel()


# An exchange wakes a thread, which costs a third of a 2 ms step, so it never runs more often than this.
RAGGED_SECONDS = 0.02
# Without items it only serves to agree on stopping.
STEADY_SECONDS = 0.25
MOST_STEPS = 16
_HEADER = 6  # stop request, seconds per step, the run's last step on this rank, and its busy seconds


# Requests in order of urgency: to admit a new process, and to stop.
CONTINUE, REGROUP, STOP, SAVE_AND_END, INTERRUPT, SAVE_FAILED = range(6)


class BusySeconds(NamedTuple):
    """Seconds per step in which a rank was busy, by activity; waits do not count."""

    data: float = 0.0
    computing: float = 0.0
    writing: float = 0.0


class _Flight(NamedTuple):
    """An exchange under way.

    Its first step, the number of steps that it covers, the handle, the buffers of its rows, and the index of the items
    in them.
    """

    due: int
    length: int
    work: dist.Work
    rows: list[Tensor]
    items: int


class _Received(NamedTuple):
    """The result of the last exchange.

    Items of `length` steps from `first` on, and the number of steps that the next exchange covers.
    """

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
        further: (step, stop, seconds waited so far) -> more numbers, the same count on every rank, sent with the items
            of the steps step .. stop - 1.
        outlives: the run continues after the loss of a rank. If one is lost during the exchange after a step, that
            step is finished first.
        measured: returns the number of steps that the busy seconds cover, if a device reports a step late; None: all.

    Attributes:
        progress: of this process; updated at every step.
        taken: number of steps in the engine's state; kept by the loop.
        waited: total seconds spent waiting for other ranks.
        heard: busy seconds of each rank from the last exchange; [] in a world of one.
        also: the result of `further` on each rank.
        count: exchanges received.
    """

    def __init__(
        self,
        world: World,
        ahead: Callable[[int], Exact],
        constant: Callable[[int], int] | None,
        last: int = 0,
        busy: Callable[[], BusySeconds] = BusySeconds,
        further: Callable[[int, int, float], list[float]] = lambda step, stop, waited: [],
        outlives: bool = False,
        measured: Callable[[], int] | None = None,
    ) -> None:
        self._world, self._ahead, self._constant, self._last, self._spent = world, ahead, constant, last, busy
        self._further = further
        self._told, self._told_at = BusySeconds(), 0  # busy seconds at the last exchange, and its step
        self._measured, self._said = measured, BusySeconds()
        self._outlives = outlives
        self._failed: PeerError | None = None
        self.progress, self.taken = Progress.of(world.rank), 0
        self.waited, self.count = 0.0, 0
        self.heard: list[BusySeconds] = []
        self.also: list[list[float]] = []
        self._group = None
        if world.size > 1:
            self._group = world.new_group()  # collective
        self._stop_request = self._stop_agreed = CONTINUE
        self._flight: _Flight | None = None
        self._received = _Received(0, 0, [], 1)
        self._busy, self._steps = 0.0, 0  # over the steps since the last exchange
        self._since: float | None = None

    @property
    def until(self) -> int:
        """The first step that no exchange has covered.

        Items of earlier steps may have been read.
        """
        return self._received.first + self._received.length

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
            return self._constant(step) if self._constant else number(self._ahead(step))
        if step >= self._received.first + self._received.length:  # the first step: nothing was sent before it
            self._flight = self._flight or self._issue(step, self._received.next_length)
            self.receive()
        now = time.perf_counter()
        if self._since is not None:
            self._busy, self._steps = self._busy + now - self._since, self._steps + 1
        self._since = now
        return self._constant(step) if self._constant else self._received.items[step - self._received.first]

    def send(self, step: int) -> None:
        """Start the exchange for the next steps, if it is due. Does not wait.

        Call once for every step, after its last backward; may load the data of the next.
        """
        if self._group is not None and step == self._received.first + self._received.length - 1:
            self._flight = self._issue(step + 1, self._received.next_length)

    def receive(self) -> int:
        """Return what all ranks do after this step: CONTINUE, or the most urgent request. Waits.

        Raises:
            PeerError: another rank did not respond within the timeout.
            LockstepError: the ranks have work for different numbers of steps.
        """
        if self._world.size == 1:
            return self._stop_request
        if self._flight:
            at = self.progress.step
            self.progress.at(at, WAITING)
            try:
                self._received, self._flight = self._arrived(self._flight), None
            except PeerError as error:
                if not self._outlives:
                    raise
                self._failed, self._flight = error, None  # the step is applied: what follows may need no other rank
            self.progress.at(at, COMPUTING)
        return self._stop_agreed

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
        rows = self._buffers(len(values))
        try:
            dist.all_gather(rows, torch.tensor(values, dtype=torch.float64), group=self._group)  # collective
        except RuntimeError as error:
            raise lost_peers(self._world.rank, error, "at a record") from error
        return [row.tolist() for row in rows]

    def _issue(self, due: int, length: int) -> "_Flight":
        busy = self._busy / self._steps if self._steps else 0.0
        self._busy, self._steps = 0.0, 0
        row = [float(self._stop_request), busy, float(self._last), *self._busy_seconds()]
        row += (further := self._further(due, due + length, self.waited))
        if not self._constant:
            coming = [parts(self._ahead(due + k) if k < length else 0) for k in range(MOST_STEPS)]
            row += [part for column in zip(*coming, strict=True) for part in column]  # MOST_STEPS numbers of each part
        rows = self._buffers(len(row))
        sent = torch.tensor(row, dtype=torch.float64)
        work = dist.all_gather(rows, sent, group=self._group, async_op=True)  # collective
        return _Flight(due, length, work, rows, _HEADER + len(further))

    def _busy_seconds(self) -> BusySeconds:
        """Return the busy seconds per step since the last exchange, without waits for others."""
        now = self._spent()  # read before counting the steps that it covers
        step = self._measured() if self._measured else self.progress.step
        if self._measured and self._told_at and step == self._told_at:  # no step has ended since
            return self._said
        now = now._replace(data=now.data - self.waited)
        steps = max(1, step - self._told_at)
        self._said = BusySeconds(*(max(0.0, new - old) / steps for new, old in zip(now, self._told, strict=True)))
        self._told, self._told_at = now, step
        return self._said

    def close(self) -> None:
        """Finish the exchange under way and destroy the group. All ranks must be at the same step."""
        if self._flight:
            with contextlib.suppress(RuntimeError):
                self._flight.work.wait()
            self._flight = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def left(self) -> "dist.ProcessGroup | None":
        """Give up the group after the loss of a rank (see `World.forsake`). Does not wait."""
        group, self._group, self._flight = self._group, None, None
        return group

    def _arrived(self, flight: "_Flight") -> "_Received":
        began = time.perf_counter()
        try:
            flight.work.wait()
        except RuntimeError as error:
            raise lost_peers(self._world.rank, error, f"before step {flight.due}") from error
        self.waited += time.perf_counter() - began
        rows = [row.tolist() for row in flight.rows]
        self._stop_agreed = int(max(row[0] for row in rows))
        _check_even([int(row[2]) for row in rows], flight.due)
        self.heard, self.count = [BusySeconds(*row[3:_HEADER]) for row in rows], self.count + 1
        self.also = [row[_HEADER : flight.items] for row in rows]
        items = [
            number(math.fsum(part for row in rows for part in row[flight.items + k :: MOST_STEPS]))
            for k in range(0 if self._constant else flight.length)
        ]
        return _Received(flight.due, flight.length, items, self._rule(max(row[1] for row in rows)))

    def broken(self) -> bool:
        """Whether the exchange under way has failed already. For use by another thread."""
        flight = self._flight
        if flight is None or not flight.work.is_completed():
            return False
        try:
            flight.work.wait()  # completed: returns at once, or raises
        except RuntimeError:
            return True
        return False

    def _rule(self, busy: float) -> int:
        wanted = STEADY_SECONDS if self._constant else RAGGED_SECONDS
        return min(MOST_STEPS, max(1, math.ceil(wanted / busy))) if busy else 1

    def _buffers(self, length: int) -> list[Tensor]:
        return [torch.empty(length, dtype=torch.float64) for _ in range(self._world.size)]


def _check_even(lasts: list[int], step: int) -> None:
    """Raise LockstepError if the ranks have work for different numbers of steps.

    They would wait for each other.
    """
    if min(lasts) != max(lasts):
        counts = ", ".join(f"{rank_label(rank)} has {last}" for rank, last in enumerate(lasts))
        raise LockstepError(
            f"uneven work, seen before step {step}: of the run's steps {counts}; give every rank the same data and plan"
        )
