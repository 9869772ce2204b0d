"""Which devices a run has, where they are not all alike.

line = differing(world.gather(device_of(world.device)))     # "" where they are
"""

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.units import bytes_text

__all__ = ["device_of", "differing", "ranges"]

_SAME = 0.05  # memories that differ by less, as a share, are alike: a host's depends on its firmware


def device_of(device: torch.device) -> list[Any]:
    """[name, bytes of its memory] of a rank's device; of a CPU its model, and the host's memory."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return [found.name, found.total_memory]
    return [_processor(), _host_memory()]


def differing(devices: Sequence[Sequence[Any]], speeds: Sequence[float] = ()) -> str:
    """One line where the ranks' devices differ in name, memory or measured speed; "" where they are alike.

    Args:
        devices: by rank, what `device_of` says of it.
        speeds: by rank, beside the fastest's; () where they are not known.
    """
    speeds = speeds or [1.0] * len(devices)
    kinds: list[tuple[str, int, float, list[int]]] = []
    for rank, ((name, size), speed) in enumerate(zip(devices, speeds, strict=True)):
        for kind in kinds:
            if kind[0] == name and abs(kind[1] - size) <= _SAME * kind[1] and abs(kind[2] - speed) <= _SAME:
                kind[3].append(rank)
                break
        else:
            kinds.append((name, size, speed, [rank]))
    if len(kinds) < 2:
        return ""
    shown = [
        f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}: {name}, {bytes_text(size)}"
        + (f", speed {speed:.2g}" if min(speeds) < 1.0 else "")
        for name, size, speed, ranks in kinds
    ]
    return f"unequal devices: {'; '.join(shown)}"


def ranges(ranks: Sequence[int]) -> str:
    """`0-3, 6`, of numbers in their order."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or no such line
        return platform.processor() or platform.machine()


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
