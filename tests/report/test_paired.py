"""The paired test: its distribution by known values, its verdicts on made-up differences."""

import random

import pytest

from lockstep.report import page as module
from lockstep.report.page import paired


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (2, 4.30265), (10, 2.22814), (30, 2.04227), (99, 1.98422)])
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, t):
    assert module._quantile(freedom) == pytest.approx(t, abs=2e-5)
    assert module._two_sided(t, freedom) == pytest.approx(0.05, abs=1e-6)


def walk(draw, count, shift, hold):
    """Noise around `shift` that keeps `hold` of its last value: an AR(1) process."""
    value, found = 0.0, []
    for _ in range(count):
        value = hold * value + draw.gauss(0, 1)
        found.append(shift + value)
    return found


def test_a_real_difference_is_found_and_its_interval_holds_it():
    found = paired(walk(random.Random(1), 4000, 1.0, 0.5))
    assert found.low < 1.0 < found.high
    assert found.low > 0.5
    assert found.p < 1e-6
    assert (found.windows, found.blocks) == (63 * 63, 63)


def test_noise_that_drifts_is_not_taken_for_a_difference():
    """Where neighbours agree, windows that are counted as independent would find something in most of these."""
    alarms = naive = 0
    for seed in range(200):
        differences = walk(random.Random(seed), 900, 0.0, 0.9)
        found = paired(differences)
        alarms += not found.low <= 0 <= found.high
        mean = sum(differences) / 900
        error = (sum((each - mean) ** 2 for each in differences) / 899 / 900) ** 0.5
        naive += abs(mean) > 1.96 * error
    assert alarms <= 34  # 5% were the blocks independent; 17% at most
    assert naive > 100


def test_too_few_or_equal_or_not_finite():
    assert paired([1.0] * 15) is None
    assert paired([1.0] * 15 + [float("nan")]) is None
    assert paired([0.0] * 16)[:4] == (0.0, 0.0, 0.0, 1.0)
    assert paired([2.0] * 16)[:4] == (2.0, 2.0, 2.0, 0.0)
