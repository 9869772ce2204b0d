"""Trace a few training steps in a fake world: one rank's memory and work.

    trace = trace_step(config, subject, world_size, layers=4)
    trace.peaks["backward 0"]       # bytes

The parts are those of a run: `build_model`, a pipeline's stage, the engine, the task's loss. Phases are named by the
model's blocks, so that a deep model can be extrapolated from two shallow ones (see estimate.py): the peak of a phase is
a linear function of the number of blocks, if each block's own forward and backward are phases of their own.
"""

import contextlib
import dataclasses
import gc
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

# torch has no public functions for nested values; the module is the same since torch 2.11.
from torch.utils._pytree import tree_leaves

from lockstep.config.engine_options import ENGINES, PLAIN, own_options
from lockstep.config.schema import Config
from lockstep.counts import check_count, describe_count
from lockstep.data.batches import MicroBatch
from lockstep.data.loader import blame
from lockstep.diagnose.plan.fakes import REFUSED, arriving, as_fake, exchanging, fake_world, finite, without_modes
from lockstep.diagnose.plan.recorder import OperationRecorder, Work
from lockstep.diagnose.plan.subject import Subject, call_task
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.blocks import find_blocks
from lockstep.engines.registry import make_engine, options_for
from lockstep.engines.request import EngineRequest
from lockstep.errors import LockstepError, UsageError
from lockstep.loop import loss_of
from lockstep.parallel.pipeline import Pipeline
from lockstep.run_state import RunState
from lockstep.task import has_own
from lockstep.training.start.build_engine import build_model, build_optimizer
from lockstep.training.start.replicas import divide_sequences, make_pipeline
from lockstep.transforms.batchnorm import recorders
from lockstep.transforms.precision import task_in_precision
from lockstep.transforms.weight_copies import copies_of

__all__ = ["PlanTrace", "Untraceable", "probe_step", "trace_step", "unlike"]

# Blocks at each end that have a phase of their own.
_EDGE = 2


class Untraceable(UsageError):
    """The model reads values of tensors, which a trace does not have."""


class PlanTrace(NamedTuple):
    """A traced step after the first.

    Phases have bytes of one rank, and the work of one micro-batch.

    Attributes:
        peaks: by phase, the maximum.
        levels: by phase, the bytes after each operation that made a storage.
        parts: by phase, the bytes of each part at the peak; "rest" has no name: activations, copies.
        held: bytes after the step: parameters, buffers and optimizer states.
        work: by "compute", forward and backward of a micro-batch, and "update".
        batch: bytes of a micro-batch.
    """

    peaks: dict[str, float]
    levels: dict[str, list[int]]
    parts: dict[str, dict[str, float]]
    held: float
    work: dict[str, Work]
    batch: float


