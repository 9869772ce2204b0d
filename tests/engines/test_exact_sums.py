"""The fixed tree's sums have the same bits at every world size, for whatever gradients a model may have.

Ranks are threads here, whose collectives are a few lines: many cases in a second.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.distributed.world import World
from lockstep.engines.fsdp import exact as shards
from lockstep.engines.fsdp.exact import ExactReduceScatter
from lockstep.engines.shared import exact
from lockstep.engines.shared.exact import Tree

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

    def _swap(self, tensor, take):
        self._sent[self._own.rank] = tensor.clone()
        self._barrier.wait()
        take(self._sent)
        self._barrier.wait()

    def all_to_all_single(self, output, given, group=None):
        rows = output.view(len(self._sent), -1)
        self._swap(
            given, lambda sent: [row.copy_(s.view_as(rows)[self._own.rank]) for row, s in zip(rows, sent, strict=True)]
        )

    def all_gather(self, outputs, given):
        self._swap(given, lambda sent: [output.copy_(s) for output, s in zip(outputs, sent, strict=True)])


def parameter(shape, dtype):
    made = torch.zeros(shape, dtype=dtype)
    return (made.to(memory_format=torch.channels_last) if len(shape) == 4 else made).requires_grad_()


def sums(gradients, parameters, chunk, world, micro):
    """What this rank's Tree leaves after two steps of its micro-batches: the vectors are used again."""
    tree = Tree(parameters, chunk, world)
    for _ in range(2):
        for place in micro:
            used = [(p, g) for p, g in zip(parameters, gradients[place], strict=True) if g is not None]
            if used:
                torch.autograd.backward([p for p, _ in used], [g.clone() for _, g in used])
            tree.push()
        tree.finish()
        found = [None if p.grad is None else p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
    return found


def at(size, gradients, kinds, chunk):
    """The gradients of every rank of a world of `size`."""
    share, threads = len(gradients) // size, Threads(size)

    def rank(index):
        threads.become(index)
        mine = range(index * share, (index + 1) * share)
        return sums(gradients, [parameter(*kind) for kind in kinds], chunk, World(rank=index, size=size), mine)

    with mock.patch.object(exact, "dist", threads), ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def alike(one, other):
    """Equal bits: a negative zero is not a positive one."""
    if one is None or other is None:
        return one is other
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@st.composite
def cases(draw):
    """(gradients of each micro-batch, shape and dtype of each parameter, q)."""
    chunk, levels = draw(st.sampled_from([1, 3, 5])), draw(st.integers(0, 3))
    kinds = draw(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    missing = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))

    def gradient(shape, dtype):
        if torch.rand((), generator=generator) < missing:
            return None
        found = torch.randn(shape, generator=generator)
        found[torch.rand(shape, generator=generator) < 0.5] = -0.0
        return found.to(dtype)

    return [[gradient(*kind) for kind in kinds] for _ in range(chunk * 2**levels)], kinds, chunk


@settings(max_examples=60)
@given(cases())
def test_every_world_size_has_the_bits_of_one_process(case):
    gradients, kinds, chunk = case
    (alone,) = at(1, gradients, kinds, chunk)
    for size in (2, 4, 8):
        if len(gradients) % (size * chunk) == 0:
            for found in at(size, gradients, kinds, chunk):
                assert all(map(alike, found, alone)), (size, found, alone)


@settings(max_examples=60)
@given(cases())
def test_sums_of_flat_gradients_with_zeros_for_missing_ones_have_the_same_bits(case):
    """As fsdp hands them over: there a parameter that a micro-batch leaves out counts as zeros."""
    gradients, kinds, chunk = case
    kinds = [(shape, torch.float32) for shape, _ in kinds]
    gradients = [[None if g is None else g.float() for g in each] for each in gradients]
    (alone,) = at(1, gradients, kinds, chunk)
    zeros = [torch.zeros(shape) for shape, _ in kinds]
    sizes = [z.numel() for z in zeros]
    comm, total, threads = ExactReduceScatter(chunk), torch.empty(sum(sizes)), Threads(1)
    threads.become(0)
    with mock.patch.object(shards, "dist", threads):
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
    (found,) = at(1, large, kinds, 1)
    assert found[1].item() == 2.0**100
