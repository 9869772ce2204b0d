"""`--profile 100:110`: these steps are traced on every rank, and rank 0 judges the traces.

profiling = Profiling(built, make_clock(device), step_loader)       # its clock is the loop's
with profiling:
    profiling.after(start)
    for step in ...:
        profiling.after(step)                   # after each step, on every rank
    profiling.end()                             # a trace that the run's end cuts short is written too

Each rank writes RUN/profile/100-110/rank-R.json.gz, rank 0 verdict.json beside them. Where no steps are asked for,
nothing of this runs, and no mark is made. No number of a run depends on it.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.clock import Clock, MarkingClock
from lockstep.config.ranges import range_of
from lockstep.data.batches import StepLoader
from lockstep.diagnose.profile.reading import Trace, TraceError, read
from lockstep.diagnose.profile.verdict import Verdict, judged
from lockstep.distributed.rank_label import rank_label
from lockstep.engines.make import SHARING, name_of
from lockstep.engines.options import own_options
from lockstep.errors import ConfigError
from lockstep.run.build import Built
from lockstep.run.machine import (
    Usage,
    cold_ms,
    cores,
    fused_ns,
    handed_ms,
    local_ranks,
    memory_free,
    operations_us,
    page_us,
    positions,
    threads_gain,
)
from lockstep.run.meter import memory

__all__ = ["Profiling", "check_range", "folder_of"]

_PLAIN = 11  # times before the trace at which the process's use of the system is noted
_IDLE = 1.0  # milliseconds a step that the thread waits, from where on it is asked what waiting costs what follows
_LOG = logging.getLogger("lockstep")


def folder_of(built: Built) -> Path:
    """Where the traces of `--profile` lie."""
    first, last = range_of(built.config.profile) or (0, 0)
    return built.folder.path / "profile" / f"{first}-{last}"


def check_range(built: Built) -> None:
    """Raises ConfigError where the steps of `--profile` lie past the run's end, or their folder cannot be written."""
    found, whole = range_of(built.config.profile), built.run_plan.step_plan.steps
    if found is None:
        return
    if found[1] > whole:
        raise ConfigError(
            f"--profile {built.config.profile} reaches past the run's end: it has {whole} steps; choose others"
        )
    if not built.world.is_main or found[1] <= built.start:
        return
    folder = folder_of(built)
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"--profile: cannot write to {above}; make it writable, or leave --profile out")


