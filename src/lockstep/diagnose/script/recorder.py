"""Time the parts of each step of a script, for `profile`, `goodput` and `report`.

    recorder = ScriptRecorder(folder, trace=[6, 15])    # hooks.py calls it, in the process that trains
    recorder.enter("backward")                          # from now on the time is the backward's
    recorder.close()                                    # at the end of the process

A step lasts from one step of the first optimizer to its next. Rank 0 writes timeline.jsonl, metrics.jsonl and
environment.json into the folder, other ranks their times into ranks/rank-R.jsonl. Every rank writes
profile/6-15/rank-R.json.gz for `profile`.
"""

import contextlib
import functools
import gc
import json
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.clock import Clock, StepMarks, make_clock
from lockstep.diagnose.profile.tracing import StepTrace, peak_memory
from lockstep.timeline import ENDING, EVALUATION, SAVES, START, TRAINING, Timeline
from lockstep.trace.events import find_rank
from lockstep.training.state.run_dir import describe_process, write_description

__all__ = ["ScriptRecorder"]

# Least seconds of a record.
_WINDOW = 0.2
# Part of a step -> part of the timeline. All others are TRAINING.
_CLASSES = {"start": START, "evaluate": EVALUATION, "save": SAVES}
# Parts without a mark in the trace.
_UNMARKED = ("start", "rest")
# Parts that do not belong to a step.
_OUTSIDE = ("start", "evaluate", "save")


