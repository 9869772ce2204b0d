"""Tell the script's recorder which part of a step begins, by the events of `trace/events.py`.

Each event costs a few microseconds, and changes no number. Forwards are not listened to, since a hook on every module
is dear: a forward lasts from a batch to its backward.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lockstep.diagnose.script import SETTINGS_VARIABLE, STARTED
from lockstep.diagnose.script.recorder import ScriptRecorder
from lockstep.trace.events import Listener

__all__ = ["attach"]


def _within(part: str) -> Callable[..., Any]:
    """Return a listener's method that counts the time of a call as `part`."""

    def run(self: "ScriptListener", call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        recorder = self.present
        # A nested call belongs to the outer one: a save's collectives to the save.
        if recorder is None or recorder.part in (part, "save") or (recorder.part == "evaluate" and part != "save"):
            return call(*args, **kwargs)
        before = recorder.enter(part)
        try:
            return call(*args, **kwargs)
        finally:
            recorder.enter(before)

    return run


class ScriptListener(Listener):
    """Listener that times the parts of a step."""

    recorder: ScriptRecorder

    def __init__(self) -> None:
        super().__init__(lambda: ScriptRecorder(**json.loads(os.environ[SETTINGS_VARIABLE])))

    @property
    def present(self) -> ScriptRecorder | None:
        """The recorder in the training's thread; None elsewhere."""
        recorder = self.recorder
        if recorder.off or threading.get_ident() != recorder.thread:
            return None
        return recorder

    @property
    def listens(self) -> bool:
        return not self.recorder.off

    # Clipping is a part of the update.
    clip = _within("update")
    collective = _within("exchange")
    message = _within("exchange")
    save = _within("save")

    def batch(self, call: Callable[..., Any], iterator: Any, /) -> Any:
        """Time the wait for a batch."""
        recorder = self.present
        if recorder is None or not recorder.load():
            return call(iterator)
        batch = None
        try:
            batch = call(iterator)
        finally:
            recorder.end_load(batch, int(iterator._num_workers))
        return batch

    def backward(self, call: Callable[..., None], /, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Time a backward, and note its losses."""
        recorder = self.present
        if recorder is None or recorder.part == "backward":
            return call(tensors, *args, **kwargs)
        recorder.backward(tensors)
        try:
            return call(tensors, *args, **kwargs)
        finally:
            recorder.end_backward()

    def scale(self, call: Callable[..., Any], scaler: Any, /, outputs: Any) -> Any:
        """Note the loss before a GradScaler multiplies it."""
        recorder = self.present
        if recorder is not None:
            recorder.unscaled = outputs
        return call(scaler, outputs)

    def update(self, optimizer: Any, closure: Callable[[], Any] | None) -> None:
        """Begin the update, or with a closure the forward in it."""
        self.recorder.update(optimizer, in_closure=closure is not None)

    def end_update(self, optimizer: Any) -> None:
        """End the update."""
        self.recorder.end_update(optimizer)

    def mode(self, call: Callable[..., Any], module: torch.nn.Module, /, mode: bool = True) -> Any:
        """Note `model.eval()` and `model.train()`, between which a script evaluates."""
        recorder = self.present
        if recorder is not None and (recorder.part == "evaluate") == bool(mode):
            recorder.switch(module, training=mode)
        return call(module, mode)


_listeners: list[ScriptListener] = []


def attach(module: ModuleType) -> None:
    """Time this process once torch is imported, and hook other libraries' saves once they are."""
    if module is torch:
        _listeners.append(ScriptListener())
        Path(json.loads(os.environ[SETTINGS_VARIABLE])["folder"], STARTED).touch()
    _listeners[0].attach(module.__name__)
