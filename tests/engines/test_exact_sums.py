"""The fixed tree's sums have the same bits at every world size, for whatever gradients a model may have.

Ranks are threads here, whose collectives are a few lines: many cases in a second.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.exact import Subtotals, Subtrees, Tree, TreeSpan, subtrees
from lockstep.engines.fsdp.engine import ExactReduceScatter

SHAPES = [(), (3,), (17,), (4, 3), (2, 3, 2, 2), (0,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Threads:
    """The two collectives of the exchange, between threads."""

    def __init__(self, size):
        self._barrier, self._sent, self._own = threading.Barrier(size, timeout=20), [None] * size, threading.local()

    def size(self):
        return len(self._sent)

    def become(self, rank):
        self._own.rank = rank

    def _swap(self, given, take):
        self._sent[self._own.rank] = given
        self._barrier.wait()
        take(self._sent)
        self._barrier.wait()

    def all_to_all_single(self, output, given, into=None, out=None, group=None):
        ranks, me = len(self._sent), self._own.rank
        out = out or [given.numel() // ranks] * ranks
        into = into or [output.numel() // ranks] * ranks

        def take(sent):
            pieces = [vector.split_with_sizes(sizes)[me] for vector, sizes in sent]
            for mine, piece in zip(output.split_with_sizes(into), pieces, strict=True):
                mine.copy_(piece)

        self._swap((given.clone(), out), take)

    def all_gather(self, outputs, given, group=None):
        self._swap(given.clone(), lambda sent: [output.copy_(s) for output, s in zip(outputs, sent, strict=True)])


def parameter(shape, dtype):
    made = torch.zeros(shape, dtype=dtype)
    return (made.to(memory_format=torch.channels_last) if len(shape) == 4 else made).requires_grad_()


def sums(gradients, parameters, world):
    """What this rank's Tree leaves after two steps of its micro-batches: the vectors are used again."""
    tree, slots = Tree(parameters, len(gradients), world), -(-len(gradients) // world.size)
    for _ in range(2):
        for place in range(world.rank * slots, (world.rank + 1) * slots):
            held = gradients[place] if place < len(gradients) else gradients[-1]  # of an empty slot nothing counts
            used = [(p, g) for p, g in zip(parameters, held, strict=True) if g is not None]
            if used:
                torch.autograd.backward([p for p, _ in used], [g.clone() for _, g in used])
            tree.push()
        tree.finish()
        found = [None if p.grad is None else p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
    return found


def at(size, gradients, kinds):
    """The gradients of every rank of a world of `size`."""
    threads = Threads(size)

    def rank(index):
        threads.become(index)
        return sums(gradients, [parameter(*kind) for kind in kinds], World(rank=index, size=size))

    with mock.patch.object(collectives, "dist", threads), ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def alike(one, other):
    """Equal bits: a negative zero is not a positive one."""
    if one is None or other is None:
        return one is other
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@st.composite
def cases(draw):
    """(gradients of each micro-batch, shape and dtype of each parameter)."""
    micro_batches = draw(st.integers(1, 13))
    kinds = draw(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    missing = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))

    def gradient(shape, dtype):
        if torch.rand((), generator=generator) < missing:
            return None
        found = torch.randn(shape, generator=generator)
        found[torch.rand(shape, generator=generator) < 0.5] = -0.0
        return found.to(dtype)

    return [[gradient(*kind) for kind in kinds] for _ in range(micro_batches)], kinds


@settings(max_examples=60)
@given(cases())
def test_every_world_size_has_the_bits_of_one_process(case):
    gradients, kinds = case
    (alone,) = at(1, gradients, kinds)
    for size in range(2, len(gradients) + 1):
        for found in at(size, gradients, kinds):
            assert all(map(alike, found, alone)), (size, found, alone)


@settings(max_examples=30)
@given(st.integers(1, 70), st.data())
def test_rank_holds_few_whole_subtrees_with_the_right_sums(micro_batches, data):
    start = data.draw(st.integers(0, micro_batches - 1))
    run = TreeSpan(start, data.draw(st.integers(start + 1, micro_batches)))
    found = subtrees(micro_batches, run)
    assert [place for span in found for place in range(*span)] == list(range(*run))
    assert len(found) <= max(1, 2 * math.log2(run.stop - run.start) + 1)
    held = Subtotals(micro_batches, lambda left, right: f"({left} {right})")
    for place in range(*run):
        held.push(TreeSpan(place, place + 1), str(place))
    assert list(held.take()) == [written(span) for span in found]
    assert not list(held.take())


def written(span):
    """The tree, by its definition."""
    if span.stop - span.start == 1:
        return str(span.start)
    half = max(2**k for k in range(8) if 2**k < span.stop - span.start)
    return f"({written(TreeSpan(span.start, span.start + half))} {written(TreeSpan(span.start + half, span.stop))})"


@settings(max_examples=60)
@given(cases())
def test_flat_gradient_sums_with_zeros_are_bitwise(case):
    """As fsdp hands them over: there a parameter that a micro-batch leaves out counts as zeros."""
    gradients, kinds = case
    kinds = [(shape, torch.float32) for shape, _ in kinds]
    gradients = [[None if g is None else g.float() for g in each] for each in gradients]
    (alone,) = at(1, gradients, kinds)
    zeros = [torch.zeros(shape) for shape, _ in kinds]
    sizes = [z.numel() for z in zeros]
    threads, total = Threads(1), torch.empty(sum(sizes))
    comm = ExactReduceScatter(Subtrees(len(gradients), World()))
    threads.become(0)
    with mock.patch.object(collectives, "dist", threads):
        for each in gradients:
            whole = [z if g is None else g for g, z in zip(each, zeros, strict=True)]
            comm.last = each is gradients[-1]
            comm(total, torch.cat([g.reshape(-1) for g in whole]), threads, None)
    parts = total.split_with_sizes(sizes)
    for found, wanted, (shape, _) in zip(parts, alone, kinds, strict=True):
        assert wanted is None or alike(found.view(shape), wanted), (found, wanted)


def test_two_half_precisions_meet_in_one_that_holds_both():
    kinds = [((1,), torch.float16), ((1,), torch.bfloat16)]
    large = [[torch.ones(1, dtype=torch.float16), torch.full((1,), 2.0**100, dtype=torch.bfloat16)]]
    (found,) = at(1, large, kinds)
    assert found[1].item() == 2.0**100
