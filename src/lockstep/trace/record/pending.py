"""Read the tensors of a device once a step, with one wait."""

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "PendingTensors",
]


# Type codes of the array module for 64-bit words.
_CODES = {torch.int64: "q", torch.float64: "d"}


class PendingTensors:
    """Queue of device tensors that are read at once."""

    def __init__(self) -> None:
        self._pending: list[tuple[Any, Any, Tensor, str]] = []

    def put(self, target: Any, key: Any, tensor: Tensor, form: str = "bytes") -> None:
        """Store a tensor's current value in `target[key]`; a device tensor's at `finish`.

        Args:
            form: "bytes": its 64-bit words; "numbers": a list of them.
        """
        if tensor.device.type == "cpu" and form == "numbers":
            # In host memory already, so nothing waits.
            target[key] = tensor.reshape(-1).tolist()
            return
        if tensor.dtype not in _CODES:
            if tensor.is_floating_point():
                tensor = tensor.double()
            else:
                tensor = tensor.long()
        if tensor.device.type == "cpu":
            target[key] = _to_bytes_or_list(tensor, form)
        else:
            target[key] = None
            self._pending.append((target, key, tensor.detach().reshape(-1).clone(), form))

    def finish(self) -> None:
        """Read the pending tensors and fill in their values. Waits for the device."""
        pending = self._pending
        self._pending = []
        for device in {tensor.device for _, _, tensor, _ in pending}:
            group = []
            for entry in pending:
                if entry[2].device == device:
                    group.append(entry)
            words = [tensor.view(torch.int64) for _, _, tensor, _ in group]
            # Waits for the device, once a step.
            read = torch.cat(words).cpu()
            parts = read.split_with_sizes([word.numel() for word in words])
            for (target, key, tensor, form), values in zip(group, parts, strict=True):
                target[key] = _to_bytes_or_list(values.view(tensor.dtype), form)


def _to_bytes_or_list(tensor: Tensor, form: str) -> Any:
    tensor = tensor.contiguous()
    count = tensor.numel()
    raw = ctypes.string_at(tensor.data_ptr(), 8 * count) if count else b""
    if form == "numbers":
        # In host memory already, so nothing waits.
        return array(_CODES[tensor.dtype], raw).tolist()
    # In the machine's byte order, in which a reader expects it.
    return raw
