"""The shapes of the schedule: bounds, ends, and torch's own where it has them."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.optim.schedule import SHAPES, cycled_momentum, factor

FALLING = ("cosine", "linear", "polynomial", "wsd", "constant")


@given(
    st.sampled_from(FALLING),
    st.integers(1, 400),
    st.integers(0, 450),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_every_shape_climbs_to_one_and_never_rises_again(shape, horizon, warmup, floor, cooldown, past):
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


def torchs(made, steps, **start):
    """[(rate, momentum)] of torch's scheduler, step by step, with base rate 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    schedule, found = made(optimizer), []
    for _ in range(steps):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_is_torchs(power):
    wanted = torchs(lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 40, power), 45)
    assert [factor(step, 40, 0, 0.0, "polynomial", power=power) for step in range(45)] == pytest.approx(
        [rate for rate, _ in wanted], abs=1e-12
    )


def test_step_is_torchs_and_by_itself_drops_twice():
    wanted = torchs(lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.3), 40)
    assert [factor(step, 40, 0, 0.0, "step", period=7, gamma=0.3) for step in range(40)] == pytest.approx(
        [rate for rate, _ in wanted]
    )
    rates = [factor(step, 30, 0, 0.0, "step") for step in range(30)]
    assert rates == pytest.approx([1.0] * 10 + [0.1] * 10 + [0.01] * 10)
    assert factor(29, 30, 0, 0.05, "step") == 0.05


def test_inverse_square_root_is_that_of_the_transformers_paper():
    """lr ~ min(n ** -0.5, n * warmup ** -1.5): the fall, as a share of its peak at n = warmup."""
    for step in range(50, 400):
        assert factor(step, 100, 50, 0.0, "inverse-sqrt") == pytest.approx((step / 50) ** -0.5)
    assert factor(50, 100, 50, 0.0, "inverse-sqrt") == 1.0
    assert [factor(step, 9, 0, 0.0, "inverse-sqrt") for step in (0, 1, 4, 100)] == [1.0, 1.0, 0.5, 0.1]
    assert factor(10**6, 100, 50, 0.2, "inverse-sqrt") == 0.2


@pytest.mark.parametrize(("steps", "warmup"), [(40, 12), (100, 30), (10, 9)])
def test_one_cycle_is_torchs_with_its_momentum(steps, warmup):
    wanted = torchs(
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=steps, pct_start=warmup / steps), steps - 1
    )
    found = [
        (factor(step, steps, warmup, 4e-6, "one-cycle"), cycled_momentum(step, steps, warmup))
        for step in range(steps - 1)
    ]
    assert [rate for rate, _ in found] == pytest.approx([rate for rate, _ in wanted], abs=1e-9)
    assert [momentum for _, momentum in found] == pytest.approx([momentum for _, momentum in wanted], abs=1e-9)
    assert factor(steps - 1, steps, warmup, 4e-6, "one-cycle") == pytest.approx(4e-6)
    assert factor(steps + 5, steps, warmup, 4e-6, "one-cycle") == pytest.approx(4e-6)


@given(st.sampled_from(SHAPES), st.integers(1, 60), st.integers(0, 70), st.floats(0, 1), st.integers(0, 200))
def test_every_shape_is_a_share_of_the_peak_in_every_step(shape, horizon, warmup, floor, step):
    assert 0 <= factor(step, horizon, warmup, floor, shape) <= 1 + 1e-12
    assert 0.85 - 1e-12 <= cycled_momentum(step, horizon, warmup) <= 0.95 + 1e-12


@given(
    st.sampled_from([shape for shape in SHAPES if shape not in ("step", "plateau")]),
    st.integers(2, 300),
    st.floats(0, 0.9),
    st.floats(0, 1),
    st.floats(0.05, 1),
)
def test_no_rate_jumps_but_where_it_drops_by_steps(shape, horizon, part, floor, cooldown):
    """From a step to the next no more than the steepest place of its curve."""
    warmup = int(part * (horizon - 1))
    rates = [factor(step, horizon, warmup, floor, shape, cooldown=cooldown) for step in range(horizon + 5)]
    falling = {
        "wsd": 1 / math.sqrt(max(1, min(round(cooldown * horizon), horizon - warmup))),
        "inverse-sqrt": 0.3,
        "one-cycle": math.pi / 2 / max(1, horizon - warmup),
        "constant": 0.0,
    }.get(shape, math.pi / 2 / (horizon - warmup))
    rising = math.pi / 2 / max(1, warmup - 1) if shape == "one-cycle" else 1 / (warmup + 1)
    for step, (one, other) in enumerate(itertools.pairwise(rates)):
        assert abs(other - one) <= (rising if step < warmup - (shape == "one-cycle") else falling) + 1e-9


@given(
    st.integers(1, 300), st.integers(0, 100), st.floats(0, 1), st.floats(0, 1), st.integers(0, 60), st.integers(0, 400)
)
def test_step_and_plateau_drop_by_their_factor_and_stay_between(horizon, warmup, floor, gamma, period, step):
    drop = period or max(1, horizon // 3)
    if step >= warmup:
        one = factor(step, horizon, warmup, floor, "step", period=period, gamma=gamma)
        other = factor(step + drop, horizon, warmup, floor, "step", period=period, gamma=gamma)
        assert other == pytest.approx(max(floor, gamma * one), abs=1e-12)
        begun = warmup + (step - warmup) // drop * drop
        assert factor(begun, horizon, warmup, floor, "step", period=period, gamma=gamma) == one
    fallen = [factor(step, horizon, warmup, floor, "plateau", gamma=gamma, drops=times) for times in range(4)]
    assert all(one >= other for one, other in itertools.pairwise(fallen))