def trace_step(
    config: Config, subject: Subject, size: int, *, layers: int = 0, slots: int = 1, fused: bool = True, stage: int = 0
) -> PlanTrace:
    """Trace the first rank of a stage, in the first replica of `size` ranks; without a pipeline rank 0.

    Args:
        config: without "auto"; its engine can be made here.
        layers: of the model's blocks; 0: all.
        slots: micro-batches of the rank in a step; in exact mode the step has so many for each replica.
        fused: see `fake_world`.
        stage: its index.

    Raises:
        Untraceable: the model reads values; the operation is named.
        UsageError: the model, the engine or the optimizer refuses.
    """
    if config.exact:
        config = dataclasses.replace(config, batch_size=config.micro_size * slots * size // config.parallel.size)
    recorder = OperationRecorder()
    with warnings.catch_warnings(), _freeze_gc():
        warnings.simplefilter("ignore")
        degrees = config.parallel.degrees
        with fake_world(size, engine=config.engine, fused=fused, degrees=degrees, stage=stage) as world, recorder:
            recorder.replica_groups = world.replica_groups
            try:
                return _FakeRun(config, subject, world, recorder, layers).trace(slots)
            except REFUSED as error:
                raise Untraceable(
                    f"the model cannot be traced without numbers: {recorder.operation} ({recorder.phase}) needs the "
                    "values of a tensor, as .item(), nonzero() and boolean masks do"
                ) from error
            except LockstepError:
                raise
            except Exception as error:
                # It is an error in any case, or only without values: `probe_step` finds out.
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise Untraceable(
                    f"the model cannot be traced: {recorder.operation} ({recorder.phase}): {reason}"
                ) from error


@contextlib.contextmanager
def _freeze_gc() -> Iterator[None]:
    """Context manager in which garbage collection skips older objects.

    A trace collects three times, and passing over all objects of torch and of other traces takes a third of a second
    each time. Objects that were already frozen stay frozen.
    """
    was_empty = not gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if was_empty:
            gc.unfreeze()


def probe_step(config: Config, subject: Subject, slots: int) -> PlanTrace:
    """Measure the same with real numbers, on this machine's CPU, in one process.

    Raises:
        UsageError: the model or the optimizer refuses.
    """
    recorder = OperationRecorder(real=True)
    config = dataclasses.replace(config, engine=PLAIN, engine_options=options_for(PLAIN, config.engine_options))
    with recorder:
        try:
            return _FakeRun(config, subject, World(), recorder, 0).trace(slots)
        except LockstepError:
            raise
        except Exception as error:
            raise blame("model" if recorder.phase == "start" else "loss", error, "its plan") from error


class _FirstStep(NamedTuple):
    """Levels and parts of the first step by phase, and its new states' bytes."""

    levels: dict[str, list[int]]
    parts: dict[str, dict[str, int]]
    states: int


class _FakeRun:
    """A run's parts in the fake world."""

    def __init__(self, config: Config, subject: Subject, world: Any, recorder: OperationRecorder, layers: int) -> None:
        self._subject = subject
        self._recorder = recorder
        self._size = config.micro_size
        self._first_differs = _first_step_differs(config)
        self._counting = config.exact or ENGINES[config.engine].own_gradients
        task = subject.at(layers)
        self._task = task_in_precision(task, config.precision, world.device.type, lambda line: None)
        model = self._model = build_model(config, self._task, world, RunState(), lambda line: None, sizes_only=True)
        self._task = divide_sequences(config, self._task, model, world)
        declared = self._task.blocks(model)
        if declared is None:
            self._blocks = find_blocks(model).modules
        else:
            self._blocks = list(declared)
        self._pipeline: Pipeline | None = None
        if config.parallel.pipeline > 1:
            self._pipeline = self._cut_stage(config, world)
        self._optimizer: Optimizer | None = None
        self._engine = self._build_engine(config, world)
        exchanging(self._engine.model)
        self._loss = loss_of(self._task)
        # FSDP changes parameters during a step, but never modules, so the dicts of parameters stay the same.
        modules = list(self._engine.model.modules())
        self._parameters = [module._parameters for module in modules if module._parameters]
        self._buffers = [module._buffers for module in modules if module._buffers]

    def _cut_stage(self, config: Config, world: World) -> Pipeline:
        """Keep one stage of the model, as a run does, and its blocks."""
        forms: list[tuple[torch.Size, torch.dtype]] = []

        def note_form(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                forms.append((output.shape, output.dtype))

        # The cut runs all blocks once, on fake tensors: this is how the stage knows what it will receive.
        handles = [block.register_forward_hook(note_form) for block in self._blocks]
        micro_batches = config.micro_batches // world.data_parallel.size
        pipeline = make_pipeline(config, self._task, self._model, world, micro_batches, lambda: self._batch().data)
        for handle in handles:
            handle.remove()
        own = pipeline.stage.index.own(len(pipeline.stage.blocks))
        if own.start:
            arriving(pipeline, *forms[own.start - 1])
        self._blocks = [pipeline.stage.blocks[number] for number in own]
        return pipeline

    def _build_engine(self, config: Config, world: World) -> Engine:
        def make(model: nn.Module) -> Optimizer:
            self._optimizer = build_optimizer(config, self._task, model, self._pipeline)
            return self._optimizer

        options = config.engine_options
        # With "auto" a step of fsdp would ask the other ranks for numbers.
        if options.find_unused_parameters == "auto":
            options = dataclasses.replace(options, find_unused_parameters=_unused_option(config))
        request = EngineRequest(
            clip=config.optim.clip,
            exact=config.micro_batches if config.exact else 0,
            loss_scaling=config.fp16 if config.precision == "fp16" else None,
            blocks=tuple(self._task.blocks(self._model) or ()),
            options=options,
            say=lambda line: None,
            ema=config.optim.ema,
            pipeline=self._pipeline,
        )
        return make_engine(config.engine, self._model, make, world, request)

    def trace(self, slots: int) -> PlanTrace:
        """Trace one step, in which the optimizer has its states."""
        recorder = self._recorder
        start = self._recorder.peaks.get("start", 0)
        before = recorder.level
        batch = self._batch()
        batch_bytes = recorder.level - before
        recorder.divide = self._parts
        with contextlib.ExitStack() as stack:
            _mark(self._blocks, recorder, stack)
            finite(self._engine.model, stack)
            first_step = self._begin(batch, slots)
            # Free the tensors of the first step, or they would count in the traced one.
            gc.collect()
            recorder.begin()
            # The first step covers the micro-batches in between.
            traced_slots = min(slots, 2) if self._first_differs else slots
            self._step(batch, traced_slots)
        gc.collect()
        levels = dict(recorder.levels)
        divided = dict(recorder.parts)
        for name, values in first_step.levels.items():
            levels[f"first {name}"] = values
            divided[f"first {name}"] = first_step.parts[name]
            # A middle micro-batch is neither the first of a step nor the exchanged one.
            if slots > 2 and name != "update":
                levels[f"middle {name}"] = [level + first_step.states for level in values]
                divided[f"middle {name}"] = first_step.parts[name] | {"optimizer states": first_step.states}
        # The batch does not belong to the step: it is added for as many batches as are in memory.
        peaks = {}
        for name, values in levels.items():
            levels[name] = [level - batch_bytes for level in values]
            peaks[name] = float(max(levels[name]))
        parts = {}
        for name, sizes in divided.items():
            parts[name] = {key: float(size - batch_bytes * (key == "rest")) for key, size in sizes.items()}
        state_bytes = float(recorder.level - batch_bytes)
        for bytes_by_name in parts.values():
            self._name_engine_state(bytes_by_name, state_bytes)
        peaks["start"] = float(start)
        return PlanTrace(
            peaks, levels, parts, state_bytes, _total_work(recorder.work, traced_slots), float(batch_bytes)
        )

    def _name_engine_state(self, parts: dict[str, float], state_bytes: float) -> None:
        """Name gradients in DDP's buffers, and states that ZeRO's optimizer does not expose.

        DDP's buffers have the gradients even while no parameter does.
        """
        trained = []
        for p in self._engine.model.parameters():
            if p.requires_grad:
                trained.append(p)
        if isinstance(self._engine.model, DDP):
            buckets = float(sum(p.nbytes for p in trained))
        else:
            buckets = 0.0
        _move(parts, "gradients", buckets - parts["gradients"])
        if not parts["optimizer states"]:
            _move(parts, "optimizer states", state_bytes - parts["parameters"] - buckets)

    def _begin(self, batch: MicroBatch, slots: int) -> "_FirstStep":
        """Take a first step, which makes the optimizer's states.

        It is returned if its peak may be higher than later ones. With ddp and zero it may: until the parameters that a
        backward uses are known, gradients exist next to the buffers.
        """
        recorder = self._recorder
        if self._first_differs:
            gc.collect()
            recorder.begin()
            before = recorder.level
            self._step(batch, min(slots, 2))
            gc.collect()
            return _FirstStep(recorder.levels, recorder.parts, recorder.level - before)
        # These engines and recorders count their forwards, so a full step must come first.
        if self._counting or recorders(self._model):
            self._step(batch, slots)
            return _FirstStep({}, {}, 0)
        for parameter in self._engine.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        recorder.phase = "update"
        self._engine.step(1.0, math.inf, None)
        return _FirstStep({}, {}, 0)

    def _step(self, batch: MicroBatch, slots: int) -> None:
        def forward(slot: int) -> Tensor:
            with self._engine.accumulate(slot == slots - 1):
                return self._forward(batch)

        if self._pipeline:
            # In its own order, which decides how many micro-batches are in flight.
            self._pipeline.passes(slots, forward, lambda _, loss: self._backward(loss))  # collective
        else:
            for slot in range(slots):
                with self._engine.accumulate(slot == slots - 1):
                    self._backward(self._forward(batch))
        self._recorder.phase = "update"
        self._engine.step(1.0, math.inf, None)

    def _batch(self) -> MicroBatch:
        with without_modes():
            real = self._subject.batch(self._size)
            if has_own(self._task, "count"):
                items = call_task("count", lambda: self._count(real))
            else:
                items = self._size
        return MicroBatch(real if self._recorder.real else as_fake(real), 0, items, 1.0)

    def _count(self, real: Any) -> float:
        value = self._task.count(real)
        items = check_count(value)
        if items is None:
            raise TypeError(f"{describe_count(value)} is not a number of items")
        return items

    def _forward(self, batch: MicroBatch) -> Tensor:
        recorder = self._recorder
        recorder.phase = "begin"
        # A model that reads a number cannot be traced; the engine may read its own.
        recorder.asked = False
        try:
            return self._loss(self._engine.model, batch)
        finally:
            recorder.asked = True

    def _backward(self, loss: Tensor) -> None:
        self._recorder.phase = "loss"
        self._engine.backward(loss, 1.0)

    def _parts(self) -> dict[str, list[Tensor]]:
        """Return the named tensors of this rank."""
        parameters = [p for group in self._parameters for p in group.values() if p is not None]
        copied = copies_of(self._model)
        copies = copied.tensors if copied else []
        buffers = [b for group in self._buffers for b in group.values() if b is not None]
        states = []
        for state in (getattr(self._optimizer, "state", None) or {}).values():
            for value in state.values():
                if isinstance(value, Tensor):
                    states.append(value)
        return {
            "parameters": [*parameters, *buffers, *copies],
            "optimizer states": states,
            "gradients": [p.grad for p in (*parameters, *copies) if p.grad is not None],
        }


def _move(parts: dict[str, float], name: str, size: float) -> None:
    """Move bytes from the unnamed rest to a part."""
    size = min(max(size, 0.0), parts["rest"])
    parts[name] += size
    parts["rest"] -= size


def unlike(config: Config) -> int:
    """Return how many micro-batches of a step differ in memory; further ones are like these.

    The last one is exchanged, those before it add to separate gradients; the first has none to add to. If gradients
    have one place throughout, the last takes as much as those between.
    """
    if _first_step_differs(config):
        return 3
    return 2


def _first_step_differs(config: Config) -> bool:
    """Whether the first step has gradients next to DDP's buffers.

    It finds the parameters that a backward uses.
    """
    options = config.engine_options
    # Gradients of divided layers and of stages are summed without DDP.
    by_hand = config.exact or config.parallel.tensor > 1 or config.parallel.pipeline > 1
    buffered = "bucket_cap_mb" in own_options(config.engine) and not by_hand
    return buffered and options.find_unused_parameters == "auto" and not options.static_graph


def _unused_option(config: Config) -> str:
    """Return the find_unused_parameters that a trace uses for "auto".

    DDP rebuilds its buffers by numbers after the first exchanged step, if no parameter is unused.
    """
    options = own_options(config.engine)
    if "bucket_cap_mb" in options and not _first_step_differs(config):
        return "true"
    if "sharding" in options:
        return "false"
    return "auto"


def _mark(blocks: list[nn.Module], recorder: OperationRecorder, stack: contextlib.ExitStack) -> None:
    """Set the recorder's phase by the forward and the backward of the blocks."""
    last_index = len(blocks) - 1

    def forward(place: int) -> Any:
        name = f"forward {place if place < _EDGE else place - last_index - 1}"

        def begin(module: nn.Module, inputs: Any, kwargs: Any) -> None:
            recorder.phase = name
            if place == 0:
                _when_done([*inputs, *kwargs.values()], "end")

        return begin

    def backward(place: int) -> Any:
        name = f"backward {place if place < _EDGE else place - last_index - 1}"

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            _when_done([output], name)
            if place == last_index:
                recorder.phase = "loss"

        return end

    def _when_done(values: Any, name: str) -> None:
        """Start the phase when the gradient of these is known."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                # torch's method has no annotations.
                leaf.register_hook(lambda _: setattr(recorder, "phase", name))  # type: ignore[no-untyped-call]

    for place, block in enumerate(blocks):
        stack.callback(block.register_forward_pre_hook(forward(place), with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(backward(place)).remove)


def _total_work(work: dict[str, Work], slots: int) -> dict[str, Work]:
    """Sum the work by "compute", of one micro-batch, and "update"."""
    totals = {"compute": Work(), "update": Work()}
    for name, phase_work in work.items():
        into = "update" if name == "update" else "compute"
        share = 1 if name == "update" else slots
        totals[into] = Work.of_each(lambda total, part, share=share: total + part / share, totals[into], phase_work)
    return totals
