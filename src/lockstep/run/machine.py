"""What a trace does not say of machine and batches: cores, memory, page faults, padding, a fused update's speed."""

import os
import resource
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.world import World

__all__ = ["Usage", "cores", "fused_ns", "local_ranks", "memory_free", "positions"]

_TRIED = 1 << 21  # elements of the tensor whose update is timed
_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # this thread's own, on Linux


class Usage(NamedTuple):
    """What this thread has had of the system so far: milliseconds in it, new pages, and pages read from a disk."""

    system: float = 0.0
    minor: float = 0.0
    major: float = 0.0

    @classmethod
    def now(cls) -> "Usage":
        found = resource.getrusage(_WHO)
        return cls(1e3 * found.ru_stime, found.ru_minflt, found.ru_majflt)

    def since(self, steps: int) -> dict[str, float]:
        """What came since, a step."""
        now = Usage.now()
        return {name: (new - old) / steps for name, new, old in zip(self._fields, now, self, strict=True)}


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_ranks(world_size: int) -> int:
    """Ranks on this host."""
    return min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def memory_free(world: World) -> int:
    """Bytes: of a CUDA device, or this rank's part of the host's."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):  # not Linux
        return 0
    return free // local_ranks(world.size)


def fused_ns(device: torch.device) -> float:
    """Nanoseconds that fused AdamW takes an element, as measured now; 0 where this device has none."""
    tried = torch.zeros(_TRIED, device=device, requires_grad=True)
    tried.grad = torch.zeros_like(tried)
    best = float("inf")
    try:
        optimizer = torch.optim.AdamW([tried], fused=True)
        for _ in range(4):
            began = time.perf_counter()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # waits for the device
            best = min(best, time.perf_counter() - began)
    except RuntimeError:
        return 0.0
    return 1e9 * best / _TRIED


def positions(held: Any, items: int) -> tuple[int, int | Tensor]:
    """Positions of a batch in host memory, and how many of them hold nothing; (0, 0) where that cannot be told.

    By the batch's `attention_mask`. Without one, rows of whole numbers (tokens) are positions, and those that are no
    items hold nothing to learn from, where there are more items than rows: else the items are the rows.
    """
    get = getattr(held, "get", None)
    mask = get("attention_mask") if callable(get) else None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.numel(), int(mask.numel() - int(mask.count_nonzero()))
    rows = [each for each in _tensors(held) if each.ndim == 2 and not each.is_floating_point()]
    widest = max(rows, key=Tensor.numel, default=None)
    if widest is None or items <= len(widest) or items > widest.numel():
        return 0, 0
    return widest.numel(), widest.numel() - items


def _tensors(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    values = list(held.values()) if isinstance(held, dict) else held if isinstance(held, list | tuple) else []
    return [tensor for value in values for tensor in _tensors(value)]
