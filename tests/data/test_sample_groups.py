"""Micro-batches by tokens and of batch samplers: each sample once an epoch, within the bound, by arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

import lockstep
from lockstep.data.groups import SampledGroups, TokenGroups, padding
from lockstep.errors import ConfigError, DataError


def epoch(groups, number):
    """The micro-batches of an epoch in the order of the run: (epochs, samples) of each."""
    places = groups.at(number * groups.size, (number + 1) * groups.size)
    return [groups.samples(*place) for place in zip(*(each.tolist() for each in places), strict=True)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=300), st.integers(500, 4000), st.integers(0, 9))
def test_each_sample_comes_once_an_epoch_within_the_bound(lengths, bound, seed):
    groups, lengths = TokenGroups(lengths, bound, seed), np.array(lengths)
    for number in (0, 7):
        parts = [samples for _, samples in epoch(groups, number)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
        assert all(lengths[part].max() * len(part) <= bound for part in parts)


def test_epochs_differ_in_group_order_and_content():
    lengths = np.random.default_rng(0).integers(1, 64, 3000)
    groups = TokenGroups(lengths, 512, seed=0)
    first, second = ([tuple(samples.tolist()) for _, samples in epoch(groups, number)] for number in (0, 1))
    assert first != second
    assert len({*map(frozenset, first)} & {*map(frozenset, second)}) < len(first) / 4
    assert first == [tuple(samples.tolist()) for _, samples in epoch(TokenGroups(lengths, 512, 0), 0)]
    assert first != [tuple(samples.tolist()) for _, samples in epoch(TokenGroups(lengths, 512, 1), 0)]


def test_padding_of_log_normal_lengths_is_at_most_5_percent():
    draw = np.random.default_rng(0)
    for mean, spread in ((4.0, 1.0), (5.0, 0.6), (6.0, 1.2)):
        lengths = np.clip(np.exp(draw.normal(mean, spread, 20_000)), 1, 8192).astype(int)
        assert padding(TokenGroups(lengths, 16384, 0), lengths) <= 0.05


def test_lengths_that_cannot_be_grouped_are_refused():
    with refuses(DataError, "--micro-batch-tokens", 64, "sample 2", 65):
        TokenGroups([3, 64, 65], 64, 0)
    with refuses(DataError, "--micro-batch-tokens", "sample 1", 0):
        TokenGroups([3, 0], 64, 0)
    with refuses(DataError, "--micro-batch-tokens"):
        TokenGroups([], 64, 0)


class ByParity:
    """A batch sampler of uneven lists, drawn from torch's default generator."""

    def __len__(self):
        return 4

    def __iter__(self):
        order = torch.randperm(10).tolist()
        yield from (order[:4], order[4:5], order[5:9], order[9:])


def test_a_batch_samplers_lists_are_the_micro_batches():
    groups = SampledGroups(ByParity(), 10, seed=3)
    for number in (0, 5, 1):
        lists = [samples.tolist() for _, samples in epoch(groups, number)]
        assert list(map(len, lists)) == [4, 1, 4, 1]
        assert sorted(index for each in lists for index in each) == list(range(10))
    before = torch.get_rng_state()
    assert epoch(groups, 9)[0][1].tolist() == epoch(SampledGroups(ByParity(), 10, seed=3), 9)[0][1].tolist()
    assert torch.equal(before, torch.get_rng_state())


def test_repeated_sample_has_its_own_epoch_number_each_time():
    sampler = BatchSampler(WeightedRandomSampler([1.0, 0.0, 0.0], 6), 4, drop_last=False)
    pairs = [
        pair for epochs, samples in epoch(SampledGroups(sampler, 3, 0), 2) for pair in zip(epochs, samples, strict=True)
    ]
    assert len(pairs) == len({*pairs}) == 6
    assert {int(each) & 0xFFFFFFFF for each, _ in pairs} == {2}


@pytest.mark.parametrize("lists", [[[0], []], [[0]], [[0], [99]]])
def test_invalid_lists_are_refused(lists):
    class Fixed:
        def __len__(self):
            return 2

        def __iter__(self):
            return iter(lists)

    with refuses(DataError, "order"):
        SampledGroups(Fixed(), 10, 0)


def test_a_sampler_that_is_not_seeded_is_refused():
    generator = np.random.default_rng()

    class Unseeded(ByParity):
        def __iter__(self):
            yield from generator.permutation(12).reshape(4, 3).tolist()

    with refuses(DataError, "order", "Unseeded"):
        SampledGroups(Unseeded(), 12, 0)
    with refuses(ConfigError, "order"):
        SampledGroups(iter([[0]]), 10, 0)
    assert SampledGroups(BatchSampler(RandomSampler(range(9)), 2, False), 9, 0).size == 5
    assert SampledGroups(BatchSampler(SequentialSampler(range(9)), 2, True), 9, 0).size == 4


class Normed(lockstep.Task):
    """Samples of 4 features, the last as long as a micro-batch."""

    lengths = (2, 2, 2, 2, 8)

    def model(self):
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(5, 4)) if split == "train" else None

    def work(self, dataset, samples):
        return float(len(samples) * max(self.lengths[sample] for sample in samples))

    def loss(self, model, batch):
        return model(batch[0]).sum()


def test_batchnorm_with_a_one_sample_micro_batch_is_refused(tmp_path):
    asked = {"batch_tokens": 16, "micro_batch_tokens": 8, "device": "cpu", "save_dir": str(tmp_path)}
    with refuses(ConfigError, "--micro-batch-tokens 8", "BatchNorm"):
        lockstep.train(lockstep.Config(**asked, max_steps=1), Normed())
    assert not list(tmp_path.iterdir())
