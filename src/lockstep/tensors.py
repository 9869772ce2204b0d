"""The part of a tensor that lies on this rank, and which tensors have values that are not finite."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "local_of", "not_finite", "sent"]


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


@torch.no_grad()
def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """List the tensors that hold NaN or an infinity, in order of their names.

    Args:
        tensors: this rank's parts, not DTensors; those that are not of numbers with a fraction are passed over.
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, each in sorted(tensors.items()):
        if each.numel() and (each.is_floating_point() or each.is_complex()):
            by_device.setdefault(each.device, []).append(name)
    return sorted(name for names in by_device.values() for name in _not_finite_on_one_device(tensors, names))


def _not_finite_on_one_device(tensors: Mapping[str, torch.Tensor], names: list[str]) -> list[str]:
    # One call reads them all, at the speed of the memory, and without the interpreter's lock. A norm overflows where
    # values are large, so what it points out is looked at again.
    values = [_readable(tensors[name].detach()) for name in names]
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(values, 2)])
    suspects = norms.isfinite().logical_not().nonzero().flatten().tolist()  # waits for the device
    return [names[index] for index in suspects if not bool(values[index].isfinite().all())]  # waits for the device


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that has norms."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.itemsize == 1 else tensor
