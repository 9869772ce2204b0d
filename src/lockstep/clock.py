"""Measure where a step's time goes, without waiting for the device.

clock.start(); ...; clock.lap("data"); ...; clock.lap("forward")
clock.read()        # {"data": 1.9, "forward": 20.4, ...}: milliseconds per step since the last reading
with marked("save"): ...                        # a mark in a trace, where a profiler runs
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
    "make_clock",
    "marked",
    "queued",
]

_ALONE = "backward/alone"
_Marks = list[tuple[str, torch.cuda.Event]]


class Clock(Protocol):
    """Stopwatch of a step: adds up the time of each named lap.

    Laps whose names are equal up to a "/" are one in `read`, and separate in `spent`. With several ranks, `read` splits
    the last backward of a step: what it takes longer than those before it ("backward/alone") is "exchange". That needs
    no synchronisation.

    Attributes:
        steps: number of steps in `spent`, including the current one if that is in it.
    """

    @property
    def steps(self) -> int: ...

    def start(self) -> None:
        """Begin a step; time since the last lap is not counted."""

    def lap(self, name: str) -> None:
        """Add the time since `start` or the last lap to `name`."""

    def spent(self) -> dict[str, float]:
        """Return total seconds by name, as far as known, without waiting for a device."""

    def read(self) -> dict[str, float]:
        """Return milliseconds per step by name since the last reading, and reset.

        Call it between two steps.
        """


class HostClock:
    """The host's clock, for a CPU: work is done when the call returns.

    Args:
        ranks: number of ranks that share the steps.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._sums: dict[str, float] = {}
        self._alone, self._ranks = 0, ranks  # backwards of this window without an exchange
        self._before: dict[str, float] = {}  # until the last reading
        self.steps = self._read = 0  # total, and up to the last reading
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
        return _added(self._before, self._sums)

    def read(self) -> dict[str, float]:
        self._before = self.spent()
        found = _by_step(self._sums, self.steps - self._read, self._alone if self._ranks > 1 else 0)
        self._sums, self._read, self._alone = {}, self.steps, 0
        return found


