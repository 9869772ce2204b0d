"""Hook the recorder into torch, Accelerate and DeepSpeed.

`attach` hooks torch's forwards, backwards, optimizer steps, loaders, collectives, clipping, unscaling and schedules.
`accelerate` and `deepspeed` hook what bypasses these. Each hook calls the process's `TraceRecorder`.
"""

import atexit
import functools
import importlib
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.trace.record.journal import Journal, Options, quiet
from lockstep.trace.record.names import Names
from lockstep.trace.record.states import PassRecorder, Updates

__all__ = [
    "accelerate",
    "attach",
    "deepspeed",
]


class TraceRecorder:
    """Recorder of one process: its journal, the passes before each update, and the updates."""

    def __init__(self, options: Options) -> None:
        names = Names()
        self.journal = Journal(options)
        self.passes = PassRecorder(self.journal, names)
        self.updates = Updates(self.journal, names, self.passes)

    @quiet
    def close(self) -> None:
        """Close the journal at the end of the process."""
        self.journal.close()


# Functions of torch.distributed that are recorded.
_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
)

_recorders: list[TraceRecorder] = []


def present() -> TraceRecorder:
    """Return the recorder of this process."""
    return _recorders[0]


def attach(_: ModuleType) -> None:
    """Start recording this process."""
    _recorders.append(TraceRecorder(Options.read()))
    os.register_at_fork(after_in_child=_restart_in_child)
    atexit.register(lambda: present().close())
    register_module_forward_pre_hook(_before_forward)
    register_module_forward_hook(_after_forward, with_kwargs=True)
    _hook_updates()
    _hook_backward()
    _hook_loaders()
    _hook_collectives()
    _hook_gradient_changes()


def _restart_in_child() -> None:
    """Start a recorder for a forked process.

    A process that does not train, such as a loader's worker, writes nothing.
    """
    recorder = _recorders[0] = TraceRecorder(Options.read())
    processes = sys.modules.get("multiprocessing.util")
    # Processes of multiprocessing end without atexit, so the close is registered when they start.
    if processes is not None:
        processes.register_after_fork(recorder, lambda child: processes.Finalize(None, child.close, exitpriority=0))


