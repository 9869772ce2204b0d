"""Where a step's time goes, without waiting for the device.

clock.start(); ...; clock.lap("data"); ...; clock.lap("forward")
clock.read()        # {"data": 1.9, "forward": 20.4, ...}: milliseconds per step since the last reading
"""

import time
from typing import Protocol

import torch

__all__ = ["Clock", "DeviceClock", "HostClock", "make_clock"]


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
        """Seconds in all by name, as far as they are known without waiting for the device."""

    def read(self) -> dict[str, float]:
        """Milliseconds a step by name since the last reading; resets. Here, and only here, the device is waited for."""


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
        return self._before | {name: self._before.get(name, 0.0) + spent for name, spent in self._sums.items()}

    def read(self) -> dict[str, float]:
        self._before = self.spent()
        found = _by_step(self._sums, self.steps - self._read)
        self._sums, self._read = {}, self.steps
        return found


class DeviceClock:
    """CUDA events on the current stream: recorded as the step goes by, read only when asked."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []
        self._before: dict[str, float] = {}
        self.steps = 0

    def start(self) -> None:
        self.lap("")

    def lap(self, name: str) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((name, event))

    def spent(self) -> dict[str, float]:
        return dict(self._before)

    def read(self) -> dict[str, float]:
        if not self._marks:
            return {}
        self._marks[-1][1].synchronize()  # waits for the device
        sums: dict[str, float] = {}
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                sums[name] = sums.get(name, 0.0) + 1e-3 * before.elapsed_time(after)
        self._before |= {name: self._before.get(name, 0.0) + spent for name, spent in sums.items()}
        count = sum(not name for name, _ in self._marks)
        self._free += [event for _, event in self._marks]
        self._marks = []
        self.steps += count
        return _by_step(sums, count)


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
