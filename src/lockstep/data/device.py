"""A nested batch on its way to a device.

move = mover(device)
batch = move(batch) if move else batch
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["mover"]


def mover(device: torch.device) -> Callable[[Any], Any] | None:
    """The function that takes a nested batch to the device; None where it is there already.

    Tensors, what has a method `to` (a PackedSequence, a BatchEncoding), dicts, tuples, named tuples, lists and
    dataclasses; each container keeps its type, and the one given stays as it is. Anything else is passed on.
    """
    if device.type == "cpu":
        return None

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        if isinstance(value, type):
            return value
        if callable(getattr(value, "to", None)):
            held = copy.copy(value)  # some change themselves: the one on the host stays there
            moved = held.to(device)
            return held if moved is None else moved
        if isinstance(value, dict):
            return _like_dict(value, {key: move(item) for key, item in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(move(item) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(move(item) for item in value)
        if dataclasses.is_dataclass(value):
            return _like_dataclass(value, move)
        return value

    return move


def _like_dict(value: dict[Any, Any], moved: dict[Any, Any]) -> Any:
    """`moved` in a dict of the same type: an OrderedDict, a defaultdict with its factory, a class of the user's."""
    if type(value) is dict:
        return moved
    made = copy.copy(value)
    for key, item in moved.items():
        made[key] = item
    return made


def _like_dataclass(value: Any, move: Callable[[Any], Any]) -> Any:
    """The same object with its fields moved; `__post_init__` has run already, and a frozen one may be filled here."""
    made = copy.copy(value)
    for spec in dataclasses.fields(value):
        object.__setattr__(made, spec.name, move(getattr(value, spec.name)))
    return made
