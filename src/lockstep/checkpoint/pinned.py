"""Host memory that a device writes by itself, no larger than what is copied into it.

    places = Pinned().places(tensors)       # a tensor in host memory for each; the same ones as long as shapes stay

torch's allocator of pinned memory rounds every request up to a power of two: of 18.7 GB in one piece it would take 32.
Here one plain buffer holds all tensors, and CUDA is told to lock its pages (`cudaHostRegister`).
"""

import contextlib
import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pinned"]

_LOG = logging.getLogger("lockstep")
_ALIGNED = 64  # bytes: where a tensor may begin, whatever its dtype
_PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process


class Pinned:
    """One buffer, which is kept for as long as the same shapes and dtypes are asked for.

    Where the driver refuses to lock it, it is used as it is, and copies from a device hold up whoever orders them.

    Attributes:
        nbytes: of the buffer.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._form: list[tuple[torch.dtype, torch.Size]] = []
        self._places: list[Tensor] = []
        self._release: Any = None

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A place for each. No copy into places that were given before may be under way where shapes have changed."""
        form = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if form != self._form:
            self._form, self._places = form, []
            if self._release:
                self._release()  # before the next one is made: never two
                self._release = None
            self._places = self._made(tensors)
        return self._places

    def _made(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts, self.nbytes = [], 0
        for tensor in tensors:
            starts.append(self.nbytes)
            self.nbytes += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
        flat = torch.empty(self.nbytes, dtype=torch.uint8)
        if self.nbytes and (runtime := _lock(flat)):
            self._release = weakref.finalize(self, _unlock, runtime, flat)
            self._release.atexit = False  # the driver is gone by then, or takes it back itself
        return [
            flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]


def _lock(flat: Tensor) -> Any:
    """What can unlock it; None where it is not locked."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, _PORTABLE))
    if not code:
        return runtime
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")  # takes the error, which the next kernel would raise in its place
    _LOG.warning("the driver does not lock %d bytes of memory (error %d): a save holds the loop up", flat.nbytes, code)
    return None


def _unlock(runtime: Any, flat: Tensor) -> None:
    runtime.cudaHostUnregister(flat.data_ptr())
