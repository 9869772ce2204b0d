"""Hook the script's recorder into torch: loaders, backwards, optimizer steps, collectives, evaluations and saves.

Each hook costs a few microseconds, and changes no number. Forwards have no hook of their own, since one on every
module is dear: a forward lasts from a batch to its backward.
"""

import atexit
import functools
import importlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.diagnose.script import SETTINGS_VARIABLE, STARTED
from lockstep.diagnose.script.recorder import ScriptRecorder

__all__ = [
    "attach",
    "hook_distributed_saves",
    "hook_safetensors",
]

_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "send", "recv"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
)
_recorders: list[ScriptRecorder] = []


def attach(_: ModuleType) -> None:
    """Start timing this process."""
    _recorders.append(_make())
    Path(json.loads(os.environ[SETTINGS_VARIABLE])["folder"], STARTED).touch()
    os.register_at_fork(after_in_child=_restart_in_child)
    atexit.register(lambda: _recorders[0].close())
    _hook_loaders()
    _hook_backward()
    _hook_updates()
    _hook_modes()
    _hook_collectives()
    _hook_clipping()
    torch.save = _within("save", torch.save)


def _make() -> ScriptRecorder:
    return ScriptRecorder(**json.loads(os.environ[SETTINGS_VARIABLE]))


def _restart_in_child() -> None:
    """Start a recorder for a forked process.

    One that does not train, such as a loader's worker, writes nothing.
    """
    recorder = _recorders[0] = _make()
    processes = sys.modules.get("multiprocessing.util")
    # Processes of multiprocessing end without atexit, so register the close when they start.
    if processes is not None:
        processes.register_after_fork(recorder, lambda child: processes.Finalize(None, child.close, exitpriority=0))


def hook_distributed_saves(module: ModuleType) -> None:
    """Hook torch.distributed.checkpoint's saves."""
    for name in ("save", "async_save"):
        wrapper = _within("save", getattr(module, name))
        setattr(module, name, wrapper)


def hook_safetensors(module: ModuleType) -> None:
    """Hook safetensors' saves."""
    for name in ("save_file", "save_model"):
        setattr(module, name, _within("save", getattr(module, name)))


def _present() -> ScriptRecorder | None:
    """Return the recorder in the training's thread; None elsewhere or while compiling."""
    recorder = _recorders[0]
    if recorder.off or threading.get_ident() != recorder.thread or torch.compiler.is_compiling():
        return None
    return recorder


def _within(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its time counts as `part`."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = _present()
        # A nested call belongs to the outer one: a save's collectives to the save.
        if recorder is None or recorder.part in (part, "save") or (recorder.part == "evaluate" and part != "save"):
            return call(*args, **kwargs)
        before = recorder.enter(part)
        try:
            return call(*args, **kwargs)
        finally:
            recorder.enter(before)

    return wrapper


def _hook_loaders() -> None:
    # torch's loaders have no public hook. The private base class is the same since torch 2.11.
    base: Any = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    get_batch = base.__next__

    @functools.wraps(get_batch)
    def next_batch(self: Any) -> Any:
        recorder = _present()
        if recorder is None or not recorder.load():
            return get_batch(self)
        batch = None
        try:
            batch = get_batch(self)
        finally:
            recorder.loaded(batch, int(self._num_workers))
        return batch

    base.__next__ = next_batch


def _hook_backward() -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> None:
        recorder = _present()
        if recorder is None or recorder.part == "backward":
            return backward(tensors, *args, **kwargs)
        recorder.backward(tensors)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            recorder.passed()

    torch.autograd.backward = wrapper
    scaler: Any = importlib.import_module("torch.amp.grad_scaler").GradScaler
    scale = scaler.scale

    # The scaler multiplies the loss, so the record takes it before.
    @functools.wraps(scale)
    def scale_and_note(self: Any, outputs: Any) -> Any:
        recorder = _present()
        if recorder is not None:
            recorder.unscaled = outputs
        return scale(self, outputs)

    scaler.scale = scale_and_note


def _hook_updates() -> None:
    """Hook every optimizer's step; if one optimizer calls another, the outer one is the update."""
    within: list[weakref.ref[Any]] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        # Wrappers call the step of an inner optimizer: count the outer one only.
        outer = within[0]() if within else None
        if _recorders[0].off or torch.compiler.is_compiling() or (outer is not None and outer is not optimizer):
            return
        within[:] = [weakref.ref(optimizer)]
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        _recorders[0].update(optimizer, in_closure=callable(closure))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if within and within[0]() is optimizer:
            within.clear()
            _recorders[0].updated(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _hook_modes() -> None:
    """Hook `model.eval()` and `model.train()`, between which a script evaluates."""
    module_class: Any = torch.nn.Module
    set_mode = module_class.train

    @functools.wraps(set_mode)
    def train(self: Any, mode: bool = True) -> Any:
        recorder = _present()
        if recorder is not None and (recorder.part == "evaluate") == bool(mode):
            recorder.switch(self, training=mode)
        return set_mode(self, mode)

    module_class.train = train


def _hook_collectives() -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        return
    home = importlib.import_module("torch.distributed.distributed_c10d")
    for name in _COLLECTIVES:
        # torch.distributed copies the names, so both modules need the wrapper.
        if hasattr(home, name):
            wrapper = _within("exchange", getattr(home, name))
            setattr(home, name, wrapper)
            setattr(distributed, name, wrapper)


def _hook_clipping() -> None:
    """Hook clipping, which is a part of the update."""
    home = importlib.import_module("torch.nn.utils.clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrapper = _within("update", getattr(home, name))
        setattr(home, name, wrapper)
        setattr(torch.nn.utils, name, wrapper)
