"""Steps with their gradient's norm as a number, without making the device wait.

for step in reader.add(record, micro): ...      # on a CPU the step itself; on a device the one before it
for step in reader.rest(): ...                  # before a checkpoint: all that are still unread
"""

import math
from collections import deque
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

    Attributes:
        lag: steps by which it is late; None: 1 on a CUDA device, else 0. Whoever asks it must work with any.
    """

    lag: ClassVar[int | None] = None

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._lag = int(self._cuda) if self.lag is None else self.lag
        self._flying: deque[_Copy] = deque()

    def add(self, record: StepRecord, micro: list[Any]) -> list[ReadStep]:
        """Takes a step, and returns those that can be read by now."""
        if not self._lag and not self._cuda:
            norm = math.nan if record.norm is None else record.norm.item()
            return [ReadStep(record, micro, norm, [loss.item() for loss in record.losses])]
        tensors = record.losses if record.norm is None else [record.norm, *record.losses]
        values = torch.stack([tensor.reshape(()) for tensor in tensors]) if tensors else torch.empty(0)
        event = None
        if self._cuda:
            values = values.to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._flying.append(_Copy(record, micro, values, event))
        return [self._landed()] if len(self._flying) > self._lag else []

    def rest(self) -> list[ReadStep]:
        """All steps that were not returned yet."""
        return [self._landed() for _ in range(len(self._flying))]

    def _landed(self) -> ReadStep:
        record, micro, values, event = self._flying.popleft()
        if event:
            event.synchronize()  # waits for the device, one step behind: it has the next one to do
        numbers = values.tolist()
        norm = math.nan if record.norm is None else numbers.pop(0)
        return ReadStep(record, micro, norm, numbers)
