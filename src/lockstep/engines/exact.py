"""The fixed tree: add a step's gradients in one order for any number of ranks.

The number M of a step's micro-batches alone fixes the tree. The left half of a node has the largest power of two of
its micro-batches that is less than all of them, and a node's sum is that of its left half plus that of its right half.
A rank owns a run of consecutive micro-batches, which consists of at most 2 log2(M) whole subtrees; `Tree` computes
their sums. `Exchange` does the rest: each rank takes one piece of the vectors, receives that piece of all subtrees'
sums, adds them in the tree's order, and all ranks gather the results. Bits are equal because every addition has the
same two operands, whichever rank does it.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.balance import Shares, Sharing, equal_shares
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError
from lockstep.tensors import sent

__all__ = [
    "Exchange",
    "Subtotals",
    "Subtrees",
    "Tree",
    "TreeSpan",
    "check_servable",
    "check_slots",
    "held_at_most",
    "subtrees",
]


Sum = TypeVar("Sum")
Gradients = list[Tensor | None]
_KNOWN = 64  # cached ways to share out a step


class TreeSpan(NamedTuple):
    """The micro-batches start .. stop - 1, whose sum is a node of the tree."""

    start: int
    stop: int


def check_servable(micro_batches: int, world_size: int) -> None:
    """Raise ConfigError if there are more ranks than micro-batches."""
    if world_size > micro_batches:
        raise ConfigError(
            f"--exact cannot serve {world_size} processes with {micro_batches} micro-batches a step: each needs one at "
            f"least; start {micro_batches}, or lower --micro-batch-size"
        )


def check_slots(found: int, slots: int, world: World) -> None:
    """Raise LockstepError if the number of backwards in a step differs from this rank's slots."""
    if slots and found != slots:
        raise LockstepError(
            f"{rank_label(world.rank)}: exact_micro_batches gives this rank {slots} micro-batches a step, and this "
            f"step had {found}; for a shorter step call backward(loss, weight=0) for the missing ones"
        )


def _middle(span: TreeSpan) -> int:
    """Return the start of the right half of a node with at least two micro-batches."""
    return span.start + (1 << (span.stop - span.start - 1).bit_length() - 1)


def subtrees(micro_batches: int, run: TreeSpan) -> list[TreeSpan]:
    """Split a run of micro-batches into the largest whole subtrees over M, in order."""

    def within(node: TreeSpan) -> Iterator[TreeSpan]:
        if run.start <= node.start and node.stop <= run.stop:
            yield node
        elif node.start < run.stop and run.start < node.stop:
            middle = _middle(node)
            yield from within(TreeSpan(node.start, middle))
            yield from within(TreeSpan(middle, node.stop))

    return list(within(TreeSpan(0, micro_batches))) if run.stop > run.start else []


@functools.cache
def _halves(micro_batches: int) -> frozenset[tuple[int, int, int]]:
    """Return (start, middle, stop) of each node with at least two micro-batches."""
    found, todo = set(), [TreeSpan(0, micro_batches)]
    while todo:
        node = todo.pop()
        if node.stop - node.start > 1:
            middle = _middle(node)
            found.add((node.start, middle, node.stop))
            todo += [TreeSpan(node.start, middle), TreeSpan(middle, node.stop)]
    return frozenset(found)


class Subtotals(Generic[Sum]):
    """Sums of adjacent micro-batches, added in order as far as the tree allows.

    Adds two sums once they are the left and right half of a node. Holds one sum for each of the `subtrees` of the
    micro-batches pushed so far: at most 2 log2(M).

    Args:
        micro_batches: M.
        add: (left, right) -> their sum; may reuse both.
    """

    def __init__(self, micro_batches: int, add: Callable[[Sum, Sum], Sum]) -> None:
        self._halves, self._add = _halves(micro_batches), add
        self._held: list[tuple[TreeSpan, Sum]] = []

    def push(self, span: TreeSpan, term: Sum) -> None:
        """Take over a subtree's sum; its micro-batches follow those pushed before."""
        while self._held and (self._held[-1][0].start, span.start, span.stop) in self._halves:
            before, other = self._held.pop()
            span, term = TreeSpan(before.start, span.stop), self._add(other, term)
        self._held.append((span, term))

    def __len__(self) -> int:
        return len(self._held)

    def taken(self) -> Iterator[Sum]:
        """Yield the sums in order and drop each one; empty after the last."""
        held, self._held = self._held, []
        held.reverse()
        while held:
            yield held.pop()[1]


@functools.cache
def held_at_most(micro_batches: int, ranks: int) -> int:
    """Return the largest number of sums that any rank holds at once, with equal shares."""
    most = 0
    for start, stop in equal_shares(micro_batches, ranks).runs:
        sums: Subtotals[int] = Subtotals(micro_batches, int.__add__)
        for place in range(start, stop):
            sums.push(TreeSpan(place, place + 1), 1)
            most = max(most, len(sums))
    return most


