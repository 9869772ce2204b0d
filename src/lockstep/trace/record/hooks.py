"""Hook the recorder into torch, Accelerate and DeepSpeed.

`attach` hooks forwards, backwards, optimizer steps, loaders, collectives, clipping, unscaling and schedules of torch.
`accelerate` and `deepspeed` hook what torch's hooks do not show. Each calls the process's `TraceRecorder`.
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
    "TraceRecorder",
    "accelerate",
    "attach",
    "deepspeed",
    "present",
]


class TraceRecorder:
    """The recorder of a process: a journal, its passes between updates, and its updates."""

    def __init__(self, options: Options) -> None:
        names = Names()
        self.journal = Journal(options)
        self.passes = PassRecorder(self.journal, names)
        self.updates = Updates(self.journal, names, self.passes)

    @quiet
    def close(self) -> None:
        """Close the journal at the end of the process."""
        self.journal.close()


_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
)

_present: list[TraceRecorder] = []


def present() -> TraceRecorder:
    """Return the recorder of this process."""
    return _present[0]


def attach(_: ModuleType) -> None:
    """Start the recording of this process."""
    _present.append(TraceRecorder(Options.read()))
    os.register_at_fork(after_in_child=_forked)
    atexit.register(lambda: present().close())
    register_module_forward_pre_hook(_before_forward)
    register_module_forward_hook(_after_forward, with_kwargs=True)
    _around_updates()
    _around_backward()
    _around_loaders()
    _around_collectives()
    _around_parts()


def _forked() -> None:
    """Start a recorder for a forked process.

    It writes nothing if the process trains nothing, as in a loader's process.
    """
    recorder = _present[0] = TraceRecorder(Options.read())
    processes = sys.modules.get("multiprocessing.util")
    if processes is not None:  # its processes end without atexit: register the close when they start
        processes.register_after_fork(recorder, lambda it: processes.Finalize(None, it.close, exitpriority=0))


# Modules.


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    recorder = _present[0]
    if recorder.passes.root is None and recorder.journal.on and not recorder.journal.busy and _is_plain(module):
        recorder.passes.entering(module, torch.is_grad_enabled())


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether its tensors can be computed with here.

    They cannot within torch.func or a graph capture, nor without values.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    first = next(module.parameters(), None)
    if first is None or first.is_meta or type(first.data).__name__ == "FakeTensor":
        return False
    return not (first.is_cuda and torch.cuda.is_current_stream_capturing())


def _after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    passes = _present[0].passes
    if passes.root is None:
        return
    if passes.root is module:
        passes.left(args, kwargs, output)
    else:
        passes.inside(module, output)


# The update.


def _around_updates() -> None:
    """Hook every optimizer. If one calls another, the outer one is the update."""
    within: list[weakref.ref[Any]] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        recorder = _present[0]
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
        called: list[bool] = []

        @functools.wraps(closure)
        def noted() -> Any:
            """Run the closure: Lightning runs forward and backward within the step."""
            result = closure()
            if not called:
                called.append(True)
                recorder.updates.before(optimizer)
            return result

        if len(args) > 1:
            return (args[0], noted, *args[2:]), kwargs
        return args, {**kwargs, "closure": noted}

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if within and within[0]() is optimizer:
            within.clear()
            _present[0].updates.after(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _around_backward() -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
        recorder = _present[0]
        passes = recorder.passes
        if torch.compiler.is_compiling() or passes.in_backward or not recorder.journal.on:
            return backward(tensors, *args, **kwargs)
        passes.backward(tensors)
        passes.in_backward = True
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            passes.in_backward = False

    torch.autograd.backward = noted


# The data.


def _around_loaders() -> None:
    """Record every batch of a DataLoader's iterator, with the indices of its sampler."""
    base: Any = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    get, index = base.__next__, base._next_index
    known: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    @functools.wraps(index)
    def noted_index(self: Any) -> Any:
        found = index(self)
        self.__dict__.setdefault("_lockstep_indices", deque()).append(found)
        return found

    @functools.wraps(get)
    def noted(self: Any) -> Any:
        if self._num_yielded == 0:
            try:
                place = known.setdefault(self._index_sampler, [len(known), -1])
            except TypeError:  # a list of batches
                place = [-1, -1]
            place[1] += 1
            self._lockstep_place = place
            if place[1] == 0:
                _present[0].passes.event("loader", place[0], *_described(self))
        data = get(self)
        indices = self.__dict__.get("_lockstep_indices")
        found = indices.popleft() if indices else None
        loader, epoch = getattr(self, "_lockstep_place", (-1, -1))
        _present[0].passes.loaded(loader, epoch, found, getattr(_sampler(self), "epoch", None), data)
        return data

    base.__next__, base._next_index = noted, noted_index


