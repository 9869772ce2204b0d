"""Move nested batches to a device.

move = mover(device)
batch = move(batch) if move else batch

Moves tensors, objects with a method `to` (a PackedSequence, a BatchEncoding), dicts, tuples, named tuples, lists and
dataclasses. Each container keeps its type, and the original is unchanged. Anything else is passed through.

Copies to a CUDA device use a stream of their own, from pinned memory: only the computation that needs them waits.
"""

import copy
import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["AHEAD", "SideStream", "mover"]

AHEAD = 8  # batches
Move = Callable[[Any], Any]


def mover(device: torch.device) -> Move | None:
    """Return a function that moves a nested batch to the device; None for a CPU."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return SideStream(device)

    def tensor(value: Tensor) -> Tensor:
        return value.to(device, non_blocking=True)

    def movable(value: Any) -> Any:
        held = copy.copy(value)  # `to` may change the object: keep the one on the host
        moved = held.to(device)
        return held if moved is None else moved

    return lambda value: _moved(value, tensor, movable)


@final
class SideStream:
    """Copies to a CUDA device on a stream of its own.

    stream = SideStream(device)
    coming = stream.begin(held)     # the copies are under way
    data = coming()                 # what is computed from here on has them; the device waits, the host does not
    data = stream(held)             # both at once

    A copy takes memory until the device has computed with it. So the host waits when it is more than `AHEAD` batches
    ahead of the device, as in an evaluation or a step of many micro-batches; the device then still has all of these to
    compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._marks: deque[torch.cuda.Event] = deque()  # events at the start of each batch's computation

    def __call__(self, held: Any) -> Any:
        return self.begin(held)()

    def begin(self, held: Any) -> Callable[[], Any]:
        """Start the copies; return a function that takes them over.

        Call it once, on the stream that computes.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        computing, placed = torch.cuda.current_stream(self._device), list[Tensor]()

        def tensor(value: Tensor) -> Tensor:
            if value.device.type != "cpu" or value.layout is not torch.strided:  # cannot be pinned
                with torch.cuda.stream(computing):
                    return value.to(self._device, non_blocking=True)
            source = value if value.is_pinned() else value.pin_memory()
            placed.append(source.to(self._device, non_blocking=True))
            return placed[-1]

        def movable(value: Any) -> Any:
            with torch.cuda.stream(computing):  # it allocates on its own terms
                return _by_itself(value, self._device)

        with torch.cuda.stream(self._stream):
            data = _moved(held, tensor, movable)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)

        def take() -> Any:
            present = torch.cuda.current_stream(self._device)
            present.wait_event(event)
            for each in placed:
                each.record_stream(present)  # its memory belongs to the side stream, and must outlive the computation
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(present)
            self._marks.append(mark)
            while self._marks and self._marks[0].query():  # type: ignore[no-untyped-call]
                self._marks.popleft()
            if len(self._marks) > AHEAD:
                self._marks.popleft().synchronize()  # waits for the device, AHEAD batches behind
            return data

        return take


def _by_itself(value: Any, device: torch.device) -> Any:
    """Move an object by its own `to`, if possible from pinned memory and without waiting."""
    held = copy.copy(value)  # `to` may change the object: keep the one on the host
    if callable(getattr(held, "pin_memory", None)):
        pinned = held.pin_memory()
        held = held if pinned is None else pinned
    elif isinstance(held, MutableMapping):
        for key, item in list(held.items()):
            if isinstance(item, Tensor) and item.device.type == "cpu" and item.layout is torch.strided:
                held[key] = item.pin_memory()
    flies = _may_fly(getattr(type(held), "to", None))
    moved = held.to(device, non_blocking=True) if flies else held.to(device)  # waits for the device
    return held if moved is None else moved


@cache
def _may_fly(to: Any) -> bool:
    """Whether a method `to` accepts `non_blocking`, as a tensor's does."""
    try:
        known = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.name == "non_blocking" or each.kind is each.VAR_KEYWORD for each in known)


def _moved(value: Any, tensor: Callable[[Tensor], Tensor], movable: Move) -> Any:
    """Rebuild the nested value with its tensors, and objects with `to`, moved."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tensor(value)
        if isinstance(value, type):
            return value
        if callable(getattr(value, "to", None)):
            return movable(value)
        if isinstance(value, dict):
            return _like_dict(value, {key: move(item) for key, item in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(move(item) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(move(item) for item in value)
        if dataclasses.is_dataclass(value):
            return _like_dataclass(value, move)
        return value

    return move(value)


def _like_dict(value: dict[Any, Any], moved: dict[Any, Any]) -> Any:
    """Put `moved` into a dict of the same type: an OrderedDict, a defaultdict, a user's class."""
    if type(value) is dict:
        return moved
    made = copy.copy(value)
    for key, item in moved.items():
        made[key] = item
    return made


def _like_dataclass(value: Any, move: Move) -> Any:
    """Copy the object with its fields moved, without `__post_init__`; works for frozen ones."""
    made = copy.copy(value)
    for spec in dataclasses.fields(value):
        object.__setattr__(made, spec.name, move(getattr(value, spec.name)))
    return made