# Modules.


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    recorder = _recorders[0]
    if recorder.passes.root is None and recorder.journal.on and not recorder.journal.busy and _is_plain(module):
        recorder.passes.entering(module, torch.is_grad_enabled())


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether a module's tensors have values that can be read now.

    They cannot be read within torch.func or a graph capture, nor on the meta device.
    """
    # Private in torch: nothing public shows whether a transform of torch.func runs.
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.is_meta or type(parameter.data).__name__ == "FakeTensor":
        return False
    return not (parameter.is_cuda and torch.cuda.is_current_stream_capturing())


def _after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    passes = _recorders[0].passes
    if passes.root is None:
        return
    if passes.root is module:
        passes.left(args, kwargs, output)
    else:
        passes.inside(module, output)


# The update.


def _hook_updates() -> None:
    """Hook every optimizer's step; if one optimizer calls another, the outer one is the update."""
    within: list[weakref.ref[Any]] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        recorder = _recorders[0]
        if torch.compiler.is_compiling() or not recorder.journal.on or recorder.updates.in_engine:
            return None
        outer = within[0]() if within else None
        if outer is not None and outer is not optimizer:
            return None
        within[:] = [weakref.ref(optimizer)]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            recorder.updates.before(optimizer)
            return None
        recorded: list[bool] = []

        @functools.wraps(closure)
        def run_closure() -> Any:
            """Run the closure and record the gradients: Lightning runs its backward within the step."""
            result = closure()
            if not recorded:
                recorded.append(True)
                recorder.updates.before(optimizer)
            return result

        if len(args) > 1:
            return (args[0], run_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": run_closure}

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if within and within[0]() is optimizer:
            within.clear()
            _recorders[0].updates.after(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _hook_backward() -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> None:
        recorder = _recorders[0]
        passes = recorder.passes
        if torch.compiler.is_compiling() or passes.in_backward or not recorder.journal.on:
            return backward(tensors, *args, **kwargs)
        passes.backward(tensors)
        passes.in_backward = True
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            passes.in_backward = False

    # Replaced, since torch has no hook for the start of a backward.
    torch.autograd.backward = wrapper


# The data.


def _hook_loaders() -> None:
    """Record every batch of a DataLoader's iterator, with the indices of its sampler."""
    # Private in torch: loaders have no hook for batches and indices.
    base: Any = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    get_batch = base.__next__
    get_index = base._next_index
    positions: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    @functools.wraps(get_index)
    def next_index(self: Any) -> Any:
        indices = get_index(self)
        self.__dict__.setdefault("_lockstep_indices", deque()).append(indices)
        return indices

    @functools.wraps(get_batch)
    def next_batch(self: Any) -> Any:
        if self._num_yielded == 0:
            try:
                position = positions.setdefault(self._index_sampler, [len(positions), -1])
            except TypeError:
                # A list of batches cannot be a weak key.
                position = [-1, -1]
            position[1] += 1
            self._lockstep_place = position
            if position[1] == 0:
                _recorders[0].passes.event("loader", position[0], *_describe_loader(self))
        data = get_batch(self)
        indices = self.__dict__.get("_lockstep_indices")
        batch_indices = indices.popleft() if indices else None
        loader, epoch = getattr(self, "_lockstep_place", (-1, -1))
        _recorders[0].passes.loaded(loader, epoch, batch_indices, getattr(_sampler(self), "epoch", None), data)
        return data

    base.__next__ = next_batch
    base._next_index = next_index


def _sampler(iterator: Any) -> Any:
    """Return the sampler that sets the order, from inside those that form batches."""
    sampler = iterator._index_sampler
    # Samplers are nested a few levels deep at most.
    for _ in range(4):
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            return sampler
        sampler = inner
    return sampler


def _describe_loader(iterator: Any) -> tuple[Any, ...]:
    """Return (sampler's class, samples of the dataset, batch size, drop_last) of a loader."""
    cut = iterator._index_sampler
    sampler = _sampler(iterator)
    try:
        count = len(iterator._dataset)
    except (TypeError, NotImplementedError, AttributeError):
        count = -1
    size = getattr(cut, "batch_size", None)
    return type(sampler).__name__, count, size if isinstance(size, int) else -1, bool(iterator._drop_last)


# Collectives, clipping, unscaling, schedules.


def _hook_collectives() -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        return
    home = importlib.import_module("torch.distributed.distributed_c10d")
    # A collective that calls others is recorded once.
    within = [False]

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or within[0]:
                return call(*args, **kwargs)
            within[0] = True
            try:
                tensor = next(
                    (value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)), None
                )
                if tensor is None:
                    shape = [0, "", 0]
                else:
                    shape = [tensor.numel(), str(tensor.dtype)[6:], tensor.element_size()]
                # The caller's package distinguishes the script's collectives from a framework's.
                caller = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
                _recorders[0].passes.event("collective", name, *shape, caller)
                return call(*args, **kwargs)
            finally:
                within[0] = False

        return wrapper

    for name in _COLLECTIVES:
        if hasattr(home, name):
            wrapper = wrap(name, getattr(home, name))
            # Replaced in both modules: scripts import from either.
            setattr(home, name, wrapper)
            setattr(distributed, name, wrapper)


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _hook_gradient_changes() -> None:
    """Hook clipping, unscaling and schedules."""
    home = importlib.import_module("torch.nn.utils.clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrapper = _wrap_clip(name, getattr(home, name))
        setattr(home, name, wrapper)
        setattr(torch.nn.utils, name, wrapper)
    scaler: Any = importlib.import_module("torch.amp.grad_scaler").GradScaler
    scaler.unscale_ = _wrap_event("unscale", scaler.unscale_)
    schedule: Any = importlib.import_module("torch.optim.lr_scheduler")
    schedule.LRScheduler.step = _wrap_event("schedule", schedule.LRScheduler.step)


def _wrap_clip(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        norm = call(*args, **kwargs)
        limit = kwargs.get("max_norm", kwargs.get("clip_value", args[1] if len(args) > 1 else None))
        value = None
        if isinstance(norm, torch.Tensor):
            # Collective over all ranks if the norm is a DTensor, as if the script read it.
            value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        _recorders[0].passes.event("clip", name, float(limit) if isinstance(limit, int | float) else None, value)
        return norm

    return wrapper


def _wrap_event(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _recorders[0].passes.event(kind)
        return call(*args, **kwargs)

    return wrapper


def accelerate(module: ModuleType) -> None:
    """Hook Accelerate's `gather_for_metrics`, which drops the padding of the last batch."""
    accelerator_class: Any = module.Accelerator
    gather = accelerator_class.gather_for_metrics

    @functools.wraps(gather)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        present().passes.event("gather_for_metrics")
        return gather(*args, **kwargs)

    accelerator_class.gather_for_metrics = wrapper


def deepspeed(module: ModuleType) -> None:
    """Hook the step of DeepSpeed's engine, which wraps optimizers of its own.

    The engine's step is the update; the recorded weights are the model's.
    """
    engine_class: Any = module.DeepSpeedEngine
    step = engine_class.step

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        updates = present().updates
        if not self.is_gradient_accumulation_boundary():
            return step(self, *args, **kwargs)
        updates.before_engine(self)
        updates.in_engine = True
        try:
            return step(self, *args, **kwargs)
        finally:
            updates.in_engine = False
            updates.after_engine(self)

    engine_class.step = wrapper
