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

# Number of batches that the host may be ahead of the device.
AHEAD = 8
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
        # `to` may change the object, so copy it: the one on the host must stay.
        copied = copy.copy(value)
        result = copied.to(device)
        if result is None:
            return copied
        return result

    return lambda value: _move_nested(value, tensor, movable)


@final
class SideStream:
    """Copies to a CUDA device on a stream of its own.

    stream = SideStream(device)
    finish = stream.begin(batch)    # start the copies
    data = finish()                 # later kernels wait for the copies on the device; the host does not wait
    data = stream(batch)            # both at once

    A copy takes memory until the device has computed with it. So the host waits when it is more than `AHEAD` batches
    ahead of the device, as in an evaluation or a step of many micro-batches; the device then still has all of these to
    compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        # Events at the start of each batch's computation.
        self._marks: deque[torch.cuda.Event] = deque()

    def __call__(self, batch: Any) -> Any:
        return self.begin(batch)()

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Start the copies; return a function that takes them over.

        Call it once, on the stream that computes.
        """
        if self._stream is None:
            # torch gives the constructors and methods of streams and events no types, here and below.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self._device)
        copies = list[Tensor]()

        def tensor(value: Tensor) -> Tensor:
            # Such a tensor cannot be pinned.
            if value.device.type != "cpu" or value.layout is not torch.strided:
                with torch.cuda.stream(computing):
                    return value.to(self._device, non_blocking=True)
            source = value if value.is_pinned() else value.pin_memory()
            copies.append(source.to(self._device, non_blocking=True))
            return copies[-1]

        def movable(value: Any) -> Any:
            # Its own `to` allocates memory as it likes, so let it use the computing stream.
            with torch.cuda.stream(computing):
                return _move_object(value, self._device)

        with torch.cuda.stream(self._stream):
            data = _move_nested(batch, tensor, movable)
            # As above: no types.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)

        def finish() -> Any:
            present = torch.cuda.current_stream(self._device)
            present.wait_event(event)
            for copied in copies:
                # The memory belongs to the side stream's pool, and must not be reused before the computation has ended.
                copied.record_stream(present)
            # As above: no types.
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(present)
            self._marks.append(mark)
            # A query does not wait.
            while self._marks and self._marks[0].query():  # type: ignore[no-untyped-call]
                self._marks.popleft()
            if len(self._marks) > AHEAD:
                # Waits for the device, AHEAD batches behind, so that copies do not fill its memory.
                self._marks.popleft().synchronize()
            return data

        return finish


def _move_object(value: Any, device: torch.device) -> Any:
    """Move an object by its own `to`, if possible from pinned memory and without waiting."""
    # `to` may change the object, so copy it: the one on the host must stay.
    copied = copy.copy(value)
    if callable(getattr(copied, "pin_memory", None)):
        pinned = copied.pin_memory()
        copied = copied if pinned is None else pinned
    elif isinstance(copied, MutableMapping):
        for key, item in list(copied.items()):
            if isinstance(item, Tensor) and item.device.type == "cpu" and item.layout is torch.strided:
                copied[key] = item.pin_memory()
    non_blocking = _accepts_non_blocking(getattr(type(copied), "to", None))
    # Without `non_blocking` this waits for the device.
    if non_blocking:
        result = copied.to(device, non_blocking=True)
    else:
        result = copied.to(device)
    if result is None:
        return copied
    return result


@cache
def _accepts_non_blocking(to: Any) -> bool:
    """Whether a method `to` accepts `non_blocking`, as a tensor's does."""
    try:
        parameters = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _move_nested(value: Any, tensor: Callable[[Tensor], Tensor], movable: Move) -> Any:
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


def _like_dict(value: dict[Any, Any], entries: dict[Any, Any]) -> Any:
    """Put `entries` into a dict of the same type.

    An OrderedDict, a defaultdict, or a user's class.
    """
    if type(value) is dict:
        return entries
    result = copy.copy(value)
    for key, item in entries.items():
        result[key] = item
    return result


def _like_dataclass(value: Any, move: Move) -> Any:
    """Copy the object with its fields moved, without `__post_init__`; works for frozen ones."""
    result = copy.copy(value)
    for spec in dataclasses.fields(value):
        object.__setattr__(result, spec.name, move(getattr(value, spec.name)))
    return result