class Subtrees:
    """The subtrees that each rank sums in its run of micro-batches.

    Attributes:
        micro_batches: M.
        rank, mine: this rank, and its run.
        slots: backwards of this rank in each step; those past the end of its run are empty.
        rounds: for each round of the exchange, by rank, the subtree whose sum it sends; None: it has sent all.
    """

    def __init__(self, micro_batches: int, world: World, shares: Shares | None = None) -> None:
        shares = shares or equal_shares(micro_batches, world.size)
        runs = [TreeSpan(*run) for run in shares.runs]
        self.micro_batches, self.slots = micro_batches, shares.slots[world.rank]
        self.rank, self.mine = world.rank, runs[world.rank]
        self.rounds = list(itertools.zip_longest(*(subtrees(micro_batches, run) for run in runs)))


class Tree:
    """Add one rank's micro-batches in the fixed order.

    Needs at most 2 log2(slots) extra copies of the gradients.

    Args:
        parameters: each backward fills their `.grad`.
        micro_batches: M.
        world: the ranks.
        sharing: which rank computes what; None: equal shares.
    """

    def __init__(
        self, parameters: list[Tensor], micro_batches: int, world: World, sharing: Sharing | None = None
    ) -> None:
        self._parameters, self._world, self._sharing = parameters, world, sharing
        self._dtype = functools.reduce(torch.promote_types, {_real(p).dtype for p in parameters})  # holds each exactly
        self._known: dict[Shares, Subtrees] = {}
        self._micro_batches = micro_batches
        self._owned = self._present()
        self._sums: Subtotals[Gradients] = Subtotals(micro_batches, _added)
        self._count = 0
        self._exchange: Exchange | None = None

    def push(self) -> None:
        """Take the gradients of one backward out of `.grad`. Call once a micro-batch."""
        if not self._count:  # a step begins
            self._owned = self._present()
        place = self._owned.mine.start + self._count
        self._count += 1
        if place < self._owned.mine.stop:  # else the slot is empty, and there is no such micro-batch
            # One layout for all, since a norm's order of summation may depend on it.
            found = [None if p.grad is None else _real(p.grad).to(self._dtype).contiguous() for p in self._parameters]
            self._sums.push(TreeSpan(place, place + 1), found)
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Set `.grad` to the sum over all micro-batches of all ranks; None for unused parameters. Collective.

        Raises:
            LockstepError: the number of micro-batches pushed differs from this rank's slots.
        """
        made, self._count = self._count, 0
        check_slots(made, self._owned.slots, self._world)
        if self._world.size > 1:
            self._exchange = self._exchange or Exchange([_real(p) for p in self._parameters], self._dtype, self._world)
            sums = self._exchange(self._sums.taken(), self._owned)
        else:
            (sums,) = self._sums.taken()
        for parameter, found in zip(self._parameters, sums, strict=True):
            parameter.grad = None if found is None else _like(parameter, found)

    def _present(self) -> Subtrees:
        """Return the subtrees of the current step's runs."""
        shares = self._sharing.now if self._sharing else equal_shares(self._micro_batches, self._world.size)
        if shares not in self._known:
            if len(self._known) == _KNOWN:
                self._known.clear()
            self._known[shares] = Subtrees(self._micro_batches, self._world, shares)
        return self._known[shares]


def _real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of reals, which add alike; return others unchanged."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _like(parameter: Tensor, found: Tensor) -> Tensor:
    if parameter.is_complex():
        return torch.view_as_complex(found.to(_real(parameter).dtype))
    return found.to(parameter.dtype)