def _quiet(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method whose failure ends the recording, and never the script."""

    @functools.wraps(method)
    def wrapper(self: "ScriptRecorder", *args: Any, **kwargs: Any) -> None:
        if self.off:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            # Whatever fails here must not change or end the script.
            self.off = True
            if str(error):
                text = str(error).splitlines()[0]
            else:
                text = type(error).__name__
            print(f"lockstep: rank {self.rank} is not recorded after step {self.steps}: {text}", file=sys.stderr)

    return wrapper


class ScriptRecorder:
    """Recorder of one process.

    Attributes:
        off: nothing is recorded: an error, or the process does not train.
        thread: the training's.
        part: of the step that takes the time now.
        steps: of this process.
        unscaled: the loss that a GradScaler was given.
    """

    def __init__(self, folder: str, trace: list[int] | None) -> None:
        self.off = False
        self.thread = threading.get_ident()
        self.part = "start"
        self.steps = 0
        self.rank = 0
        self.unscaled = None
        self._folder = Path(folder)
        self._span = trace
        self._timeline = Timeline()
        self._marks = StepMarks()
        self._timeline.begin(of_process=True)
        self._trace: StepTrace | None = None
        self._clock: Clock | None = None
        # The optimizer whose steps are counted.
        self._owner: weakref.ref[Any] | None = None
        self._device = torch.device("cpu")
        self._tensors = frozenset[int]()
        # Steps that the optimizer had before this process.
        self._before = self._world_size = 0
        self._in_closure = self._by_mode = self._has_loader = False
        self._waited = self._load_began = self._due = 0.0
        self._timeline.measures(lambda: self._waited)
        self._workers = self._parameters = self._bytes = 0
        # Number of evaluations and saves within the traced steps.
        self._counts = dict.fromkeys(("evaluate", "save"), 0)
        # Batches of the step, while they are needed.
        self._held: list[Any] = []
        self._losses: list[torch.Tensor] = []
        # The newest record, which is not written yet.
        self._record: tuple[dict[str, Any], torch.Tensor | None] | None = None

    def enter(self, part: str) -> str:
        """Begin a part, and return the one that it ends."""
        before = self.part
        if part == before:
            return before
        self.part = part
        if self._clock is not None:
            self._clock.lap(before)
        self._marks.leave()
        self._marks.enter("" if part in _UNMARKED else part)
        if part in self._counts:
            self._counts[part] += 1
        activity = _CLASSES.get(part, TRAINING)
        if activity != _CLASSES.get(before, TRAINING):
            self._timeline.enter(activity)
        return before

    # The parts.

    def load(self) -> bool:
        """Begin to wait for a batch; False within an evaluation."""
        if self.part == "data":
            return False
        # Loading without gradients belongs to an evaluation.
        if not torch.is_grad_enabled():
            self.enter("evaluate")
            return False
        if self.part == "evaluate" and self._by_mode:
            return False
        self.enter("data")
        self._load_began = time.perf_counter()
        return True

    def end_load(self, batch: Any, workers: int) -> None:
        """End the wait.

        Args:
            batch: None at the end of an epoch.
            workers: loader processes.
        """
        self._waited += time.perf_counter() - self._load_began
        self._workers = workers
        self._has_loader = True
        if self._trace is not None and batch is not None:
            self._held.append(batch)
        self.enter("forward" if batch is not None else "rest")

    def backward(self, tensors: Any) -> None:
        """Begin a backward of these losses."""
        self._by_mode = False
        # A trace must show the script's own operations only.
        if not self._is_traced:
            loss = self.unscaled if self.unscaled is not None else tensors
            loss = loss[0] if isinstance(loss, list | tuple) and loss else loss
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._losses.append(loss.detach())
        self.unscaled = None
        self.enter("backward")

    def end_backward(self) -> None:
        """End a backward."""
        self.enter("update" if self._in_closure else "forward")

    def switch(self, module: torch.nn.Module, *, training: bool) -> None:
        """Begin or end an evaluation, if most trained tensors are the module's."""
        if not self._tensors or 2 * sum(id(p) in self._tensors for p in module.parameters()) < len(self._tensors):
            return
        self._by_mode = not training
        self.enter("rest" if training else "evaluate")

    def update(self, optimizer: Any, *, in_closure: bool) -> None:
        """Begin an optimizer's step.

        Args:
            in_closure: its closure has the forward and the backward.
        """
        if self._owner is None or self._owner() is None:
            self._start(optimizer)
        self._in_closure = in_closure
        self.enter("forward" if in_closure else "update")

    def end_update(self, optimizer: Any) -> None:
        """End an optimizer's step."""
        self._in_closure = False
        if self._owner is not None and self._owner() is optimizer:
            self._end_step()
        else:
            self.enter("forward")

    # The steps.

    @_quiet
    def _start(self, optimizer: Any) -> None:
        """Look at the optimizer whose steps are counted, and begin to write with the first."""
        tensors = []
        for group in optimizer.param_groups:
            tensors.extend(group["params"])
        self._owner = weakref.ref(optimizer)
        self._tensors = frozenset(map(id, tensors))
        self._parameters = sum(p.numel() for p in tensors)
        self._bytes = sum(p.numel() * p.element_size() for p in tensors)
        if self._world_size:
            return
        self.thread = threading.get_ident()
        self._device = tensors[0].device
        if optimizer.state:
            steps_before = optimizer.state.get(tensors[0], {}).get("step", 0)
        else:
            steps_before = 0
        # The host waits for the device here, once for each process.
        self._before = int(steps_before)
        self.rank, self._world_size = find_rank()
        if self.rank == 0:
            self._timeline.open(self._folder / "timeline.jsonl", self._before, self._world_size)
            # Without the file the report lacks the environment.
            with contextlib.suppress(OSError):
                described = describe_process(devices=self._device.type == "cuda")
                write_description(self._folder / "environment.json", described)
        if self._span is not None:
            self._trace = StepTrace(self._device, self._world_size, self._marks)
        self._due = time.perf_counter()

    @_quiet
    def _end_step(self) -> None:
        self.steps += 1
        self.enter("rest")
        self._timeline.at(self._before + self.steps)
        self._timeline.enter(TRAINING)
        if self._trace is not None and self._span is not None:
            self._trace_step(self._trace, *self._span)
        # The first step's times are those of a start.
        if self._clock is None:
            self._clock = make_clock(self._device, self._world_size)
        elif time.perf_counter() >= self._due and not self._is_traced:
            self._end_window(self._clock)
        self._held = []
        self.part = "rest" if self._has_loader else "forward"
        self._clock.start()
        self._marks.begin_step("" if self._has_loader else "forward")

    def _end_window(self, clock: Clock) -> None:
        """Write the record of the last window, and make this one's.

        The last one's loss has reached the host.
        """
        self._write()
        times = {}
        for name, milliseconds in clock.read().items():
            if name not in _OUTSIDE:
                times[name] = milliseconds
        record: dict[str, Any] = {"global_step": self._before + self.steps, "memory": peak_memory(self._device)}
        for name, milliseconds in times.items():
            record[f"time/{'other' if name == 'rest' else name}"] = milliseconds
        record["time/total"] = sum(times.values())
        loss = None
        if self._losses and self.rank == 0:
            with torch.no_grad():
                loss = torch.stack(
                    [loss_tensor.reshape(()).to(self._device, torch.float32) for loss_tensor in self._losses]
                ).mean()
        self._losses = []
        self._record = (record, loss)
        self._due = time.perf_counter() + _WINDOW

    def _write(self) -> None:
        if self._record is None:
            return
        record, loss = self._record
        self._record = None
        if loss is not None:
            # The host waits for the device here, which computed the loss a window ago, so hardly ever.
            value = loss.item()
            record["running_loss"] = value if math.isfinite(value) else str(value)
        if self.rank == 0:
            path = self._folder / "metrics.jsonl"
        else:
            path = self._folder / "ranks" / f"rank-{self.rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    @_quiet
    def close(self) -> None:
        """End the trace, the records and the timeline."""
        if not self.steps or threading.get_ident() != self.thread:
            return
        if self._trace is not None and self._is_traced:
            self._stop_trace(self._trace, self.steps)
        if self._clock is not None and self._clock.steps > 1:
            self._end_window(self._clock)
        self._write()
        if self.part not in _OUTSIDE:
            self._timeline.reassign(ENDING)
        self._timeline.close("ended")
        self.off = True

    # The trace.

    @property
    def _is_traced(self) -> bool:
        return self._trace is not None and self._trace.first > 0

    def _trace_step(self, trace: StepTrace, first: int, last: int) -> None:
        """Begin or end the trace, if that is due."""
        if trace.first:
            trace.note_traced((batch, 0.0) for batch in self._held)
            if self.steps == last:
                self._stop_trace(trace, last)
            return
        if self.steps < first - 1:
            trace.note_untraced()
        # torch's profiler warms up for a step before the trace.
        if self.steps >= first - 2 and not trace.is_prepared:
            trace.prepare(self._parameters, [] if self._workers else self._held[:1])
        if self.steps == first - 1:
            self._counts = dict.fromkeys(self._counts, 0)
            trace.begin(first)

    def _stop_trace(self, trace: StepTrace, last: int) -> None:
        self._trace = None
        if last < trace.first:
            trace.drop()
            return
        assert self._span is not None
        folder = self._folder / "profile" / f"{self._span[0]}-{self._span[1]}"
        trace.stop(folder / f"rank-{self.rank}.json.gz", last, self.rank, self._facts(last - trace.first + 1))

    def _facts(self, steps: int) -> dict[str, Any]:
        """Return what the verdict needs to know of the script."""
        often = {}
        for name, count in self._counts.items():
            if count:
                often[name] = max(1, steps // count)
            else:
                often[name] = 0
        options = {"data.workers": self._workers, "eval_freq": often["evaluate"], "ckpt_freq": often["save"]}
        return {
            "script": True,
            "micro_batches": self._world_size,
            "slots": 1,
            "engine_options": ["bucket_cap_mb"] if self._world_size > 1 and _has_ddp() else [],
            "shares": False,
            "gradient_bytes": self._bytes,
            "parameters": self._parameters,
            "options": options | {"compile": _is_compiled()},
            "unseen": self._unseen(),
        }

    def _unseen(self) -> list[str]:
        """Name what the verdict cannot see."""
        device_type = self._device.type
        unseen = []
        if device_type != "cuda":
            if device_type == "cpu":
                where = "the model is on the CPU"
            else:
                where = f"the work of a device of type {device_type} is not traced"
            unseen.append(f"host side only: {where}, so synchronisations such as .item() are counted with other calls")
        if not self._has_loader:
            unseen.append("no DataLoader of torch was used: time spent loading samples counts as computing or Python")
        return unseen


def _has_ddp() -> bool:
    ddp_class = torch.nn.parallel.DistributedDataParallel
    # The script may hold the model anywhere, so look at all objects, once at the end of the trace.
    return any(issubclass(type(tracked), ddp_class) for tracked in gc.get_objects())


def _is_compiled() -> bool:
    # torch has no public count of compiled graphs; the private module is the same since torch 2.11.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"])
