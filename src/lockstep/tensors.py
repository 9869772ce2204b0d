"""The part of a tensor that lies on this rank."""

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "local_of"]


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether it is spread over ranks."""
    # Asked of the tensor, not of its class: to import that costs half a second, too much for runs without DTensors.
    return hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds of a DTensor, which shares its memory; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
