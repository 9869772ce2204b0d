"""Orders that are drawn by samplers: the same on any ranks, in any loader process, after any resume."""

import random

import numpy as np
import pytest
import torch
from ranks import run
from small_runs import config, mark
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from toys import Ragged, taken

import lockstep
from lockstep import checkpoint
from lockstep.config.sections import Data
from lockstep.data.batches import START
from lockstep.data.loader import generator_states
from lockstep.data.sampler import order_from
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.training.start.defaults import describe_run
from lockstep.training.state.plan import RunPlan

SAMPLES, DRAWN = 40, 56


class Balanced(Sampler):
    """As many samples of each class, drawn with the three default generators."""

    def __init__(self, labels):
        self.by_class = [np.flatnonzero(labels == each) for each in np.unique(labels)]

    def __len__(self):
        return 30

    def __iter__(self):
        for _ in range(10):
            yield self.by_class[0][int(torch.randint(len(self.by_class[0]), ()))]
            yield int(np.random.choice(self.by_class[1]))
            yield random.choice(list(self.by_class[2]))


class Turned(Sampler):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(np.roll(np.arange(SAMPLES), self.epoch))


def weights():
    return torch.arange(1.0, SAMPLES + 1)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(weights(), DRAWN),
    "own generator": lambda: WeightedRandomSampler(weights(), SAMPLES, generator=torch.Generator()),
    "balanced": lambda: Balanced(np.arange(SAMPLES) % 3),
    "shuffle": lambda: RandomSampler(range(SAMPLES)),
    "subset": lambda: SubsetRandomSampler(range(3, 20)),
    "in order": lambda: SequentialSampler(range(SAMPLES)),
    "set_epoch": Turned,
    "list": lambda: list(range(7)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_position_is_had_at_any_time(name):
    sampler = SAMPLERS[name]()
    size = len(sampler)
    before = generator_states()
    order = order_from(sampler, SAMPLES, 3)
    whole = order.at(0, 4 * size)
    for start, stop in ((3 * size + 1, 4 * size), (0, 5), (size - 2, size + 3), (5, 5)):
        fresh = order_from(SAMPLERS[name](), SAMPLES, 3)
        for found in (order, fresh):
            for one, other in zip(found.at(start, stop), whole, strict=True):
                np.testing.assert_array_equal(one, other[start:stop])
    assert generator_states() == before
    assert order.size == size
    epochs = whole[1].reshape(4, size).tolist()
    alike = name in ("in order", "list")
    assert len({tuple(epoch) for epoch in epochs}) == (1 if alike else 4)
    assert (order_from(SAMPLERS[name](), SAMPLES, 4).at(0, size)[1].tolist() == epochs[0]) == (
        alike or name == "set_epoch"
    )


def test_a_samplers_own_generator_is_left_as_it_was():
    generator = torch.Generator().manual_seed(9)
    sampler, before = RandomSampler(range(SAMPLES), generator=generator), generator.get_state()
    order_from(sampler, SAMPLES, 0).at(0, 100)
    assert torch.equal(generator.get_state(), before)


def test_draws_follow_the_weights():
    order = order_from(WeightedRandomSampler(weights(), 1000), SAMPLES, 0)
    found = np.bincount(order.at(0, 40_000)[1], minlength=SAMPLES)
    wanted = 40_000 * (weights() / weights().sum()).numpy()
    assert ((found - wanted) ** 2 / wanted).sum() < 80  # chi-square of 39 degrees of freedom: 99.99% lie below


def test_sample_repeated_in_its_epoch_draws_other_numbers():
    epochs, samples = order_from([2, 0, 2, 1, 2, 0], 3, 0).at(0, 12)
    assert samples.tolist() == [2, 0, 2, 1, 2, 0] * 2
    assert len(set(zip(epochs.tolist(), samples.tolist(), strict=True))) == 12
    assert epochs[[0, 1, 3, 6, 7, 9]].tolist() == [0, 0, 0, 1, 1, 1]  # the first ones as without a sampler


class Unseeded(Sampler):
    generator = np.random.default_rng(0)

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(self.generator.permutation(5).tolist())


class Shrinking(Turned):
    def __iter__(self):
        return iter(range(SAMPLES - (self.epoch > 0)))


class Failing(Turned):
    def __iter__(self):
        raise KeyError("weights.csv")


class Far(Turned):
    def __iter__(self):
        return iter(range(self.epoch, SAMPLES + self.epoch))


class At:
    def __init__(self, at, size=None):
        self.at = at
        if size is not None:
            type(self).__len__ = lambda self: size


def places(start, stop):
    return np.arange(start, stop) // SAMPLES, np.arange(start, stop) % SAMPLES


DATA = TensorDataset(torch.arange(SAMPLES))


@pytest.mark.parametrize(
    ("given", "kind", "word"),
    [
        (DistributedSampler(DATA, 2, 0), ConfigError, "DistributedSampler"),
        (BatchSampler(SequentialSampler(DATA), 4, False), ConfigError, "BatchSampler"),
        (DataLoader(DATA), ConfigError, "DataLoader"),
        (Turned, ConfigError, "Turned itself"),
        (object(), ConfigError, r"at\(start, stop\)"),
        ((each for each in range(3)), ConfigError, "__len__"),
        ([], ConfigError, "length 0"),
        ([[0, 1], [2, 3]], ConfigError, "lists"),
        ([0.5, 1.0], DataError, "float"),
        ([0, SAMPLES], DataError, f"index {SAMPLES} .* {SAMPLES} samples"),
        ([0, -1], DataError, "index -1"),
        (Unseeded(), DataError, "Unseeded"),
        (Failing(), DataError, r"weights.csv.*test_sampler.py"),
        (At(lambda start, stop: np.arange(start, stop)), DataError, "two arrays"),
        (At(lambda start, stop: (np.zeros(3), np.zeros(3))), DataError, r"shape \[3\]"),
        (At(lambda start, stop: (np.zeros(stop - start), np.zeros(stop - start))), DataError, "float64"),
        (At(lambda start, stop: (places(start, stop)[0], np.arange(start, stop) + SAMPLES)), DataError, "not in"),
        (At(lambda start, stop: (places(start, stop)[0], np.random.permutation(SAMPLES)[: stop - start])),
         DataError, "`order`.*positions"),
        (At(lambda start, stop: 1 / 0), DataError, "ZeroDivisionError.*test_sampler.py"),
    ],
)  # fmt: skip
def test_what_is_no_order_is_one_line(given, kind, word):
    with pytest.raises(kind, match=word) as found:
        order_from(given, SAMPLES, 0)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("sampler", "word"), [(Shrinking(), "39 indices in epoch 1"), (Far(), "epoch 1 .* index 40")])