def _sampler(iterator: Any) -> Any:
    """The sampler that decides the order, inside those that form batches."""
    found = iterator._index_sampler
    for _ in range(4):
        inner = getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)
        if inner is None:
            return found
        found = inner
    return found


def _described(iterator: Any) -> tuple[Any, ...]:
    """Return (sampler's class, samples of the dataset, batch size, drop_last) of a loader."""
    cut, sampler = iterator._index_sampler, _sampler(iterator)
    try:
        count = len(iterator._dataset)
    except (TypeError, NotImplementedError, AttributeError):
        count = -1
    size = getattr(cut, "batch_size", None)
    return type(sampler).__name__, count, size if isinstance(size, int) else -1, bool(iterator._drop_last)


# The rest.


def _around_collectives() -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        return
    home = importlib.import_module("torch.distributed.distributed_c10d")
    within = [False]

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or within[0]:
                return call(*args, **kwargs)
            within[0] = True
            try:
                tensor = next(
                    (each for each in _flat((*args, *kwargs.values())) if isinstance(each, torch.Tensor)), None
                )
                shape = [0, "", 0] if tensor is None else [tensor.numel(), str(tensor.dtype)[6:], tensor.element_size()]
                caller = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
                _present[0].passes.event("collective", name, *shape, caller)
                return call(*args, **kwargs)
            finally:
                within[0] = False

        return noted

    for name in _COLLECTIVES:
        if hasattr(home, name):
            noted = noting(name, getattr(home, name))
            setattr(home, name, noted)
            setattr(distributed, name, noted)


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _around_parts() -> None:
    """Hook clipping, unscaling and schedules."""
    home = importlib.import_module("torch.nn.utils.clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        noted = _clipping(name, getattr(home, name))
        setattr(home, name, noted)
        setattr(torch.nn.utils, name, noted)
    scaler: Any = importlib.import_module("torch.amp.grad_scaler").GradScaler
    scaler.unscale_ = _announced("unscale", scaler.unscale_)
    schedule: Any = importlib.import_module("torch.optim.lr_scheduler")
    schedule.LRScheduler.step = _announced("schedule", schedule.LRScheduler.step)


def _clipping(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        norm = call(*args, **kwargs)
        limit = kwargs.get("max_norm", kwargs.get("clip_value", args[1] if len(args) > 1 else None))
        value = None
        if isinstance(norm, torch.Tensor):
            value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # collective: as the script's reading
        _present[0].passes.event("clip", name, float(limit) if isinstance(limit, int | float) else None, value)
        return norm

    return noted


def _announced(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _present[0].passes.event(kind)
        return call(*args, **kwargs)

    return noted


def accelerate(module: ModuleType) -> None:
    """Hook `gather_for_metrics`, in which Accelerate drops the padding of the last batch."""
    kind: Any = module.Accelerator
    gather = kind.gather_for_metrics

    @functools.wraps(gather)
    def noted(*args: Any, **kwargs: Any) -> Any:
        present().passes.event("gather_for_metrics")
        return gather(*args, **kwargs)

    kind.gather_for_metrics = noted


def deepspeed(module: ModuleType) -> None:
    """Hook the step of DeepSpeed's engine, which calls optimizers of its own.

    The engine's step is the update, and the weights are the model's.
    """
    kind: Any = module.DeepSpeedEngine
    step = kind.step

    @functools.wraps(step)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
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

    kind.step = noted
