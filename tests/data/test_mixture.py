"""Mixtures: exact counts of each source at any place, curricula, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

import lockstep
from lockstep.data.mixture_schedule import UNIT, Schedule
from lockstep.data.shard_order import Geometry
from lockstep.errors import ConfigError, DataError

steady = settings(deadline=None, database=None, max_examples=25)
NAMES = ("a", "b", "c", "d")
WEIGHTS = st.lists(st.integers(0, 50) | st.just(0), min_size=4, max_size=4).filter(any)


class Sharded(list):
    draws_random = False

    def __init__(self, name, *sizes):
        super().__init__((name, index) for index in range(sum(sizes)))
        self.shard_sizes = list(sizes)


def sources():
    return {"a": Sharded("a", 30, 20), "b": Sharded("b", 3), "c": Sharded("c", *[40] * 30), "d": Sharded("d", 1, 2)}


def integral(points, width, stop):
    """The exact integral of the weights over the first `stop` positions."""
    steps = np.array([step for step, _ in points], dtype=float) * width
    rows = np.array([weights for _, weights in points], dtype=float)
    rows /= rows.sum(1, keepdims=True)
    knots = np.unique(np.concatenate([[0.0], steps[steps < stop], [stop]]))
    values = np.stack([np.interp(knots, steps, row) for row in rows.T], 1)
    return (np.diff(knots)[:, None] * (values[1:] + values[:-1]) / 2).sum(0)


@steady
@given(data=st.data(), count=st.integers(1, 4), width=st.integers(1, 300))
def test_counts_are_within_one_of_the_weights_at_each_block(data, count, width):
    steps = sorted(data.draw(st.sets(st.integers(0, 500), min_size=count, max_size=count)))
    points = [(step, data.draw(WEIGHTS)) for step in steps]
    mix = lockstep.mixture(
        {name: [0] for name in NAMES}, [(at, dict(zip(NAMES, row, strict=True))) for at, row in points]
    )
    schedule, position, before = (
        Schedule([(step * width, shares) for step, shares in mix.points]),
        0,
        np.zeros(4, dtype=np.int64),
    )
    for _ in range(40):
        block = schedule.block(position)
        assert block.start == position
        assert np.array_equal(block.before, before)  # no sample is left out
        assert block.counts.min() >= 0
        assert block.counts.sum() == block.stop - block.start
        position, before = block.stop, block.before + block.counts
        # A part of a curriculum begins with whole counts; weights are millionths.
        passed = 1 + sum(0 < step * width < position for step in steps)
        assert abs(before - integral(points, width, position)).max() <= passed + position / UNIT
    far = schedule.block(10**9)
    assert far.start <= 10**9 < far.stop
    assert abs(far.before.sum() - far.start) == 0


@pytest.mark.parametrize("shuffle_shards", [0, 3])
def test_each_source_gives_each_of_its_samples_once_an_epoch(shuffle_shards):
    mix = lockstep.mixture(sources(), {"a": 0.5, "b": 0.1, "c": 0.4})
    order = mix.make_order(7, shuffle_shards).placed(Geometry(32, 4), 0)
    stop = 12_000
    epochs, samples = order.at(0, stop)
    assert len(set(zip(epochs.tolist(), samples.tolist(), strict=True))) == stop
    starts = dict(zip(NAMES, np.cumsum([0, 50, 3, 1200]), strict=True))
    for name, size, share in (("a", 50, 0.5), ("b", 3, 0.1), ("c", 1200, 0.4), ("d", 3, 0.0)):
        own = (samples >= starts[name]) & (samples < starts[name] + size)
        assert abs(own.sum() - share * stop) <= 8 + 1000 * share  # lanes, and a block that has not ended
        full = [int((own & (epochs == epoch)).sum()) for epoch in range(int(share * stop) // size - 8000 // size)]
        assert all(count == size for count in full)
        assert shuffle_shards or (np.diff(epochs[own]) >= 0).all(), "a source begins again before it is used up"
    pieces = [order.at(start, min(start + 3777, stop))[1] for start in range(0, stop, 3777)]
    assert np.array_equal(np.concatenate(pieces), samples)
    shares = order.shares(0, stop)
    assert shares["d"] == 0
    assert abs(shares["a"] - 0.5) < 0.03


def test_a_curriculum_moves_from_one_source_to_the_other():
    points = [(10, {"a": 1.0}), (110, {"c": 1.0})]
    order = lockstep.mixture(sources(), points).make_order(0, 0).placed(Geometry(100, 10), 0)
    assert order.shares(0, 1000) == {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}
    assert order.shares(11_000, 12_000)["c"] == 1.0
    assert abs(order.shares(1000, 11_000)["a"] - 0.5) <= 1e-4
    assert order.shares(1000, 2000)["a"] > 0.9


def test_a_mixture_is_its_sources_one_after_the_other():
    mix = lockstep.mixture(sources())
    assert len(mix) == 1256
    wanted = [("a", 0), ("b", 2), ("c", 1199), ("d", 1), ("a", 49)]
    assert [mix[index] for index in (0, 52, 1252, 1254, 49)] == wanted
    assert mix.__getitems__([0, 52, 1252, 1254, 49]) == wanted
    assert mix.draws_random is False
    assert mix.fingerprint == lockstep.mixture(sources()).fingerprint
    assert mix.fingerprint != lockstep.mixture(sources(), {"a": 1}).fingerprint
    with pytest.raises(IndexError):
        mix[1256]


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"e": 1.0}, ("e",)),
        ({"a": -1.0}, ("a", "-1.0")),
        ({"a": float("nan")}, ("a", "nan")),
        ({"a": 0.0}, ("0.0",)),
        ({"a": 1.0, "b": 1e-9}, ("b",)),
        ([(5, {"a": 1}), (5, {"b": 1})], ("5",)),
        ([], ("steps",)),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights, named):
    with refuses(ConfigError, "lockstep.mixture", *named):
        lockstep.mixture(sources(), weights)


def test_sources_that_cannot_be_mixed_are_refused():
    for given_sources, kind in (({}, ConfigError), ({"a": []}, ConfigError), ({"a": iter("x")}, DataError)):
        with refuses(kind):
            lockstep.mixture(given_sources)
    with refuses(ConfigError, "m"):
        lockstep.mixture({"m": lockstep.mixture(sources())})
