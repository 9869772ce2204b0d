"""The fit of a step's time over sizes: it finds what made synthetic times again, and its interval covers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.schema import Config
from lockstep.diagnose.scale.fit import Fit, SizeMeasurement, carried, expected_maximum, rows_of
from lockstep.diagnose.scale.report import Outcome
from lockstep.diagnose.scale.runs import STRONG, WEAK, Machine, RunSample, ScaleRequest, Setting


def test_the_expected_maximum_of_normal_draws():
    known = {1: 0.0, 2: 1 / math.sqrt(math.pi), 3: 1.5 / math.sqrt(math.pi), 10: 1.53875, 100: 2.50759}
    assert {count: expected_maximum(count) for count in known} == pytest.approx(known, abs=1e-4)


def made(sizes, strong, *, compute=100.0, serial=0.0, ring=0.0, tree=0.0, bandwidth=0.0, imbalance=0.0, noise=0.0):
    """Points whose times the terms made, three rounds each, and the function that made them."""
    chance = np.random.default_rng(3)

    def time(n):
        work = 1 / n if strong else 1.0
        exchange = ring * (n - 1) + tree * math.log2(n) + bandwidth * 2 * (n - 1) / n
        return (compute + imbalance * expected_maximum(n)) * work + serial + exchange

    points = [
        SizeMeasurement(
            n, 1 / n if strong else 1.0, tuple(float(time(n) * math.exp(noise * chance.normal())) for _ in range(3))
        )
        for n in sizes
    ]
    return points, time


@pytest.mark.parametrize("strong", [True, False])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"bandwidth": 8.0},
        {"tree": 4.0},
        {"ring": 1.0},
        {"imbalance": 5.0},
        {"bandwidth": 5.0, "tree": 2.0},
    ],
    ids=lambda terms: "+".join(terms) or "compute",
)
def test_synthetic_times_are_found_again_and_carried_on(strong, terms):
    points, time = made((1, 2, 4, 8), strong, **terms)
    fit = Fit(points)
    for n in (1, 2, 3, 4, 6, 8):
        assert fit.predict(n, 1 / n if strong else 1.0).value == pytest.approx(time(n), rel=0.03), n
    found = fit.predict(16, 1 / 16 if strong else 1.0)
    assert found.value == pytest.approx(time(16), rel=0.12)
    assert found.low <= time(16) <= found.high


def test_both_modes_tell_the_serial_part_from_the_exchange():
    truth = {"compute": 80.0, "serial": 20.0, "bandwidth": 6.0}
    strong, weak = (made((1, 2, 4), way, **truth)[0] for way in (True, False))
    found = Fit([*strong, *weak[1:]]).terms(4, 0.25)
    assert found["compute"] == pytest.approx(20, rel=0.1)
    assert found["serial"] == pytest.approx(20, rel=0.15)
    assert sum(found.values()) == pytest.approx(20 + 20 + 9, rel=0.03)


@settings(max_examples=25)
@given(
    *(st.floats(0, 20) for _ in range(3)),
    st.booleans(),
    st.lists(st.integers(1, 64), min_size=2, max_size=5, unique=True),
    st.integers(1, 512),
)
def test_nothing_is_ever_negative_and_the_interval_holds_the_value(tree, bandwidth, serial, strong, sizes, ranks):
    points, _ = made(sorted(sizes), strong, tree=tree, bandwidth=bandwidth, serial=serial, noise=0.02)
    fit = Fit(points)
    work = 1 / ranks if strong else 1.0
    found, terms = fit.predict(ranks, work), fit.terms(ranks, work)
    assert 0 < found.low <= found.value <= found.high < math.inf
    assert all(spent > 0 for spent in terms.values())
    assert sum(terms.values()) == pytest.approx(found.value)


def test_the_same_points_give_the_same_numbers():
    points, _ = made((1, 2, 4), False, tree=5.0, noise=0.02)
    assert Fit(points).predict(64, 1.0) == Fit(points).predict(64, 1.0)


def test_noisy_rounds_widen_the_interval():
    calm, rough = (Fit(made((1, 2, 4), False, tree=5.0, noise=noise)[0]).predict(4, 1.0) for noise in (0.001, 0.1))
    assert (rough.high - rough.low) / rough.value > 1.5 * (calm.high - calm.low) / calm.value


def test_the_interval_covers_most_of_many_noisy_curves():
    chance, inside = np.random.default_rng(1), 0
    for _ in range(60):
        terms = {name: float(size) for name, size in zip(("tree", "bandwidth"), chance.exponential(4, 2), strict=True)}
        points, time = made((1, 2, 4, 8), False, **terms)
        noisy = [
            SizeMeasurement(each.ranks, each.work, tuple(t * math.exp(0.02 * chance.normal()) for t in each.times))
            for each in points
        ]
        found = Fit(noisy).predict(16, 1.0)
        inside += found.low <= time(16) <= found.high
    assert inside >= 0.8 * 60


def test_between_nodes_is_a_term_of_its_own():
    def time(n):
        inside, nodes = min(n, 8), -(-n // 8)
        return 100 + 3 * 2 * (inside - 1) / inside + 20 * 2 * (nodes - 1) / nodes

    points = [SizeMeasurement(n, 1.0, (time(n),)) for n in (1, 2, 4, 8, 16, 32)]
    assert Fit(points, ranks_per_node=8).predict(64, 1.0).value == pytest.approx(time(64), rel=0.03)
    assert Fit(points, ranks_per_node=8).terms(32, 1.0)["bandwidth between nodes"] == pytest.approx(30, rel=0.3)


def test_an_imbalance_beyond_what_the_steps_show_is_not_believed():
    points, _ = made((1, 2, 4, 8), False, imbalance=10.0)
    assert "imbalance" in Fit(points).terms(8, 1.0)
    assert "imbalance" not in Fit(points, most_imbalance=0.01).terms(8, 1.0)


def test_two_sizes_are_needed():
    with pytest.raises(ValueError, match="two sizes"):
        Fit([SizeMeasurement(1, 1.0, (1.0,)), SizeMeasurement(1, 1.0, (2.0,))])


def request_of(*sizes, **more):
    return ScaleRequest((), Config(batch_size=16, micro_batch_size=2), sizes, **more)


def sampled(rates):
    return [
        RunSample(setting, number, [rate * (1 + 0.002 * number), rate], 100.0, {})
        for setting, rate in rates.items()
        for number in range(3)
    ]


def test_what_is_measured_is_carried_on_with_its_limits_said():
    rates = {Setting(1, 16): 160.0, Setting(2, 16): 300.0, Setting(4, 16): 520.0, Setting(2, 32): 310.0}
    rates |= {Setting(4, 64): 600.0}
    request = request_of(1, 2, 4, extrapolate=(8, 64))
    machine, samples = Machine(4, 8, 1), sampled(rates)
    rows = rows_of(request, machine, samples, {}, 2)
    further = carried(request, machine, rows, samples)
    assert [(each.mode, each.ranks, each.batch_size) for each in further] == [
        (STRONG, 8, 16), (STRONG, 64, 16), (WEAK, 8, 128), (WEAK, 64, 1024),
    ]  # fmt: skip
    assert all(each.low < each.efficiency < each.high for each in further)
    assert further[0].speedup == pytest.approx(8 * further[0].efficiency)
    assert [each.idle for each in further] == [False, True, False, False]
    assert further[1].speedup < 8
    assert 0.85 < further[2].efficiency < 0.97
    outcome = Outcome(request, machine, 2, rows, further=further)
    assert any("extrapolation from 1, 2, 4 ranks" in line for line in outcome.notes())
    assert any("64 ranks (strong) are more than a step has micro-batches" in line for line in outcome.notes())
    assert len(outcome.plain()["extrapolated"]) == 4


def test_ranks_that_share_cores_are_carried_on_as_if_they_had_their_own():
    rates = {Setting(1, 16): 160.0, Setting(2, 32): 312.0, Setting(4, 64): 305.0}  # two cores: four are as fast as two
    request = request_of(1, 2, 4, modes=(WEAK,), extrapolate=(4,))
    machine, samples = Machine(0, 2, 1), sampled(rates)
    rows = rows_of(request, machine, samples, {}, 2)
    assert rows[2].efficiency == pytest.approx(0.477, abs=0.01)
    assert 0.85 < carried(request, machine, rows, samples)[0].efficiency < 1


def test_nothing_is_carried_on_from_one_size():
    request = request_of(1, 2, modes=(STRONG,), extrapolate=(8,))
    samples = sampled({Setting(1, 16): 160.0})
    rows = rows_of(request, Machine(2, 2, 1), samples, {Setting(2, 16): "no"}, 2)
    assert carried(request, Machine(2, 2, 1), rows, samples) == []
