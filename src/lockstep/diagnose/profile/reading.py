"""Read a rank's trace into sets of times, in microseconds of its host's clock.

trace = read(Path("outputs/a/profile/100-110/rank-3.json.gz"))
traces = read_all(Path("outputs/a/profile/100-110"))        # every rank's

A trace is a file of torch.profiler (Kineto's Chrome format), with lockstep's marks and an entry `lockstep` next to the
events that describes the run. On a CPU the marked thread computes, and gloo works on its own threads as
`gloo:all_reduce`. On a CUDA device kernels compute, and exchanges are kernels whose names start with nccl. `union`,
`common` and `minus` are the set operations on spans.
"""

import bisect
import gzip
import heapq
import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import ConfigError

__all__ = [
    "HEADING",
    "NONE",
    "Operation",
    "ProfileTrace",
    "ProfileTraceError",
    "Spans",
    "Times",
    "common",
    "length",
    "minus",
    "read",
    "read_all",
    "top",
    "union",
]


Spans = NDArray[np.float64]

NONE: Spans = np.empty((0, 2))


def union(*spans: Spans | Sequence[Sequence[float]]) -> Spans:
    """Return the times in any of the intervals.

    They may overlap, and be in any order; empty ones are dropped.
    """
    parts = [np.asarray(group, dtype=np.float64).reshape(-1, 2) for group in spans]
    every = np.concatenate(parts) if parts else NONE
    every = every[every[:, 1] > every[:, 0]]
    if not len(every):
        return NONE
    # After sorting by begin, an interval starts a new one where it begins after all earlier ends.
    every = every[np.argsort(every[:, 0], kind="stable")]
    ends = np.maximum.accumulate(every[:, 1])
    begins = np.flatnonzero(np.r_[True, every[1:, 0] > ends[:-1]])
    lasts = np.r_[begins[1:] - 1, len(every) - 1]
    return np.stack([every[begins, 0], ends[lasts]], axis=1)


