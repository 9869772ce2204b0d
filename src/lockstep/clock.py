"""Where a step's time goes, without waiting for the device.

clock.start(); ...; clock.lap("data"); ...; clock.lap("forward")
clock.read()        # {"data": 1.9, "forward": 20.4, ...}: milliseconds per step since the last reading
"""

import time
from collections import deque
from itertools import pairwise
from typing import Protocol

import torch

__all__ = ["Clock", "DeviceClock", "HostClock", "make_clock"]

_Marks = list[tuple[str, torch.cuda.Event]]


class Clock(Protocol):
    """Adds up the time between `start` or a lap and the next lap, under the lap's name.

    Laps whose names begin alike, up to a "/", are one in what `read` returns, and apart in `spent`.

    Attributes:
        steps: those that `spent` knows of, the present one included where it does.
    """

    steps: int

    def start(self) -> None:
        """Begins a step: what passed since the last lap belongs to nobody."""

    def lap(self, name: str) -> None:
        """What passed since `start` or the last lap belongs to `name`."""

    def spent(self) -> dict[str, float]:
        """Seconds in all by name, as far as they are known: no device is waited for."""

    def read(self) -> dict[str, float]:
        """Milliseconds a step by name, of the steps since the last reading; resets. To be called between two steps."""


class HostClock:
    """The host's clock, for a CPU: work is done when the call returns."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
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

    def spent(self) -> dict[str, float]:
        return _added(self._before, self._sums)

    def read(self) -> dict[str, float]:
        self._before = self.spent()
        found = _by_step(self._sums, self.steps - self._read)
        self._sums, self._read = {}, self.steps
        return found


class DeviceClock:
    """CUDA events on the current stream: recorded as the step goes by, and read when the device has passed them.

    Nothing here waits for the device. A step is known once its last event has come to pass, mostly in the step after.
    """

    def __init__(self) -> None:
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
            self._found = _by_step(self._sums, self.steps - self._read)
            self._sums, self._read = {}, self.steps
        return dict(self._found)

    def _land(self, whole: int) -> None:
        """Adds up the first `whole` steps that are noted, as far as the device has done them."""
        while whole > 0 and len(self._flying[0]) > 1:
            if not self._flying[0][-1][1].query():  # type: ignore[no-untyped-call]
                return
            marks, whole = self._flying.popleft(), whole - 1
            for (_, before), (name, after) in pairwise(marks):
                self._sums[name] = self._sums.get(name, 0.0) + 1e-3 * before.elapsed_time(after)
            self._free += [event for _, event in marks]
            self.steps += 1


def _added(before: dict[str, float], sums: dict[str, float]) -> dict[str, float]:
    return before | {name: before.get(name, 0.0) + spent for name, spent in sums.items()}


def _by_step(seconds: dict[str, float], steps: int) -> dict[str, float]:
    """Milliseconds a step, by the names' first words."""
    found: dict[str, float] = {}
    for name, spent in seconds.items():
        first = name.partition("/")[0]
        found[first] = found.get(first, 0.0) + 1e3 * spent / max(1, steps)
    return found


def make_clock(device: torch.device) -> Clock:
    """The clock for a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
