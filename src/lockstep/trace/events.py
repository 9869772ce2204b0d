"""Patch torch and the frameworks, and call a process's recorder at each event of a training.

class BackwardTimer(Listener):
    def backward(self, call, /, *args, **kwargs): ...     # runs in place of torch.autograd.backward, and calls it

listener = BackwardTimer(make_recorder)
listener.attach("torch"); listener.attach("accelerate.accelerator")       # a module, once it is imported
listener.detach()                                                         # torch is as before

This is the only file that replaces functions of a script's torch. `trace/record/hooks.py` listens for `lockstep trace`,
`diagnose/script/hooks.py` for the timing of scripts.
"""

import atexit
import contextlib
import functools
import importlib
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["Listener", "find_rank"]

_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
)
# Scripts import these from either module, so both get the wrapper.
_DISTRIBUTED = ("torch.distributed.distributed_c10d", "torch.distributed")
_CLIPPING = ("torch.nn.utils.clip_grad", "torch.nn.utils")
# Pickle finds a function in its own module, and refuses it if another one is there.
_SAVING = ("torch.serialization", "torch")
# Private in torch: loaders have no hook for batches and indices. The class is the same since torch 2.11.
_LOADER = ("torch.utils.data.dataloader:_BaseDataLoaderIter",)
_SCALER = ("torch.amp.grad_scaler:GradScaler",)
# Imported module -> (event, owners, functions): a listener's method of the event's name runs in place of each function.
# Torch has no hook for these. An owner is a module, or a class of one after the colon.
_FUNCTIONS: dict[str, list[tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "torch": [
        ("batch", _LOADER, ("__next__",)),
        ("indices", _LOADER, ("_next_index",)),
        ("backward", ("torch.autograd",), ("backward",)),
        ("mode", ("torch.nn:Module",), ("train",)),
        ("clip", _CLIPPING, ("clip_grad_norm_", "clip_grad_value_")),
        ("scale", _SCALER, ("scale",)),
        ("unscale", _SCALER, ("unscale_",)),
        ("schedule", ("torch.optim.lr_scheduler:LRScheduler",), ("step",)),
        ("save", _SAVING, ("save",)),
    ],
    "torch.distributed": [
        ("collective", _DISTRIBUTED, _COLLECTIVES),
        ("message", _DISTRIBUTED, ("send", "recv")),
    ],
    "torch.distributed.checkpoint.state_dict_saver": [
        ("save", ("torch.distributed.checkpoint.state_dict_saver",), ("save", "async_save")),
    ],
    "safetensors.torch": [("save", ("safetensors.torch",), ("save_file", "save_model"))],
    "accelerate.accelerator": [
        ("gather_for_metrics", ("accelerate.accelerator:Accelerator",), ("gather_for_metrics",))
    ],
    "deepspeed.runtime.engine": [("engine_step", ("deepspeed.runtime.engine:DeepSpeedEngine",), ("step",))],
}


class Listener:
    """Base of what listens to the events of a process, for its recorder.

    A subclass has a method for each event that it needs. The events of `_FUNCTIONS` pass the replaced function and its
    arguments; the method calls it and returns the result. Further events, by torch's own hooks:

    before_forward(module, args), after_forward(module, args, kwargs, output): a module's forward.
    update(optimizer, closure): an optimizer's step begins; returns the closure to run instead, or None.
    end_update(optimizer): it has ended.

    Args:
        make: makes the recorder of this process, and another one in each forked process. One that does not train, such
            as a loader's worker, writes nothing.

    Attributes:
        recorder: has `close`, for the end of the process.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.recorder = make()
        self._make = make
        self._undo = contextlib.ExitStack()
        # Torch and Python cannot forget a fork's hook, so it asks whether the listener is still attached.
        self._attached = True
        os.register_at_fork(after_in_child=self._restart_in_child)
        atexit.register(self._close)
        self._undo.callback(atexit.unregister, self._close)

    @property
    def listens(self) -> bool:
        """Whether the optimizers' steps are recorded now."""
        return True

    def attach(self, module: str) -> None:
        """Patch the functions of a module that has been imported; with torch also add its hooks."""
        self._replace(module)
        if module == "torch":
            if torch.distributed.is_available():
                self._replace("torch.distributed")
            self._hook_forwards()
            self._hook_updates()

    def detach(self) -> None:
        """Restore all functions, and remove all hooks."""
        self._attached = False
        self._undo.close()

    def _replace(self, module: str) -> None:
        for event, owners, names in _FUNCTIONS[module]:
            method = getattr(self, event, None)
            if method is None:
                continue
            places = [_find(owner) for owner in owners]
            for name in names:
                wrapper = _wrap(getattr(places[0], name), method)
                for place in places:
                    self._undo.callback(setattr, place, name, getattr(place, name))
                    setattr(place, name, wrapper)

    def _hook_forwards(self) -> None:
        # A hook on every module is dear, so only for listeners that need it.
        before = getattr(self, "before_forward", None)
        after = getattr(self, "after_forward", None)
        if before is not None:
            self._undo.callback(register_module_forward_pre_hook(before).remove)
        if after is not None:
            self._undo.callback(register_module_forward_hook(after, with_kwargs=True).remove)

    def _hook_updates(self) -> None:
        """Hook every optimizer's step; if one optimizer calls another, the outer one is the update."""
        within: list[weakref.ref[Any]] = []

        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            outer = within[0]() if within else None
            is_inner = outer is not None and outer is not optimizer
            if torch.compiler.is_compiling() or not self.listens or is_inner:
                return None
            within[:] = [weakref.ref(optimizer)]
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            replacement = self.update(optimizer, closure if callable(closure) else None)
            if replacement is None:
                return None
            if len(args) > 1:
                return (args[0], replacement, *args[2:]), kwargs
            return args, {**kwargs, "closure": replacement}

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if within and within[0]() is optimizer:
                within.clear()
                self.end_update(optimizer)

        self._undo.callback(register_optimizer_step_pre_hook(before).remove)
        self._undo.callback(register_optimizer_step_post_hook(after).remove)

    def update(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Begin an optimizer's step; return the closure to run instead, or None."""

    def end_update(self, optimizer: Any) -> None:
        """End an optimizer's step."""

    def _close(self) -> None:
        self.recorder.close()

    def _restart_in_child(self) -> None:
        if not self._attached:
            return
        self.recorder = self._make()
        processes = sys.modules.get("multiprocessing.util")
        # Processes of multiprocessing end without atexit, so the close is registered when they start.
        if processes is not None:
            processes.register_after_fork(
                self.recorder, lambda recorder: processes.Finalize(None, recorder.close, exitpriority=0)
            )


def _find(owner: str) -> Any:
    """Import a module, or a class of one after the colon."""
    module, _, name = owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _wrap(call: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a listener's method in place of a function, except in code that is being compiled."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        return method(call, *args, **kwargs)

    return wrapper


def find_rank() -> tuple[int, int]:
    """Return the rank and the world size of this process.

    They are the default group's, else those of the launcher's variables, else (0, 1).
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
