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

__all__ = ["Counter", "Tree", "check_servable", "fold_of", "sum_of_rows", "sum_over_ranks"]


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


class Counter:
    """Adds vectors in the fixed order: each `fold` of them in order, these sums pairwise, level by level.

    It holds log2 of the number of sums, at most: a binary counter whose level k holds the sum of 2**k folds.

    Attributes:
        free: takes the vectors that are used up, for the caller to fill again; None drops them. A fresh vector of
            millions of numbers costs more in page faults than its additions.
    """

    def __init__(self, fold: int, free: list[Tensor] | None = None) -> None:
        self._fold = fold
        self.free = free
        self._pending: list[Tensor | None] = []
        self._started: Tensor | None = None  # the sum of the fold in progress, of `_within` vectors
        self._within = 0

    def push(self, vector: Tensor) -> None:
        """Takes a vector over; it may be changed in place."""
        if self._started is not None:
            vector = self._started.add_(vector)
        self._within = (self._within + 1) % self._fold
        self._started = vector if self._within else None
        if not self._within:
            self.push_fold(vector)

    def push_fold(self, carry: Tensor) -> None:
        """Takes a whole fold's sum over."""
        level = 0
        while level < len(self._pending) and (other := self._pending[level]) is not None:
            if self.free is not None:
                self.free.append(carry)
            carry = other.add_(carry)
            self._pending[level] = None
            level += 1
        if level == len(self._pending):
            self._pending.append(None)
        self._pending[level] = carry

    def total(self) -> Tensor:
        """The sum of all that was pushed, which is a power of two of folds; the counter is empty again."""
        total = self._pending[-1]
        assert total is not None, "a rank's slots are a whole subtree"
        self._pending = []
        return total


class Tree:
    """Adds one rank's micro-batches in the fixed order, in log2(slots) extra copies of the gradients.

    Args:
        parameters: whose `.grad` each backward fills.
        fold: q, the micro-batches that are added in order.
        world: the ranks.
    """

    def __init__(self, parameters: list[Tensor], fold: int, world: World) -> None:
        self._parameters, self._fold, self._world = parameters, fold, world
        sizes = [p.numel() for p in parameters]
        filling = -(sum(sizes) + len(sizes)) % world.size
        self._sizes = [*sizes, len(sizes), filling]  # gradients; how often each was used; up to equal pieces a rank
        self._dtype = max((p.dtype for p in parameters), key=lambda dtype: dtype.itemsize)
        self._free: list[Tensor] = []
        self._counter = Counter(fold, self._free)
        self._lent: list[Tensor] = []  # vectors that the `.grad` of the last step lie in
        self._count = 0

    def push(self) -> None:
        """Takes what one backward left in `.grad`; to be called once a micro-batch."""
        self._free += self._lent
        self._lent = []
        self._count += 1
        if self._count % self._fold == 0:  # until then autograd adds the micro-batches of this fold in order
            self._counter.push_fold(self._flatten())

    def finish(self) -> None:
        """Leaves in `.grad` the sum over all micro-batches of all ranks; None where no micro-batch used a parameter."""
        total, self._count = self._counter.total(), 0
        self._lent = [total]
        if self._world.size > 1:
            self._lent.append(spare := self._vector())
            sum_over_ranks(total, spare, self._world.size)
        *pieces, used, _ = total.split_with_sizes(self._sizes)
        counts = used.tolist()  # waits for the device
        for parameter, piece, count in zip(self._parameters, pieces, counts, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype) if count else None

    def _vector(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.zeros(sum(self._sizes), dtype=self._dtype, device=self._parameters[0].device)

    def _flatten(self) -> Tensor:
        """All gradients and, behind them, a 1 for each parameter that has one, as one vector; clears `.grad`."""
        vector = self._vector()
        *pieces, used, _ = vector.split_with_sizes(self._sizes)
        gradients = [p.grad for p in self._parameters]
        used.copy_(torch.tensor([float(gradient is not None) for gradient in gradients]))
        present = [(piece, g.reshape(-1)) for piece, g in zip(pieces, gradients, strict=True) if g is not None]
        torch._foreach_copy_([piece for piece, _ in present], [gradient for _, gradient in present])
        for piece, gradient in zip(pieces, gradients, strict=True):
            if gradient is None:
                piece.zero_()
        for parameter in self._parameters:
            parameter.grad = None
        return vector


def sum_over_ranks(mine: Tensor, spare: Tensor, ranks: int) -> None:
    """Replaces each rank's vector by the sum of all, added pairwise in rank order: two collectives of its length.

    Its length is a multiple of `ranks`; `spare` is another of that length, and is used up.
    """
    dist.all_to_all_single(spare, mine)  # collective
    total = sum_of_rows(spare.view(ranks, -1))
    dist.all_gather(list(mine.view(ranks, -1).unbind()), total)  # collective


def sum_of_rows(rows: Tensor) -> Tensor:
    """The rows of a matrix, a power of two of them, added pairwise in the tree's order; the matrix is used up."""
    parts = list(rows.unbind())
    while len(parts) > 1:
        parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
