"""The parts of --guards.audit: what is audited by whom, who is wrong, what a digest sees, what is left behind."""

import random
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from torch import nn
from toys import Ragged

from lockstep.data.batches import MicroBatch
from lockstep.distributed.balance import equal_shares, shares_of_counts
from lockstep.errors import ConfigError
from lockstep.guards.audit import (
    BY_ITSELF,
    BY_OTHERS,
    EVERYBODY,
    ONE_OF_TWO,
    Recomputation,
    Recomputer,
    choose_audits,
    describe_tensors,
    vote,
)
from lockstep.guards.desync import Digests, of_batch

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(shares_of_counts) | st.builds(
    equal_shares, st.integers(1, 30), st.integers(1, 8)
)


@given(SHARES, st.integers(0, 2**63), st.floats(0, 1))
def test_each_rank_is_audited_by_one_other_with_little_work(shares, seed, share):
    runs = shares.runs
    for step in range(20):
        found = choose_audits(seed, step, share, runs)
        assert len({each.micro for each in found}) == len(found)
        auditors = {}
        for auditor, micro in found:
            owner = next(rank for rank, (start, stop) in enumerate(runs) if start <= micro < stop)
            assert auditor != owner or len(runs) == 1
            assert auditors.setdefault(owner, auditor) == auditor
        assert len(set(auditors.values())) == len(auditors)
        for owner, (start, stop) in enumerate(runs):
            count = sum(start <= each.micro < stop for each in found)
            assert abs(count - share * (stop - start)) < 1
            firsts = [each for each in choose_audits(seed, step, share, runs, first_only=True) if each.micro == start]
            assert len(firsts) == min(count, 1) or stop == start, owner
    least = choose_audits(seed, 0, 0.0, runs, least=1, first_only=True)
    assert [each.micro for each in least] == [start for start, stop in runs if stop > start]


@pytest.mark.parametrize("runs", [equal_shares(8, 2).runs, shares_of_counts((5, 3, 1)).runs, equal_shares(3, 1).runs])
@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_the_share_is_kept_over_many_steps_for_each_micro_batch(runs, share):
    last, steps = runs[-1][1], 4000
    found = [each.micro for step in range(steps) for each in choose_audits(5, step, share, runs)]
    for micro in range(last):
        rate = found.count(micro) / steps
        assert abs(rate - share) < 4 * (share * (1 - share) / steps) ** 0.5 + 1e-9
    assert fmean([len(choose_audits(5, step, share, runs)) for step in range(steps)]) == pytest.approx(
        share * last, rel=0.25
    )


RESULT = st.sampled_from("abcd")


@given(st.integers(2, 6), st.data())
def test_a_device_that_contradicts_itself_is_named(ranks, data):
    wrong = data.draw(st.integers(0, ranks - 1))
    found = [["right"] * data.draw(st.integers(1, 5)) for _ in range(ranks)]
    found[wrong] = data.draw(st.permutations(["right", *data.draw(st.lists(RESULT, min_size=1, max_size=3))]))
    assert vote(found) == ([wrong], BY_ITSELF)


@given(st.integers(3, 6), st.data())
def test_most_say_which_device_is_always_wrong(ranks, data):
    wrong = data.draw(st.integers(0, ranks - 1))
    assert vote([["ab"[rank == wrong]] * 3 for rank in range(ranks)]) == ([wrong], BY_OTHERS)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([["a", "a"], ["b", "b"]], ([0, 1], ONE_OF_TWO)),
        ([["a"], ["b"], []], ([0, 1], ONE_OF_TWO)),
        ([["a", "b"]], ([0], BY_ITSELF)),
        ([["a", "b"], ["c", "d"]], ([0, 1], EVERYBODY)),
        ([["a", "b"], ["c", "d"], ["e", "e"]], ([0, 1], EVERYBODY)),
        ([["a"], ["b"], ["c"]], ([0, 1, 2], EVERYBODY)),
        ([["a", "b"], ["b"], ["c"]], ([0, 1, 2], EVERYBODY)),
        ([["b", "a"], ["a"], ["c"], ["a"], ["a"]], ([0, 2], BY_OTHERS)),
    ],
)
def test_what_the_results_say(found, wanted):
    assert vote(found) == wanted


