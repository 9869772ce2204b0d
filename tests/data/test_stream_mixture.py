"""Mixtures of streams: the same samples on any ranks and after a resume; exact counts, and what is refused."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from test_streams import Failing, Parts, batches_of, play, resumed, shifting
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from lockstep.data.stream_adapters import source_of
from lockstep.data.stream_mixture import LaneMixture
from lockstep.data.streams import Lanes
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError

CURRICULUM = [(2, {"a": 0.9, "b": 0.1}), (8, {"a": 0.2, "c": 0.8})]
WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}


class Named(Parts):
    """Its samples begin with a name."""

    def __init__(self, name, lengths, noise=False):
        super().__init__(lengths, noise)
        self.name = name

    def iter(self, part, start):
        for sample in super().iter(part, start):
            yield self.name, *sample


class Count(IterableDataset):
    """One part that cannot seek; a sample depends on what all before it have drawn."""

    def __iter__(self):
        drawn = 0.0
        for number in range(11):
            drawn += torch.rand(()).item()
            yield "c", 0, number, drawn


def mixed(weights=WEIGHTS, noise=True, few=False):
    many = Named("a", [5, 9, 2, 7, 1, 0, 3, 3, 8], noise)
    return lockstep.mixture(
        {"a": many, "b": Named("b", [4, 3, 5, 1, 6], noise), "c": Count() if few else Named("c", [2, 9, 4, 4])}, weights
    )


def flat(steps):
    return [sample for step in steps for _, batch in sorted(step.items()) for sample in batch]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("weights", [WEIGHTS, CURRICULUM])
def test_a_resume_between_any_numbers_of_ranks(weights, few):
    steps = 11
    wanted, _ = play(mixed(weights, few=few), 1, steps)
    assert all(len(batch) == 2 for step in wanted for batch in step.values())
    for ranks, others in itertools.product(range(1, 5), repeat=2):
        stop = 1 + (3 * ranks + others) % (steps - 1)
        before, state = play(mixed(weights, few=few), ranks, stop)
        place = resumed(state, stop)
        json.dumps(place[1].cursors)
        assert before + play(mixed(weights, few=few), others, steps - stop, place=place)[0] == wanted, (ranks, others)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than cores
@pytest.mark.parametrize(("workers", "few"), [(1, True), (4, False)])
def test_loader_processes_read_the_same(workers, few):
    wanted, _ = play(mixed(CURRICULUM, few=few), 1, 12)
    before, state = play(mixed(CURRICULUM, few=few), 2, 5, workers=workers)
    assert before + play(mixed(CURRICULUM, few=few), 3, 7, workers=workers, place=resumed(state, 5))[0] == wanted


def test_slots_change_hands_and_nothing_is_lost_or_doubled():
    wanted, _ = play(mixed(), 1, 30)
    assert play(mixed(), 3, 30, sharing=shifting(4, 3))[0] == wanted


PARTS = st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any)


@settings(max_examples=40, deadline=None, database=None)
@given(a=PARTS, b=PARTS, micro=st.sampled_from([1, 2, 4, 6]), share=st.integers(1, 9))
def test_each_source_gives_each_sample_once_in_its_epochs(a, b, micro, share):
    """By lanes: each begins its source's next epoch by itself."""
    stream = lockstep.mixture({"a": Named("a", a), "b": Named("b", b)}, {"a": share, "b": 10 - share})
    steps, count = 60, micro * 2 * 60
    samples = Counter(flat(play(stream, 1, steps, micro=micro)[0]))
    assert samples.total() == count
    for name, lengths in (("a", a), ("b", b)):
        everything = {(name, part, offset) for part, length in enumerate(lengths) for offset in range(length)}
        own = {sample: times for sample, times in samples.items() if sample[0] == name}
        assert set(own) <= everything
        lanes = Lanes(min(len(a), len(b)), micro, 2, 3).count
        if lanes == 1 and sum(own.values()) >= len(everything):
            assert set(own) == everything
            assert max(own.values()) - min(own.values()) <= 1


def test_an_epoch_of_a_source_is_dealt_anew_and_complete():
    """With one lane two epochs have each sample twice, in another order of the parts."""
    stream = lockstep.mixture({"a": Named("a", [3, 4, 5, 2]), "b": Named("b", [5])}, {"a": 0.5, "b": 0.5})
    samples = [each for each in flat(play(stream, 1, 40, micro=2)[0]) if each[0] == "a"]
    first, second = samples[:14], samples[14:28]
    assert len(set(first)) == 14
    assert set(first) == set(second)
    assert first != second


