"""The fixed tree: gradients of a step's M micro-batches, added in one order whatever the world size.

M = q * 2**t with q odd. Each q consecutive micro-batches are added in order; the 2**t sums are added pairwise, level by
level. A rank of a power-of-two world owns a subtree, so its part is `Tree`, and `sum_over_ranks` does the levels above:
the ranks' sums are cut into as many pieces as there are ranks, each rank adds one piece in the tree's order, and all
collect the results. Bits are equal because every addition has the same two operands at every world size.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.world import World

__all__ = ["Tree", "check_servable", "fold_of"]


def check_servable(micro_batches: int, world_size: int) -> None:
    """Raises ConfigError for a world size whose ranks do not own whole subtrees."""
    if world_size & (world_size - 1) or micro_batches % world_size:
        fit = max(2**k for k in range(world_size.bit_length()) if micro_batches % 2**k == 0)
        raise ConfigError(
            f"--exact cannot serve {world_size} processes with {micro_batches} micro-batches a step: it needs a "
            f"power of two that divides {micro_batches}; start {fit}, or change --micro-batch-size"
        )


def fold_of(micro_batches: int) -> int:
    """q, the odd part of M: how many consecutive micro-batches are added in order before the tree begins."""
    return micro_batches // (micro_batches & -micro_batches)


class Tree:
    """Adds one rank's micro-batches in the fixed order, in log2(slots) extra copies of the gradients.

    Args:
        parameters: whose `.grad` each backward fills.
        fold: q, the micro-batches that are added in order.
        world: the ranks.
    """

    def __init__(self, parameters: list[Tensor], fold: int, world: World) -> None:
        self._parameters, self._fold, self._world = parameters, fold, world
        self._sizes = [p.numel() for p in parameters]
        self._dtype = max((p.dtype for p in parameters), key=lambda dtype: dtype.itemsize)
        self._pending: list[Tensor | None] = []  # a binary counter: level k holds the sum of 2**k folds, or nothing
        self._count = 0

    def push(self) -> None:
        """Takes what one backward left in `.grad`; to be called once a micro-batch."""
        self._count += 1
        if self._count % self._fold:
            return  # autograd adds the next micro-batch of this fold in order
        carry = self._flatten()
        level = 0
        while level < len(self._pending) and (other := self._pending[level]) is not None:
            carry = other.add_(carry)
            self._pending[level] = None
            level += 1
        if level == len(self._pending):
            self._pending.append(None)
        self._pending[level] = carry

    def finish(self) -> None:
        """Leaves in `.grad` the sum over all micro-batches of all ranks; None where no micro-batch used a parameter."""
        total = self._pending[-1]
        assert total is not None, "a rank's slots are a whole subtree"
        self._count, self._pending = 0, []
        if self._world.size > 1:
            total = sum_over_ranks(total, self._world)
        used = total[-len(self._sizes) :].tolist()  # waits for the device
        pieces = total[: sum(self._sizes)].split_with_sizes(self._sizes)
        for parameter, piece, count in zip(self._parameters, pieces, used, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype) if count else None

    def _flatten(self) -> Tensor:
        """All gradients and, behind them, a 1 for each parameter that has one, as one vector; clears `.grad`."""
        dtype = self._dtype
        parts = [
            p.grad.reshape(-1).to(dtype) if p.grad is not None else p.new_zeros(size, dtype=dtype)
            for p, size in zip(self._parameters, self._sizes, strict=True)
        ]
        used = torch.tensor([float(p.grad is not None) for p in self._parameters], dtype=dtype, device=parts[0].device)
        for parameter in self._parameters:
            parameter.grad = None
        return torch.cat([*parts, used])


def sum_over_ranks(mine: Tensor, world: World) -> Tensor:
    """The sum of each rank's vector, added pairwise in rank order: two collectives, of the vector's length each."""
    length = mine.numel()
    piece = -(-length // world.size)
    padded = torch.nn.functional.pad(mine, (0, piece * world.size - length))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded)  # collective
    rows = list(received.view(world.size, piece).unbind())
    while len(rows) > 1:
        rows = [left.add_(right) for left, right in zip(rows[::2], rows[1::2], strict=True)]
    whole = [torch.empty_like(rows[0]) for _ in range(world.size)]
    dist.all_gather(whole, rows[0].contiguous())  # collective
    return torch.cat(whole)[:length]
