"""Trace steps with torch's profiler, and measure the costs that the verdict needs.

    trace = StepTrace(device, world_size, MarkingClock(clock))
    trace.note_untraced()                           # after each step before the trace
    trace.prepare(parameters, held)                 # in the step before the trace, where torch's profiler warms up
    trace.begin(6)
    trace.note_traced(held)                         # after each traced step
    trace.stop(path, 15, rank, facts)               # writes rank-R.json.gz

It needs torch and nothing else, since `lockstep profile -- COMMAND` runs it in any script's processes. No number of a
run depends on it.
"""

import contextlib
import json
import mmap
import os
import pickle
import resource
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

# The import registers tensors with ForkingPickler.
import torch.multiprocessing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lockstep.clock import StepMarks, queue_seconds
from lockstep.distributed.cpus import usable_cores

__all__ = [
    "StepTrace",
    "ThreadUsage",
    "cold_ms",
    "fused_ns",
    "handover_ms",
    "local_ranks",
    "memory_free",
    "operations_us",
    "page_us",
    "peak_memory",
    "positions",
    "threads_gain",
]


# --- measured costs

# Elements of the tensor whose optimizer update is timed.
_ELEMENTS = 1 << 21
# Bytes of pages to touch: more than a core's own caches.
_PAGE_BYTES = 1 << 24
# Operations to time.
_EVENTS = 400
# Seconds. A longer sleep slows the next step no further.
_MAX_SLEEP = 0.05
# Rows and columns of a layer to time after a sleep: small, so that malloc reuses its memory.
_LAYER_SIZE = 128
# Most layers to time: more than a core's own caches.
_LAYERS = 64
# Rows and columns of the matrices that time threads.
_MATRIX_SIZE = 384
# Counters of this thread only, on Linux; of the process elsewhere.
_USAGE_SCOPE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class ThreadUsage(NamedTuple):
    """This thread's use of the system so far.

    Attributes:
        system: milliseconds in the kernel.
        minor: page faults without disk reads.
        major: page faults that read from a disk.
        busy: milliseconds of CPU time of this thread.
        others: milliseconds of CPU time of the process's other threads.
        queued: milliseconds that it waited for a core.
    """

    system: float = 0.0
    minor: float = 0.0
    major: float = 0.0
    busy: float = 0.0
    others: float = 0.0
    queued: float = 0.0

    @classmethod
    def now(cls) -> "ThreadUsage":
        """Read the counters of this thread."""
        usage = resource.getrusage(_USAGE_SCOPE)
        thread = 1e3 * time.thread_time()
        process = 1e3 * time.process_time()
        return cls(
            1e3 * usage.ru_stime, usage.ru_minflt, usage.ru_majflt, thread, process - thread, 1e3 * queue_seconds()
        )

    @classmethod
    def median_step(cls, readings: Sequence["ThreadUsage"]) -> "ThreadUsage":
        """Return the median use of a step, from readings after each step.

        All 0 for less than two steps.
        """
        steps = []
        for pair in pairwise(readings):
            steps.append([new - old for new, old in zip(*pair[::-1], strict=True)])
        if len(steps) > 1:
            return cls(*(median(differences) for differences in zip(*steps, strict=True)))
        return cls()

    @classmethod
    def min_busy(cls, readings: Sequence["ThreadUsage"]) -> float:
        """Return the smallest `busy` of a step, in ms; 0 for less than two steps."""
        steps = [new.busy - old.busy for old, new in pairwise(readings)]
        if len(steps) > 1:
            return min(steps)
        return 0.0

    def mean_since(self, steps: int) -> dict[str, float]:
        """Return the mean use per step since this reading."""
        usage = ThreadUsage.now()
        means = {}
        for name, new, old in zip(self._fields, usage, self, strict=True):
            means[name] = (new - old) / steps
        return means


