"""What a trace does not say of machine and batches: cores, memory, page faults, padding, what some things cost.

What is timed here is timed when a trace is about to begin, takes some milliseconds, and leaves the process as it was:
its memory comes from the system and not from malloc, which would keep what follows it otherwise.
"""

import mmap
import os
import pickle
import resource
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # teaches ForkingPickler tensors
from torch import Tensor

from lockstep.clock import queued
from lockstep.distributed.world import World

__all__ = [
    "Usage",
    "cold_ms",
    "cores",
    "fused_ns",
    "handed_ms",
    "local_ranks",
    "memory_free",
    "operations_us",
    "page_us",
    "positions",
    "threads_gain",
]

_TRIED = 1 << 21  # elements of the tensor whose update is timed
_PAGES = 1 << 24  # bytes whose pages are touched: more than a core's own caches hold
_EVENTS = 400  # operations that are traced
_SLEPT = 0.05  # seconds: what follows a longer sleep is no slower
_UNIT = 128  # rows and columns of a layer that is timed after a sleep, small enough for malloc to keep what it takes
_LAYERS = 64  # of these at most: more than a core's own caches hold
_WIDE = 384  # rows and columns of the matrices by which threads are timed
_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # this thread's own, on Linux


class Usage(NamedTuple):
    """What this thread has had so far: milliseconds in the system, new pages, pages read from a disk; milliseconds that
    it computed, that the process's other threads did, and that it wanted a core and had none."""

    system: float = 0.0
    minor: float = 0.0
    major: float = 0.0
    busy: float = 0.0
    others: float = 0.0
    queued: float = 0.0

    @classmethod
    def now(cls) -> "Usage":
        found = resource.getrusage(_WHO)
        busy, whole = 1e3 * time.thread_time(), 1e3 * time.process_time()
        return cls(1e3 * found.ru_stime, found.ru_minflt, found.ru_majflt, busy, whole - busy, 1e3 * queued())

    @classmethod
    def usual(cls, noted: Sequence["Usage"]) -> "Usage":
        """What a step had of each, in the middle one of those between what was noted; nothing, for less than two."""
        steps = [[new - old for new, old in zip(*pair[::-1], strict=True)] for pair in pairwise(noted)]
        return cls(*(median(each) for each in zip(*steps, strict=True))) if len(steps) > 1 else cls()

    @classmethod
    def least_busy(cls, noted: Sequence["Usage"]) -> float:
        """Milliseconds that this thread computed in the step in which it did so least; 0 for less than two steps."""
        steps = [new.busy - old.busy for old, new in pairwise(noted)]
        return min(steps) if len(steps) > 1 else 0.0

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
    if device.type == "cpu":
        held = mmap.mmap(-1, 16 * _TRIED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tried, grad, first, second = torch.frombuffer(held, dtype=torch.float32).view(4, _TRIED).unbind()
        tried = tried.detach().requires_grad_()
    else:
        tried, grad = torch.zeros(_TRIED, device=device, requires_grad=True), torch.zeros(_TRIED, device=device)
        first, second = torch.zeros_like(grad), torch.zeros_like(grad)
    tried.grad = grad
    best, clock = float("inf"), time.thread_time if device.type == "cpu" else time.perf_counter
    try:
        optimizer = torch.optim.AdamW([tried], fused=True)
        step = torch.zeros((), device=device)
        optimizer.state[tried] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        for _ in range(4):
            began = clock()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # waits for the device
            best = min(best, clock() - began)
    except RuntimeError:
        return 0.0
    return 1e9 * best / _TRIED


def page_us() -> float:
    """Microseconds that a new page of memory takes the system, its zeros and its return included."""
    best, size = float("inf"), mmap.PAGESIZE
    for _ in range(3):
        began = time.thread_time()
        held = mmap.mmap(-1, _PAGES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        torch.frombuffer(held, dtype=torch.uint8).fill_(1)
        held.close()
        best = min(best, time.thread_time() - began)
    return 1e6 * best * size / _PAGES


def operations_us() -> float:
    """Microseconds of a small operation, called from Python; what tracing adds to it is an event's cost."""
    one, other = torch.zeros(1), torch.zeros(1)
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(_EVENTS // 5):
            one.add_(other)
        best = min(best, time.thread_time() - began)
    return 1e6 * best / (_EVENTS // 5)


def cold_ms(idle: float, parameters: int) -> float:
    """Milliseconds by which a small training step takes longer after a sleep, which leaves a core and its caches cold.

    Args:
        idle: milliseconds that a step of the run waits.
        parameters: of the model; a small one has less to load again.
    """
    layers = min(max(parameters // (_UNIT * _UNIT), 2), _LAYERS)
    held, size = mmap.mmap(-1, 16 * layers * _UNIT**2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), _UNIT**2
    each = [
        torch.frombuffer(held, dtype=torch.float32, count=size, offset=4 * size * place).view(_UNIT, _UNIT)
        for place in range(4 * layers)
    ]
    weights = [weight.requires_grad_() for weight in each[:layers]]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for weight, grad, first, second in zip(*(each[k * layers : (k + 1) * layers] for k in range(4)), strict=True):
        weight.grad = grad
        optimizer.state[weight] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
    rounds = []
    with torch.enable_grad():
        for _ in range(9):
            time.sleep(min(_SLEPT, 1e-3 * idle))
            took = []
            for _ in range(3):
                began = time.thread_time()
                out = torch.ones(_UNIT // 4, _UNIT)
                for weight in weights:
                    out = torch.relu(torch.mm(out, weight))
                out.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                took.append(time.thread_time() - began)
            rounds.append(took[0] - took[2])
    return max(0.0, 1e3 * median(rounds[1:]))


def handed_ms(held: Any) -> float:
    """Milliseconds that a batch takes from a loader process to this one, as small tensors take from this to itself.

    Each tensor is a file of its own, for which the two talk over a socket: most of it, whatever the tensor holds.
    """
    count, threads = len({tensor.untyped_storage().data_ptr() for tensor in _tensors(held)}), set(threading.enumerate())
    best = float("inf")
    try:
        for _ in range(5):
            made = [torch.zeros(1) for _ in range(count)]
            began = time.process_time()  # of both threads: one waits for the other
            pickle.loads(ForkingPickler.dumps(made))
            best = min(best, time.process_time() - began)
    except (OSError, RuntimeError):  # no room, or no file left to share: nor could a loader
        return 0.0
    finally:
        if set(threading.enumerate()) - threads:  # the one that hands out, which would go on waiting
            resource_sharer.stop(timeout=1.0)
    return 1e3 * best


def threads_gain(fewer: int) -> float:
    """How many times as fast small products of matrices are with `fewer` threads as with those of now.

    All processes of the host are to ask at about the same time: that they disturb each other is what is measured.
    """
    now, took = torch.get_num_threads(), []
    one, found = torch.ones(_WIDE, _WIDE), torch.empty(_WIDE, _WIDE)
    try:
        for threads in (now, fewer):
            torch.set_num_threads(threads)
            torch.mm(one, one, out=found)
            began = time.perf_counter()
            for _ in range(20):
                torch.mm(one, one, out=found)
                found.add_(1.0)
            took.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(now)
    return took[0] / took[1]


def positions(held: Any, items: float) -> tuple[int, float | Tensor]:
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
