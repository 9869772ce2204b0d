"""The fixed tree: gradients of a step's M micro-batches, added in one order, however many ranks share them.

M alone fixes the tree: the left half of a node is the largest power of two of its micro-batches that is less than all
of them, and the sum of a node is that of its left plus that of its right half. A rank owns a run of micro-batches that
follow each other, which is at most 2 log2(M) whole subtrees: `Tree` makes their sums. `Exchange` does the rest: each
rank takes one piece of the vectors, gets that piece of the sums of all subtrees, adds them as the tree says, and all
collect the results. Bits are equal because every addition has the same two operands, whoever makes it.
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
_KNOWN = 64  # cuts of a step whose subtrees are remembered


class TreeSpan(NamedTuple):
    """The micro-batches start .. stop - 1, whose sum is a node of the tree."""

    start: int
    stop: int


def check_servable(micro_batches: int, world_size: int) -> None:
    """Raises ConfigError for more ranks than micro-batches."""
    if world_size > micro_batches:
        raise ConfigError(
            f"--exact cannot serve {world_size} processes with {micro_batches} micro-batches a step: each needs one at "
            f"least; start {micro_batches}, or lower --micro-batch-size"
        )


def check_slots(found: int, slots: int, world: World) -> None:
    """Raises LockstepError where a step of this rank had another number of backwards than its run of the tree."""
    if slots and found != slots:
        raise LockstepError(
            f"{rank_label(world.rank)}: exact_micro_batches gives this rank {slots} micro-batches a step, and this "
            f"step had {found}; for a shorter step call backward(loss, weight=0) for the missing ones"
        )


def _middle(span: TreeSpan) -> int:
    """Where the right half of a node of two micro-batches or more begins."""
    return span.start + (1 << (span.stop - span.start - 1).bit_length() - 1)


def subtrees(micro_batches: int, run: TreeSpan) -> list[TreeSpan]:
    """The largest whole subtrees of the tree over M that a run of micro-batches is made of, in order."""

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
    """(start, middle, stop) of each node of two micro-batches or more."""
    found, todo = set(), [TreeSpan(0, micro_batches)]
    while todo:
        node = todo.pop()
        if node.stop - node.start > 1:
            middle = _middle(node)
            found.add((node.start, middle, node.stop))
            todo += [TreeSpan(node.start, middle), TreeSpan(middle, node.stop)]
    return frozenset(found)


class Subtotals(Generic[Sum]):
    """Adds what comes in the micro-batches' order, as far as the tree allows: two halves of a node, left and right.

    It holds the sums of as many subtrees as `subtrees` says of what was pushed so far: 2 log2(M) at most.

    Args:
        micro_batches: M.
        add: (left, right) -> their sum; both are used up.
    """

    def __init__(self, micro_batches: int, add: Callable[[Sum, Sum], Sum]) -> None:
        self._halves, self._add = _halves(micro_batches), add
        self._held: list[tuple[TreeSpan, Sum]] = []

    def push(self, span: TreeSpan, term: Sum) -> None:
        """Takes a subtree's sum over; its micro-batches follow those that came before."""
        while self._held and (self._held[-1][0].start, span.start, span.stop) in self._halves:
            before, other = self._held.pop()
            span, term = TreeSpan(before.start, span.stop), self._add(other, term)
        self._held.append((span, term))

    def __len__(self) -> int:
        return len(self._held)

    def taken(self) -> Iterator[Sum]:
        """The sums that it holds, in order, each let go of as it is taken; empty again after the last."""
        held, self._held = self._held, []
        held.reverse()
        while held:
            yield held.pop()[1]


@functools.cache
def held_at_most(micro_batches: int, ranks: int) -> int:
    """The sums that a rank holds at most while it goes through its run of the tree over M, the one that has most."""
    most = 0
    for start, stop in equal_shares(micro_batches, ranks).runs:
        sums: Subtotals[int] = Subtotals(micro_batches, int.__add__)
        for place in range(start, stop):
            sums.push(TreeSpan(place, place + 1), 1)
            most = max(most, len(sums))
    return most


class Subtrees:
    """Which subtrees each rank makes of its run of micro-batches.

    Attributes:
        micro_batches: M.
        rank, mine: this rank, and its run.
        slots: backwards of this rank in each step: those past the end of its run are empty.
        rounds: for each round of the exchange, by rank, the subtree whose sum it then sends; None: it has sent all.
    """

    def __init__(self, micro_batches: int, world: World, shares: Shares | None = None) -> None:
        shares = shares or equal_shares(micro_batches, world.size)
        runs = [TreeSpan(*run) for run in shares.runs]
        self.micro_batches, self.slots = micro_batches, shares.slots[world.rank]
        self.rank, self.mine = world.rank, runs[world.rank]
        self.rounds = list(itertools.zip_longest(*(subtrees(micro_batches, run) for run in runs)))


