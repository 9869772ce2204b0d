"""Get a tensor's shard on this rank, collate samples, and find non-finite tensors."""

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch.utils.data import default_collate

# Private to torch: its `_worker_info` is set in a loader process.
from torch.utils.data._utils import worker

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "as_bytes",
    "collate_samples",
    "copy_into",
    "copy_to_device",
    "from_bytes",
    "has_gaps",
    "host_bytes",
    "is_dtensor",
    "is_expanded",
    "local_of",
    "not_finite",
    "reaches",
    "shared_memory",
]


def reaches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a tensor's or module's name.

    A pattern has `*`, `?`, `[...]`; it may also equal the name's last parts.
    """
    return fnmatchcase(name, pattern) or name.endswith(f".{pattern}")


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether the tensor is distributed over ranks."""
    # Duck-typed: importing the class takes half a second, too much for runs without DTensors.
    return hasattr(tensor, "placements")


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether a dimension has a stride of 0.

    torch refuses to write into such a tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(not step and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True))


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor has other numbers between its own in memory, as `rows[::2]` has."""
    begin, end = _span(tensor)
    return end - begin > tensor.nbytes > 0


def shared_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of each two tensors whose spans of memory overlap.

    Sparse and nested tensors are left out.
    """
    spans = []
    for name, tensor in tensors.items():
        local = local_of(tensor)
        if local.layout is torch.strided and not local.is_nested and local.numel():
            # `_cdata` is private: it identifies the storage even on the meta device, where `data_ptr()` is 0 for all
            # tensors.
            spans.append((local.untyped_storage()._cdata, *_span(local), name))
    spans.sort()
    for index, (storage, _, end, name) in enumerate(spans):
        for other_storage, other_begin, _, other in spans[index + 1 :]:
            if other_storage != storage or other_begin >= end:
                break
            yield name, other


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's first byte in its storage, and the byte after its last.

    The tensor has elements.
    """
    first_element = int(tensor.storage_offset())
    last_element = first_element + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first_element * tensor.itemsize, (last_element + 1) * tensor.itemsize


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as a plain tensor without gradient, sharing its memory."""
    local = tensor
    if is_dtensor(tensor):
        with torch.no_grad():
            local = tensor.to_local()
    # Called for each gradient in each step, so a needless `detach` is avoided.
    if local.requires_grad:
        return local.detach()
    return local


def gradient_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a gradient of this rank's shard in the form of its parameter: a DTensor, or the plain tensor."""
    if not is_dtensor(parameter):
        return local
    # At the first use: torch loads the module for a second.
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order.

    A view of its memory if it is contiguous, else a copy.

    Args:
        tensor: on any device. Of a quantized one, its integers; of a sparse one, its dense values; of a nested one,
            its parts, one after the other.

    Returns:
        uint8 [bytes]
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_nested:
        return torch.cat([torch.empty(0, dtype=torch.uint8, device=plain.device), *map(as_bytes, plain.unbind())])
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    flat = plain.contiguous().reshape(-1)
    # `contiguous` and `reshape` keep the stride of a dimension of size 1, whatever it is, and `view` checks that
    # stride.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a host tensor in row-major order.

    Without a copy if it is contiguous.
    """
    # `numpy()` would forbid for good that the storage is resized, as modules of torch.ao do in their forwards.
    return np.from_dlpack(as_bytes(tensor)).data


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Copy bytes into a new tensor on their device. The reverse of `as_bytes`.

    Args:
        data: uint8, of any shape, strides and alignment.
        dtype: of the new tensor.
        shape: of the new tensor.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device=data.device)
    as_bytes(tensor).copy_(data.reshape(-1))
    return tensor


def copy_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor.

    Plain values for a distributed tensor are those of this rank's shard.
    """
    if is_dtensor(tensor) and not is_dtensor(values):
        tensor = local_of(tensor)
    tensor.copy_(values)


def copy_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device through pinned memory, without waiting for it."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


@torch.no_grad()
def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """List the tensors that hold NaN or an infinity, sorted by name.

    Args:
        tensors: this rank's parts, not DTensors; integer ones are skipped.
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            by_device.setdefault(tensor.device, []).append(name)
    return sorted(name for names in by_device.values() for name in _not_finite_on_one_device(tensors, names))


def _not_finite_on_one_device(tensors: Mapping[str, torch.Tensor], names: list[str]) -> list[str]:
    # One call reads all tensors at memory speed, without the GIL. The norm of large values may overflow, so suspects
    # are checked again.
    values = [_readable(tensors[name].detach()) for name in names]
    # Private to torch: norms of all tensors in one call.
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(values, 2)])
    # Waits for the device, once.
    suspects = norms.isfinite().logical_not().nonzero().flatten().tolist()
    # Waits for the device, for suspects only.
    return [names[index] for index in suspects if not bool(values[index].isfinite().all())]


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype that has norms."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.itemsize == 1:
        return tensor.float()
    return tensor


# NumPy makes an array of numbers of one type in a third of torch's time.
_NUMBERS: dict[type, type] = {int: np.int64, float: np.float64, bool: np.bool_}


def collate_samples(samples: Sequence[Any]) -> Any:
    """Combine samples into a batch as torch's `default_collate` does, faster for tensors and numbers.

    As there, the first sample decides how all are combined.

    Args:
        samples: tensors, numbers, or tuples, lists, dicts or dataclasses of them, or graphs of PyG; anything else is
            left to torch.
    """
    return _COLLATE.get(type(samples[0]), _collate_other)(samples)


def _collate_tensors(samples: Any) -> Any:
    sample = samples[0]
    # In a loader process torch's own collation stacks into shared memory.
    if worker._worker_info is None and sample.layout is torch.strided and not sample.is_nested:
        return torch.stack(samples)
    return default_collate(samples)


def _collate_numbers(samples: Any) -> Any:
    types = set(map(type, samples))
    if len(types) == 1:
        with suppress(OverflowError):
            return torch.from_numpy(np.array(samples, _NUMBERS[types.pop()]))
    return default_collate(samples)


def _collate_sequences(samples: Any) -> Any:
    try:
        columns = list(zip(*samples, strict=True))
    except ValueError:
        # The samples have different lengths.
        return default_collate(samples)
    return [collate_samples(column) for column in columns]


def _collate_dicts(samples: Sequence[Any]) -> Any:
    return {name: collate_samples([sample[name] for sample in samples]) for name in samples[0]}


def _collate_other(samples: Any) -> Any:
    sample_0 = samples[0]
    if dataclasses.is_dataclass(sample_0) and not isinstance(sample_0, type):
        # Copy it without `__post_init__`, which is meant for one sample.
        batch = copy.copy(sample_0)
        for spec in dataclasses.fields(sample_0):
            object.__setattr__(batch, spec.name, collate_samples([getattr(sample, spec.name) for sample in samples]))
        return batch
    if any(base.__module__.startswith("torch_geometric.data") for base in type(sample_0).__mro__):
        return sys.modules["torch_geometric.data"].Batch.from_data_list(samples)
    return default_collate(samples)


_COLLATE: dict[type, Callable[[Any], Any]] = {
    torch.Tensor: _collate_tensors,
    tuple: _collate_sequences,
    list: _collate_sequences,
    dict: _collate_dicts,
    **dict.fromkeys(_NUMBERS, _collate_numbers),
}
