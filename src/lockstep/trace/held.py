"""Values that stay on their devices until a step's one read.

read = Reading()
read.put(record, "loss", loss, "numbers")   # on the host at once where it is there already
read.finish()                               # the rest of them: waits for their devices once
"""

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

__all__ = ["Reading"]

_CODES = {torch.int64: "q", torch.float64: "d"}


class Reading:
    """Tensors that are waited for together."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Any, Tensor, str]] = []

    def put(self, into: Any, key: Any, tensor: Tensor, form: str = "bytes") -> None:
        """Makes `into[key]`, of a dict or a list, what a tensor holds now; not before `finish` where it is on a device.

        Args:
            form: "bytes": its 64-bit words; "numbers": a list of them.
        """
        if tensor.device.type == "cpu" and form == "numbers":
            into[key] = tensor.reshape(-1).tolist()
            return
        if tensor.dtype not in _CODES:
            tensor = tensor.double() if tensor.is_floating_point() else tensor.long()
        if tensor.device.type == "cpu":
            into[key] = _written(tensor, form)
        else:
            into[key] = None
            self._waiting.append((into, key, tensor.detach().reshape(-1).clone(), form))

    @property
    def waits(self) -> bool:
        """Whether `finish` would wait for a device."""
        return bool(self._waiting)

    def finish(self) -> None:
        """Fills in what is waited for."""
        waiting, self._waiting = self._waiting, []
        for device in {tensor.device for _, _, tensor, _ in waiting}:
            here = [each for each in waiting if each[2].device == device]
            words = [tensor.view(torch.int64) for _, _, tensor, _ in here]
            read = torch.cat(words).cpu()  # waits for the device
            parts = read.split_with_sizes([word.numel() for word in words])
            for (into, key, tensor, form), part in zip(here, parts, strict=True):
                into[key] = _written(part.view(tensor.dtype), form)


def _written(tensor: Tensor, form: str) -> Any:
    tensor = tensor.contiguous()
    count = tensor.numel()
    raw = ctypes.string_at(tensor.data_ptr(), 8 * count) if count else b""
    if form == "numbers":
        return array(_CODES[tensor.dtype], raw).tolist()
    return raw  # of little-endian machines