class Profiling:
    """Traces the steps that are asked for. Making it waits for nobody.

    Attributes:
        clock: the run's: the given one, which also makes marks where steps are to be traced.
    """

    def __init__(self, built: Built, clock: Clock, step_loader: StepLoader) -> None:
        self._built, self._step_loader = built, step_loader
        self._range = range_of(built.config.profile)
        self._marks = MarkingClock(clock) if self._range else None
        self.clock: Clock = self._marks or clock
        self._profiler: Any = None
        self._first = self._done = 0  # of the traced steps: the first one, and the last that was taken
        self._usage, self._costs = Usage(), dict[str, Any]()
        self._plain: deque[Usage] = deque(maxlen=_PLAIN)
        self._traced: list[Usage] = []
        self._padding: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """A trace that is still made is dropped: what ends the run in the middle leaves none."""
        if self._profiler is not None and self._marks:
            with contextlib.suppress(RuntimeError):
                self._marks.end()
                if self._first:
                    self._profiler.stop_trace()
            self._profiler, self._first = None, 0

    def after(self, done: int) -> float:
        """Begins and ends the trace where that is due after `done` steps; the seconds that this took.

        Collective after the last step of the range.
        """
        if self._range is None or done > self._range[1]:
            return 0.0
        began, (first, last) = time.perf_counter(), self._range
        if self._first:
            self._done = done
            self._traced.append(Usage.now())
            self._padding += [positions(batch.held, batch.items) for batch in self._step_loader.present if batch.weight]
        if done < first - 1:
            self._plain.append(Usage.now())
        if done == last:
            self.end()
        elif done >= first - 2 and self._profiler is None:  # the step before warms the profiler up
            self._prepare()
        if first - 1 <= done < last and not self._first:
            self._begin(done + 1)
        return time.perf_counter() - began

    def end(self) -> None:
        """Writes the trace that is being made, if there is one. Collective then."""
        if not self._first or self._marks is None:
            return
        if self._done >= self._first:
            self._finish(self._marks)
        else:  # no step came after its begin
            self.__exit__()

    def _prepare(self) -> None:
        device = self._built.world.device
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
        self._costs = {"fused_ns": fused_ns(device), "page_us": page_us(), "threads": torch.get_num_threads()}
        ranks = local_ranks(self._built.world.size)
        fewer = max(1, cores() // ranks)
        if device.type == "cpu" and torch.get_num_threads() * ranks > cores() and torch.get_num_threads() > fewer:
            self._costs["fewer_threads"] = {"count": fewer, "gain": threads_gain(fewer)}
        if device.type == "cpu" and self._marks and len(self._plain) > 2:
            usual = Usage.usual(self._plain)
            idle = 1e3 * median(self._marks.plain) - usual.busy - usual.queued
            parameters = sum(p.numel() for p in self._built.model.parameters() if p.requires_grad)
            self._costs |= {"idle_ms": idle, "cold_ms": cold_ms(idle, parameters) if idle > _IDLE else 0.0}
        if device.type == "cpu" and not self._built.config.data.workers:
            self._costs["handed_ms"] = sum(handed_ms(batch.held) for batch in self._step_loader.present[:1])
        with _quiet():
            self._profiler = profile(activities=activities)
            self._profiler.prepare_trace()

    def _begin(self, number: int) -> None:
        assert self._marks is not None
        if self._built.world.device.type == "cuda":
            torch.cuda.synchronize(self._built.world.device)  # waits for the device: what is traced begins here
        plain = operations_us()
        with _quiet():
            self._profiler.start_trace()
        self._costs["event_us"] = max(0.0, operations_us() - plain)
        self._first, self._padding, self._usage = number, [], Usage.now()
        self._traced = [self._usage]
        self._marks.trace(number)

    def _finish(self, marks: MarkingClock) -> None:
        """Writes, reads and judges. A file system that refuses costs the verdict, and not the run."""
        world, trace, why = self._built.world, dict[str, Any](), ""
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # waits for the device: what is traced ends here
        marks.end()
        profiler, self._profiler = self._profiler, None
        with _quiet():
            profiler.add_metadata_json("lockstep", json.dumps(self._about(marks)))
            profiler.stop_trace()
        self._first = 0
        path = folder_of(self._built) / f"rank-{world.rank}.json.gz"
        try:
            _export(profiler, path)
            trace = read(path).packed
        except (OSError, RuntimeError, TraceError) as error:
            why = f"{rank_label(world.rank)}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        found = world.gather([trace, why])  # collective
        problems = [each for _, each in found if each]
        if world.is_main:
            if problems:
                _LOG.warning("--profile %s: no verdict: %s", self._built.config.profile, problems[0])
            else:
                self._tell(judged([Trace.unpacked(each) for each, _ in found]), path.parent)

    def _tell(self, verdict: Verdict, folder: Path) -> None:
        for line in str(verdict).splitlines():
            _LOG.info("%s", line)
        try:
            verdict.write(folder)
            _LOG.info("traces for https://ui.perfetto.dev and verdict.json: %s", folder)
        except OSError as error:
            _LOG.warning("--profile: %s: %s", folder, error.strerror or error)

    def _about(self, marks: MarkingClock) -> dict[str, Any]:
        """What the verdict has to know beside the events."""
        built, world, count = self._built, self._built.world, self._done - self._first + 1
        config, engine = built.config, name_of(built.config.engine, built.world)
        trained = [p for p in built.model.parameters() if p.requires_grad]
        usage, plain, within = self._usage.since(count), Usage.least_busy(self._plain), Usage.least_busy(self._traced)
        # What a trace keeps lies between the tensors in memory, and makes pages new that are not without it.
        usage["minor"] = min(usage["minor"], Usage.usual(self._plain).minor)
        return {
            "rank": world.rank,
            "world_size": world.size,
            "steps": [self._first, self._done],
            "device": world.device.type,
            "host": socket.gethostname(),
            "cores": cores(),
            "local_ranks": local_ranks(world.size),
            "micro_batches": config.micro_batches,
            "micro_batch_size": config.micro_size,
            "slots": len(self._step_loader.present),
            "engine_options": own_options(engine),
            "shares": engine in SHARING,
            "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
            "parameters": sum(p.numel() for p in trained),
            **self._costs,
            "untraced_ms": 1e3 * median(marks.plain) if marks.plain else None,
            "tracing_ms": max(0.0, within - plain) if plain and within else None,
            "cpu": {part: 1e3 * spent / count for part, spent in marks.computed.items()},
            "queued": {part: 1e3 * spent / count for part, spent in marks.queued.items()},
            "queued_by_step": [new.queued - old.queued for old, new in pairwise(self._traced)],
            "usage": usage,
            "padding": {
                "positions": sum(whole for whole, _ in self._padding),
                "empty": sum(int(empty) for _, empty in self._padding),
            },
            "memory_free": memory_free(world),
            "memory_used": memory(world.device),
            "options": built.arguments,
        }


def _export(profiler: Any, path: Path) -> None:
    """Writes the trace whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".tmp-{secrets.token_hex(4)}.json.gz"
    try:
        profiler.export_chrome_trace(str(part))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Kineto writes lines of its own to the process's standard error."""
    with contextlib.ExitStack() as stack:
        try:
            kept = os.dup(2)
        except OSError:  # closed
            yield
            return
        stack.callback(os.close, kept)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2)
        os.close(sink)
        stack.callback(os.dup2, kept, 2)
        yield
