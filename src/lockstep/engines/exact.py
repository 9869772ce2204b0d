"""The fixed tree: add a step's gradients in one order for any number of ranks.

The number M of a step's micro-batches alone fixes the tree. The left half of a node has the largest power of two of
its micro-batches that is less than their number, and a node's sum is that of its left half plus that of its right half.
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

from lockstep.distributed import collectives
from lockstep.distributed.balance import Shares, ShareSchedule, equal_shares
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError
from lockstep.tensors import copy_to_device, gradient_like, local_of

__all__ = [
    "Subtotals",
    "Subtrees",
    "Tree",
    "TreeSpan",
    "check_servable",
    "check_slots",
    "held_at_most",
]


Sum = TypeVar("Sum")
Gradients = list[Tensor | None]
_CACHE_SIZE = 64  # cached ways to share out a step


class TreeSpan(NamedTuple):
    """The micro-batches start .. stop - 1, whose sum is a node of the tree."""

    start: int
    stop: int


def check_servable(micro_batches: int, world_size: int) -> None:
    """Raise ConfigError if there are more ranks than micro-batches."""
    if world_size > micro_batches:
        raise ConfigError(
            f"--exact needs a micro-batch for each of {world_size} processes, but a step has {micro_batches}; start at "
            f"most {micro_batches} processes, or lower --micro-batch-size"
        )


def check_slots(count: int, slots: int, world: World) -> None:
    """Raise LockstepError if the number of backwards in a step differs from this rank's slots."""
    if slots and count != slots:
        raise LockstepError(
            f"{world.label}: exact_micro_batches gives this rank {slots} micro-batches a step, and this "
            f"step had {count}; for a shorter step call backward(loss, weight=0) for the missing ones"
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

    if run.stop > run.start:
        return list(within(TreeSpan(0, micro_batches)))
    return []


@functools.cache
def _splits(micro_batches: int) -> frozenset[tuple[int, int, int]]:
    """Return (start, middle, stop) of each node with at least two micro-batches."""
    nodes = set()
    todo = [TreeSpan(0, micro_batches)]
    while todo:
        node = todo.pop()
        if node.stop - node.start > 1:
            middle = _middle(node)
            nodes.add((node.start, middle, node.stop))
            todo += [TreeSpan(node.start, middle), TreeSpan(middle, node.stop)]
    return frozenset(nodes)


class Subtotals(Generic[Sum]):
    """Sums of adjacent micro-batches, added in order where the tree allows it.

    Adds two sums once they are the left and right half of a node. Holds one sum for each of the `subtrees` of the
    micro-batches pushed so far: at most 2 log2(M).

    Args:
        micro_batches: M.
        add: (left, right) -> their sum; may reuse both.
    """

    def __init__(self, micro_batches: int, add: Callable[[Sum, Sum], Sum]) -> None:
        self._splits = _splits(micro_batches)
        self._add = add
        self._stack: list[tuple[TreeSpan, Sum]] = []

    def push(self, span: TreeSpan, term: Sum) -> None:
        """Take over a subtree's sum; its micro-batches follow those pushed before."""
        while self._stack and (self._stack[-1][0].start, span.start, span.stop) in self._splits:
            before, left_sum = self._stack.pop()
            span = TreeSpan(before.start, span.stop)
            term = self._add(left_sum, term)
        self._stack.append((span, term))

    def __len__(self) -> int:
        return len(self._stack)

    def take(self) -> Iterator[Sum]:
        """Yield the sums in order and drop each one; empty after the last."""
        sums = self._stack
        self._stack = []
        sums.reverse()
        while sums:
            yield sums.pop()[1]


@functools.cache
def held_at_most(micro_batches: int, ranks: int) -> int:
    """Return the largest number of sums that any rank holds at once, with equal shares."""
    most = 0
    for start, stop in equal_shares(micro_batches, ranks).runs:
        sums: Subtotals[int] = Subtotals(micro_batches, int.__add__)
        for micro_batch in range(start, stop):
            sums.push(TreeSpan(micro_batch, micro_batch + 1), 1)
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
        self.micro_batches = micro_batches
        self.slots = shares.slots[world.rank]
        self.rank = world.rank
        self.mine = runs[world.rank]
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
        self, parameters: list[Tensor], micro_batches: int, world: World, sharing: ShareSchedule | None = None
    ) -> None:
        self._parameters = parameters
        self._world = world
        self._sharing = sharing
        # The narrowest dtype that represents every gradient exactly.
        self._dtype = functools.reduce(torch.promote_types, {_real(p).dtype for p in parameters})
        self._cache: dict[Shares, Subtrees] = {}
        self._micro_batches = micro_batches
        self._subtrees = self._current_subtrees()
        self._sums: Subtotals[Gradients] = Subtotals(micro_batches, _add_gradients)
        self._count = 0
        self._exchange: Exchange | None = None

    def push(self) -> None:
        """Take the gradients of one backward out of `.grad`. Call once a micro-batch."""
        # The shares may change between steps, but not within one.
        if not self._count:
            self._subtrees = self._current_subtrees()
        micro_batch = self._subtrees.mine.start + self._count
        self._count += 1
        # Beyond the run the slot is empty: there is no such micro-batch.
        if micro_batch < self._subtrees.mine.stop:
            # Use one memory layout for all gradients, since a norm's order of summation may depend on it.
            gradients = [
                None if p.grad is None else _real(local_of(p.grad)).to(self._dtype).contiguous()
                for p in self._parameters
            ]
            self._sums.push(TreeSpan(micro_batch, micro_batch + 1), gradients)
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Set `.grad` to the sum over all micro-batches of all ranks. Collective.

        Parameters that no rank uses get None.

        Raises:
            LockstepError: the number of micro-batches pushed differs from this rank's slots.
        """
        count = self._count
        self._count = 0
        check_slots(count, self._subtrees.slots, self._world)
        if self._world.size > 1:
            # Made at the first use, since it allocates a vector of all gradients.
            self._exchange = self._exchange or Exchange(
                [_real(local_of(p)) for p in self._parameters], self._dtype, self._world
            )
            sums = self._exchange(self._sums.take(), self._subtrees)
        else:
            (sums,) = self._sums.take()
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = None if total is None else gradient_like(parameter, _cast_to(parameter, total))

    def _current_subtrees(self) -> Subtrees:
        """Return the subtrees of the current step's runs."""
        if self._sharing:
            shares = self._sharing.now
        else:
            shares = equal_shares(self._micro_batches, self._world.size)
        if shares not in self._cache:
            if len(self._cache) == _CACHE_SIZE:
                self._cache.clear()
            self._cache[shares] = Subtrees(self._micro_batches, self._world, shares)
        return self._cache[shares]


