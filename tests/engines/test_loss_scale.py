"""The scale of the loss under fp16: DeepSpeed's own rule, in every engine, kept over a resume."""

import importlib
import math
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import config

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.read import open_tensors
from lockstep.config.sections import Fp16
from lockstep.distributed.world import World
from lockstep.engines.optimizer_step import LossScale
from lockstep.engines.registry import engine
from lockstep.errors import LockstepError, ResumeError


@pytest.fixture(scope="module")
def theirs():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own
        module = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: 1))  # which says nothing
        yield module.DynamicLossScaler


def told(scale, overflow):
    scale.learn(torch.tensor(math.inf if overflow else 1.0), not overflow)


@settings(max_examples=60, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    stop=st.integers(0, 40),
)
def test_it_is_deepspeeds_rule_over_a_resume_too(theirs, overflows, window, hysteresis, consecutive, stop):
    how = Fp16(6, window, hysteresis, consecutive, 0.25)
    wanted = theirs(
        2.0**6,
        scale_window=window,
        min_scale=0.25,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive,
    )
    wanted.last_overflow_iter -= 1  # they count the good steps before this one, as torch's GradScaler does not
    found = LossScale(how)
    for step, overflow in enumerate(overflows):
        if step == stop:
            again = LossScale(how)
            again.load_state_dict(found.state_dict())
            found = again
        try:
            wanted.update_scale(overflow)
        except Exception:
            with pytest.raises(LockstepError, match=r"scale 0\.25 \(--fp16\.min-loss-scale\)"):
                told(found, overflow)
            return
        wanted.last_overflow_iter -= overflow
        told(found, overflow)
        assert found.scale == wanted.cur_scale


def test_a_step_that_is_left_out_with_a_finite_norm_says_nothing():
    scale = LossScale(Fp16(6, 2, 2))
    told(scale, False)
    scale.learn(torch.tensor(3.0), False)
    told(scale, False)
    assert scale.scale == 128.0
    assert LossScale(Fp16()).state_dict().keys() == {"scaler/scale", "scaler/good_steps"}, "as in older ones"


def test_an_engine_scales_as_it_is_told():
    model = torch.nn.Linear(1, 1, bias=False)
    made = engine("single", model, torch.optim.SGD(model.parameters(), lr=0.0), World(), loss_scaling=Fp16(3, 1, 2))
    seen = []
    for factor in (1.0, math.inf, math.inf, 1.0):
        made.backward(model(torch.ones(1, 1)).sum() * factor)
        seen.append((made.step().applied, float(made.state_dict()["scaler/scale"])))
    assert seen == [(True, 16.0), (False, 16.0), (False, 8.0), (True, 16.0)]


class Half(lockstep.Task):
    """A product in float16 under autocast; an early overflow."""

    def model(self):
        return torch.nn.Linear(4, 1)

    def dataset(self, split):
        return [torch.full((4,), 1.0 + index / 10) for index in range(40)]

    def loss(self, model, batch):
        return model(batch).float().square().sum()


def test_a_run_takes_it_and_a_resume_must_find_it_unchanged(tmp_path):
    how = {"precision": "fp16", "fp16": {"loss_scale_window": 2, "initial_scale_power": 4, "hysteresis": 2}}
    lockstep.train(config(tmp_path, stop_at=6, **how), Half())
    with open_tensors(checkpoint.newest(tmp_path / "r", say=print)) as found:
        state = {name: float(found.read(name)) for name in found.contents if name.startswith("scaler/")}
    assert state == {"scaler/scale": 128.0, "scaler/good_steps": 0.0, "scaler/spared": 1.0}
    with pytest.raises(ResumeError, match=r"--fp16.loss-scale-window 2 \(now 3\)"):
        lockstep.train(config(tmp_path, **how | {"fp16": {**how["fp16"], "loss_scale_window": 3}}), Half())
    assert lockstep.train(config(tmp_path, **how), Half()).global_step == 12
