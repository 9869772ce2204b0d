"""Host memory for copies of tensors, no larger than they are, that a device writes by itself.

    pinned = Pinned()
    pinned.prepare(tensors, device)     # makes it in a thread, ahead of the first copy
    places = pinned.places(tensors)     # a tensor in host memory for each; the same ones as long as shapes stay
    runs(places)                        # [range(0, 37), range(37, 70)]: those that follow each other without a gap
    span(places[:37])                   # their bytes as one tensor

torch's allocator of pinned memory rounds every request up to a power of two: of 18.7 GB in one piece it would take 32.
Here one plain buffer holds all tensors, and CUDA is told to lock its pages (`cudaHostRegister`). To fault in and lock
a gigabyte takes some tenths of a second, so it is done beside the steps.
"""

import contextlib
import ctypes
import logging
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pinned", "runs", "span"]

_LOG = logging.getLogger("lockstep")
_PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process
_SEGMENT = 512 * 2**20  # bytes that are locked at once: launches of kernels wait for the driver meanwhile
_THREADS = 4  # that touch pages: one alone reaches a fraction of the memory's rate

_Form = list[tuple[torch.dtype, torch.Size, bool]]  # whether it comes from a CUDA device


class Pinned:
    """One buffer, which is kept for as long as the same shapes and dtypes are asked for.

    It is locked where one of the tensors lies on a CUDA device. Where the driver refuses, it is used as it is, and
    copies from a device hold up whoever orders them.

    Attributes:
        nbytes: of the buffer.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._form: _Form = []
        self._places: list[Tensor] | None = []
        self._release: Any = None
        self._thread: threading.Thread | None = None

    def prepare(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Make the buffer for such tensors in a thread; `places` waits for it.

        Args:
            device: the CUDA device of this process, which a new thread does not know.
        """
        form = _form_of(tensors)
        if self._thread or form == self._form:
            return
        self._drop(form)

        def make() -> None:
            with contextlib.suppress(Exception):  # `places` tries again, and raises in the caller
                torch.cuda.set_device(device)
                self._make()

        self._thread = threading.Thread(target=make, name="lockstep-pin", daemon=True)
        self._thread.start()

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A place for each. No copy into places that were given before may be under way where shapes have changed."""
        if self._thread:
            self._thread.join()
            self._thread = None
        form = _form_of(tensors)
        if form != self._form or self._places is None:
            self._drop(form)
            self._make()
        assert self._places is not None
        return self._places

    def _drop(self, form: _Form) -> None:
        """Give the buffer back before the next one is made: never two."""
        self._form, self._places = form, None
        if self._release:
            self._release()
            self._release = None

    def _make(self) -> None:
        starts, segments, end = [], [0], 0
        for dtype, shape, _ in self._form:
            end = _up(end, dtype.itemsize)
            if end - segments[-1] >= _SEGMENT:  # a copy must not go across two of them, nor a run: there is a gap
                end = _up(end + 1, mmap.PAGESIZE)
                segments.append(end)
            starts.append(end)
            end += _size(dtype, shape)
        lock = any(on_device for _, _, on_device in self._form)
        flat = _memory(end) if lock else torch.empty(end, dtype=torch.uint8)
        parts = [flat[start:stop] for start, stop in zip(segments, [*segments[1:], end], strict=True)]
        locked: list[Tensor] = []
        runtime: Any = torch.cuda.cudart() if lock else None  # type: ignore[no-untyped-call]
        self._release = weakref.finalize(self, _unlock, runtime, locked)
        self._release.atexit = False  # the driver is gone by then, or takes it back itself
        for part in (part for part in parts if part.nbytes and lock):
            _touch(part)
            if not _lock(runtime, part):
                break
            locked.append(part)
        self.nbytes = end
        self._places = [
            flat[start : start + _size(dtype, shape)].view(dtype).view(shape)
            for start, (dtype, shape, _) in zip(starts, self._form, strict=True)
        ]


def runs(tensors: Sequence[Tensor], most: int = sys.maxsize) -> list[range]:
    """Group tensors of host memory that follow each other in it without a gap.

    Args:
        most: bytes that a run of more than one tensor may have.

    Returns:
        Ranges of indices of `tensors`, all of them in order. One that is not dense host memory is a run by itself.
    """
    begins, size = list[int](), 0
    after: tuple[int, int] | None = None  # where the run goes on: the storage, and the byte in it
    for index, tensor in enumerate(tensors):
        storage, start = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.itemsize
        dense = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not dense or after != (storage, start) or size + tensor.nbytes > most:
            begins.append(index)
            size = 0
        after, size = ((storage, start + tensor.nbytes) if dense else None), size + tensor.nbytes
    return [range(begin, stop) for begin, stop in pairwise([*begins, len(tensors)])]


def span(run: Sequence[Tensor]) -> Tensor:
    """View the memory of a run as one tensor of bytes."""
    first = run[0]
    start, size = first.storage_offset() * first.itemsize, sum(tensor.nbytes for tensor in run)
    return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage(), start, (size,), (1,))


def _form_of(tensors: Sequence[Tensor]) -> _Form:
    return [(tensor.dtype, tensor.shape, tensor.is_cuda) for tensor in tensors]


def _size(dtype: torch.dtype, shape: torch.Size) -> int:
    return dtype.itemsize * math.prod(shape)


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _memory(nbytes: int) -> Tensor:
    """Map anonymous memory, in large pages where the system has them, that no forked process inherits.

    A fork would copy its page tables, and before Linux 5.11 its pages too, while the device writes into them.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(AttributeError, OSError):  # not of this system: the memory is as good without
            mapped.madvise(getattr(mmap, advice))
    return torch.frombuffer(mapped, dtype=torch.uint8)  # which keeps it


def _touch(part: Tensor) -> None:
    """Have the system give the memory's pages, by several threads at once, without the interpreter's lock."""
    step = _up(math.ceil(part.nbytes / _THREADS), 2**21)
    begin = part.data_ptr()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for start in range(0, part.nbytes, step):
            pool.submit(ctypes.memset, begin + start, 0, min(step, part.nbytes - start))


def _lock(runtime: Any, part: Tensor) -> bool:
    """Whether the driver locked the memory's pages."""
    code = int(runtime.cudaHostRegister(part.data_ptr(), part.nbytes, _PORTABLE))
    if not code:
        return True
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")  # takes the error, which the next kernel would raise in its place
    _LOG.warning("the driver does not lock %d bytes of memory (error %d): a save holds the loop up", part.nbytes, code)
    return False


def _unlock(runtime: Any, locked: list[Tensor]) -> None:
    for part in locked:
        runtime.cudaHostUnregister(part.data_ptr())
    locked.clear()
