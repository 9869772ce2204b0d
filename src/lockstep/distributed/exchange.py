"""The step exchange: the one small, regular exchange of all ranks.

    exchange = StepExchange(world, ahead=step_loader.items, constant=None)
    items = exchange.global_items(step)     # of the whole step, over all ranks
    ...                                     # forward, backward
    exchange.send(step)                     # of the steps to come, and the request to stop
    ...                                     # the optimizer's step, meanwhile
    stop_agreed = exchange.receive()        # what all ranks do after this step

One all-gather of a few numbers on a CPU group of its own, under way while the optimizer steps. It carries the items of
the coming steps, how many steps there are, the request to stop, and the seconds in which this rank was busy itself. It
takes place every step where items are ragged and steps are long enough for it to cost nothing, else every few steps;
how many, all ranks derive from the same exchanged numbers. A request that comes before the last backward of a long step
ends the run after that step.
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
    """For each cost a rank: the largest first, each to the rank that has least. The same wherever it is asked."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def gather_rows(
    parts: Sequence[Tensor], shapes: Shapes, owners: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The tensors that this rank owns, whole, each in memory of its own. One all-to-all.

    Args:
        parts: this rank's rows of every tensor, of one dtype and device.
        shapes: of the whole tensors.
        owners: for each a rank within `group`.
        group: of the ranks that share the rows; None: all.
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
    """This rank's rows of every tensor, from the owners' whole ones. One all-to-all.

    Args:
        wholes: those that this rank owns, in order, of the dtype and device of `like`.
        shapes, owners, group: as for `gather_rows`.
        like: gives dtype and device, also where this rank owns none.
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
    """How many rows of a tensor lie on `rank`: as torch.chunk cuts, ceil(n / ranks) each."""
    each = -(-shape[0] // ranks)
    return max(0, min(each, shape[0] - rank * each))


def _held(shape: Sequence[int], rank: int, ranks: int) -> int:
    """Elements of a tensor that lie on `rank`."""
    return _rows(shape, rank, ranks) * torch.Size(shape[1:]).numel()


# An exchange wakes a thread, which costs a 2 ms step a third of its time: never more often than this.
RAGGED_SECONDS = 0.02
# Where it carries no items it is only to agree on stopping.
STEADY_SECONDS = 0.25
MOST_STEPS = 16
_HEADER = 6  # request to stop, seconds per step, the run's last step as this rank sees it, and its busy seconds


# Requests in order of urgency: to take somebody in, and to stop.
CONTINUE, REGROUP, STOP, SAVE_AND_END, INTERRUPT, SAVE_FAILED = range(6)


class BusySeconds(NamedTuple):
    """Seconds per step in which a rank was busy itself, not waiting: with data, with computing, with writing."""

    data: float = 0.0
    computing: float = 0.0
    writing: float = 0.0


class _Flight(NamedTuple):
    """An exchange under way: the first step it is for, how many steps it covers, where its rows arrive, and the place
    of the items in them."""

    due: int
    length: int
    work: dist.Work
    rows: list[Tensor]
    items: int


class _Received(NamedTuple):
    """What the last exchange said: items of `length` steps from `first` on, and how many the next shall cover."""

    first: int
    length: int
    items: list[float]
    next_length: int


class StepExchange:
    """What the ranks know of each other's coming steps.

    Args:
        world: the ranks.
        ahead: this rank's items in a coming step, added up without rounding, 0 past the last; may load data.
        constant: the items of any step over all ranks where that is known without asking; else None.
        last: the step after which this rank has no more work; 0: not known.
        busy: seconds in which this rank was busy so far, in all, waiting for the others in the data included; asked at
            each exchange, which tells the others what it makes a step.
        further: (step, stop, seconds waited so far) -> more numbers, as many on every rank, told with the items of the
             steps step .. stop - 1.
        outlives: the run goes on after the loss of a rank. Where one is lost while the exchange after a step is under
            way, that step comes to its end first.
        measured: how many steps the busy seconds are of, where a device tells of a step after it; None: of all.

    Attributes:
        progress: where this process stands; kept at every step.
        taken: steps that the engine's state holds; kept by the loop.
        waited: seconds spent in waiting for the other ranks, in all.
        heard: what the last exchange said of each rank; [] in a world of one.
        also: what `further` said on each rank.
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
        self._told, self._told_at = BusySeconds(), 0  # busy seconds by the step at which they were told last
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
        self._busy, self._steps = 0.0, 0  # of the steps since the last exchange
        self._since: float | None = None

    @property
    def until(self) -> int:
        """The first step that no exchange was for yet: of those before it, items may have been asked for."""
        return self._received.first + self._received.length

    def global_items(self, step: int) -> float:
        """Items of `step`, over all ranks: the same bits however they are shared out. To be called once for every step.

        Raises:
            PeerError: another rank did not answer within the timeout.
            LockstepError: the ranks have work for different numbers of steps.
        """
        self.progress.at(step, COMPUTING)
        if self._failed:
            raise self._failed
        if self._world.size == 1:
            return self._constant(step) if self._constant else number(self._ahead(step))
        if step >= self._received.first + self._received.length:  # the first step: nobody sent anything before it
            self._flight = self._flight or self._issue(step, self._received.next_length)
            self.receive()
        now = time.perf_counter()
        if self._since is not None:
            self._busy, self._steps = self._busy + now - self._since, self._steps + 1
        self._since = now
        return self._constant(step) if self._constant else self._received.items[step - self._received.first]

    def send(self, step: int) -> None:
        """Tells the others what they must know before the next step, where that is due; waits for nobody.

        To be called once for every step, after its last backward; may load the data of the next.
        """
        if self._group is not None and step == self._received.first + self._received.length - 1:
            self._flight = self._issue(step + 1, self._received.next_length)

    def receive(self) -> int:
        """What all ranks do after the present step: CONTINUE, or the most urgent request. Waits for what was sent.

        Raises:
            PeerError: another rank did not answer within the timeout.
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
                self._failed, self._flight = error, None  # the step was taken: what follows it may need nobody else
            self.progress.at(at, COMPUTING)
        return self._stop_agreed

    def stop(self, stop_request: int) -> None:
        """Asks all ranks to end; safe in a signal handler. `receive` returns the most urgent, on all in one step."""
        self._stop_request = max(self._stop_request, stop_request)

    @property
    def stop_request(self) -> int:
        """What this rank asks for."""
        return self._stop_request

    def totals(self, values: list[float]) -> list[float]:
        """Each value summed over the ranks, in rank order, in float64; waits for all ranks. Used where one logs."""
        if self._world.size == 1:
            return values
        return [math.fsum(column) for column in zip(*self.rows(values), strict=True)]

    def rows(self, values: list[float]) -> list[list[float]]:
        """The values of each rank, as many on each, in rank order; waits for all ranks."""
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
            row += [part for column in zip(*coming, strict=True) for part in column]  # MOST_STEPS of each part
        rows = self._buffers(len(row))
        sent = torch.tensor(row, dtype=torch.float64)
        work = dist.all_gather(rows, sent, group=self._group, async_op=True)  # collective
        return _Flight(due, length, work, rows, _HEADER + len(further))

    def _busy_seconds(self) -> BusySeconds:
        """Busy seconds per step since this was told last; to wait for the others is no work."""
        now = self._spent()  # before the steps that it is of are counted
        step = self._measured() if self._measured else self.progress.step
        if self._measured and self._told_at and step == self._told_at:  # no step has come to its end since
            return self._said
        now = now._replace(data=now.data - self.waited)
        steps = max(1, step - self._told_at)
        self._said = BusySeconds(*(max(0.0, new - old) / steps for new, old in zip(now, self._told, strict=True)))
        self._told, self._told_at = now, step
        return self._said

    def close(self) -> None:
        """Lets the exchange under way come to its end and gives the group back; all ranks stand at the same step."""
        if self._flight:
            with contextlib.suppress(RuntimeError):
                self._flight.work.wait()
            self._flight = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def left(self) -> "dist.ProcessGroup | None":
        """Hands out the group, to be left after the loss of a rank (see `World.forsake`); waits for nobody."""
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
        """Whether the exchange under way has failed already, though nobody waited for it yet. For another thread."""
        flight = self._flight
        if flight is None or not flight.work.is_completed():
            return False
        try:
            flight.work.wait()  # is over: returns at once, or raises
        except RuntimeError:
            return True
        return False

    def _rule(self, busy: float) -> int:
        wanted = STEADY_SECONDS if self._constant else RAGGED_SECONDS
        return min(MOST_STEPS, max(1, math.ceil(wanted / busy))) if busy else 1

    def _buffers(self, length: int) -> list[Tensor]:
        return [torch.empty(length, dtype=torch.float64) for _ in range(self._world.size)]


def _check_even(lasts: list[int], step: int) -> None:
    """Raises where the ranks have work for different numbers of steps: they would wait for each other."""
    if min(lasts) != max(lasts):
        counts = ", ".join(f"{rank_label(rank)} has {last}" for rank, last in enumerate(lasts))
        raise LockstepError(
            f"uneven work, seen before step {step}: of the run's steps {counts}; give every rank the same data and plan"
        )
