"""Get a tensor's part on this rank, and find tensors that are not finite."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["copy_into", "copy_to_device", "is_dtensor", "local_of", "not_finite"]


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether the tensor is distributed over ranks."""
    # Duck-typed: importing the class takes half a second, too much for runs without DTensors.
    return hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a plain tensor without gradient, sharing its memory."""
    local = tensor
    if is_dtensor(tensor):
        with torch.no_grad():
            local = tensor.to_local()
    return local.detach() if local.requires_grad else local  # called for each gradient in each step


def copy_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor; plain ones into a distributed tensor are those of this rank's part."""
    if is_dtensor(tensor) and not is_dtensor(values):
        tensor = local_of(tensor)
    tensor.copy_(values)


def copy_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device through pinned memory, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


@torch.no_grad()
def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """List the tensors that hold NaN or an infinity, sorted by name.

    Args:
        tensors: this rank's parts, not DTensors; integer ones are skipped.
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, each in sorted(tensors.items()):
        if each.numel() and (each.is_floating_point() or each.is_complex()):
            by_device.setdefault(each.device, []).append(name)
    return sorted(name for names in by_device.values() for name in _not_finite_on_one_device(tensors, names))


def _not_finite_on_one_device(tensors: Mapping[str, torch.Tensor], names: list[str]) -> list[str]:
    # One call reads them all at memory speed, without the GIL. A norm overflows for large values, so suspects are
    # checked again.
    values = [_readable(tensors[name].detach()) for name in names]
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(values, 2)])
    suspects = norms.isfinite().logical_not().nonzero().flatten().tolist()  # waits for the device
    return [names[index] for index in suspects if not bool(values[index].isfinite().all())]  # waits for the device


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype that has norms."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.itemsize == 1 else tensor