def common(a: Spans, b: Spans) -> Spans:
    """Return the times in both."""
    if not len(a) or not len(b):
        return NONE
    # The intervals of `b` that overlap one of `a` are consecutive, so two searches find them.
    first_overlaps = np.searchsorted(b[:, 1], a[:, 0], side="right")
    stop = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(stop - first_overlaps, 0)
    rows = np.repeat(np.arange(len(a)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    columns = np.repeat(first_overlaps, counts) + np.arange(len(rows)) - before
    overlaps = np.stack([np.maximum(a[rows, 0], b[columns, 0]), np.minimum(a[rows, 1], b[columns, 1])], axis=1)
    return union(overlaps)


def minus(a: Spans, b: Spans) -> Spans:
    """Return the times in `a` and not in `b`."""
    if not len(a) or not len(b):
        return a
    # The complement of `b` has its edges, shifted by one.
    edges = np.concatenate([[-np.inf], b.reshape(-1), [np.inf]]).reshape(-1, 2)
    return common(a, edges)


def length(spans: Spans) -> float:
    """Return their total length, in their own unit."""
    return float((spans[:, 1] - spans[:, 0]).sum())


# Name -> number of calls, and microseconds in all of them.
Times = dict[str, list[float]]
# Operations in the table, and characters of a name.
_MOST = 10
_WIDTH = 52
HEADING = f"  {'operation':<{_WIDTH}} {'time a step':>12} {'share':>5} {'calls':>8}"


class Operation(NamedTuple):
    """An operation or kernel, in a step of the mean rank.

    Attributes:
        name: torch's or the kernel's.
        ms: milliseconds, without the operations that it calls.
        share: of the step.
        calls: number of calls.
    """

    name: str
    ms: float
    share: float
    calls: float

    def __str__(self) -> str:
        if len(self.name) <= _WIDTH:
            name = self.name
        else:
            name = f"{self.name[: _WIDTH - 3]}..."
        return f"  {name:<{_WIDTH}} {self.ms:>9.3f} ms {self.share:>5.0%} {self.calls:>8.4g}"

    def as_json(self) -> dict[str, Any]:
        """Return the entry of verdict.json."""
        numbers = {"ms": self.ms, "share": self.share, "calls": self.calls}
        return {"name": self.name} | {name: round(number, 4) for name, number in numbers.items()}


def own_times(spans: Iterable[tuple[str, float, float]]) -> Times:
    """Add up calls and times by name, each without nested spans.

    Args:
        spans: name, begin and end in microseconds, of one thread: nested or disjoint.
    """
    times: Times = {}
    # Open spans, with their ends.
    around: list[tuple[str, float]] = []
    for name, begin, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while around and around[-1][1] <= begin:
            around.pop()
        # The span around this one called it, so its own time is shorter.
        if around:
            times[around[-1][0]][1] -= end - begin
        entry = times.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += end - begin
        around.append((name, end))
    return times


def top(ranks: Sequence[Times], steps: int, step_ms: float) -> list[Operation]:
    """Return the operations with the largest times.

    Args:
        ranks: the times of each rank, over all traced steps.
        steps: traced.
        step_ms: milliseconds of a step.
    """
    totals: Times = {}
    for times in ranks:
        for name, (calls, microseconds) in times.items():
            entry = totals.setdefault(name, [0, 0.0])
            entry[0] += calls
            entry[1] += microseconds
    count = len(ranks) * steps
    largest = heapq.nlargest(_MOST, totals.items(), key=lambda item: item[1][1])
    operations = []
    for name, (calls, microseconds) in largest:
        if microseconds > 0:
            operations.append(
                Operation(
                    name, microseconds / count / 1e3, microseconds / count / 1e3 / max(step_ms, 1e-9), calls / count
                )
            )
    return operations


_MARK = "lockstep:"
_PHASES = ("data", "forward", "backward", "exchange", "update", "save", "evaluate", "record", "step", "load")
_NAME = re.compile(r"rank-(\d+)\.json\.gz")
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "hipStreamSynchronize")
_ALLOCATES = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree")
# The first are nodes that contain other operations; the others start an exchange, which continues on another thread.
_NODE = "autograd::engine::"
_NO_WORK = (_NODE, "c10d::", "torch.distributed.ddp.reducer::", "torch::autograd::AccumulateGrad")
# Microseconds of a call whatever the size is: of an operation on a CPU, and of a kernel on a device.
_CALL = {True: 8.0, False: 4.0}
_SPANS = ("copies", "waits", "allocates", "again", "following")
# Microseconds between two events in which Python does no more than call the next operation.
_CALL_GAP = 25.0


class ProfileTraceError(ConfigError):
    """A trace that is missing, damaged, or not one of lockstep's."""


@dataclass(frozen=True, slots=True)
class ProfileTrace:
    """The traced steps of one rank.

    Attributes:
        about: the run's description: rank, world_size, steps, device, options; see `tracing.StepTrace`.
        window: begin and end of the traced steps.
        marks: spans of lockstep's own parts, on the host, by the names of `_PHASES`.
        works: computing spans: on a CUDA device by the phase that launched them; on a CPU under "".
        exchanges: (kind, begin, end) of each exchange, by their begins.
        copies: copies of batches to the device.
        waits: waits of the host for the device, except lockstep's own reading of a step.
        allocates: the host's requests and releases of memory at the driver.
        again: recomputed forwards, within the backwards.
        following: from an operation, or node of a backward, to one that follows at once, on a CPU.
        count: operations (CPU, not nested) or kernels (CUDA) of the forwards and backwards.
        calls: upper bound in microseconds of their time without any computation.
        events: by phase, the events that this thread wrote, at a cost for each; on a CPU.
        frames: those of the forwards and backwards outside any operation, whose cost is no operation's.
        names: of the operations of the update.
        operations: by name, in the traced steps: computing ones on a CPU, kernels of a device.
    """

    about: dict[str, Any]
    window: tuple[float, float]
    marks: dict[str, Spans]
    works: dict[str, Spans]
    exchanges: list[tuple[str, float, float]]
    copies: Spans = field(default_factory=lambda: NONE)
    waits: Spans = field(default_factory=lambda: NONE)
    allocates: Spans = field(default_factory=lambda: NONE)
    again: Spans = field(default_factory=lambda: NONE)
    following: Spans = field(default_factory=lambda: NONE)
    count: int = 0
    calls: float = 0.0
    events: dict[str, int] = field(default_factory=dict)
    frames: int = 0
    names: frozenset[str] = frozenset()
    operations: Times = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return int(self.about["rank"])

    @property
    def steps(self) -> int:
        """Number of traced steps."""
        begin, end = self.about["steps"]
        return int(end) - int(begin) + 1

    @property
    def on_cpu(self) -> bool:
        return bool(self.about["device"] == "cpu")

    @property
    def packed(self) -> dict[str, Any]:
        """The trace as plain numbers, for another rank; `unpack` restores it."""
        values: dict[str, Any] = {}
        for spec in fields(self):
            values[spec.name] = getattr(self, spec.name)
        for name in ("marks", "works"):
            values[name] = {key: spans.tolist() for key, spans in values[name].items()}
        for name in _SPANS:
            values[name] = values[name].tolist()
        return values | {"names": sorted(self.names)}

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> "ProfileTrace":
        """Restore a trace from `packed`."""
        values = dict(packed)
        for name in ("marks", "works"):
            values[name] = {key: _as_spans(spans) for key, spans in values[name].items()}
        for name in _SPANS:
            values[name] = _as_spans(values[name])
        values |= {"names": frozenset(values["names"]), "window": tuple(values["window"])}
        return cls(**values | {"exchanges": [tuple(exchange) for exchange in values["exchanges"]]})


def read_all(folder: Path) -> list[ProfileTrace]:
    """Read the traces of all ranks, by rank.

    Raises:
        ProfileTraceError: there are none, or one is missing, damaged, foreign, or of other steps than the others.
    """
    try:
        paths = {}
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                paths[int(match[1])] = path
    except OSError as error:
        raise ProfileTraceError(
            f"{folder}: {error.strerror or error}; give a folder such as RUN/profile/100-110"
        ) from error
    if not paths:
        raise ProfileTraceError(f"{folder} has no rank-R.json.gz; give a folder such as RUN/profile/100-110")
    traces = [read(paths[rank]) for rank in sorted(paths)]
    world = int(traces[0].about["world_size"])
    steps = traces[0].about["steps"]
    for rank, trace in zip(sorted(paths), traces, strict=True):
        identity = (trace.rank, trace.about["world_size"], trace.about["steps"])
        if identity != (rank, world, steps):
            raise ProfileTraceError(
                f"{paths[rank]} is of another profile (rank, world size, steps: {identity}); profile again"
            )
    missing = sorted(set(range(world)) - paths.keys())
    if missing:
        ranks = ", ".join(map(str, missing))
        raise ProfileTraceError(
            f"{folder}: of {world} ranks, the trace of {ranks} is missing; copy it there, or profile again"
        )
    return traces


def read(path: Path) -> ProfileTrace:
    """Read one rank's trace.

    Raises:
        ProfileTraceError: it is damaged, or was not written by lockstep.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ProfileTraceError(f"{path} is damaged: {why}; profile these steps again") from error
    try:
        return understood(document)
    except ProfileTraceError as error:
        raise ProfileTraceError(f"{path} {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProfileTraceError(
            f"{path} is damaged: {type(error).__name__} {error}; profile these steps again"
        ) from error


def understood(document: Any) -> ProfileTrace:
    """Make a trace from its JSON.

    Raises:
        ProfileTraceError: it is not lockstep's.
    """
    about = document.get("lockstep") if isinstance(document, dict) else None
    if not isinstance(about, dict) or not isinstance(document.get("traceEvents"), list):
        raise ProfileTraceError(
            "is not a trace of lockstep: make one with train --profile FIRST:LAST, or lockstep profile"
        )
    base = float(document.get("baseTimeNanoseconds", 0)) / 1e3
    events = []
    for event in document["traceEvents"]:
        # Complete events with a duration; a trace also has counters and metadata.
        if event.get("ph") == "X" and "dur" in event:
            events.append(event)
    marks, thread = _marks(events, base)
    steps = marks.get("step", NONE)
    if thread is None or not len(steps):
        raise ProfileTraceError("contains no step of lockstep; profile these steps again")
    window = (float(steps[0, 0]), float(steps[-1, 1]))
    if about["device"] == "cpu":
        return _of_cpu(about, window, marks, events, base, thread)
    return _of_device(about, window, marks, events, base)


def _span(event: dict[str, Any], base: float) -> tuple[float, float]:
    begin = float(event["ts"]) + base
    return begin, begin + float(event["dur"])


def _spans(events: Iterable[dict[str, Any]], base: float) -> Spans:
    return union([_span(event, base) for event in events])


def _marks(events: list[dict[str, Any]], base: float) -> tuple[dict[str, Spans], Any]:
    """Return the spans of the phases, and their thread.

    Merges touching marks, except for the steps.
    """
    by_phase: dict[str, list[tuple[float, float]]] = {}
    thread = None
    for event in events:
        name = str(event.get("name", ""))
        if name.startswith(_MARK) and event.get("cat") == "user_annotation":
            phase = name.removeprefix(_MARK).split()[0]
            if phase in _PHASES:
                thread = event.get("tid") if phase == "step" else thread
                by_phase.setdefault(phase, []).append(_span(event, base))
    return {phase: _sort_spans(spans) if phase == "step" else union(spans) for phase, spans in by_phase.items()}, thread


def _sort_spans(spans: list[tuple[float, float]]) -> Spans:
    return _as_spans(sorted(spans))


def _as_spans(spans: Sequence[Sequence[float]]) -> Spans:
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _of_cpu(
    about: dict[str, Any],
    window: tuple[float, float],
    marks: dict[str, Spans],
    events: list[dict[str, Any]],
    base: float,
    thread: Any,
) -> ProfileTrace:
    thread_events = []
    for event in events:
        if event.get("cat") == "cpu_op" and event.get("tid") == thread:
            thread_events.append(event)
    working = []
    for event in thread_events:
        if _is_work(str(event["name"])):
            working.append(event)
    # An operation of c10d waits for an exchange, so it is no computing.
    sending = _spans((event for event in thread_events if str(event["name"]).startswith("c10d::")), base)
    busy = minus(_spans(working, base), sending)
    passes = union(marks.get("forward", NONE), marks.get("backward", NONE))
    inside, updating, in_steps = (
        _within(phase_spans, base) for phase_spans in (passes, marks.get("update", NONE), marks["step"])
    )
    outer = _outermost(working)
    lengths = []
    for event in outer:
        if inside(event):
            lengths.append(float(event["dur"]))
    frames = 0
    for event in thread_events:
        if not _is_work(str(event["name"])):
            frames += inside(event)
    return ProfileTrace(
        about,
        window,
        marks,
        {"": busy},
        _by_gloo(events, base, thread),
        again=_recomputations(thread_events, marks, base),
        following=_following(thread_events, base),
        count=len(lengths),
        calls=sum(min(length, _CALL[True]) for length in lengths),
        events={phase: _count(thread_events, spans, base) for phase, spans in marks.items()},
        frames=frames + len(lengths),
        names=frozenset(str(event["name"]) for event in thread_events if updating(event)),
        operations=own_times((str(event["name"]), *_span(event, base)) for event in working if in_steps(event)),
    )


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of one thread that are not nested."""
    outer = []
    end = -float("inf")
    for event in sorted(events, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        if float(event["ts"]) >= end:
            outer.append(event)
            end = float(event["ts"]) + float(event["dur"])
    return outer


def _following(events: list[dict[str, Any]], base: float) -> Spans:
    """Return the gaps between a thread's consecutive begins and ends, if short."""
    edges = np.sort(np.array([_span(event, base) for event in events]).reshape(-1))
    near = np.flatnonzero(np.diff(edges) < _CALL_GAP)
    return union(np.stack([edges[near], edges[near + 1]], axis=1))


def _recomputations(events: list[dict[str, Any]], marks: dict[str, Spans], base: float) -> Spans:
    """Return the spans of recomputed forwards.

    By activation checkpointing or by the model itself.

    A backward records no operations for another backward. Recorded operations within one of its nodes, which have a
    sequence number and no forward thread, belong to a forward, which began with the node.
    """
    inside = _within(marks.get("backward", NONE), base)
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if inside(event):
            by_thread.setdefault(event.get("tid"), []).append(event)
    forwards = []
    for thread_events in by_thread.values():
        open_nodes: list[tuple[float, float]] = []
        for event in sorted(thread_events, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
            begin, end = _span(event, base)
            while open_nodes and open_nodes[-1][1] <= begin:
                open_nodes.pop()
            name = str(event["name"])
            args = event.get("args", {})
            if name.startswith(_NODE):
                open_nodes.append((begin, end))
            elif open_nodes and _is_work(name) and "Sequence number" in args and not args.get("Fwd thread id"):
                forwards.append((open_nodes[-1][0], end))
    return union(forwards)


def _is_work(name: str) -> bool:
    if name.startswith(_NO_WORK):
        return False
    return "::" in name or name.startswith(("Torch-Compiled", "CompiledFunction", "## Call CompiledFxGraph"))


def _within(spans: Spans, base: float) -> Callable[[dict[str, Any]], bool]:
    """Return a function of an event -> whether it begins within the spans."""
    edges = spans.reshape(-1).tolist()
    # Edges alternate between begin and end, so an odd number of them before a time means inside.
    return lambda event: bisect.bisect_right(edges, float(event["ts"]) + base) % 2 == 1


def _count(events: list[dict[str, Any]], spans: Spans, base: float) -> int:
    """Count the events that begin within the spans."""
    begins = np.array([float(event["ts"]) for event in events]) + base
    return int((np.searchsorted(spans.reshape(-1), begins, side="right") % 2).sum())


def _by_gloo(events: list[dict[str, Any]], base: float, thread: Any) -> list[tuple[str, float, float]]:
    """Return the exchanges of the training's own thread, without those of a save.

    An exchange does not record its caller: each call from another thread removes the next exchange of its kind.
    """
    ranges = []
    for event in events:
        if str(event.get("name", "")).startswith("gloo:"):
            ranges.append((*_span(event, base), str(event["name"])))
    ranges.sort()
    exchanges = [(collective.removeprefix("gloo:"), begin, end) for begin, end, collective in ranges]
    foreign_calls = []
    for event in events:
        if str(event.get("name", "")).startswith("c10d::") and event["tid"] != thread:
            foreign_calls.append(event)
    for event in sorted(foreign_calls, key=lambda event: float(event["ts"])):
        collective = _kind(str(event["name"]))
        at = float(event["ts"]) + base
        index = None
        for k, (name, begin, _) in enumerate(exchanges):
            if _kind(name) == collective and begin >= at:
                index = k
                break
        if index is not None:
            del exchanges[index]
    return exchanges


def _kind(name: str) -> str:
    """Normalise a name: `c10d::allreduce_` and `all_reduce` -> `allreduce`."""
    return name.removeprefix("c10d::").replace("_", "")


def _of_device(
    about: dict[str, Any],
    window: tuple[float, float],
    marks: dict[str, Spans],
    events: list[dict[str, Any]],
    base: float,
) -> ProfileTrace:
    # A kernel has no phase: it belongs to the phase in which the host launched it.
    launches = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = float(event["ts"]) + base
    phases = [(phase, _places(marks[phase])) for phase in _NESTED if phase in marks]
    recomputes = _places(_recomputations([event for event in events if event.get("cat") == "cpu_op"], marks, base))
    work: dict[str, list[tuple[float, float]]] = {}
    exchanges = []
    copies = []
    lengths = []
    recomputations = []
    names = set()
    kernels = Times()
    for event in events:
        if event.get("cat") not in _DEVICE:
            continue
        name = str(event.get("name", ""))
        span = _span(event, base)
        entry = kernels.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] = entry[1] + span[1] - span[0]
        if name.lower().startswith("nccl"):
            exchanges.append((_collective(name), *span))
            continue
        if event["cat"] == "gpu_memcpy" and "HtoD" in name:
            copies.append(span)
            continue
        at = launches.get(event.get("args", {}).get("correlation"), span[0])
        phase = next((phase for phase, inside in phases if inside(at)), "")
        work.setdefault(phase, []).append(span)
        if phase in ("forward", "backward"):
            lengths.append(span[1] - span[0])
            recomputations += [span] * recomputes(at)
        elif phase == "update":
            names.add(name)
    calls = []
    for event in events:
        if event.get("cat") == "cuda_runtime":
            calls.append(event)
    waits = _spans((event for event in calls if str(event["name"]) in _HOST_WAITS), base)
    # The device may end the last step later than the host.
    end = max([window[1], *(spans[-1][1] for spans in work.values())])
    return ProfileTrace(
        about,
        (window[0], end),
        marks,
        {phase: union(spans) for phase, spans in work.items()},
        sorted(exchanges, key=lambda each: each[1]),
        union(copies),
        waits,
        _spans((event for event in calls if str(event["name"]).startswith(_ALLOCATES)), base),
        again=union(recomputations),
        count=len(lengths),
        calls=sum(min(length, _CALL[False]) for length in lengths),
        names=frozenset(names),
        operations=kernels,
    )


# A mark within another one belongs to the inner phase, so the inner ones come first.
_NESTED = ("evaluate", "save", "record", "load", "data", "exchange", "update", "backward", "forward")


def _places(spans: Spans) -> Callable[[float], bool]:
    edges = spans.reshape(-1).tolist()
    return lambda at: bisect.bisect_right(edges, at) % 2 == 1


def _collective(name: str) -> str:
    """Extract the kind of an NCCL kernel: `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` -> `allreduce`."""
    match = re.search(r"(AllReduce|ReduceScatter|AllGather|Broadcast|Reduce|SendRecv)", name)
    if match:
        return match[1].lower()
    return "nccl"
