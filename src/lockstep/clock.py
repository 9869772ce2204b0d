"""Measure where a step's time goes, without waiting for the device.

clock.start(); ...; clock.lap("data"); ...; clock.lap("forward")
clock.read()        # {"data": 1.9, "forward": 20.4, ...}: milliseconds per step since the last reading
with trace_mark("save"): ...                    # a mark in a trace, if a profiler runs
"""

import os
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Protocol, final

import torch
from torch.profiler import record_function

__all__ = [
    "Clock",
    "HostClock",
    "MarkingClock",
    "StepMarks",
    "make_clock",
    "queue_seconds",
    "trace_mark",
]

_ALONE = "backward/alone"
_Marks = list[tuple[str, torch.cuda.Event]]


class Clock(Protocol):
    """Stopwatch of a step: adds up the time of each named lap.

    `read` merges laps whose names are equal up to a "/"; `spent` does not. With several ranks, `read` splits the last
    backward of a step: what it takes longer than the others ("backward/alone") is "exchange". That needs no
    synchronisation.

    Attributes:
        steps: number of steps in `spent`, including the current one if that is in it.
    """

    @property
    def steps(self) -> int: ...

    def start(self) -> None:
        """Start a step; the time since the last lap is not counted."""

    def lap(self, name: str) -> None:
        """Add the time since `start` or the last lap to `name`."""

    def spent(self) -> dict[str, float]:
        """Return the total seconds by name that are known without waiting for the device."""

    def read(self) -> dict[str, float]:
        """Return milliseconds per step by name since the last reading, and reset.

        Call it between two steps.
        """


class HostClock:
    """Clock of the host, for a CPU, whose work is done when a call returns.

    Args:
        ranks: number of ranks that share the steps.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._sums: dict[str, float] = {}
        # Number of backwards without an exchange since the last reading.
        self._alone = 0
        self._ranks = ranks
        self._before: dict[str, float] = {}  # until the last reading
        # Number of steps in total, and up to the last reading.
        self.steps = self._read = 0
        self._last = 0.0

    def start(self) -> None:
        self.steps += 1
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._sums[name] = self._sums.get(name, 0.0) + now - self._last
        self._last = now
        self._alone += name == _ALONE

    def spent(self) -> dict[str, float]:
        return _add_sums(self._before, self._sums)

    def read(self) -> dict[str, float]:
        self._before = self.spent()
        times = _by_step(self._sums, self.steps - self._read, self._alone if self._ranks > 1 else 0)
        self._sums = {}
        self._read = self.steps
        self._alone = 0
        return times


class DeviceClock:
    """Clock of CUDA events on the current stream, which never waits for the device.

    A step's times are known once its last event has completed, usually during the
    next step.

    Args:
        ranks: number of ranks that share the steps.
    """

    def __init__(self, ranks: int = 1) -> None:
        # As in HostClock.
        self._alone = 0
        self._ranks = ranks
        # One list of marks per step, beginning with its start. The last list is the current step's.
        self._pending: deque[_Marks] = deque()
        self._free: list[torch.cuda.Event] = []
        self._before: dict[str, float] = {}  # until the last reading
        self._sums: dict[str, float] = {}
        self._times: dict[str, float] = {}
        self.steps = self._read = 0

    def start(self) -> None:
        self._collect(len(self._pending))
        # Reuse the event of a start without laps, which follows the last step before a pause.
        if self._pending and len(self._pending[-1]) == 1:
            self._free.append(self._pending.pop()[0][1])
        self._pending.append([])
        self.lap("")

    def lap(self, name: str) -> None:
        # Events are reused from step to step. torch has no types for the constructor.
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._pending[-1].append((name, event))

    def spent(self) -> dict[str, float]:
        self._collect(len(self._pending) - 1)
        return _add_sums(self._before, self._sums)

    def read(self) -> dict[str, float]:
        """Return as `Clock.read`, over the steps that completed on the device.

        If none did, it returns the last result again.
        """
        self._collect(len(self._pending))
        if self.steps > self._read:
            self._before = _add_sums(self._before, self._sums)
            self._times = _by_step(self._sums, self.steps - self._read, self._alone if self._ranks > 1 else 0)
            self._sums = {}
            self._read = self.steps
            self._alone = 0
        return dict(self._times)

    def _collect(self, count: int) -> None:
        """Add up the completed ones of the first `count` pending steps."""
        while count > 0 and len(self._pending[0]) > 1:
            # A query does not wait. Steps complete in order, so the first incomplete one ends the search.
            if not self._pending[0][-1][1].query():  # type: ignore[no-untyped-call]
                return
            marks = self._pending.popleft()
            count = count - 1
            for (_, before), (name, after) in pairwise(marks):
                self._sums[name] = self._sums.get(name, 0.0) + 1e-3 * before.elapsed_time(after)
                self._alone += name == _ALONE
            self._free += [event for _, event in marks]
            self.steps += 1


# lap -> the part of a step that follows it; after any other lap the part continues. "told" is receiving from the other
# ranks; it is a key of the files of `lockstep profile`.
_AFTER = {
    "data": "forward",
    "forward": "backward",
    "backward/alone": "forward",
    "backward": "exchange",
    "update": "told",
}
_UNTRACED = 10  # durations of untraced steps to keep


class StepMarks:
    """Marks of steps and their parts in a trace, with this thread's time by part.

    Attributes:
        cpu_seconds: CPU time of this thread by part, over the marked steps; the rest it waited.
        queue_seconds: time by part that it waited for a core. Linux only.
        untraced: seconds of each of the last unmarked steps, including what follows a step.
    """

    def __init__(self) -> None:
        self._number = 0  # the step to mark next; 0: none
        self._part = ""
        self._mark = _Mark()
        self._whole = _Mark()
        self._ran = 0.0
        self._waited = 0.0
        self._began = 0.0
        self.cpu_seconds: dict[str, float] = {}
        self.queue_seconds: dict[str, float] = {}
        # A file descriptor of /proc/thread-self/schedstat; None on systems without it.
        self._schedstat: int | None = None
        self.untraced: deque[float] = deque(maxlen=_UNTRACED)

    def trace(self, number: int) -> None:
        """Mark steps, beginning with the next one.

        Args:
            number: of the next step, counted from 1.
        """
        if self._schedstat is None:
            self._schedstat = _open_queue()
        self._number = number
        self._began = 0.0
        self.cpu_seconds = {}
        self.queue_seconds = {}

    def end(self) -> None:
        """End the marked step, and mark no further ones."""
        self.leave()
        self._whole.end()
        self._number = 0
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def begin_step(self, part: str) -> None:
        """End a step, and begin the next one with `part`."""
        now = time.perf_counter()
        if self._number:
            self.leave()
            self._whole.end()
            self._whole.begin(f"step {self._number}")
            self._number += 1
            self.enter(part)
        elif self._began:
            self.untraced.append(now - self._began)
        self._began = now

    def enter(self, part: str) -> None:
        """Begin a part, if steps are marked; "" has no mark."""
        if self._number and part:
            self._part, self._ran, self._waited = part, time.thread_time(), _read_queue(self._schedstat)
            self._mark.begin("exchange" if part == "told" else part)

    def leave(self) -> None:
        """End the part."""
        if self._part:
            self.cpu_seconds[self._part] = self.cpu_seconds.get(self._part, 0.0) + time.thread_time() - self._ran
            self.queue_seconds[self._part] = (
                self.queue_seconds.get(self._part, 0.0) + _read_queue(self._schedstat) - self._waited
            )
        self._part = ""
        self._mark.end()


@final
class MarkingClock(StepMarks):
    """A clock that also marks the parts of `lockstep.loop` in a trace.

    clock = MarkingClock(make_clock(device))
    clock.trace(101)    # the next step is the 101st, and marked
    clock.end()
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    @property
    def steps(self) -> int:
        return self._clock.steps

    def start(self) -> None:
        self._clock.start()
        self.begin_step("data")

    def lap(self, name: str) -> None:
        self._clock.lap(name)
        if not self._number:
            return
        part = self._part
        self.leave()
        # The parts "exchange" (send) and "told" (receive) both end with a lap named "data".
        if name == "data" and part in ("exchange", "told"):
            if part == "exchange":
                self.enter("update")
        else:
            self.enter(_AFTER.get(name, part))

    def spent(self) -> dict[str, float]:
        return self._clock.spent()

    def read(self) -> dict[str, float]:
        return self._clock.read()