def test_each_epoch_is_checked_as_it_is_drawn(sampler, word):
    order = order_from(sampler, SAMPLES, 0)
    with pytest.raises(DataError, match=word):
        order.at(SAMPLES - 1, SAMPLES + 1)


def test_each_answer_of_an_own_order_is_checked():
    order = order_from(At(lambda start, stop: (places(start, stop)[0], np.arange(start, stop))), SAMPLES, 0)
    with pytest.raises(DataError, match=f"index {SAMPLES}"):
        order.at(SAMPLES - 2, SAMPLES + 2)


def test_an_own_order_may_have_epochs_of_a_length_of_its_own():
    assert order_from(At(places), SAMPLES, 0).size == SAMPLES

    class Longer(At):
        pass

    assert order_from(Longer(places, 100), SAMPLES, 0).size == 100


@pytest.mark.parametrize(
    ("epoch", "words"),
    [(40, ""), (20, "; an epoch is 20 of 40 samples"), (56, "; an epoch is 56 draws from 40 samples")],
)
def test_the_line_at_the_start_says_what_an_epoch_is(epoch, words):
    plan = RunPlan(epoch, lockstep.Config(batch_size=8, micro_batch_size=2), START, 1, SAMPLES)
    assert f" of 8 samples in 4 micro-batches of 2{words}; " in describe_run(plan, 1)