@pytest.mark.parametrize("weights", [WEIGHTS, CURRICULUM])
def test_shares_are_of_samples_and_within_one_of_the_weights(weights):
    everyone = batches_of(mixed(weights), World())
    steps, _ = play(mixed(weights), 2, 40)
    for first, last in ((0, 40), (3, 11)):
        counts = Counter(sample[0] for sample in flat(steps[first:last]))
        wanted = {name: counts[name] / (8 * (last - first)) for name in "abc"}
        assert everyone.shares(first, last) == pytest.approx(wanted)
    if weights is CURRICULUM:
        assert "c" not in {sample[0] for sample in flat(steps[:2])}
        assert "b" not in {sample[0] for sample in flat(steps[8:])}


def test_counts_and_blocks_of_a_lane_agree():
    lanes = Lanes(64, 4, 3, 7)
    mixture = LaneMixture(lanes, [(0, [600_000, 400_000]), (900, [0, 1_000_000])])
    for lane, number in ((0, 1), (5, 999), (9, 1000), (9, 2500), (31, 10_007)):
        sources = mixture.sources(lane, 0, number)
        assert mixture.counts(lane, number) == np.bincount(sources, minlength=2).tolist()
    for own in (0, 1, 17, 1234):
        block = mixture.block_of(1, 9, own)
        assert block.start <= own < block.stop
        assert (block.start, block.stop) == tuple(mixture.counts(9, 3 * (block.number + k))[1] for k in (0, 1))
    assert mixture.counts(3, 10**9)[1] > 10**9 - 10**5


def test_a_source_of_weight_0_is_never_opened():
    class Unopened(Parts):
        def iter(self, part, start):
            raise FileNotFoundError("it is opened")

    stream = lockstep.mixture({"a": Named("a", [9] * 8), "b": Unopened([1])}, {"a": 1.0, "b": 0.0})
    assert source_of(stream).parts == 8  # nor do its parts count
    steps, _ = play(stream, 2, 10)
    assert {sample[0] for sample in flat(steps)} == {"a"}
    assert batches_of(stream, World()).shares(0, 10) == {"a": 1.0, "b": 0.0}


def test_a_source_without_samples_is_one_line():
    stream = lockstep.mixture({"a": Named("a", [9] * 4), "b": Parts([0] * 4)}, {"a": 0.5, "b": 0.5})
    with pytest.raises(DataError, match=r"source b.*no samples"):
        play(stream, 1, 4)
    few = lockstep.mixture({"a": Named("a", [9] * 4), "b": Named("b", [0, 0, 1, 0])}, {"a": 0.5, "b": 0.5})
    assert {sample[0] for sample in flat(play(few, 1, 9)[0])} == {"a", "b"}


@pytest.mark.parametrize("noise", [False, True])
def test_failing_part_is_reopened_and_named_if_it_fails_on(tmp_path, noise):
    def stream(folder):
        return lockstep.mixture(
            {"a": Named("a", [9] * 4, noise), "b": Failing([9] * 4, folder, noise)}, {"a": 1, "b": 2}
        )

    wanted, _ = play(stream(tmp_path), 1, 8)
    for number in range(2):
        (tmp_path / str(number)).touch()
    assert play(stream(tmp_path), 2, 8, retries=2)[0] == wanted
    assert not list(tmp_path.iterdir())
    (tmp_path / "0").touch()
    with pytest.raises(DataError, match=r"source b.*part 2, sample 2.*--guards.retries"):
        play(stream(tmp_path), 1, 8)


def test_a_trial_reads_parts_and_halves():
    everyone = batches_of(mixed(), World(rank=1, size=2))
    loader = everyone.from_step(0)
    whole, first, second = (batch.held for batch, _ in everyone.parts(0, [(0, 6), (0, 3), (3, 6)]))
    assert whole == first + second
    loader.close()


def test_what_cannot_be_mixed_is_refused():
    table = TensorDataset(torch.zeros(3))
    with refuses(ConfigError, "lockstep.mixture", "a", "b", "index"):
        lockstep.mixture({"a": Parts([1]), "b": table}, {"a": 1, "b": 1})
    with refuses(ConfigError, "lockstep.mixture", "weights"):
        lockstep.mixture({"a": Parts([1]), "b": Parts([1])})
    with refuses(ConfigError, "lockstep.mixture", "m"):
        lockstep.mixture({"m": mixed(), "a": Parts([1])}, {"a": 1})
    with refuses(DataError, "parts = 0"):
        lockstep.mixture({"a": Parts([])}, {"a": 1})
    assert mixed().fingerprint == mixed().fingerprint != mixed(CURRICULUM).fingerprint
