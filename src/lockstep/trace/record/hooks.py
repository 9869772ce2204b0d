"""Record what torch, Accelerate and DeepSpeed do: forwards, backwards, updates, batches, collectives and others.

`attach` starts the recorder of a process. `TraceListener` listens to the events of `trace/events.py`, and calls the
process's `TraceRecorder`.
"""

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from lockstep.trace.events import Listener
from lockstep.trace.record.journal import Journal, Options, quiet
from lockstep.trace.record.names import Names
from lockstep.trace.record.states import PassRecorder, Updates

__all__ = [
    "attach",
    "detach",
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


class TraceListener(Listener):
    """Listener that records all that two runs are compared by."""

    recorder: TraceRecorder

    def __init__(self) -> None:
        super().__init__(lambda: TraceRecorder(Options.read()))
        # A collective that calls others is recorded once.
        self._in_collective = False
        # Sampler -> [number of its loader, epoch].
        self._loaders: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    @property
    def listens(self) -> bool:
        return self.recorder.journal.on and not self.recorder.updates.in_engine

    # Modules.

    def before_forward(self, module: torch.nn.Module, _: Any) -> None:
        """Record the script's call of a module."""
        if torch.compiler.is_compiling():
            return
        recorder = self.recorder
        if recorder.passes.root is None and recorder.journal.on and not recorder.journal.busy and _is_plain(module):
            recorder.passes.entering(module, torch.is_grad_enabled())

    def after_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the output of the script's module, or of one inside."""
        if torch.compiler.is_compiling():
            return
        passes = self.recorder.passes
        if passes.root is None:
            return
        if passes.root is module:
            passes.end_forward(args, kwargs, output)
        else:
            passes.inside(module, output)

    # Backward and update.

    def backward(self, call: Callable[..., None], /, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Record the losses of a backward; it may call others."""
        recorder = self.recorder
        passes = recorder.passes
        if passes.in_backward or not recorder.journal.on:
            return call(tensors, *args, **kwargs)
        passes.backward(tensors)
        passes.in_backward = True
        try:
            return call(tensors, *args, **kwargs)
        finally:
            passes.in_backward = False

    def update(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Record the gradients; with a closure after its first call, since Lightning runs its backward in it."""
        updates = self.recorder.updates
        if closure is None:
            updates.before(optimizer)
            return None
        recorded: list[bool] = []

        @functools.wraps(closure)
        def run_closure() -> Any:
            result = closure()
            if not recorded:
                recorded.append(True)
                updates.before(optimizer)
            return result

        return run_closure

    def end_update(self, optimizer: Any) -> None:
        """Record the state after an update."""
        self.recorder.updates.after(optimizer)

    # The data.

    def indices(self, call: Callable[..., Any], iterator: Any, /) -> Any:
        """Keep the indices that a loader's sampler gives."""
        indices = call(iterator)
        iterator.__dict__.setdefault("_lockstep_indices", deque()).append(indices)
        return indices

    def batch(self, call: Callable[..., Any], iterator: Any, /) -> Any:
        """Record a batch of a DataLoader's iterator, with the indices of its sampler."""
        if iterator._num_yielded == 0:
            try:
                position = self._loaders.setdefault(iterator._index_sampler, [len(self._loaders), -1])
            except TypeError:
                # A list of batches cannot be a weak key.
                position = [-1, -1]
            position[1] += 1
            iterator._lockstep_place = position
            if position[1] == 0:
                self.recorder.passes.event("loader", position[0], *_describe_loader(iterator))
        data = call(iterator)
        indices = iterator.__dict__.get("_lockstep_indices")
        batch_indices = indices.popleft() if indices else None
        loader, epoch = getattr(iterator, "_lockstep_place", (-1, -1))
        set_epoch = getattr(_sampler(iterator), "epoch", None)
        self.recorder.passes.record_batch(loader, epoch, batch_indices, set_epoch, data)
        return data

    # Collectives, clipping, unscaling, schedules.

    def collective(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Record a collective's name, its first tensor's size, and the package that calls it."""
        if self._in_collective:
            return call(*args, **kwargs)
        self._in_collective = True
        try:
            tensor = None
            for value in _flat((*args, *kwargs.values())):
                if isinstance(value, torch.Tensor):
                    tensor = value
                    break
            if tensor is None:
                shape = [0, "", 0]
            else:
                shape = [tensor.numel(), str(tensor.dtype)[6:], tensor.element_size()]
            # The caller's package distinguishes the script's collectives from a framework's. Between it and this
            # method is the wrapper.
            caller = sys._getframe(2).f_globals.get("__name__", "").split(".")[0]
            self.recorder.passes.event("collective", call.__name__, *shape, caller)
            return call(*args, **kwargs)
        finally:
            self._in_collective = False

    def clip(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Record a clipping's limit and the norm that it returns."""
        norm = call(*args, **kwargs)
        limit = kwargs.get("max_norm", kwargs.get("clip_value", args[1] if len(args) > 1 else None))
        value = None
        if isinstance(norm, torch.Tensor):
            # Collective over all ranks if the norm is a DTensor, as if the script read it.
            value = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        limit_value = float(limit) if isinstance(limit, int | float) else None
        self.recorder.passes.event("clip", call.__name__, limit_value, value)
        return norm

    def unscale(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Record that a GradScaler divides the gradients."""
        self.recorder.passes.event("unscale")
        return call(*args, **kwargs)

    def schedule(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Record that a schedule sets the learning rates."""
        self.recorder.passes.event("schedule")
        return call(*args, **kwargs)

    # Accelerate and DeepSpeed.

    def gather_for_metrics(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Record Accelerate's `gather_for_metrics`, which drops the padding of the last batch."""
        self.recorder.passes.event("gather_for_metrics")
        return call(*args, **kwargs)

    def engine_step(self, call: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Record the step of DeepSpeed's engine, which wraps optimizers of its own.

        The engine's step is the update; the recorded weights are the model's.
        """
        updates = self.recorder.updates
        if not engine.is_gradient_accumulation_boundary():
            return call(engine, *args, **kwargs)
        updates.before_engine(engine)
        updates.in_engine = True
        try:
            return call(engine, *args, **kwargs)
        finally:
            updates.in_engine = False
            updates.after_engine(engine)


_listeners: list[TraceListener] = []


def present() -> TraceRecorder:
    """Return the recorder of this process."""
    return _listeners[0].recorder


def attach(module: ModuleType) -> None:
    """Record this process once torch is imported, and hook a framework once that is."""
    if module is torch:
        _listeners.append(TraceListener())
    _listeners[0].attach(module.__name__)


def detach() -> None:
    """Close the recorder of this process, and restore torch."""
    present().close()
    _listeners.pop().detach()


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


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
