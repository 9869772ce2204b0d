"""Find out whether the memory of a loader process grows with each sample.

growth = memory_growth(batches)             # MB per 1,000 samples; 0.0: none

A dataset that keeps its samples grows in each process, and so does a long list of Python objects: reading one counts a
reference in it, and its page is copied from the process that forked. Only memory that the process has for itself is
counted, and a mapped file is not.
"""

import ctypes
import math
import re
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from lockstep.data.batches import Batches
from lockstep.data.loader import Fetching, Key

__all__ = ["MemoryFetch", "memory_growth", "rate_of_growth"]

# Most seconds of the process's processor time, and by the clock.
_SECONDS = 3.0
_WALL_SECONDS = 10.0
# Most samples, and MB of growth that are enough.
_SAMPLES = 4000
_MANY = 64.0
# Least seconds between two readings, and the largest share of the time that readings may take.
_PAUSE = 0.02
_SHARE = 0.5
# Most samples between two readings: quick samples are all loaded while a large process is read once.
_EVERY = 100
# MB that are no noise: a process that kept nothing grew by less than 0.3.
_LEAST = 1.0
# Points in each third of the samples; odd, so that a median is a reading.
_PART = 17
# Slower rate to faster: a cache that fills up does not reach it, nor does memory that jumps once.
_STEADY = 0.4


def memory_growth(batches: Batches) -> float:
    """Load in one process for a few seconds, and return by how much it grows.

    Returns:
        MB per 1,000 samples; 0.0 where there is no growth, or no way to measure it.
    """
    readings: list[tuple[int, float]] = []
    samples = 0
    begin = 0.0
    end = math.inf
    with closing(batches.read_apart(MemoryFetch)) as stream:
        for key, (memory, seconds), _ in stream:
            samples += len(key.samples)
            if not readings:
                # The time that a process takes to start is not spent on loading.
                begin = seconds
                end = time.monotonic() + _WALL_SECONDS
            if not readings or memory != readings[-1][1]:
                readings.append((samples, memory))
            is_over = seconds - begin > _SECONDS or time.monotonic() > end
            if is_over or samples > _SAMPLES or memory - readings[0][1] > _MANY:
                break
    return rate_of_growth(readings)


class MemoryFetch:
    """Loads micro-batches, and returns readings of this process in place of each.

    A reading is its memory (MB) and its processor time (s).
    """

    def __init__(self, fetch: Fetching) -> None:
        self._fetch = fetch
        self._next = 0.0
        self._samples = 0
        self._memory = 0.0

    def __getitem__(self, key: Key) -> tuple[tuple[float, float], float]:
        items = self._fetch[key][1]
        self._samples += len(key.samples)
        begin = time.monotonic()
        if begin > self._next or self._samples >= _EVERY:
            self._memory = _own_memory()
            end = time.monotonic()
            self._samples = 0
            self._next = end + max(_PAUSE, (end - begin) / _SHARE)
        return (self._memory, time.process_time()), items


def _own_memory() -> float:
    """Return the MB that this process alone has written; 0.0 if unknown."""
    # Freed memory that the allocator keeps is no growth, so give it back first.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return sum(int(size) for size in re.findall(r"^(?:Private_Dirty|Swap): +(\d+) kB", text, re.MULTILINE)) / 1e3


def rate_of_growth(readings: list[tuple[int, float]]) -> float:
    """Return MB per 1,000 samples if memory grows throughout; else 0.0.

    0.0 if it is level, comes to rest, or jumps.

    The first half is left out: processes import, fill their caches, and copy the pages that they were forked with.

    Args:
        readings: (samples loaded so far, MB) in order.
    """
    if not readings:
        return 0.0
    samples, memory = np.array(readings, dtype=np.float64).T
    # Readings are not evenly spaced: a process that waits for its core makes few, then many. So each counts until the
    # next one.
    even = np.linspace(samples[-1] / 2, samples[-1], 3 * _PART)
    indices = np.searchsorted(samples, even, side="right") - 1
    parts = memory[indices].reshape(3, _PART)
    begin, middle, end = np.median(parts, axis=1)
    slower, faster = sorted([middle - begin, end - middle])
    beyond_noise = end - begin >= _LEAST and parts[2].min() > parts[0].max()
    if not beyond_noise or slower < _STEADY * faster:
        return 0.0
    begin_samples, _, end_samples = np.median(samples[indices].reshape(3, _PART), axis=1)
    return float(1e3 * (end - begin) / (end_samples - begin_samples))