def local_ranks(world_size: int) -> int:
    """Return the number of ranks on this host."""
    return min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def memory_free(device: torch.device, world_size: int) -> int:
    """Return the free bytes of a CUDA device, or this rank's share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        # Not Linux.
        return 0
    return free // local_ranks(world_size)


# Only Linux has it.
_STATUS = "/proc/self/status"


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: allocated on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = os.pread(_open_status(_STATUS, os.getpid()), 1 << 14, 0)
        return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024
    except (OSError, IndexError, ValueError):
        # Not Linux; there getrusage may include the parent's peak.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform == "darwin":
            return peak
        return peak * 1024


@cache
def _open_status(path: str, process: int) -> int:
    """Open this process's status, and keep it open: opening takes twice as long as reading."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def fused_ns(device: torch.device) -> float:
    """Measure fused AdamW, in nanoseconds per element; 0 if the device lacks it."""
    if device.type == "cpu":
        memory = mmap.mmap(-1, 16 * _ELEMENTS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        weight, grad, first_moment, second_moment = (
            torch.frombuffer(memory, dtype=torch.float32).view(4, _ELEMENTS).unbind()
        )
        weight = weight.detach().requires_grad_()
    else:
        weight = torch.zeros(_ELEMENTS, device=device, requires_grad=True)
        grad = torch.zeros(_ELEMENTS, device=device)
        first_moment = torch.zeros_like(grad)
        second_moment = torch.zeros_like(grad)
    weight.grad = grad
    best = float("inf")
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    try:
        optimizer = torch.optim.AdamW([weight], fused=True)
        step = torch.zeros((), device=device)
        optimizer.state[weight] = {"step": step, "exp_avg": first_moment, "exp_avg_sq": second_moment}
        for _ in range(4):
            start = clock()
            optimizer.step()
            if device.type == "cuda":
                # The host waits for the device here: the kernels' time is measured.
                torch.cuda.synchronize(device)
            best = min(best, clock() - start)
    except RuntimeError:
        # The device has no fused kernel.
        return 0.0
    return 1e9 * best / _ELEMENTS


def page_us() -> float:
    """Measure a new page of memory, from its allocation to its release, in microseconds."""
    best = float("inf")
    size = mmap.PAGESIZE
    for _ in range(3):
        start = time.thread_time()
        memory = mmap.mmap(-1, _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        memory.close()
        best = min(best, time.thread_time() - start)
    return 1e6 * best * size / _PAGE_BYTES


def operations_us() -> float:
    """Measure a small operation called from Python, in microseconds.

    Its increase under a trace is the cost of an event.
    """
    total = torch.zeros(1)
    number = torch.zeros(1)
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for _ in range(_EVENTS // 5):
            total.add_(number)
        best = min(best, time.thread_time() - start)
    return 1e6 * best / (_EVENTS // 5)


def cold_ms(idle: float, parameters: int) -> float:
    """Measure how much slower a small training step is after a sleep, in milliseconds.

    A sleep leaves the core and its caches cold.

    Args:
        idle: milliseconds that a step of the run waits.
        parameters: of the model; a small model has less to load into the caches.
    """
    layers = min(max(parameters // (_LAYER_SIZE * _LAYER_SIZE), 2), _LAYERS)
    size = _LAYER_SIZE**2
    memory = mmap.mmap(-1, 16 * layers * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensors = []
    for k in range(4 * layers):
        tensors.append(
            torch.frombuffer(memory, dtype=torch.float32, count=size, offset=4 * size * k).view(
                _LAYER_SIZE, _LAYER_SIZE
            )
        )
    weights = [weight.requires_grad_() for weight in tensors[:layers]]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for weight, grad, first_moment, second_moment in zip(
        *(tensors[k * layers : (k + 1) * layers] for k in range(4)), strict=True
    ):
        weight.grad = grad
        optimizer.state[weight] = {"step": torch.zeros(()), "exp_avg": first_moment, "exp_avg_sq": second_moment}
    rounds = []
    with torch.enable_grad():
        for _ in range(9):
            time.sleep(min(_MAX_SLEEP, 1e-3 * idle))
            seconds = []
            for _ in range(3):
                # Processor time, so that other processes' use of the core does not count.
                start = time.thread_time()
                out = torch.ones(_LAYER_SIZE // 4, _LAYER_SIZE)
                for weight in weights:
                    out = torch.relu(torch.mm(out, weight))
                # torch's method has no annotations.
                out.sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                seconds.append(time.thread_time() - start)
            # The first step after the sleep is cold, the third is warm.
            rounds.append(seconds[0] - seconds[2])
    return max(0.0, 1e3 * median(rounds[1:]))


def handover_ms(batch: Any) -> float:
    """Measure how long a loader process takes to hand over a batch, in milliseconds.

    Measured with small tensors within this process: each tensor is a shared file, which is negotiated over a socket.
    That is most of the cost, at any size of the tensor.
    """
    count = len({tensor.untyped_storage().data_ptr() for tensor in _tensors(batch)})
    threads = set(threading.enumerate())
    best = float("inf")
    try:
        for _ in range(5):
            tensors = [torch.zeros(1) for _ in range(count)]
            # Processor time of both threads: one waits for the other.
            start = time.process_time()
            pickle.loads(ForkingPickler.dumps(tensors))
            best = min(best, time.process_time() - start)
    except (OSError, RuntimeError):
        # There is no memory or file descriptor to share; a loader process would fail too.
        return 0.0
    finally:
        # Stop the sharing thread, which would wait forever.
        if set(threading.enumerate()) - threads:
            resource_sharer.stop(timeout=1.0)
    return 1e3 * best


def threads_gain(fewer: int) -> float:
    """Measure how many times faster small matrix products are with `fewer` threads.

    All processes of the host must call it at about the same time, since it measures their interference.
    """
    count = torch.get_num_threads()
    seconds = []
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE)
    product = torch.empty(_MATRIX_SIZE, _MATRIX_SIZE)
    try:
        for threads in (count, fewer):
            torch.set_num_threads(threads)
            torch.mm(matrix, matrix, out=product)
            start = time.perf_counter()
            for _ in range(20):
                torch.mm(matrix, matrix, out=product)
                product.add_(1.0)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(count)
    return seconds[0] / seconds[1]


def positions(batch: Any, items: float) -> tuple[int, float | Tensor]:
    """Count the positions of a batch in host memory, and the empty ones (padding).

    By the batch's `attention_mask`. Without one, positions are the entries of integer rows (tokens), and those that are
    not items are empty; but not if there are no more items than rows, since the rows are the items then.

    Returns:
        (positions, empty ones); (0, 0) if unknown.
    """
    get = getattr(batch, "get", None)
    mask = get("attention_mask") if callable(get) else None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.numel(), int(mask.numel() - int(mask.count_nonzero()))
    rows = []
    for tensor in _tensors(batch):
        if tensor.ndim == 2 and not tensor.is_floating_point():
            rows.append(tensor)
    widest = max(rows, key=Tensor.numel, default=None)
    if widest is None or items <= len(widest) or items > widest.numel():
        return 0, 0
    return widest.numel(), widest.numel() - items


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else []
    return [tensor for value in values for tensor in _tensors(value)]


# --- traces

# Readings of the thread's usage before the trace.
_UNTRACED_READINGS = 11
# Milliseconds. The cost of cold caches is measured if a step waits longer.
_MIN_IDLE = 1.0


class StepTrace:
    """A trace of consecutive steps of this process, with their marks and the measured costs.

    Attributes:
        first: the first traced step; 0 while nothing is traced.
        is_prepared: torch's profiler is made.
    """

    def __init__(self, device: torch.device, world_size: int, marks: StepMarks) -> None:
        self._device = device
        self._world_size = world_size
        self._marks = marks
        self._profiler: Any = None
        self.first = 0
        self._usage = ThreadUsage()
        self._costs = dict[str, Any]()
        self._untraced: deque[ThreadUsage] = deque(maxlen=_UNTRACED_READINGS)
        self._traced: list[ThreadUsage] = []
        self._padding: list[Any] = []

    @property
    def is_prepared(self) -> bool:
        return self._profiler is not None

    def note_untraced(self) -> None:
        """Read this thread's usage after a step before the trace."""
        self._untraced.append(ThreadUsage.now())

    def note_traced(self, held: Iterable[tuple[Any, float]]) -> None:
        """Read this thread's usage after a traced step, and count its padding.

        Args:
            held: the batches of the step, with their items.
        """
        self._traced.append(ThreadUsage.now())
        for batch, items in held:
            self._padding.append(positions(batch, items))

    def prepare(self, parameters: int, held: Iterable[Any]) -> None:
        """Measure costs, and make torch's profiler.

        Args:
            parameters: number of trained ones.
            held: batches of a step that were loaded in this process.
        """
        device = self._device
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
        self._costs = {"fused_ns": fused_ns(device), "page_us": page_us(), "threads": torch.get_num_threads()}
        ranks = local_ranks(self._world_size)
        fewer = max(1, usable_cores(os.environ) // ranks)
        threads = torch.get_num_threads()
        # Measured by all ranks of the host at once, since they disturb each other.
        if device.type == "cpu" and threads * ranks > usable_cores(os.environ) and threads > fewer:
            self._costs["fewer_threads"] = {"count": fewer, "gain": threads_gain(fewer)}
        if device.type == "cpu" and len(self._untraced) > 2:
            step = ThreadUsage.median_step(self._untraced)
            idle = 1e3 * median(self._marks.untraced) - step.busy - step.queued
            self._costs |= {"idle_ms": idle, "cold_ms": cold_ms(idle, parameters) if idle > _MIN_IDLE else 0.0}
        if device.type == "cpu":
            handed = [handover_ms(batch) for batch in held]
            self._costs |= {"handed_ms": sum(handed)} if handed else {}
        with _silence_stderr():
            self._profiler = profile(activities=activities)
            self._profiler.prepare_trace()

    def begin(self, number: int) -> None:
        """Start the trace with the next step, `number`."""
        if self._device.type == "cuda":
            # The host waits for the device here, once for each trace: work of earlier steps must not be in it.
            torch.cuda.synchronize(self._device)
        plain = operations_us()
        with _silence_stderr():
            self._profiler.start_trace()
        # What an event costs: the same operation is slower under the trace.
        self._costs["event_us"] = max(0.0, operations_us() - plain)
        self.first = number
        self._padding = []
        self._usage = ThreadUsage.now()
        self._traced = [self._usage]
        self._marks.trace(number)

    def stop(self, path: Path, last: int, rank: int, facts: dict[str, Any]) -> None:
        """End the trace after the step `last`, and write it to `path`, atomically.

        Args:
            facts: what the verdict needs in addition to the measured costs: the model, engine and options.

        Raises:
            OSError, RuntimeError: it cannot be written.
        """
        if self._device.type == "cuda":
            # The host waits for the device here, once for each trace: the last step must be complete.
            torch.cuda.synchronize(self._device)
        self._marks.end()
        profiler = self._profiler
        self._profiler = None
        with _silence_stderr():
            profiler.add_metadata_json("lockstep", json.dumps(self._facts(last, rank) | facts))
            profiler.stop_trace()
        self.first = 0
        export_trace(profiler, path)

    def drop(self) -> None:
        """End the trace without writing it."""
        if self._profiler is not None:
            with contextlib.suppress(RuntimeError):
                self._marks.end()
                if self.first:
                    self._profiler.stop_trace()
            self._profiler = None
            self.first = 0

    def _facts(self, last: int, rank: int) -> dict[str, Any]:
        """Return what was measured, and where."""
        marks = self._marks
        count = last - self.first + 1
        usage = self._usage.mean_since(count)
        plain = ThreadUsage.min_busy(self._untraced)
        within = ThreadUsage.min_busy(self._traced)
        # The trace's own allocations fragment memory and add page faults, so the number from before the trace is used.
        usage["minor"] = min(usage["minor"], ThreadUsage.median_step(self._untraced).minor)
        return {
            "rank": rank,
            "world_size": self._world_size,
            "steps": [self.first, last],
            "device": self._device.type,
            "host": socket.gethostname(),
            "cores": usable_cores(os.environ),
            "local_ranks": local_ranks(self._world_size),
            **self._costs,
            "untraced_ms": 1e3 * median(marks.untraced) if marks.untraced else None,
            "tracing_ms": max(0.0, within - plain) if plain and within else None,
            "cpu": {name: 1e3 * seconds / count for name, seconds in marks.cpu_seconds.items()},
            "queued": {name: 1e3 * seconds / count for name, seconds in marks.queue_seconds.items()},
            "queued_by_step": [new.queued - old.queued for old, new in pairwise(self._traced)],
            "usage": usage,
            "padding": {
                "positions": sum(count for count, _ in self._padding),
                "empty": sum(int(empty) for _, empty in self._padding),
            },
            "memory_free": memory_free(self._device, self._world_size),
            "memory_used": peak_memory(self._device),
        }


def export_trace(profiler: Any, path: Path) -> None:
    """Write the trace atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{secrets.token_hex(4)}.json.gz"
    try:
        profiler.export_chrome_trace(str(temporary))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Silence Kineto, which writes to the process's standard error."""
    with contextlib.ExitStack() as stack:
        try:
            stderr = os.dup(2)
        except OSError:
            # Standard error is closed, so there is nothing to silence.
            yield
            return
        stack.callback(os.close, stderr)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2)
        os.close(sink)
        stack.callback(os.dup2, stderr, 2)
        yield
