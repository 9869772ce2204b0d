"""Compute the digests of small CPU tensors for several steps at once.

One by one, the cost of the calls would dominate.

pool = Pool(reading.put)
pool.sums(slots, tensors, [(entry, 0, 6), ...])     # copies their current values
pool.batch(record, batch); pool.output(record, rows)
pool.finish()                                       # fills in all records: `entry[1]`, `record["s"]`, ...

`PendingTensors` likewise reads the tensors of a device at once.
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

    @property
    def waits(self) -> bool:
        """Whether `finish` would wait for a device."""
        return bool(self._pending)

    def finish(self) -> None:
        """Read the pending tensors and fill in their values. Waits for the device."""
        pending = self._pending
        self._pending = []
        for device in {tensor.device for _, _, tensor, _ in pending}:
            group = [entry for entry in pending if entry[2].device == device]
            words = [tensor.view(torch.int64) for _, _, tensor, _ in group]
            # Waits for the device, once each time that records are written.
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


# Steps that may be queued, at most.
SLOTS = 8
# Rows of sums up to which a step may be queued: a MiB of memory for each step.
_ROWS = 1024
# Elements of a batch or an output that may be queued, at most.
_MOST_OF_ONE = 1 << 16
# Elements of all queued batches and outputs, at most: an evaluation may have any number.
_MOST_ELEMENTS = 1 << 20
# Exact types: a subclass may redefine copying.
_TYPES = (Tensor, torch.nn.Parameter)

Put = Callable[..., None]

# Compares bits, those of NaN too, without a kernel for each tensor.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Slots:
    """Memory for copies of the same pieces from up to `SLOTS` steps.

    Attributes:
        into: for each queued step, the targets of its rows: (list whose index 1 is filled, first row, end).
    """

    def __init__(self, plains: Sequence[Tensor], places: Sequence[ElementPlaces]) -> None:
        self._plan = SumPlan(plains, places, pooled=True)
        self._count = len(plains)
        self._rooms, self._views = self._plan.rooms(SLOTS)
        self.into: list[list[tuple[list[Any], int, int]]] = []
        self._last = 0

    @staticmethod
    def suit(locals_: Sequence[Tensor], places: Sequence[ElementPlaces]) -> bool:
        """Whether these tensors are small, strided and on a CPU."""
        # 256 elements a row, and one row that is partly filled.
        rows = sum(-(-tensor.numel() // 256) + 1 for tensor in locals_)
        return rows <= _ROWS and all(
            type(tensor) in _TYPES
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and not tensor.is_complex()
            and not position.run
            for tensor, position in zip(locals_, places, strict=True)
        )

    def take(self, tensors: list[Tensor], targets: list[tuple[list[Any], int, int]]) -> None:
        self._last = len(self.into)
        # Private in torch: one call copies all tensors.
        torch._foreach_copy_(self._views[self._last], tensors)
        self.into.append(targets)

    def unmoved(self, tensors: list[Tensor]) -> bool:
        """Whether the last step's first pieces are bytewise equal to `tensors`."""
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
        for time, targets in enumerate(self.into):
            for entry, begin, end in targets:
                # A row has WIDTH words of 8 bytes.
                start, stop = ((time * self._count + row) * WIDTH * 8 for row in (begin, end))
                entry[1] = raw[start:stop]
        self.into = []


class Pool:
    """Queue of small computations, which are done for several steps at once."""

    def __init__(self, store: Put) -> None:
        self._store = store
        self._slots: list[Slots] = []
        self._batches: dict[Hashable, list[tuple[dict[str, Any], Batch]]] = {}
        self._outputs: dict[Hashable, list[tuple[dict[str, Any], list[Tensor]]]] = {}
        self._size = 0

    def sums(self, slots: Slots, tensors: list[Tensor], targets: list[tuple[list[Any], int, int]]) -> None:
        if len(slots.into) == SLOTS:
            self.finish()
        if not slots.into:
            self._slots.append(slots)
        slots.take(tensors, targets)

    def batch(self, record: dict[str, Any], batch: Batch) -> bool:
        """Queue a copy of a batch if it is small enough; return whether it was."""
        key = self._key([value for _, value in batch.leaves])
        if key is None:
            return False
        batch.leaves = [(path, value.clone()) for path, value in batch.leaves]
        self._batches.setdefault((key, batch.mask, *batch.names), []).append((record, batch))
        return True

    def output(self, record: dict[str, Any], rows: list[Tensor]) -> bool:
        """Queue a copy of an output's rows if they are small; return whether they were."""
        key = self._key(rows)
        if key is None:
            return False
        self._outputs.setdefault(key, []).append((record, [row.clone() for row in rows]))
        return True

    def finish(self) -> None:
        """Compute what is queued."""
        for slots in self._slots:
            slots.finish()
        for batches in self._batches.values():
            digests = digested([batch for _, batch in batches])
            for number, (record, _) in enumerate(batches):
                put_digests(self._store, record, digests, number)
        for outputs in self._outputs.values():
            parts = zip(*(rows for _, rows in outputs), strict=True)
            sums = outcomes([torch.cat(group) for group in parts]).view(len(outputs), -1, 2)
            for (record, _), values in zip(outputs, sums, strict=True):
                self._store(record, "out", values)
        self._slots = []
        self._batches = {}
        self._outputs = {}
        self._size = 0

    def _key(self, values: list[Any]) -> Hashable:
        """Return the shapes and dtypes that group tensors; None if they cannot be queued."""
        for value in values:
            if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
                return None
        count = sum(value.numel() for value in values)
        if not values or count > _MOST_OF_ONE:
            return None
        if self._size + count > _MOST_ELEMENTS:
            self.finish()
        self._size += count
        return tuple((value.shape, value.dtype) for value in values)


def put_digests(store: Put, record: dict[str, Any], digests: SampleDigests, number: int = 0) -> None:
    """Store the digests of one batch in its record."""
    for name, tensor, form in (
        ("s", digests.samples, "bytes"),
        ("leaf", digests.leaves, "bytes"),
        ("c", digests.counts, "numbers"),
    ):
        if tensor is not None:
            store(record, name, tensor[number], form)
