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
request before the last backward of a long step ends the run after that step.
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
]


# Seconds. An exchange wakes a thread, which costs a third of a 2 ms step, so it never runs more often than this.
RAGGED_SECONDS = 0.02
# Seconds. With constant items it only carries stop requests.
STEADY_SECONDS = 0.25
# Steps that one exchange covers at most, and so the steps that a stop request may have to wait.
MOST_STEPS = 16
# float64 represents every whole number up to here.
_EXACT = 2.0**53
# Columns before the turns: stop request, seconds per step, this rank's last step, and its three busy seconds.
_HEADER = 6


# Requests, least urgent first. REGROUP admits a new process; those after it stop the run.
CONTINUE, REGROUP, STOP, SAVE_AND_END, INTERRUPT, SAVE_FAILED = range(6)


class BusySeconds(NamedTuple):
    """Seconds per step in which a rank was busy, by activity; waits do not count."""

    data: float = 0.0
    computing: float = 0.0
    writing: float = 0.0


class Turn(NamedTuple):
    """A rank's share of a turn of a stream.

    Attributes:
        items, samples: in the turn.
        filled: micro-batches that have samples.
    """

    items: Exact
    samples: int
    filled: int


NO_TURN = Turn(0, 0, 0)


class Turns(Protocol):
    """Turns of a stream; one without a sample on any rank is no step.

    Attributes:
        cover: step -> None; set by the exchange, and called before a step whose turn is not settled.
    """

    cover: Callable[[int], None]

    def ahead(self, turn: int) -> Turn:
        """Return this rank's share of a coming turn; may load data.

        Args:
            turn: counted from the first that is not settled.
        """

    def settle(self, samples: Sequence[int], filled: Sequence[int]) -> list[int]:
        """Return which of the next turns are steps.

        Args:
            samples, filled: of each turn, over all ranks.
        """


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
        # Busy seconds at the last exchange, and its step.
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
            # All ranks. Its own group, since an exchange in flight must not interleave with other agreements.
            self._group = world.new_group()  # collective
        self._stop_request = self._agreed_stop = CONTINUE
        self._pending: _PendingExchange | None = None
        self._rows: Tensor | None = None
        self._rows_by_rank: list[Tensor] = []
        self._result = _ExchangeResult(0, 0, [], 1)
        # Over the steps since the last exchange.
        self._busy = 0.0
        self._steps = 0
        self._step_start: float | None = None

    def take_turns(self, turns: Turns | None) -> None:
        """Exchange the items of a stream's turns from now on; None: no stream.

        The exchange settles which turns are steps.
        """
        self._turns = turns
        if turns:
            self._constant = None
            if self._world.size > 1:
                turns.cover = self.cover

    def limit_reading(self, readable_before: Callable[[int], int] | None) -> None:
        """Limit reading to the coming steps whose data are ready.

        Args:
            readable_before: step -> the first later step whose data must not be read before it is reached; None: the
                data of all steps are ready.
        """
        # Constant items need no data, so nothing is read ahead.
        self._readable_before = None if self._constant else readable_before

    @property
    def horizon(self) -> int:
        """The first step that no exchange has covered.

        Items of earlier steps may have been read.
        """
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
        time_now = time.perf_counter()
        if self._step_start is not None:
            # The time of a step decides how often the ranks exchange.
            self._busy = self._busy + time_now - self._step_start
            self._steps = self._steps + 1
        self._step_start = time_now
        if self._constant:
            return self._constant(step)
        return self._result.items[step - self._result.first]

    def cover(self, step: int) -> None:
        """Wait for the exchange that covers a step.

        Before the first step nothing was sent, so the exchange starts here.


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
        # The data of the next step are not ready, as between epochs. Then `cover` starts the exchange when they are.
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
            # A peer that looks at this rank's progress sees that it waits.
            at = self.progress.step
            self.progress.at(at, WAITING)
            try:
                result = self._complete(self._pending)
                # No rank has a sample in these turns of a stream: exchange the next ones.
                while not result.length and self._pending.length:
                    self._pending = self._issue(self._pending.due, self._pending.length)
                    result = self._complete(self._pending)
                self._result = result
                self._pending = None
            except PeerError as error:
                if not self._survives_loss:
                    raise
                # The step is applied. What follows, such as a save, may need no other rank.
                self._failed = error
                self._pending = None
            self.progress.at(at, COMPUTING)
        return self._agreed_stop

    def stop(self, stop_request: int) -> None:
        """Request that all ranks stop; safe in a signal handler.

        `receive` returns the most urgent request, in the same step on all ranks.
        """
        # A single assignment, since a signal handler may run between any two instructions.
        self._stop_request = max(self._stop_request, stop_request)

    @property
    def stop_request(self) -> int:
        """This rank's request."""
        return self._stop_request

    def totals(self, values: list[float], losses: int = 0) -> list[float]:
        """Sum each value over the ranks in float64, in rank order.

        Waits for all ranks; used for logging. The first `losses` values are losses, as in `rows`.
        """
        if self._world.size == 1:
            return values
        return [math.fsum(column) for column in zip(*self.rows(values, losses), strict=True)]

    def rows(self, values: list[float], losses: int = 0) -> list[list[float]]:
        """Return the values of each rank, to be summed, in rank order. Waits for all ranks.

        Every rank passes the same number of values. Those of ranks that do not count (`World.counts`) are 0.

        Args:
            losses: the number of values, at the beginning, that are losses: 0 unless a rank `adds_losses`.
        """
        if self._world.size == 1:
            return [values]
        # The other ranks of a replica have the same values, which count once.
        if not self._world.counts:
            kept = losses if self._world.adds_losses else 0
            values = values[:kept] + [0.0] * (len(values) - kept)
        rows = self._buffer(len(values))
        sent = torch.tensor(values, dtype=torch.float64)
        # All ranks, once for each record. The CPU group waits here for the slowest rank, and for no device.
        collectives.all_gather(list(rows.unbind()), sent, group=self._group)  # collective
        # A CPU tensor: no device waits.
        by_rank: list[list[float]] = rows.tolist()
        return by_rank

    def _issue(self, due: int, length: int) -> "_PendingExchange":
        # The header of this rank's row, then turns, extra numbers and items.
        busy = self._busy / self._steps if self._steps else 0.0
        self._busy = 0.0
        self._steps = 0
        if self._readable_before:
            length = min(length, self._readable_before(due) - due)
        row = [float(self._stop_request), busy, float(self._last), *self._busy_seconds()]
        turns = list[Turn]()
        if self._turns:
            # Near the end of the run exchange only the turns that may still be steps.
            length = max(0, min(length, self._last - due)) if self._last else length
            turns = []
            for k in range(MOST_STEPS):
                if k < length:
                    turns.append(self._turns.ahead(k))
                else:
                    turns.append(NO_TURN)
            if not self._world.counts:
                turns = [NO_TURN] * MOST_STEPS
            row += [float(turn.samples) for turn in turns] + [float(turn.filled) for turn in turns]
        start = len(row)
        row += self._extra(due, due + length, self.wait_seconds)
        items = len(row)
        if not self._constant:
            ahead = self._ahead
            # Past the last step a rank sends zeros, so that all rows have one length.
            counts = [turn.items for turn in turns] or [ahead(due + k) if k < length else 0 for k in range(MOST_STEPS)]
            # Another rank of the replica sends the same items.
            if not self._world.counts:
                counts = [0] * MOST_STEPS
            coming = [parts(turn) for turn in counts]
            # Each count is a sum of several float64 parts: send MOST_STEPS numbers for each part.
            row += [addend for column in zip(*coming, strict=True) for addend in column]
        # Reuse the buffer: one exchange is in flight at a time, and is read before the next.
        if self._rows is None or self._rows.shape[1] != len(row):
            self._rows = self._buffer(len(row))
            self._rows_by_rank = list(self._rows.unbind())
        sent = torch.tensor(row, dtype=torch.float64)
        # All ranks, without a wait: it travels while the optimizer steps, and `_complete` waits for it.
        work = collectives.all_gather(self._rows_by_rank, sent, group=self._group, async_op=True)  # collective
        return _PendingExchange(due, length, work, self._rows, start, items)

    def _busy_seconds(self) -> BusySeconds:
        """Return the busy seconds per step since the last exchange, without waits for others."""
        # Read the seconds first: reading a device's clock adds the steps that the device has completed.
        total = self._total_busy()
        step = self._timed_steps() if self._timed_steps else self.progress.step
        # A device reports late, and no step has ended since the last exchange.
        if self._timed_steps and self._last_total_step and step == self._last_total_step:
            return self._last_busy
        total = total._replace(data=total.data - self.wait_seconds)
        steps = max(1, step - self._last_total_step)
        self._last_busy = BusySeconds(
            *(max(0.0, new - old) / steps for new, old in zip(total, self._last_total, strict=True))
        )
        self._last_total = total
        self._last_total_step = step
        return self._last_busy

    def close(self) -> None:
        """Finish the exchange in flight and destroy the group. Collective.

        All ranks must be at the same step.
        """
        if self._pending:
            with contextlib.suppress(RuntimeError):
                self._pending.work.wait()
            self._pending = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def release_group(self) -> "dist.ProcessGroup | None":
        """Give up the group after a rank failed, for `World.drop_groups`.

        Does not wait.
        """
        group = self._group
        self._group = None
        self._pending = None
        return group

    def _complete(self, pending: "_PendingExchange") -> "_ExchangeResult":
        # The host waits here once for each exchange; the time counts as waiting for other ranks.
        began = time.perf_counter()
        try:
            pending.work.wait()
        except RuntimeError as error:
            # gloo reports a rank that is gone or late as a plain RuntimeError.
            raise lost_peers(self._world.rank, f"before step {pending.due + 1}") from error
        self.wait_seconds += time.perf_counter() - began
        # The rows are on the CPU, so reading them waits for no device.
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
            items = [number(exact_sum) for exact_sum in sums]
        # All ranks derive the next interval from the slowest rank's seconds, so they agree on it.
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
            # The exchange is completed, so this returns at once or raises.
            pending.work.wait()
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
    """Sum each column with one rounding, so that the order of rows does not matter."""
    # Whole numbers below 2**53: no addition rounds, so numpy's faster sum is exact.
    if (values == np.floor(values)).all() and np.abs(values).sum() < _EXACT:
        sums: list[float] = values.sum(axis=0).tolist()
        # fsum rounds once, at the end; zeros add nothing.
        return sums
    return [math.fsum(column[column != 0].tolist()) for column in values.T]


def _check_even(lasts: "np.ndarray[Any, np.dtype[np.float64]]", step: int) -> None:
    """Raise LockstepError if the ranks plan different numbers of steps."""
    if lasts.min() != lasts.max():
        counts = ", ".join(f"{rank_label(rank)} has {int(step_count)}" for rank, step_count in enumerate(lasts))
        raise LockstepError(
            f"uneven work before step {step + 1}: {counts} steps; give every rank the same data and plan"
        )
