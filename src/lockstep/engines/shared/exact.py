"""The fixed tree: gradients of a step's M micro-batches, added in one order whatever the world size.

M = q * 2**t with q odd. Each q consecutive micro-batches are added in order; the 2**t sums are added pairwise, level by
level. A rank of a power-of-two world owns a subtree, so its part is `Tree`, and `sum_over_ranks` does the levels above:
the ranks' sums are cut into as many pieces as there are ranks, each rank adds one piece in the tree's order, and all
collect the results. Bits are equal because every addition has the same two operands at every world size.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError

__all__ = ["Counter", "Tree", "check_servable", "check_slots", "chunk_of", "sum_of_rows", "sum_over_ranks"]

Sum = TypeVar("Sum")
Gradients = list[Tensor | None]


def check_servable(micro_batches: int, world_size: int) -> None:
    """Raises ConfigError for a world size whose ranks do not own whole subtrees."""
    if world_size & (world_size - 1) or micro_batches % world_size:
        fit = max(2**k for k in range(world_size.bit_length()) if micro_batches % 2**k == 0)
        raise ConfigError(
            f"--exact cannot serve {world_size} processes with {micro_batches} micro-batches a step: it needs a "
            f"power of two that divides {micro_batches}; start {fit}, or change --micro-batch-size"
        )


def chunk_of(micro_batches: int) -> int:
    """q, the odd part of M: how many consecutive micro-batches are added in order before the tree begins."""
    return micro_batches // (micro_batches & -micro_batches)


def check_slots(found: int, slots: int, world: World) -> None:
    """Raises LockstepError where a step of this rank had another number of micro-batches than its part of the tree."""
    if slots and found != slots:
        raise LockstepError(
            f"rank {world.rank}: exact_micro_batches gives each rank {slots} micro-batches a step, and this step had "
            f"{found}; for a shorter step call backward(loss, weight=0) for the missing ones"
        )


class Counter(Generic[Sum]):
    """Adds terms in the fixed order: each `chunk` of them in order, these sums pairwise, level by level.

    It holds log2 of the number of sums, at most: a binary counter whose level k holds the sum of 2**k folds.

    Args:
        fold: q, how many consecutive terms are added in order.
        add: (left, right) -> their sum; both are used up.
    """

    def __init__(self, chunk: int, add: Callable[[Sum, Sum], Sum]) -> None:
        self._chunk, self._add = chunk, add
        self._pending: list[Sum | None] = []
        self._started: Sum | None = None  # the sum of the fold in progress, of `_within` terms
        self._within = 0

    def push(self, term: Sum) -> None:
        """Takes a term over."""
        if self._started is not None:
            term = self._add(self._started, term)
        self._within = (self._within + 1) % self._chunk
        self._started = term if self._within else None
        if not self._within:
            self.push_fold(term)

    def push_fold(self, carry: Sum) -> None:
        """Takes a whole fold's sum over."""
        level = 0
        while level < len(self._pending) and (other := self._pending[level]) is not None:
            carry = self._add(other, carry)
            self._pending[level] = None
            level += 1
        if level == len(self._pending):
            self._pending.append(None)
        self._pending[level] = carry

    def total(self) -> Sum:
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
        slots: the micro-batches that this rank has in each step; 0: not known.
    """

    def __init__(self, parameters: list[Tensor], chunk: int, world: World, slots: int = 0) -> None:
        self._parameters, self._chunk, self._world, self._slots = parameters, chunk, world, slots
        self._dtype = functools.reduce(torch.promote_types, {_real(p).dtype for p in parameters})  # holds each exactly
        self._counter = Counter(chunk, _added)
        self._count = 0
        self._exchange: Exchange | None = None

    def push(self) -> None:
        """Takes what one backward left in `.grad`; to be called once a micro-batch."""
        self._count += 1
        if self._count % self._chunk:  # until then autograd adds the micro-batches of this fold in order
            return
        # One layout for all, since the order in which a norm is summed may follow it.
        gradients = [None if p.grad is None else _real(p.grad).to(self._dtype).contiguous() for p in self._parameters]
        present = [g for g in gradients if g is not None]
        if present and self._chunk > 1:  # where a micro-batch misses one, fsdp adds zeros and autograd nothing: x + 0
            torch._foreach_add_(present, 0.0)
        self._counter.push_fold(gradients)
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Leaves in `.grad` the sum over all micro-batches of all ranks; None where no micro-batch used a parameter.

        Raises:
            LockstepError: another number of micro-batches than `slots` was pushed.
        """
        made, self._count = self._count, 0
        check_slots(made, self._slots, self._world)
        sums = self._counter.total()
        if self._world.size > 1:
            self._exchange = self._exchange or Exchange([_real(p) for p in self._parameters], self._dtype, self._world)
            sums = self._exchange(sums)
        for parameter, found in zip(self._parameters, sums, strict=True):
            parameter.grad = None if found is None else _like(parameter, found)


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, which add alike; any other as it is."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _like(parameter: Tensor, found: Tensor) -> Tensor:
    if parameter.is_complex():
        return torch.view_as_complex(found.to(_real(parameter).dtype))
    return found.to(parameter.dtype)


class Exchange:
    """Gradients of all ranks, added in the tree's order.

    It keeps two vectors of the gradients' length, since fresh ones cost more in page faults than the sums. In them each
    gradient begins at a multiple of 16 numbers, as in memory of its own: kernels that add up a norm on a device choose
    their order by the alignment.
    """

    def __init__(self, parameters: list[Tensor], dtype: torch.dtype, world: World) -> None:
        self._ranks = world.size
        sizes = [p.numel() for p in parameters]
        starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
        length = starts[-1] + len(sizes)  # the last: whether each was used
        length += -length % world.size  # up to equal pieces a rank
        self._mine = torch.zeros(length, dtype=dtype, device=parameters[0].device)
        self._spare = torch.zeros_like(self._mine)
        places = zip(starts, sizes, parameters, strict=False)
        self._pieces = [self._mine.narrow(0, start, size).view(p.shape) for start, size, p in places]
        self._used = self._mine.narrow(0, starts[-1], len(sizes))

    def __call__(self, mine: Gradients) -> Gradients:
        """The sums, which lie in a vector of ours until the next call; None where no rank has a gradient."""
        self._used.copy_(torch.tensor([float(gradient is not None) for gradient in mine]))
        for piece, gradient in zip(self._pieces, mine, strict=True):
            piece.zero_() if gradient is None else piece.copy_(gradient)
        sum_over_ranks(self._mine, self._spare, self._ranks)
        counts = self._used.tolist()  # waits for the device
        return [piece if count else None for piece, count in zip(self._pieces, counts, strict=True)]


def _added(left: Gradients, right: Gradients) -> Gradients:
    """Each parameter's two gradients added, into the left one where there are two.

    A missing one counts as zeros, as where ranks add their vectors: x + 0, which makes a negative zero positive.
    """
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    if len(pairs) == len(left):
        return left
    return [_alone(a, b) if a is None or b is None else a for a, b in zip(left, right, strict=True)]


def _alone(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    one = right if left is None else left
    return None if one is None else one.add_(0.0)


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
