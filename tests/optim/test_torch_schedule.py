"""torch's schedulers as a function of the step: the rates are torch's own, also after a resume."""

import warnings

import pytest
import torch
from small_runs import config, mark
from torch.optim import lr_scheduler as theirs
from toys import Ragged

import lockstep
from lockstep.errors import ConfigError
from lockstep.logging.jsonl import read

LR, STEPS = 0.3, 40


def after_warm_up(optimizer, steps):
    first = theirs.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    return theirs.SequentialLR(optimizer, [first, theirs.CosineAnnealingLR(optimizer, steps - 5, 1e-3)], [5])


MAKERS = {
    "restarts": lambda optimizer, steps: theirs.CosineAnnealingWarmRestarts(optimizer, 7, 2, eta_min=1e-3),
    "steps": lambda optimizer, steps: theirs.MultiStepLR(optimizer, [steps // 4, steps // 2], gamma=0.2),
    "exponential": lambda optimizer, steps: theirs.ExponentialLR(optimizer, 0.9),
    "sequence": after_warm_up,
    "chain": lambda optimizer, steps: theirs.ChainedScheduler(
        [theirs.ConstantLR(optimizer, 0.5, 3), theirs.ExponentialLR(optimizer, 0.95)]
    ),
    "cycle": lambda optimizer, steps: theirs.OneCycleLR(optimizer, LR, total_steps=steps, cycle_momentum=False),
    "own": lambda optimizer, steps: theirs.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


def torchs(make, steps, groups=1):
    """The rates of each step, of the last of some groups whose rates are LR, LR / 2, ..."""
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": LR / (1 + k)} for k in range(groups)]
    optimizer = torch.optim.SGD(parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR's own
        scheduler, found = make(optimizer, steps), []
        for _ in range(steps):
            found.append(optimizer.param_groups[-1]["lr"])
            optimizer.step()
            if len(found) < steps:
                scheduler.step()
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_the_rates_are_torchs_in_any_order(name):
    schedule = lockstep.torch_schedule(MAKERS[name], lr=LR)
    wanted = torchs(MAKERS[name], STEPS)
    for step in (*reversed(range(STEPS)), *range(0, STEPS, 3)):
        assert LR * schedule(step, STEPS) == pytest.approx(wanted[step], rel=1e-12)
    assert schedule(STEPS + 5, STEPS) == schedule(STEPS - 1, STEPS)
    assert LR * schedule(9, 20) == pytest.approx(torchs(MAKERS[name], 20)[9], rel=1e-12), "a longer plan is another"


def test_all_groups_keep_their_ratio_as_with_torch():
    schedule = lockstep.torch_schedule(MAKERS["steps"])
    assert [LR / 3 * schedule(k, STEPS) for k in range(STEPS)] == pytest.approx(torchs(MAKERS["steps"], STEPS, 3))


def restarts(optimizer, steps):
    return theirs.CosineAnnealingWarmRestarts(optimizer, steps // 3)


class Restarting(Ragged):
    rates = lockstep.torch_schedule(restarts)

    def schedule(self, step, steps):
        return self.rates(step, steps)


class Assigned(Ragged):
    schedule = lockstep.torch_schedule(restarts)


def test_a_run_has_them_and_a_resume_too(tmp_path):
    lockstep.train(config(tmp_path / "whole", log_freq=1), Restarting())
    shown = [record["lr"] for record in read(tmp_path / "whole" / "r" / "metrics.jsonl") if "lr" in record]
    assert shown == pytest.approx([0.01 / LR * rate for rate in torchs(restarts, 12)])
    for stop in (5, 0):
        lockstep.train(config(tmp_path / "parts", log_freq=1, stop_at=stop), Assigned())
    assert mark(tmp_path / "parts") == mark(tmp_path / "whole")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda optimizer, steps: theirs.ReduceLROnPlateau(optimizer), "use --optim.schedule plateau"),
        (lambda optimizer, steps: theirs.OneCycleLR(optimizer, LR, total_steps=steps), "cycle_momentum=False"),
        (
            lambda optimizer, steps: theirs.OneCycleLR(optimizer, LR, total_steps=7, cycle_momentum=False),
            "in step 9 of 40",
        ),
        (
            lambda optimizer, steps: theirs.LambdaLR(optimizer, [float, float]),
            "failed in step 1 of 40: ValueError: Expec",
        ),
        (lambda optimizer, steps: [1.0] * steps, "the function returned list"),
        (
            lambda optimizer, steps: theirs.ExponentialLR(torch.optim.SGD([torch.zeros(1)]), 0.9),
            "another optimizer",
        ),
    ],
)
def test_what_is_more_than_a_function_of_the_step_is_refused(make, line):
    with pytest.raises(ConfigError) as caught:
        lockstep.torch_schedule(make)(0, STEPS)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="lr is 0"):
        lockstep.torch_schedule(make, lr=0)


def test_a_run_refuses_it_before_anything_is_written(tmp_path):
    class Falling(Ragged):
        schedule = lockstep.torch_schedule(lambda optimizer, steps: theirs.ReduceLROnPlateau(optimizer))

    with pytest.raises(ConfigError, match="ReduceLROnPlateau.*--optim.schedule plateau"):
        lockstep.train(config(tmp_path), Falling())
    assert not list(tmp_path.iterdir())
