"""Where a step's time goes, without waiting for the device.

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

__all__ = ["Clock", "DeviceClock", "HostClock", "MarkingClock", "make_clock", "marked", "queued"]

_ALONE = "backward/alone"
_Marks = list[tuple[str, torch.cuda.Event]]


class Clock(Protocol):
    """Adds up the time between `start` or a lap and the next lap, under the lap's name.

    Laps whose names begin alike, up to a "/", are one in what `read` returns, and apart in `spent`. But where there are
    other ranks, by which the last backward of a step takes longer than those before it, which are "backward/alone", is
    "exchange" there, and no backward: told without waiting for anything.

    Attributes:
        steps: those that `spent` knows of, the present one included where it does.
    """

    @property
    def steps(self) -> int: ...

    def start(self) -> None:
        """Begins a step: what passed since the last lap belongs to nobody."""

    def lap(self, name: str) -> None:
        """What passed since `start` or the last lap belongs to `name`."""

    def spent(self) -> dict[str, float]:
        """Seconds in all by name, as far as they are known: no device is waited for."""

    def read(self) -> dict[str, float]:
        """Milliseconds a step by name, of the steps since the last reading; resets. To be called between two steps."""


class HostClock:
    """The host's clock, for a CPU: work is done when the call returns.

    Args:
        ranks: that share the steps.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._sums: dict[str, float] = {}
        self._alone, self._ranks = 0, ranks  # backwards of this window that no exchange was in
        self._before: dict[str, float] = {}  # until the last reading
        self.steps = self._read = 0  # in all, and up to the last reading
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
    """CUDA events on the current stream: recorded as the step goes by, and read when the device has passed them.

    Nothing here waits for the device. A step is known once its last event has come to pass, mostly in the step after.

    Args:
        ranks: that share the steps.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._alone, self._ranks = 0, ranks  # as in HostClock
        self._flying: deque[_Marks] = deque()  # a step's each, its start first; the last is the present one's
        self._free: list[torch.cuda.Event] = []
        self._before: dict[str, float] = {}  # until the last reading
        self._sums: dict[str, float] = {}
        self._found: dict[str, float] = {}
        self.steps = self._read = 0

    def start(self) -> None:
        self._land(len(self._flying))
        if self._flying and len(self._flying[-1]) == 1:  # it was begun after the last
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
        """As `Clock.read`, of the steps that came to an end on the device since; if none did, what it said last."""
        self._land(len(self._flying))
        if self.steps > self._read:
            self._before = _added(self._before, self._sums)
            self._found = _by_step(self._sums, self.steps - self._read, self._alone if self._ranks > 1 else 0)
            self._sums, self._read, self._alone = {}, self.steps, 0
        return dict(self._found)

    def _land(self, whole: int) -> None:
        """Adds up the first `whole` steps that are noted, as far as the device has done them."""
        while whole > 0 and len(self._flying[0]) > 1:
            if not self._flying[0][-1][1].query():  # type: ignore[no-untyped-call]
                return
            marks, whole = self._flying.popleft(), whole - 1
            for (_, before), (name, after) in pairwise(marks):
                self._sums[name] = self._sums.get(name, 0.0) + 1e-3 * before.elapsed_time(after)
                self._alone += name == _ALONE
            self._free += [event for _, event in marks]
            self.steps += 1


# The part of a step that follows a lap of this name. Where the name is none of these the part goes on.
_AFTER = {
    "data": "forward",
    "forward": "backward",
    "backward/alone": "forward",
    "backward": "exchange",
    "update": "told",
}
_PLAIN = 10  # steps without a trace whose lengths are kept


@final
class MarkingClock:
    """A clock whose laps are marks in a trace, while one is made: a step's parts as `lockstep.loop` goes through them.

    clock = MarkingClock(make_clock(device))
    clock.trace(101)    # the next step is the 101st, and marked
    clock.end()

    Attributes:
        computed: seconds by part in which this thread was computing, of the marked steps; the rest it waited.
        queued: seconds by part in which it wanted to, and had no core: others had them all. On Linux.
        plain: seconds of each of the last steps that were not marked, what follows a step included.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._number = 0  # of the step to be marked next; 0: none
        self._part, self._mark, self._whole = "", _Mark(), _Mark()
        self._ran, self._waited, self._began = 0.0, 0.0, 0.0
        self.computed: dict[str, float] = {}
        self.queued: dict[str, float] = {}
        self._told: int | None = None  # where the system tells how long this thread was in the queue
        self.plain: deque[float] = deque(maxlen=_PLAIN)

    @property
    def steps(self) -> int:
        return self._clock.steps

    def trace(self, number: int) -> None:
        """From the next step on, which is the one of this number, counted from 1, each is marked."""
        self._told = self._told if self._told is not None else _open_queue()
        self._number, self._began, self.computed, self.queued = number, 0.0, {}, {}

    def end(self) -> None:
        """The marked step is over, and no other is marked."""
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
        if name == "data" and part in ("exchange", "told"):  # told the others, and heard from them
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
    """Seconds that this thread has wanted a core and had none, since it began; 0 where the system does not tell."""
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
    except OSError:  # no Linux, or one that does not count it
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
    """Around one of lockstep's own parts: its mark in a trace where a profiler runs, else nothing."""
    return record_function(f"lockstep:{part}") if torch._C._autograd._profiler_enabled() else _NOTHING


def _added(before: dict[str, float], sums: dict[str, float]) -> dict[str, float]:
    return before | {name: before.get(name, 0.0) + spent for name, spent in sums.items()}


def _by_step(seconds: dict[str, float], steps: int, alone: int) -> dict[str, float]:
    """Milliseconds a step, by the names' first words; of `alone` backwards it is known what one takes by itself."""
    found: dict[str, float] = {}
    for name, spent in seconds.items():
        first = name.partition("/")[0]
        found[first] = found.get(first, 0.0) + 1e3 * spent / max(1, steps)
    if alone and "backward" in seconds:
        exchange = 1e3 * max(0.0, seconds["backward"] / max(1, steps) - seconds[_ALONE] / alone)
        found |= {"backward": found["backward"] - exchange, "exchange": exchange}
    return found


def make_clock(device: torch.device, ranks: int = 1) -> Clock:
    """The clock for a device, in a world of so many ranks."""
    return DeviceClock(ranks) if device.type == "cuda" else HostClock(ranks)
