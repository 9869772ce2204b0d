"""Batch digests of small CPU tensors over several steps, because per-call overhead dominates.

pool = Pool(reading.put)
pool.sums(slots, tensors, [(found, 0, 6), ...])     # their current values
pool.batch(record, batch); pool.output(record, rows)
pool.finish()                                       # fills in all records: `found[1]`, `record["s"]`, ...

`PendingTensors` likewise reads the tensors of a device together.
"""

import ctypes
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.trace.record.samples import Batch, SampleDigests, digested, outcomes
from lockstep.trace.record.sums import WIDTH, ElementPlaces, SumPlan

__all__ = [
    "SLOTS",
    "PendingTensors",
    "Pool",
    "Slots",
    "put_digests",
]


_CODES = {torch.int64: "q", torch.float64: "d"}


class PendingTensors:
    """Device tensors that are read together."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Any, Tensor, str]] = []

    def put(self, into: Any, key: Any, tensor: Tensor, form: str = "bytes") -> None:
        """Store a tensor's current value in `into[key]`; for a device tensor, at `finish`.

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
        """Read the pending tensors, and fill in their values. Waits for the device."""
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


SLOTS = 8  # steps that may wait
_ROWS = 1024  # rows of sums up to which a step may wait: a MiB of memory for each step
_ELEMENTS = 1 << 16  # of a batch, or of an output
_HELD = 1 << 20  # elements of all batches and outputs: an evaluation may have any number
_TYPES = (Tensor, torch.nn.Parameter)  # a copy of other types may mean something else

Put = Callable[..., None]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Slots:
    """Memory for the same pieces in each of `SLOTS` steps.

    Attributes:
        into: for each waiting step, the targets of its rows: (list whose index 1 is filled, first row, end).
    """

    def __init__(self, plains: Sequence[Tensor], places: Sequence[ElementPlaces]) -> None:
        self._plan, self._count = SumPlan(plains, places, pooled=True), len(plains)
        self._rooms, self._views = self._plan.rooms(SLOTS)
        self.into: list[list[tuple[list[Any], int, int]]] = []
        self._last = 0

    @staticmethod
    def suit(locals_: Sequence[Tensor], places: Sequence[ElementPlaces]) -> bool:
        """Whether these tensors are few, on a CPU, and plainly laid out."""
        rows = sum(-(-tensor.numel() // 256) + 1 for tensor in locals_)
        return rows <= _ROWS and all(
            type(tensor) in _TYPES
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and not tensor.is_complex()
            and not place.run
            for tensor, place in zip(locals_, places, strict=True)
        )

    def take(self, tensors: list[Tensor], into: list[tuple[list[Any], int, int]]) -> None:
        self._last = len(self.into)
        torch._foreach_copy_(self._views[self._last], tensors)
        self.into.append(into)

    def unmoved(self, tensors: list[Tensor]) -> bool:
        """Whether the first pieces of the last step are bytewise equal to `tensors`."""
        views = self._views[self._last]
        return all(
            tensor.dtype == view.dtype
            and tensor.is_contiguous()
            and not _memcmp(tensor.data_ptr(), view.data_ptr(), tensor.numel() * tensor.element_size())
            for tensor, view in zip(tensors, views, strict=False)
        )

    def finish(self) -> None:
        rows = self._plan.pooled(self._rooms, len(self.into))
        raw = ctypes.string_at(rows.data_ptr(), 8 * rows.numel())
        for time, into in enumerate(self.into):
            for found, begin, end in into:
                first, last = ((time * self._count + place) * WIDTH * 8 for place in (begin, end))
                found[1] = raw[first:last]
        self.into = []


class Pool:
    """Small computations that wait for those of later steps."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._slots: list[Slots] = []
        self._batches: dict[Hashable, list[tuple[dict[str, Any], Batch]]] = {}
        self._outputs: dict[Hashable, list[tuple[dict[str, Any], list[Tensor]]]] = {}
        self._held = 0

    def sums(self, slots: Slots, tensors: list[Tensor], into: list[tuple[list[Any], int, int]]) -> None:
        if len(slots.into) == SLOTS:
            self.finish()
        if not slots.into:
            self._slots.append(slots)
        slots.take(tensors, into)

    def batch(self, record: dict[str, Any], batch: Batch) -> bool:
        """Copy a batch if it is small enough; return whether it was."""
        key = self._key([value for _, value in batch.leaves])
        if key is None:
            return False
        batch.leaves = [(path, value.clone()) for path, value in batch.leaves]
        self._batches.setdefault((key, batch.mask, *batch.names), []).append((record, batch))
        return True

    def output(self, record: dict[str, Any], rows: list[Tensor]) -> bool:
        """Copy the rows of an output if they are small enough; return whether they were."""
        key = self._key(rows)
        if key is None:
            return False
        self._outputs.setdefault(key, []).append((record, [row.clone() for row in rows]))
        return True

    def finish(self) -> None:
        """Compute what waits."""
        for slots in self._slots:
            slots.finish()
        for batches in self._batches.values():
            digests = digested([batch for _, batch in batches])
            for number, (record, _) in enumerate(batches):
                put_digests(self._put, record, digests, number)
        for outputs in self._outputs.values():
            parts = zip(*(rows for _, rows in outputs), strict=True)
            found = outcomes([torch.cat(part) for part in parts]).view(len(outputs), -1, 2)
            for (record, _), each in zip(outputs, found, strict=True):
                self._put(record, "out", each)
        self._slots, self._batches, self._outputs, self._held = [], {}, {}, 0

    def _key(self, values: list[Any]) -> Hashable:
        """The shapes and dtypes by which tensors are grouped; None if they cannot wait."""
        for value in values:
            if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
                return None
        count = sum(value.numel() for value in values)
        if not values or count > _ELEMENTS:
            return None
        if self._held + count > _HELD:
            self.finish()
        self._held += count
        return tuple((value.shape, value.dtype) for value in values)


def put_digests(put: Put, record: dict[str, Any], digests: SampleDigests, number: int = 0) -> None:
    """Store the digests of one batch in its record."""
    for name, tensor, form in (
        ("s", digests.samples, "bytes"),
        ("leaf", digests.leaves, "bytes"),
        ("c", digests.counts, "numbers"),
    ):
        if tensor is not None:
            put(record, name, tensor[number], form)
