"""The part of a tensor that lies on this rank."""

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "local_of", "sent"]


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether it is spread over ranks."""
    # Asked of the tensor, not of its class: to import that costs half a second, too much for runs without DTensors.
    return hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor, without gradient, that this rank holds of `tensor`; they share their memory."""
    local = tensor
    if is_dtensor(tensor):
        with torch.no_grad():
            local = tensor.to_local()
    return local.detach() if local.requires_grad else local  # asked first: it stands in each step, for each gradient


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, from pinned memory: a copy from any other would wait for the device."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