def queue_seconds() -> float:
    """Return the seconds that this thread has waited for a core; 0 if unknown."""
    schedstat = _open_queue()
    if schedstat is None:
        return 0.0
    try:
        return _read_queue(schedstat)
    finally:
        os.close(schedstat)


def _open_queue() -> int | None:
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not Linux, or a kernel without schedstat
        return None


def _read_queue(schedstat: int | None) -> float:
    try:
        if schedstat is not None:
            # The second field of schedstat is the time in the run queue, in nanoseconds.
            return 1e-9 * int(os.pread(schedstat, 100, 0).split()[1])
        return 0.0
    except (OSError, IndexError, ValueError):
        return 0.0


class _Mark:
    """A mark in a trace, from `begin` to `end`."""

    def __init__(self) -> None:
        self._open: Any = None

    def begin(self, part: str) -> None:
        self._open = record_function(f"lockstep:{part}")
        self._open.__enter__()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


_NO_MARK: AbstractContextManager[Any] = nullcontext()


def trace_mark(part: str) -> AbstractContextManager[Any]:
    """Return a context that marks a part in the trace of a running profiler."""
    # A private name of torch, used by its own `record_function` callers too: a mark costs 10 us even if no profiler
    # runs.
    if torch._C._autograd._profiler_enabled():
        return record_function(f"lockstep:{part}")
    return _NO_MARK


def _add_sums(before: dict[str, float], sums: dict[str, float]) -> dict[str, float]:
    return before | {name: before.get(name, 0.0) + spent for name, spent in sums.items()}


def _by_step(seconds: dict[str, float], steps: int, alone: int) -> dict[str, float]:
    """Return milliseconds per step by the first part of the names.

    Args:
        alone: number of backwards without an exchange.
    """
    times: dict[str, float] = {}
    for name, spent in seconds.items():
        part_name = name.partition("/")[0]
        times[part_name] = times.get(part_name, 0.0) + 1e3 * spent / max(1, steps)
    if alone and "backward" in seconds:
        # The last backward contains the all-reduce. What it takes longer than an average other backward is the
        # exchange.
        exchange = 1e3 * max(0.0, seconds["backward"] / max(1, steps) - seconds[_ALONE] / alone)
        times |= {"backward": times["backward"] - exchange, "exchange": exchange}
    return times


def make_clock(device: torch.device, ranks: int = 1) -> Clock:
    """Make the clock for a device, in a world of `ranks` ranks."""
    if device.type == "cuda":
        return DeviceClock(ranks)
    return HostClock(ranks)