class Exchange:
    """The sum of all ranks' gradients, added in the tree's order.

    Keeps one vector of the gradients' length and one for incoming pieces, because fresh memory costs more in page
    faults than the sums. In the first vector each gradient starts at a multiple of 16 elements, as in memory of its
    own: norm kernels on a device choose their order by the alignment.

    The flags of used parameters travel with the sums. On a CPU they are read from there. On a device that would wait
    for it in every step, so they are read only when unknown: a rank whose own micro-batches used all parameters knows
    that all are used. If some rank missed one in the first step, all ranks exchange their flags in each step over
    `control`, without the device. If a parameter is missed only in a later step, the ranks that missed it wait for the
    device.

    Attributes:
        late: whether values arrive late, as from a device; None: on a CUDA device. Set by tests.
    """

    late: ClassVar[bool | None] = None

    def __init__(self, parameters: list[Tensor], dtype: torch.dtype, world: World) -> None:
        self._ranks, self._control = world.size, world.control
        self._late = parameters[0].device.type == "cuda" if self.late is None else self.late
        self._own = [False] * len(parameters)  # used by this rank's micro-batches of the current step
        self._told: bool | None = None  # whether the ranks exchange their flags; None: before the first step
        sizes = [p.numel() for p in parameters]
        starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
        length = starts[-1] + len(sizes)  # the last: whether each was used
        length += -length % self._ranks  # up to equal pieces a rank
        self._mine = torch.zeros(length, dtype=dtype, device=parameters[0].device)
        self._kept: Tensor | None = None
        places = zip(starts, sizes, parameters, strict=False)
        self._parts = [self._mine.narrow(0, start, size).view(p.shape) for start, size, p in places]
        self._used = self._mine.narrow(0, starts[-1], len(sizes))

    def __call__(self, mine: Iterable[Gradients], parts: Subtrees) -> Gradients:
        """Return the sums; None where no rank has a gradient. Collective.

        The sums are views of an internal vector, valid until the next call.

        Args:
            mine: the sums of this rank's subtrees, each requested when it is sent.
            parts: the subtrees of all ranks.
        """
        once = len(parts.rounds) == 1
        self._own = [False] * len(self._parts)
        total = piece_of_sum(map(self._flat, mine), lambda pieces: self._room(pieces, once), parts)
        dist.all_gather(list(self._mine.view(self._ranks, -1).unbind()), total)  # collective
        return [part if used else None for part, used in zip(self._parts, self._by_any(), strict=True)]

    def _by_any(self) -> Sequence[float | bool]:
        """Return, for each parameter, whether any rank used it. Call after the sums."""
        if self._late and self._told is not False:
            mine = torch.tensor([*self._own, not all(self._own)], dtype=torch.int32)
            dist.all_reduce(mine, group=self._control)  # collective
            *used, lacking = mine.tolist()
            if self._told is None:
                self._told = lacking > 0  # alike on all ranks
            return used
        if self._late and all(self._own):
            return self._own
        found: list[float] = self._used.tolist()  # waits for the device, where it is one
        return found

    def _room(self, pieces: int, once: bool) -> Tensor:
        """Return memory for incoming pieces, reused if one round suffices; more would hold too much."""
        kept, self._kept = self._kept, None
        made = kept if kept is not None and len(kept) == pieces else None
        made = self._mine.new_empty(pieces, len(self._mine) // self._ranks) if made is None else made
        self._kept = made if once else None
        return made

    def _flat(self, gradients: Gradients) -> Tensor:
        used = [gradient is not None for gradient in gradients]
        self._own = [one or other for one, other in zip(self._own, used, strict=True)]
        if all(used):
            self._used.fill_(1.0)
        else:
            self._used.copy_(sent(torch.tensor(used, dtype=self._used.dtype), self._used.device))
        for part, gradient in zip(self._parts, gradients, strict=True):
            part.zero_() if gradient is None else part.copy_(gradient)
        return self._mine


def piece_of_sum(
    mine: Iterable[Tensor], room: Callable[[int], Tensor], parts: Subtrees, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return this rank's piece of the sum over all ranks, added in the tree's order.

    One collective a round.

    Args:
        mine: the sums of this rank's subtrees, [ranks * n] each; each is consumed before the next is requested.
        room: k -> a contiguous tensor [k, n] for incoming pieces.
        group: all ranks; None: the default group.
    """
    vectors, found = iter(mine), list[tuple[TreeSpan, Tensor]]()
    for spans in parts.rounds:
        coming = room(sum(span is not None for span in spans))
        _exchange(next(vectors) if spans[parts.rank] else None, coming, spans, group)
        found += zip([span for span in spans if span], coming.unbind(), strict=True)
    sums: Subtotals[Tensor] = Subtotals(parts.micro_batches, Tensor.add_)
    for span, piece in sorted(found, key=lambda each: each[0]):
        sums.push(span, piece)
    (total,) = sums.taken()
    return total


def _exchange(
    vector: Tensor | None, coming: Tensor, spans: Sequence[TreeSpan | None], group: dist.ProcessGroup | None
) -> None:
    """Send each rank its piece of the vector; receive from the ranks that send."""
    flat, size = coming.view(-1), coming.shape[1]
    if all(span is not None for span in spans) and vector is not None:
        dist.all_to_all_single(flat, vector, group=group)  # collective
        return
    out = [size * (vector is not None)] * len(spans)
    into = [size * (span is not None) for span in spans]
    dist.all_to_all_single(flat, flat[:0] if vector is None else vector, into, out, group=group)  # collective


def _added(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients, in place into the left one.

    A missing gradient counts as zeros, as where ranks add their vectors: x + 0, which turns a negative zero positive.
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