def _real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of reals, with the same sums; return others unchanged."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().resolve_conj())
    return tensor


def _cast_to(parameter: Tensor, value: Tensor) -> Tensor:
    if parameter.is_complex():
        return torch.view_as_complex(value.to(_real(parameter).dtype))
    return value.to(parameter.dtype)


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
        self._ranks = world.size
        self._control = world.control
        self._group = world.group
        if self.late is None:
            self._late = parameters[0].device.type == "cuda"
        else:
            self._late = self.late
        # Whether this rank's micro-batches of the current step used each parameter.
        self._local_flags = [False] * len(parameters)
        # Whether the ranks exchange their flags in each step; None before the first step.
        self._sends_flags: bool | None = None
        sizes = [p.numel() for p in parameters]
        # A multiple of 16 elements, as in memory of its own: norm kernels choose their order by the alignment.
        starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
        # The flags of the used parameters follow the gradients; then pad to equal pieces per rank.
        length = starts[-1] + len(sizes)
        length += -length % self._ranks
        self._vector = torch.zeros(length, dtype=dtype, device=parameters[0].device)
        self._spare_room: Tensor | None = None
        layout = zip(starts, sizes, parameters, strict=False)
        self._parts = [self._vector.narrow(0, start, size).view(p.shape) for start, size, p in layout]
        self._flag_part = self._vector.narrow(0, starts[-1], len(sizes))

    def __call__(self, local_sums: Iterable[Gradients], parts: Subtrees) -> Gradients:
        """Return the sums; None where no rank has a gradient. Collective.

        The sums are views of an internal vector, valid until the next call.

        Args:
            local_sums: the sums of this rank's subtrees, each requested when it is sent.
            parts: the subtrees of all ranks.
        """
        one_round = len(parts.rounds) == 1
        self._local_flags = [False] * len(self._parts)
        allocate = functools.partial(self._allocate, one_round=one_round)
        total = piece_of_sum(map(self._flatten, local_sums), allocate, parts, self._group)
        # All ranks: each has summed one piece, and needs all of them.
        pieces = list(self._vector.view(self._ranks, -1).unbind())
        collectives.all_gather(pieces, total, group=self._group)  # collective
        return [view if flag else None for view, flag in zip(self._parts, self._global_flags(), strict=True)]

    def _global_flags(self) -> Sequence[float | bool]:
        """Return, for each parameter, whether any rank used it. Call after the sums."""
        if self._late and self._sends_flags is not False:
            vector = torch.tensor([*self._local_flags, not all(self._local_flags)], dtype=torch.int32)
            # All ranks, over the host's group, so that nobody waits for the device.
            collectives.all_reduce(vector, group=self._control)  # collective
            # Does not wait: the vector is on the host.
            *counts, lacking = vector.tolist()
            if self._sends_flags is None:
                # The sum is the same on all ranks, so all decide alike.
                self._sends_flags = lacking > 0
            return counts
        if self._late and all(self._local_flags):
            return self._local_flags
        # Waits for the device on a rank that missed a parameter; on a CPU it costs nothing.
        flags: list[float] = self._flag_part.tolist()
        return flags

    def _allocate(self, pieces: int, one_round: bool) -> Tensor:
        """Return memory for incoming pieces, reused if one round suffices; more would hold too much."""
        spare = self._spare_room
        self._spare_room = None
        room = spare if spare is not None and len(spare) == pieces else None
        if room is None:
            room = self._vector.new_empty(pieces, len(self._vector) // self._ranks)
        self._spare_room = room if one_round else None
        return room

    def _flatten(self, gradients: Gradients) -> Tensor:
        flags = [gradient is not None for gradient in gradients]
        self._local_flags = [before or used for before, used in zip(self._local_flags, flags, strict=True)]
        if all(flags):
            self._flag_part.fill_(1.0)
        else:
            # The copy must not wait for the device, so it goes through pinned memory.
            self._flag_part.copy_(
                copy_to_device(torch.tensor(flags, dtype=self._flag_part.dtype), self._flag_part.device)
            )
        for gradient_view, gradient in zip(self._parts, gradients, strict=True):
            gradient_view.zero_() if gradient is None else gradient_view.copy_(gradient)
        return self._vector


def piece_of_sum(
    local_sums: Iterable[Tensor], room: Callable[[int], Tensor], parts: Subtrees, group: dist.ProcessGroup | None
) -> Tensor:
    """Return this rank's piece of the sum over all ranks, added in the tree's order.

    One collective a round.

    Args:
        local_sums: the sums of this rank's subtrees, [ranks * n] each; each is consumed before the next is requested.
        room: k -> a contiguous tensor [k, n] for incoming pieces.
        group: all ranks; None: the default group.
    """
    vectors = iter(local_sums)
    pieces = list[tuple[TreeSpan, Tensor]]()
    for spans in parts.rounds:
        coming = room(sum(span is not None for span in spans))
        _exchange(next(vectors) if spans[parts.rank] else None, coming, spans, group)
        pieces += zip([span for span in spans if span], coming.unbind(), strict=True)
    sums: Subtotals[Tensor] = Subtotals(parts.micro_batches, Tensor.add_)
    for span, piece in sorted(pieces, key=lambda each: each[0]):
        sums.push(span, piece)
    (total,) = sums.take()
    return total


def _exchange(
    vector: Tensor | None, coming: Tensor, spans: Sequence[TreeSpan | None], group: dist.ProcessGroup | None
) -> None:
    """Send each rank its piece of the vector; receive from the ranks that send."""
    flat = coming.view(-1)
    size = coming.shape[1]
    if all(span is not None for span in spans) and vector is not None:
        # All ranks send: one all-to-all of equal pieces.
        collectives.all_to_all_single(flat, vector, group=group)  # collective
        return
    out = [size * (vector is not None)] * len(spans)
    into = [size * (span is not None) for span in spans]
    # Some ranks have sent all of their subtrees. Every rank takes part, those with empty pieces.
    collectives.all_to_all_single(flat, flat[:0] if vector is None else vector, into, out, group=group)  # collective


def _add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients, in place into the left one.

    A missing gradient is treated as zeros, as in a vector of all gradients: x + 0, which turns -0.0 into 0.0.
    """
    pairs = []
    for a, b in zip(left, right, strict=True):
        if a is not None and b is not None:
            pairs.append((a, b))
    if pairs:
        # Private to torch: adds all pairs in few kernels.
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    if len(pairs) == len(left):
        return left
    return [_add_zero(a, b) if a is None or b is None else a for a, b in zip(left, right, strict=True)]


def _add_zero(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    value = right if left is None else left
    if value is None:
        return None
    return value.add_(0.0)