def of(tensor):
    digests = Digests()
    digests.add("it", tensor)
    return digests.read()["it"]


def test_a_digest_sees_each_bit_and_no_nan_from_another():
    values = torch.tensor([1.0, -0.0, torch.inf, 1e-45])
    assert len({of(values), of(values.flip(0)), of(values.abs()), of(values[:3]), of(-values)}) == 5
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, -0x3FFFFF))
    assert bool(quiet.isnan() & other.isnan())
    assert of(quiet) == of(other) != of(torch.full((1,), torch.inf))
    dense = torch.eye(3, dtype=torch.complex64).conj()
    assert of(dense) == of(dense.resolve_conj()) != of(torch.eye(3))
    assert of(torch.eye(3).to_sparse()) == of(torch.eye(3)) == of(torch.eye(3).t())
    assert of(torch.ones(2, dtype=torch.bool)) != of(torch.zeros(2, dtype=torch.bool))


def test_a_batch_is_another_where_its_memory_begins_elsewhere():
    """Kernels of small products on a CPU then add in another order."""
    memory = torch.arange(20.0)
    assert of_batch({"x": memory[16:].clone()}) == of_batch({"x": memory[16:]})
    assert of_batch({"x": memory[1:5].clone()}) != of_batch({"x": memory[1:5]})
    assert of_batch([np.ones(2), "a", None]) != of_batch([np.zeros(2), "a", None])


class _Leaving(nn.Module):
    """It draws, writes into a buffer and puts another tensor in another's place."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 1), nn.Linear(1, 1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        self.count += 1
        self.mean = x.mean(0).detach()
        return self.layer(self.norm(x) + torch.rand(()) + random.random() + np.random.rand()) * self.count


class _Task(Ragged):
    def state_dict(self):
        return {}

    def loss(self, model, batch):
        return model(batch).sum()


def test_what_is_computed_again_begins_alike_and_leaves_nothing():
    model = _Leaving()
    again = Recomputer(model, _Task(), lambda held, batch: held(batch.data).sum(), _seed, torch.device("cpu"))
    again.begin()
    first, second = (MicroBatch(torch.randn(4, 3), index, 4, 1.0) for index in (0, 1))
    for batch in (first, second):
        _seed(7, batch.index)
        with again.watch(batch) as seen:
            (seen(model(batch.data).sum()) * 1.0).backward(torch.tensor(0.25))
    told = again.read_results()
    assert [each.root for each in told.values()] == [0.25, 0.25]
    assert again.has_moved()
    assert again.unlike(first, told[0]) == ""
    assert again.unlike(first, told[1]) == "data"
    assert again.unlike(second, told[1]) == "buffers"
    before = _all(model)
    bits = again.bits(7, first, told[0])
    assert bits == again.own(0)
    assert [name for name in again.names if name in bits] == [
        "",
        "layer.weight",
        "layer.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert _all(model) == before
    assert again.own(5) == {}
    with refuses(ConfigError, "--guards.audit", "use_reentrant=False"):
        again.bits(7, first, told[0]._replace(names=""))
    assert isinstance(told[0], Recomputation)


def _seed(step, index):
    torch.manual_seed(step + index)
    np.random.seed(step + index)
    random.seed(step + index)


def _all(model):
    """Everything of a model and the generators, and which tensors are there."""
    tensors = [*model.named_buffers(), *((name, p.grad) for name, p in model.named_parameters())]
    held = [(name, id(tensor), None if tensor is None else tensor.tolist()) for name, tensor in tensors]
    numpy = np.random.get_state()
    return held, torch.get_rng_state().tolist(), random.getstate(), [np.asarray(part).tolist() for part in numpy]


def test_what_differs_is_said_in_a_few_words():
    assert describe_tensors([""]) == "the loss"
    assert describe_tensors(["a"]) == "the gradient of a"
    assert describe_tensors(["", "a"]) == "the loss and the gradient of a"
    assert describe_tensors(["", "a", "b", "c"]) == "the loss and the gradients of a and 2 more parameters"