class Noisy:
    """A dataset whose samples draw random numbers as they are loaded, and say which they are."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] | {"index": torch.tensor(index), "noise": torch.rand(())}


class Weighted(Ragged):
    """A task whose rarer samples come more often."""

    def dataset(self, split):
        return Noisy(super().dataset(split)) if split == "train" else None

    def order(self, samples, seed):
        return WeightedRandomSampler(weights(), DRAWN)


class Curriculum(Weighted):
    """The first epoch has the first half of the samples, the others all."""

    def order(self, samples, seed):
        def at(start, stop):
            epochs, within = places(start, stop)
            return epochs, np.where(epochs == 0, within // 2, within)

        return At(at)


class Listed(Weighted):
    """A batch sampler's uneven lists are the micro-batches; a step is 4 of them."""

    def order(self, samples, seed):
        order = torch.randperm(SAMPLES).tolist()
        lists = [order[at : at + 1 + at % 3] for at in range(0, SAMPLES, 2)]
        return type("Lists", (Sampler,), {"__len__": lambda self: len(lists), "__iter__": lambda self: iter(lists)})()


class ByTokens(Weighted):
    """Micro-batches of samples with like numbers of labels; a step is 4 of them."""

    order = Ragged.order

    def dataset(self, split):
        rows = super().dataset(split)
        if rows is not None:
            rows.lengths = rows.rows.kept
        return rows


SETTINGS = {
    Listed: {"batch_size": 4, "micro_batch_size": "auto"},
    ByTokens: {"batch_tokens": 48, "micro_batch_tokens": 12},
}


def trained(world, folder, kind, workers, leave_at, epochs=3):
    settings = {"max_steps": 0, "num_epochs": epochs, "exact": True, "data": Data(workers=workers)}
    settings |= SETTINGS.get(kind, {})
    if leave_at:
        taken(config(folder, **settings), kind(), world, leave_at)
    return taken(config(folder, **settings), kind(), world)


@pytest.mark.parametrize(
    ("kind", "size", "ways"),
    [
        (Weighted, DRAWN, [(1, 2, 9), (2, 0, 11), (3, 1, 0)]),
        (Curriculum, SAMPLES, [(2, 0, 7)]),
        (Listed, 40, [(3, 0, 7)]),
        (ByTokens, 0, [(3, 0, 7), (2, 1, 0)]),
    ],
)
def test_run_is_bitwise_on_any_ranks_with_loaders_and_resumes(tmp_path, kind, size, ways):
    steps, _ = trained(None, tmp_path / "one", kind, 0, 0)
    assert steps == list(range(3 * size // 8 or len(steps)))
    wanted, _ = mark(tmp_path / "one")
    for world_size, workers, leave_at in ways:
        folder = tmp_path / f"{world_size}-{workers}"
        run(trained, world_size, folder, kind, workers, leave_at)
        assert mark(folder)[0] == wanted


def test_a_run_sees_what_its_sampler_draws(tmp_path):
    task, found = Weighted(), []
    collate = task.collate
    task.collate = lambda samples: found.append(collate(samples)) or found[-1]
    taken(config(tmp_path, max_steps=0, num_epochs=2), task)
    found = found[-DRAWN:]  # micro-batches of two; before them the trial collates some
    wanted = order_from(WeightedRandomSampler(weights(), DRAWN), SAMPLES, 0).at(0, 2 * DRAWN)[1]
    assert torch.cat([batch["index"] for batch in found]).tolist() == wanted.tolist()
    assert len(torch.cat([batch["noise"] for batch in found]).unique()) == 2 * DRAWN
    state = checkpoint.read_state(checkpoint.newest(tmp_path / "r", say=print))
    assert (state["epoch"], state["position"], state["plan"]["samples"]) == (1, 2 * DRAWN, DRAWN)


def test_a_bad_order_ends_a_run_before_anything_is_written(tmp_path):
    class Bad(Weighted):
        def order(self, samples, seed):
            return DistributedSampler(DATA, 2, 0)

    with pytest.raises(UsageError, match="DistributedSampler"):
        taken(config(tmp_path), Bad(), None)
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def loaded(world, order):
    loader = lockstep.loader(DATA, world, batch_size=8, micro_batch_size=2, epochs=2, order=order)
    mine = [[batch.data[0].tolist() for batch in step if batch.items] for step in loader]
    every = world.gather(mine)
    return [[micro for rank in every for micro in rank[step]] for step in range(len(mine))]


def test_a_loop_of_ones_own_takes_a_sampler():
    sampler = WeightedRandomSampler(weights(), DRAWN)
    one = run(loaded, 1, sampler)[0]
    assert run(loaded, 2, sampler) == [one, one]
    assert [index for step in one for micro in step for index in micro] == order_from(sampler, SAMPLES, 0).at(
        0, 2 * DRAWN
    )[1].tolist()
