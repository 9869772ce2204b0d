"""Find out whether the memory of a loader process grows with each sample.

growth = memory_growth(batches)             # MB per 1,000 samples; 0.0: none

A dataset that keeps its samples grows in each process, and so does a long list of Python objects: reading one counts a
reference in it, and its page is copied from the process that forked. Only memory that the process has for itself is
counted, and a mapped file is not.
"""

import ctypes
import re
import statistics
import time
from contextlib import closing
from pathlib import Path

from lockstep.data.batches import Batches
from lockstep.data.loader import Fetching, Key

__all__ = ["MemoryFetch", "memory_growth", "rate_of_growth"]

_SECONDS, _SAMPLES, _MANY = 3.0, 4000, 64.0  # of loading, at most; MB of growth that are enough
_PAUSE = 0.02  # seconds between two readings
_LEAST = 1.0  # MB that are no noise: a process that kept nothing grew by less than 0.3
_STEADY = 0.4  # slower rate to faster: a cache that fills up does not reach it, nor does memory that jumps once


def memory_growth(batches: Batches) -> float:
    """Load in one process for a few seconds, and return by how much it grows.

    Returns:
        MB per 1,000 samples; 0.0 where there is no growth, or no way to measure it.
    """
    readings: list[tuple[int, float]] = []
    samples, end = 0, time.monotonic() + _SECONDS
    with closing(batches.read_apart(MemoryFetch)) as stream:
        for key, memory, _ in stream:
            samples += len(key.samples)
            if not readings or memory != readings[-1][1]:
                readings.append((samples, memory))
            if time.monotonic() > end or samples > _SAMPLES or memory - readings[0][1] > _MANY:
                break
    return rate_of_growth(readings)


class MemoryFetch:
    """Loads micro-batches, and returns the MB of this process in place of each."""

    def __init__(self, fetch: Fetching) -> None:
        self._fetch, self._last, self._memory = fetch, 0.0, 0.0

    def __getitem__(self, key: Key) -> tuple[float, float]:
        items = self._fetch[key][1]
        if time.monotonic() - self._last > _PAUSE:
            self._memory, self._last = _own_memory(), time.monotonic()
        return self._memory, items


def _own_memory() -> float:
    """Return the MB that this process has written and shares with none; 0.0 where the system does not tell."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # what was freed goes back, and is no growth
    if trim is not None:
        trim(0)
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return sum(int(size) for size in re.findall(r"^(?:Private_Dirty|Swap): +(\d+) kB", text, re.MULTILINE)) / 1e3


def rate_of_growth(readings: list[tuple[int, float]]) -> float:
    """Return MB per 1,000 samples if memory grows throughout; 0.0 if it is level, comes to rest, or jumps.

    The first quarter is left out: processes import and fill their caches.

    Args:
        readings: (samples loaded so far, MB) in order.
    """
    own = readings[len(readings) // 4 :]
    third = len(own) // 3
    if not third:
        return 0.0
    parts = [own[:third], own[third:-third], own[-third:]]
    (s0, m0), (s1, m1), (s2, m2) = ([statistics.median_low(each) for each in zip(*part, strict=True)] for part in parts)
    beyond_noise = min(memory for _, memory in parts[2]) - max(memory for _, memory in parts[0])
    slower, faster = sorted([(m1 - m0) / (s1 - s0), (m2 - m1) / (s2 - s1)])
    return 1e3 * (m2 - m0) / (s2 - s0) if beyond_noise >= _LEAST and slower >= _STEADY * faster else 0.0
