"""Values that stay on their devices until a step's one read, and names that are written once.

read = Reading()
record = {"digests": read.hold(sums), "loss": read.hold(loss, "numbers")}
read.line(record)           # the same with plain values in their places
"""

import base64
import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Held", "Reading", "packed"]


@dataclass(frozen=True)
class Held:
    """The place of a tensor whose values are not on the host yet; `form`: how they are written."""

    index: int
    form: str


class Reading:
    """Tensors that are waited for together."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def hold(self, tensor: Tensor, form: str = "bytes") -> Held:
        """Takes a tensor as it is now.

        Args:
            form: "bytes": base64 of its 64-bit words; "numbers": a list of them.
        """
        flat = tensor.detach().reshape(-1)
        wanted = torch.float64 if flat.is_floating_point() else torch.int64
        self._tensors.append(flat.to(wanted, copy=True))
        return Held(len(self._tensors) - 1, form)

    def line(self, record: Any) -> Any:
        """`record` with its values, and an empty Reading afterwards."""
        values = self._read()
        self._tensors = []
        return _filled(record, values)

    def _read(self) -> list[Tensor]:
        found: list[Tensor] = [torch.empty(0)] * len(self._tensors)
        for device in {tensor.device for tensor in self._tensors}:
            here = [index for index, tensor in enumerate(self._tensors) if tensor.device == device]
            words = [self._tensors[index].view(torch.int64) for index in here]
            read = torch.cat(words).cpu()  # waits for the device
            for index, part in zip(here, read.split_with_sizes([word.numel() for word in words]), strict=True):
                found[index] = part.view(self._tensors[index].dtype)
        return found


def _filled(value: Any, values: list[Tensor]) -> Any:
    if isinstance(value, Held):
        return packed(values[value.index]) if value.form == "bytes" else values[value.index].tolist()
    if isinstance(value, dict):
        return {key: _filled(each, values) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    return value


def packed(words: Tensor) -> str:
    """base64 of a host tensor's bytes (little-endian machines)."""
    flat = words.contiguous()
    raw = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
    return base64.b64encode(raw).decode()
