"""Merge state that has rows by sample or stream: hidden states, a memory bank.

    rows = SampleState(places, world)
    rows.begin()                            # a step begins
    rows.begin_slot(); rows.end_slot(last)  # around each micro-batch
    rows.merge()                            # before the update

Each micro-batch of a step reads the values from the beginning of the step. What the micro-batches of all ranks write is
merged at its end, bit by bit. Of an element that several write, the last one's value counts. So the step is that of one
device with all samples in one batch. `is_by_rows` distinguishes such state from statistics, which all micro-batches
write.
"""

from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.tensors import as_bytes

__all__ = ["SampleState", "changed_elements", "is_by_rows"]

# Largest number of micro-batches of a rank in a step: writer numbers of different ranks must not overlap in an int32.
_MAX_SLOTS = 1 << 16


class Place(Protocol):
    """A tensor that forwards write.

    Attributes:
        name: as the task declares it.
        now: the current tensor.
        step_value: a copy of its values at the beginning of the step.
    """

    @property
    def name(self) -> str: ...
    @property
    def now(self) -> Tensor: ...
    @property
    def step_value(self) -> Tensor | None: ...


class _Merged:
    """The writes of this rank's micro-batches to one tensor in the present step.

    Attributes:
        values: of the elements that were written; elsewhere those from the beginning of the step.
        writer: the last micro-batch that wrote an element, in the order of the run from 1 on; 0: none. int32
        writers: how many wrote it. int32
    """

    def __init__(self, before: Tensor) -> None:
        self.values = before.clone()
        self.writer = torch.zeros(before.shape, dtype=torch.int32, device=before.device)
        self.writers = torch.zeros_like(self.writer)

    def add(self, now: Tensor, before: Tensor, writer: int) -> None:
        """Add what a micro-batch wrote."""
        written = changed_elements(now, before)
        self.values = torch.where(written, now, self.values)
        self.writer = torch.where(written, writer, self.writer)
        self.writers += written


@final
class SampleState:
    """Tensors with rows by sample or stream, over the micro-batches of a step.

    Args:
        places: the tensors, in the same order on every rank.
    """

    def __init__(self, places: Sequence[Place], world: World) -> None:
        self._places = places
        self._world = world
        self._merged: list[_Merged] = []
        self._is_checked = False

    def begin(self) -> None:
        """Forget an unfinished step."""
        self._slots = 0
        self._merged = []

    @torch.no_grad()
    def begin_slot(self) -> None:
        """Restore the values from the beginning of the step for the next micro-batch."""
        if self._slots:
            for place in self._places:
                place.now.copy_(_before(place))

    @torch.no_grad()
    def end_slot(self, last: bool) -> None:
        """Record what a micro-batch wrote.

        The only micro-batch of a step writes in place, as in a plain loop, and needs no record.

        Args:
            last: it is this rank's last one in the step.
        """
        if last and not self._slots and self._world.size == 1:
            return
        self._slots += 1
        if self._slots == 1:
            self._merged = [_Merged(_before(place)) for place in self._places]
        for place, merged in zip(self._places, self._merged, strict=True):
            # Number the writers of all ranks in the order of the run: a rank's micro-batches follow those of the rank
            # before it.
            merged.add(place.now, _before(place), self._world.rank * _MAX_SLOTS + self._slots)

    @torch.no_grad()
    def merge(self) -> None:
        """Set all tensors to what the micro-batches of all ranks wrote. Collective on several ranks.

        Raises:
            ConfigError: in the first step, most elements are written by several micro-batches.
        """
        if not self._slots and self._world.size == 1:
            return
        # A rank without samples has recorded nothing, but takes part in the collectives.
        all_merged = self._merged or [_Merged(_before(place)) for place in self._places]
        for place, merged in zip(self._places, all_merged, strict=True):
            if not self._is_checked:
                self._check(place, merged)
            place.now.copy_(self._combine(merged, _before(place)))
        self._is_checked = True
        self.begin()

    def _check(self, place: Place, merged: _Merged) -> None:
        if self._world.size > 1:
            # All ranks, in the first step only: are the rows of the ranks disjoint?
            collectives.all_reduce(merged.writers, group=self._world.group)  # collective
        # Waits for the device, in the first step only.
        if not is_by_rows(merged.writers):
            raise ConfigError(
                f"the task's sample_state has '{place.name.removeprefix('task/')}', but several micro-batches of the "
                "first step write the same elements: leave it out, and write it in `step_loss` or in the hook "
                "`after_update`"
            )

    def _combine(self, merged: _Merged, before: Tensor) -> Tensor:
        """Return the values that the last writers of all ranks gave. Collective on several ranks."""
        if self._world.size == 1:
            return merged.values
        last_writer = merged.writer.clone()
        # All ranks: the last writer of each element wins.
        collectives.all_reduce(last_writer, op=dist.ReduceOp.MAX, group=self._world.group)  # collective
        mine = (merged.writer == last_writer) & (last_writer > 0)
        values = _bytes(torch.where(mine, merged.values, torch.zeros_like(before)))
        # All ranks. For each byte only the winner's is not 0, so the sum is that byte.
        collectives.all_reduce(values, group=self._world.group)  # collective
        return torch.where(last_writer > 0, values.view(before.dtype).view(before.shape), before)


def changed_elements(now: Tensor, before: Tensor) -> Tensor:
    """Return which elements of a tensor have other bits than before.

    Does not wait for the device.
    """
    return (_bytes(now) != _bytes(before)).any(1).view(before.shape)


def is_by_rows(writers: Tensor) -> bool:
    """Whether a tensor is state by rows. Waits for the device.

    In such a tensor most of the written elements have one writer.

    Args:
        writers: how many wrote each element.
    """
    several, any_at_all = torch.stack([(writers > 1).sum(), (writers > 0).sum()]).tolist()
    return bool(2 * several < any_at_all or not any_at_all)


def _before(place: Place) -> Tensor:
    value = place.step_value
    assert value is not None, "a step begins with a copy"
    return value


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of each element. uint8 [elements, bytes of one]"""
    if tensor.numel():
        return as_bytes(tensor).view(tensor.numel(), -1)
    return tensor.new_empty(0, 1, dtype=torch.uint8)
