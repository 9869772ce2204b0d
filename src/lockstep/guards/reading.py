"""Steps with their gradient's norm as a number, without making the device wait.

for step in reader.add(record, micro): ...      # on a CPU the step itself; on a device the one before it
for step in reader.rest(): ...                  # before a checkpoint: all that are still unread
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lockstep.numbers import filled, flat
from lockstep.records import StepRecord

__all__ = ["ReadStep", "Reader", "floats"]


class ReadStep(NamedTuple):
    """A step whose numbers are on the host.

    Attributes:
        norm: of the gradient; `gradients`: of its blocks, where the step took them.
        losses: of this rank's micro-batches.
        numbers: of the task's own by name: (sum, count) of each of them.
    """

    record: StepRecord
    micro: list[Any]
    norm: float
    losses: list[float]
    numbers: Mapping[str, Sequence[tuple[float, float]]] = {}
    gradients: Mapping[str, float] = {}


class _Copy(NamedTuple):
    """Numbers on their way to the host; `host` has those that were there, and None for each of the others."""

    record: StepRecord
    micro: list[Any]
    values: Tensor
    host: list[float | None]
    event: Any


class Reader:
    """Reads norms and losses: at once where that costs nothing, else one step later, when the copy has arrived.

    On a device a step costs one launch, one copy into pinned memory and an event, and its host is never more than a
    step ahead. What the guards and the records need of a step is read here alone.

    Attributes:
        lag: steps by which it is late; None: 1 on a CUDA device, else 0. Whoever asks it must work with any.
    """

    lag: ClassVar[int | None] = None

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._lag = int(self._cuda) if self.lag is None else self.lag
        self._flying: deque[_Copy] = deque()
        self._free: list[Any] = []  # events that have come to pass

    @property
    def late(self) -> bool:
        """Whether a step is read after it."""
        return self._lag > 0

    def add(self, record: StepRecord, micro: list[Any]) -> list[ReadStep]:
        """Takes a step, and returns those that can be read by now: how many depends on the number of steps alone."""
        every = _values(record)
        if not self._lag and not self._cuda:
            return [_read(record, micro, [float(value) for value in every])]
        host, tensors = _split(every, "cuda" if self._cuda else "cpu")
        values = torch.stack([tensor.reshape(()) for tensor in tensors]) if tensors else torch.empty(0)
        event = None
        if self._cuda:
            values = values.to("cpu", non_blocking=True)  # from a device that is into pinned memory
            event = self._free.pop() if self._free else torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._flying.append(_Copy(record, micro, values, host, event))
        return [self._landed()] if len(self._flying) > self._lag else []

    def rest(self) -> Iterator[ReadStep]:
        """All steps that were not returned yet, one by one."""
        while self._flying:
            yield self._landed()

    def _landed(self) -> ReadStep:
        record, micro, values, host, event = self._flying.popleft()
        if event:
            event.synchronize()  # waits for the device, one step behind: it has the next one to do
            self._free.append(event)
        return _read(record, micro, _joined(host, values.tolist()))


def floats(values: Sequence[Tensor | float]) -> list[float]:
    """The values on the host. Waits for the device, once."""
    kind = next((v.device.type for v in values if isinstance(v, Tensor) and v.device.type != "cpu"), "")
    host, tensors = _split(values, kind)
    return _joined(host, torch.stack([t.reshape(()) for t in tensors]).tolist() if tensors else [])


def _values(record: StepRecord) -> list[Tensor | float]:
    """All that is to be read of a step, in the order of `_read`."""
    norm: list[Tensor | float] = [] if record.norm is None else [record.norm]
    values = [*norm, *record.losses]
    if record.gradients or record.numbers:
        values += [*record.gradients.values(), *flat(record.numbers)]
    return values


def _read(record: StepRecord, micro: list[Any], values: list[float]) -> ReadStep:
    norm = math.nan if record.norm is None else values[0]
    start = record.norm is not None
    losses = values[start : start + len(record.losses)]
    if not record.gradients and not record.numbers:
        return ReadStep(record, micro, norm, losses, {}, {})
    rest = iter(values[start + len(losses) :])
    gradients = {name: next(rest) for name in record.gradients}
    return ReadStep(record, micro, norm, losses, filled(record.numbers, rest), gradients)


def _split(values: Sequence[Tensor | float], device: str) -> tuple[list[float | None], list[Tensor]]:
    """Each value that lies on the host, or None; and those on a device of this type, in order."""
    there = [isinstance(value, Tensor) and value.device.type == device for value in values]
    host = [None if away else float(value) for value, away in zip(values, there, strict=True)]
    return host, [value for value, away in zip(values, there, strict=True) if away and isinstance(value, Tensor)]


def _joined(host: list[float | None], read: list[float]) -> list[float]:
    told = iter(read)
    return [next(told) if value is None else value for value in host]
