"""Digests of tensors, to be compared between ranks bit for bit.

    bits = Digests()
    bits.add("first.weight", gradient)      # on a device without waiting for it
    bits.read()                             # {"first.weight": "8c3d..."}

On a CPU it is xxh3 over the bytes, on a device a sum that depends on each word's place. So digests of one kind of
device are comparable with each other alone.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lockstep.checkpoint.write import bytes_of

__all__ = ["Digests", "leaves", "of_batch", "of_digests", "word_sum"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
_CHUNK = 1 << 24  # words at a time: their places take 128 MiB
_NAN = 3.25e-4  # in the place of each NaN, whose sign and payload no kernel promises
_ALIGNED = 64  # bytes: kernels of small products on a CPU choose their order by where the memory begins


def word_sum(local: Tensor) -> Tensor:
    """Sum of each word times an odd number that depends on its place, modulo 2**64. 0-dim int64.

    A chunk of words at a time, so that it needs no more memory than two int64 vectors of a chunk.
    """
    flat = local.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        places = torch.arange(start, start + chunk.numel(), device=flat.device, dtype=torch.int64)
        total += places.mul_(_ODD).bitwise_or_(1).mul_(chunk).sum()
    return total


class Digests:
    """Digests by name. All NaN count as one, and a sparse tensor as the dense one that it stands for."""

    def __init__(self) -> None:
        self._found: dict[str, str | Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes the tensor as it is now."""
        plain = _plain(tensor)
        on_host = plain.device.type == "cpu"
        self._found[name] = xxhash.xxh3_64_hexdigest(bytes_of(plain)) if on_host else word_sum(plain)

    def read(self) -> dict[str, str]:
        """name -> 16 hexadecimal digits, in the order of `add`."""
        waiting = [found for found in self._found.values() if isinstance(found, Tensor)]
        numbers = iter(torch.stack(waiting).tolist() if waiting else ())  # waits for the device, once
        return {
            name: found if isinstance(found, str) else f"{next(numbers) & ((1 << 64) - 1):016x}"
            for name, found in self._found.items()
        }


def of_digests(found: dict[str, str]) -> str:
    """One digest of all, whatever their order."""
    return xxhash.xxh3_64_hexdigest(repr(sorted(found.items())).encode())


def of_batch(data: Any) -> str:
    """A nested batch in host memory: its tensors, numbers and texts, and how the tensors' memory is aligned."""
    total = xxhash.xxh3_64()
    for path, leaf in leaves(data):
        total.update(path.encode())
        if isinstance(leaf, Tensor):
            total.update(repr((leaf.dtype, leaf.shape, leaf.stride(), leaf.data_ptr() % _ALIGNED)).encode())
        total.update(bytes_of(leaf) if isinstance(leaf, Tensor) else leaf)
    return total.hexdigest()


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Tensor | bytes]]:
    """(path, tensor or bytes) of every leaf of a nested batch."""
    if isinstance(data, Tensor):
        yield path, data
    elif isinstance(data, np.ndarray):
        yield path, repr((data.dtype, data.shape)).encode() + (b"" if data.dtype.hasobject else data.tobytes())
    elif isinstance(data, dict) or hasattr(data, "items"):
        for key, value in data.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(data, list | tuple):
        yield from _numbered(data, path)
    elif isinstance(data, str | int | float | bool | bytes | None):
        yield path, repr(data).encode()
    elif hasattr(data, "__dict__"):
        yield from leaves(vars(data), path)


def _numbered(values: Iterable[Any], path: str) -> Iterator[tuple[str, Tensor | bytes]]:
    for index, value in enumerate(values):
        yield from leaves(value, f"{path}[{index}]")


def _plain(tensor: Tensor) -> Tensor:
    """A dense tensor of real numbers with the same bits, but for NaN."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if not plain.is_floating_point():
        return plain
    return plain.nan_to_num(nan=_NAN, posinf=torch.inf, neginf=-torch.inf)