class Tree:
    """Adds one rank's micro-batches in the fixed order, in 2 log2(slots) extra copies of the gradients at most.

    Args:
        parameters: whose `.grad` each backward fills.
        micro_batches: M.
        world: the ranks.
        sharing: who computes what; None: all as much.
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
        """Takes what one backward left in `.grad`; to be called once a micro-batch."""
        if not self._count:  # a step begins
            self._owned = self._present()
        place = self._owned.mine.start + self._count
        self._count += 1
        if place < self._owned.mine.stop:  # else the slot is empty, and there is no such micro-batch
            # One layout for all, since the order in which a norm is summed may follow it.
            found = [None if p.grad is None else _real(p.grad).to(self._dtype).contiguous() for p in self._parameters]
            self._sums.push(TreeSpan(place, place + 1), found)
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Leaves in `.grad` the sum over all micro-batches of all ranks; None where no micro-batch used a parameter.

        Raises:
            LockstepError: another number of micro-batches than each rank's slots was pushed.
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
        """The subtrees of the present step's runs."""
        shares = self._sharing.now if self._sharing else equal_shares(self._micro_batches, self._world.size)
        if shares not in self._known:
            if len(self._known) == _KNOWN:
                self._known.clear()
            self._known[shares] = Subtrees(self._micro_batches, self._world, shares)
        return self._known[shares]


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, which add alike; any other as it is."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _like(parameter: Tensor, found: Tensor) -> Tensor:
    if parameter.is_complex():
        return torch.view_as_complex(found.to(_real(parameter).dtype))
    return found.to(parameter.dtype)


class Exchange:
    """Gradients of all ranks, added in the tree's order.

    It keeps a vector of the gradients' length, and one for the pieces that come in, since fresh ones cost more in page
    faults than the sums. In the first each gradient begins at a multiple of 16 numbers, as in memory of its own:
    kernels that add up a norm on a device choose their order by the alignment.

    Which parameters any micro-batch used travels with the sums. On a CPU it is read there. To read it on a device would
    wait for that in each step, so there it is asked only where it is not known: a rank whose own micro-batches used all
    parameters knows that all are used, whatever the others did. Where some rank lacked one in the first step, all tell
    each other theirs in each step, over `control`, which no device is in the way of. Where one is lacking in a later
    step alone, the ranks that lack it wait for the device.

    Attributes:
        late: whether numbers come late, as from a device; None: on a CUDA device. A test sets it.
    """

    late: ClassVar[bool | None] = None

    def __init__(self, parameters: list[Tensor], dtype: torch.dtype, world: World) -> None:
        self._ranks, self._control = world.size, world.control
        self._late = parameters[0].device.type == "cuda" if self.late is None else self.late
        self._own = [False] * len(parameters)  # which this rank's micro-batches of the present step used
        self._told: bool | None = None  # whether the ranks tell each other; None: before the first step
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
        """The sums, which lie in a vector of ours until the next call; None where no rank has a gradient.

        Args:
            mine: the sums of this rank's subtrees, each asked for when it is sent.
            parts: which they are, and those of the others.
        """
        once = len(parts.rounds) == 1
        self._own = [False] * len(self._parts)
        total = piece_of_sum(map(self._flat, mine), lambda pieces: self._room(pieces, once), parts)
        dist.all_gather(list(self._mine.view(self._ranks, -1).unbind()), total)  # collective
        return [part if used else None for part, used in zip(self._parts, self._by_any(), strict=True)]

    def _by_any(self) -> Sequence[float | bool]:
        """For each parameter, whether a micro-batch of any rank used it in this step; after the sums are known."""
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
        """For what comes in. Kept where it is one vector, as with runs that are subtrees: more would be too much."""
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
    """This rank's piece of the sum of all ranks' vectors, added in the tree's order: a collective a round.

    Args:
        mine: the sums of this rank's subtrees, [ranks * n] each, used up before the next one is asked for.
        room: k -> a contiguous tensor [k, n], for what comes in.
        group: of all ranks; None: the default one.
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
    """Sends each rank its piece of the vector, and takes in those of the ranks that have one."""
    flat, size = coming.view(-1), coming.shape[1]
    if all(span is not None for span in spans) and vector is not None:
        dist.all_to_all_single(flat, vector, group=group)  # collective
        return
    out = [size * (vector is not None)] * len(spans)
    into = [size * (span is not None) for span in spans]
    dist.all_to_all_single(flat, flat[:0] if vector is None else vector, into, out, group=group)  # collective


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