class DeviceClock:
    """CUDA events on the current stream, read once the device has passed them.

    Nothing here waits for the device. A step's times are known once its last event has completed, usually during the
    next step.

    Args:
        ranks: number of ranks that share the steps.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._alone, self._ranks = 0, ranks  # as in HostClock
        self._flying: deque[_Marks] = deque()  # one list per step, its start first; the last is the current step's
        self._free: list[torch.cuda.Event] = []
        self._before: dict[str, float] = {}  # until the last reading
        self._sums: dict[str, float] = {}
        self._found: dict[str, float] = {}
        self.steps = self._read = 0

    def start(self) -> None:
        self._land(len(self._flying))
        if self._flying and len(self._flying[-1]) == 1:  # a start without laps, after the last step
            self._free.append(self._flying.pop()[0][1])
        self._flying.append([])
        self.lap("")

    def lap(self, name: str) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._flying[-1].append((name, event))

    def spent(self) -> dict[str, float]:
        self._land(len(self._flying) - 1)
        return _added(self._before, self._sums)

    def read(self) -> dict[str, float]:
        """Return as `Clock.read`, over the steps that completed on the device.

        If none did, it returns the last result again.
        """
        self._land(len(self._flying))
        if self.steps > self._read:
            self._before = _added(self._before, self._sums)
            self._found = _by_step(self._sums, self.steps - self._read, self._alone if self._ranks > 1 else 0)
            self._sums, self._read, self._alone = {}, self.steps, 0
        return dict(self._found)

    def _land(self, whole: int) -> None:
        """Add up the first `whole` pending steps, as far as the device has completed them."""
        while whole > 0 and len(self._flying[0]) > 1:
            if not self._flying[0][-1][1].query():  # type: ignore[no-untyped-call]
                return
            marks, whole = self._flying.popleft(), whole - 1
            for (_, before), (name, after) in pairwise(marks):
                self._sums[name] = self._sums.get(name, 0.0) + 1e-3 * before.elapsed_time(after)
                self._alone += name == _ALONE
            self._free += [event for _, event in marks]
            self.steps += 1


# The part of a step that follows a lap of this name; after any other name the part goes on.
_AFTER = {
    "data": "forward",
    "forward": "backward",
    "backward/alone": "forward",
    "backward": "exchange",
    "update": "told",
}
_PLAIN = 10  # untraced steps whose durations are kept


@final
class MarkingClock:
    """A clock whose laps also mark the parts of `lockstep.loop` in a trace.

        clock = MarkingClock(make_clock(device))
        clock.trace(101)    # the next step is the 101st, and marked
        clock.end()

    Attributes:
        computed: CPU seconds of this thread by part, over the marked steps; the rest it waited.
        queued: seconds by part that it waited for a core. Linux only.
        plain: seconds of each of the last unmarked steps, including what follows a step.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._number = 0  # the step to mark next; 0: none
        self._part, self._mark, self._whole = "", _Mark(), _Mark()
        self._ran, self._waited, self._began = 0.0, 0.0, 0.0
        self.computed: dict[str, float] = {}
        self.queued: dict[str, float] = {}
        self._told: int | None = None  # schedstat, if the system has it
        self.plain: deque[float] = deque(maxlen=_PLAIN)

    @property
    def steps(self) -> int:
        return self._clock.steps

    def trace(self, number: int) -> None:
        """Mark steps, beginning with the next one.

        Args:
            number: of the next step, counted from 1.
        """
        self._told = self._told if self._told is not None else _open_queue()
        self._number, self._began, self.computed, self.queued = number, 0.0, {}, {}

    def end(self) -> None:
        """End the marked step, and mark no further ones."""
        self._leave()
        self._whole.end()
        self._number = 0
        if self._told is not None:
            os.close(self._told)
            self._told = None

    def start(self) -> None:
        self._clock.start()
        now = time.perf_counter()
        if self._number:
            self._leave()
            self._whole.end()
            self._whole.begin(f"step {self._number}")
            self._number += 1
            self._enter("data")
        elif self._began:
            self.plain.append(now - self._began)
        self._began = now

    def lap(self, name: str) -> None:
        self._clock.lap(name)
        if not self._number:
            return
        part = self._part
        self._leave()
        if name == "data" and part in ("exchange", "told"):  # after sending to the other ranks, and receiving from them
            if part == "exchange":
                self._enter("update")
        else:
            self._enter(_AFTER.get(name, part))

    def spent(self) -> dict[str, float]:
        return self._clock.spent()

    def read(self) -> dict[str, float]:
        return self._clock.read()

    def _enter(self, part: str) -> None:
        self._part, self._ran, self._waited = part, time.thread_time(), _queued(self._told)
        self._mark.begin("exchange" if part == "told" else part)

    def _leave(self) -> None:
        if self._part:
            self.computed[self._part] = self.computed.get(self._part, 0.0) + time.thread_time() - self._ran
            self.queued[self._part] = self.queued.get(self._part, 0.0) + _queued(self._told) - self._waited
        self._part = ""
        self._mark.end()


def queued() -> float:
    """Return the seconds that this thread has waited for a core.

    0 if the system does not report them.
    """
    told = _open_queue()
    if told is None:
        return 0.0
    try:
        return _queued(told)
    finally:
        os.close(told)


def _open_queue() -> int | None:
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not Linux, or a kernel without schedstat
        return None


def _queued(told: int | None) -> float:
    try:
        return 1e-9 * int(os.pread(told, 100, 0).split()[1]) if told is not None else 0.0
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


_NOTHING: AbstractContextManager[Any] = nullcontext()


def marked(part: str) -> AbstractContextManager[Any]:
    """Return a context that marks a part of lockstep in a trace.

    It does nothing without a profiler.
    """
    return record_function(f"lockstep:{part}") if torch._C._autograd._profiler_enabled() else _NOTHING


def _added(before: dict[str, float], sums: dict[str, float]) -> dict[str, float]:
    return before | {name: before.get(name, 0.0) + spent for name, spent in sums.items()}


def _by_step(seconds: dict[str, float], steps: int, alone: int) -> dict[str, float]:
    """Return milliseconds per step by the first part of the names.

    Args:
        alone: number of backwards without an exchange, which show what one takes by itself.
    """
    found: dict[str, float] = {}
    for name, spent in seconds.items():
        first = name.partition("/")[0]
        found[first] = found.get(first, 0.0) + 1e3 * spent / max(1, steps)
    if alone and "backward" in seconds:
        exchange = 1e3 * max(0.0, seconds["backward"] / max(1, steps) - seconds[_ALONE] / alone)
        found |= {"backward": found["backward"] - exchange, "exchange": exchange}
    return found


def make_clock(device: torch.device, ranks: int = 1) -> Clock:
    """Make the clock for a device, in a world of `ranks` ranks."""
    return DeviceClock(ranks) if device.type == "cuda" else HostClock(ranks)
