"""Norms and exact sums over gradients that are split by rows over the ranks.

`sharded_norm` is the lean norm, `sharded_norms` that of each gradient; `ExactNorm` and `ExactReduceScatter` give, at
every world size, the bits of a single process.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.rows import gather_rows, shared_out
from lockstep.distributed.world import World
from lockstep.engines.shared.exact import Parts, Span, Subtotals, piece_of_sum
from lockstep.engines.shared.optimizer_step import combined, norms_of
from lockstep.tensors import local_of

__all__ = ["ExactNorm", "ExactReduceScatter", "sharded_norm", "sharded_norms"]


def sharded_norm(gradients: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """2-norm of all gradients together, 0-dim on `device`, from the shards of the ranks of `group`."""
    squares = combined(norms_of([local_of(gradient) for gradient in gradients])).to(device).square()
    dist.all_reduce(squares, group=group)  # collective
    return squares.sqrt()


def sharded_norms(gradients: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """2-norm of each gradient by itself, 0-dim on `device`, from the shards of the ranks of `group`."""
    if not gradients:
        return []
    squares = torch.stack(norms_of([local_of(gradient) for gradient in gradients])).to(device).square()
    dist.all_reduce(squares, group=group)  # collective
    return list(squares.sqrt().unbind())


class ExactNorm:
    """The norm of a single process, bit for bit: each whole gradient's norm is taken by one rank, by the same kernel.

    One all-to-all brings each parameter's shards to the rank that owns it for this purpose; one all-reduce, which adds
    each norm to zeros, tells all ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        return combined(self.each(gradients))

    def each(self, gradients: list[Tensor]) -> list[Tensor]:
        """The norm of each gradient by itself. Collective."""
        if not gradients:
            return []
        owners = shared_out([gradient.numel() for gradient in gradients], self._world.size)
        wholes = self._gathered(gradients, owners)
        found = iter(norms_of(wholes))
        mine = [next(found) if owner == self._world.rank else None for owner in owners]
        kind = torch.float64 if any(g.dtype is torch.float64 for g in gradients) else torch.float32
        table = torch.zeros(len(gradients), dtype=kind, device=self._world.device)
        for index, norm in enumerate(mine):
            if norm is not None:
                table[index] = norm
        dist.all_reduce(table)  # collective
        return list(table.unbind())

    def _gathered(self, gradients: list[Tensor], owners: list[int]) -> list[Tensor]:
        """This rank's own gradients, whole, in order."""
        wide = max((g.dtype for g in gradients), key=lambda dtype: dtype.itemsize)
        parts = [local_of(gradient).to(wide) for gradient in gradients]
        wholes = gather_rows(parts, [gradient.shape for gradient in gradients], owners)  # collective
        mine = (gradient for gradient, owner in zip(gradients, owners, strict=True) if owner == self._world.rank)
        return [whole.to(gradient.dtype) for whole, gradient in zip(wholes, mine, strict=True)]


class ExactReduceScatter:
    """FSDP2's reduce-scatter of one unit, in the fixed tree: keeps each micro-batch's flat gradients, talks last.

    A ReduceScatter for `FSDPModule.set_custom_reduce_scatter`, by shape: its base class has no public place.

    Attributes:
        slots: calls in each step.
        last: whether the coming call is the step's last.
    """

    def __init__(self, parts: Parts) -> None:
        self._owned, self.slots = parts, parts.slots
        self._sums: Subtotals[Tensor] = Subtotals(parts.micro_batches, Tensor.add_)
        self._count = 0
        self.last = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Takes `input_tensor` [ranks * n] over; at the last call fills `output_tensor` [n] with the sum."""
        if input_tensor.is_cuda:  # it outlives the call, on this stream
            input_tensor.record_stream(torch.cuda.current_stream())
        place = self._owned.mine.start + self._count
        self._count += 1
        if place < self._owned.mine.stop:  # else the slot is empty
            self._sums.push(Span(place, place + 1), input_tensor)
        if not self.last:
            output_tensor.zero_()
            return
        self._count = 0

        def room(pieces: int) -> Tensor:
            return input_tensor.new_empty(pieces, len(output_tensor))

        output_tensor.copy_(piece_of_sum(self._sums.taken(), room, self._owned, group))
