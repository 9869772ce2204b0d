"""The shapes of the schedule: bounds, ends, and torch's own where it has them."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.optim.schedule import factor

SHAPES = ("cosine", "linear", "wsd", "constant")


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 400),
    st.integers(0, 450),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_every_shape_climbs_to_one_stays_within_its_bounds_and_never_rises_again(
    shape, horizon, warmup, floor, cooldown, past
):
    rates = [factor(step, horizon, warmup, floor, shape, cooldown=cooldown) for step in range(horizon + past)]
    climb, rest = rates[:warmup], rates[warmup:]
    assert all(0 < rate < 1 for rate in climb)
    assert all(a < b for a, b in itertools.pairwise(climb))
    assert all(floor - 1e-12 <= rate <= 1 for rate in rest)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rest))
    assert all(rate == (1.0 if shape == "constant" else floor) for rate in rates[max(horizon, warmup) :])


@pytest.mark.parametrize(("horizon", "floor"), [(10, 0.0), (97, 0.25)])
def test_linear_is_torchs(horizon, floor):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, floor, total_iters=horizon)
    for step in range(horizon + 3):
        assert factor(step, horizon, 0, floor, "linear") == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_linear_after_a_warm_up_is_the_hf_trainers():
    """max(0, (T - step) / (T - warmup)), as `get_linear_schedule_with_warmup` has it."""
    for step in range(10, 60):
        assert factor(step, 60, 10, 0.0, "linear") == pytest.approx((60 - step) / 50)


def test_wsd_is_constant_and_then_falls_as_one_minus_the_root():
    rates = [factor(step, 100, 5, 0.1, "wsd", cooldown=0.25) for step in range(101)]
    assert rates[5:76] == [1.0] * 71
    assert rates[76:] == [pytest.approx(0.1 + 0.9 * (1 - math.sqrt((step - 75) / 25))) for step in range(76, 101)]
    assert [factor(step, 100, 0, 0.0, "wsd", cooldown=0.0) for step in (99, 100)] == [1.0, 0.0]
    assert factor(90, 100, 90, 0.0, "wsd", cooldown=0.5) == 1.0  # the warm-up lasts into the cool-down
