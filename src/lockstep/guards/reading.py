"""Steps with their gradient's norm as a number, without making the device wait.

for step in reader.add(record, micro): ...      # on a CPU the step itself; on a device the one before it
for step in reader.rest(): ...                  # before a checkpoint: all that are still unread
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lockstep.records import StepRecord

__all__ = ["ReadStep", "Reader"]


class ReadStep(NamedTuple):
    """A step whose numbers are on the host: the gradient's norm and this rank's losses."""

    record: StepRecord
    micro: list[Any]
    norm: float
    losses: list[float]


class _Copy(NamedTuple):
    """Numbers on their way to the host."""

    record: StepRecord
    micro: list[Any]
    values: Tensor
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
        if not self._lag and not self._cuda:
            norm = math.nan if record.norm is None else record.norm.item()
            return [ReadStep(record, micro, norm, [loss.item() for loss in record.losses])]
        tensors = record.losses if record.norm is None else [record.norm, *record.losses]
        values = torch.stack([tensor.reshape(()) for tensor in tensors]) if tensors else torch.empty(0)
        event = None
        if self._cuda:
            values = values.to("cpu", non_blocking=True)  # from a device that is into pinned memory
            event = self._free.pop() if self._free else torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._flying.append(_Copy(record, micro, values, event))
        return [self._landed()] if len(self._flying) > self._lag else []

    def rest(self) -> Iterator[ReadStep]:
        """All steps that were not returned yet, one by one."""
        while self._flying:
            yield self._landed()

    def _landed(self) -> ReadStep:
        record, micro, values, event = self._flying.popleft()
        if event:
            event.synchronize()  # waits for the device, one step behind: it has the next one to do
            self._free.append(event)
        numbers = values.tolist()
        norm = math.nan if record.norm is None else numbers.pop(0)
        return ReadStep(record, micro, norm, numbers)
