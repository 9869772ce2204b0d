"""The rate that falls where the evaluation gets no better: torch's decisions, on any ranks, resumed and rolled back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run
from refusals import refuses
from small_runs import config, mark
from test_best import Silent
from toys import Ragged, taken

import lockstep
from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.errors import ConfigError, ResumeError
from lockstep.optim.schedule import factor
from lockstep.records import EvaluationRecord
from lockstep.run_state import Selection
from lockstep.training.state.selection import plateau_drops, select_best, update_plateau

VALUES = st.lists(st.integers(0, 6) | st.just(math.nan), min_size=1, max_size=40)


WAYS = st.sampled_from(["min", "max"])


@given(VALUES, st.integers(0, 4), st.sampled_from([0.0, 1.0, 2.0]), WAYS, st.integers(0, 3), st.integers(0, 3))
def test_it_decides_as_torch_does(values, patience, delta, way, least, cooldown):
    """After each of any row of evaluations: NaN, equal values, a threshold, a floor, a cooldown."""
    floor = 0.5**least / 2
    optim = {"schedule": "plateau", "plateau_patience": patience, "gamma": 0.5, "floor": floor}
    optim["plateau_cooldown"] = cooldown
    settings = Config(eval_freq=1, best_metric=f"a:{way}", min_delta=delta, optim=optim)
    held = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        held, way, 0.5, patience, delta, threshold_mode="abs", cooldown=cooldown, min_lr=0.25 * floor, eps=0.0
    )
    state = Selection()
    for step, value in enumerate(values):
        better = select_best(settings, state, EvaluationRecord(step, 1.0, 1, {"a": float(value)}))
        update_plateau(settings, state, better=better)
        reference.step(value)
        rate = 0.25 * factor(step, 100, 0, floor, "plateau", gamma=0.5, drops=plateau_drops(state))
        assert rate == held.param_groups[0]["lr"]


def test_the_warm_up_rises_to_the_rate_that_is_left():
    found = [factor(step, 100, 3, 0.0, "plateau", gamma=0.1, drops=1) for step in (0, 1, 2, 3, 4, 1000)]
    assert found == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert factor(9, 100, 0, 0.5, "plateau", gamma=0.1, drops=3) == 0.5


SCORES = [0.5, 0.8, 0.7, 0.7, 0.6, 0.9]  # of the evaluations after steps 2, 4, ...: the fourth is one too many
RATES = [1.0] * 8 + [0.1] * 4


class Scored(Ragged):
    """Its evaluations have a score that is known: the loop's body sets it, or without a body the step does."""

    now = None

    def evaluate(self, model, batch):
        rows = len(batch["input"])
        score = SCORES[(self.step + 1) // 2 - 1] if self.now is None else self.now
        return self.loss(model, batch), {"score": (score * rows, rows)}


def settings(folder, **changes):
    optim = {"schedule": "plateau", "plateau_patience": 1, "warmup_steps": 0}
    known = {"eval_freq": 2, "ckpt_freq": 0, "best_metric": "score:max", "exact": True, "optim": optim}
    return config(folder, **known | changes)


def go(world, folder, leave_at=None, changes=None):
    """The rate of each step, as a share of --lr, and what was saved."""
    task, rates = Scored(), []
    with lockstep.Run(settings(folder, **changes or {}), task, world) as session:
        newest = checkpoint.list_steps(folder / "r")[-1:] if (folder / "r").exists() else []
        task.now = SCORES[sum(newest) // 2]
        for step in session:
            rates.append(step.lr / 0.01)
            task.now = SCORES[min(step.global_step // 2, 5)]  # of the evaluation after the next step
            if step.global_step == leave_at:
                break
    return rates, mark(folder)


def test_rate_falls_alike_on_every_rank_and_resumes(tmp_path):
    rates, whole = go(None, tmp_path / "whole")
    assert rates == pytest.approx(RATES)
    found = run(go, 2, tmp_path / "ranks")
    assert [each[0] for each in found] == [rates] * 2
    assert found[0][1] == whole
    for leave_at in (7, 8, 9):  # before, right at and after the evaluation that counts
        before, _ = go(None, tmp_path / str(leave_at), leave_at)
        after, end = go(None, tmp_path / str(leave_at))
        assert before + after == rates
        assert end == whole


def test_a_resume_goes_on_with_the_cooldown(tmp_path):
    """The fall after step 6 leaves the next two evaluations uncounted, so that the one after step 12 is the first."""
    optim = {"schedule": "plateau", "plateau_patience": 0, "plateau_cooldown": 2, "warmup_steps": 0}
    rates, whole = go(None, tmp_path / "whole", changes={"optim": optim})
    assert rates == pytest.approx([1.0] * 6 + [0.1] * 6)
    before, _ = go(None, tmp_path / "again", 7, {"optim": optim})
    after, end = go(None, tmp_path / "again", changes={"optim": optim})
    assert (before + after, end) == (rates, whole)


@pytest.mark.parametrize("known", [True, False])
def test_evaluation_after_its_checkpoint_counts_once(tmp_path, known):
    """The save comes before the evaluation: what that decided is known by evaluated.json, or it is made again."""
    changes = {"ckpt_freq": 2}
    whole = go(None, tmp_path / "whole", changes=changes)
    lockstep.Run(settings(tmp_path / "again", stop_at=8, **changes), Scored())()
    state = checkpoint.read_state(checkpoint.path_of(tmp_path / "again" / "r", 8))
    assert state["evaluation_due"]
    assert state["plateau"] == {"bad": 1, "fallen": 0, "cooling": 0}
    if not known:
        (tmp_path / "again" / "r" / "checkpoints" / "evaluated.json").unlink()
    after, end = go(None, tmp_path / "again", changes=changes)
    assert (after, end) == (whole[0][8:], whole[1])


class Spiked(Scored):
    """One step's gradient is not finite, once."""

    spiked = False

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if model.training and self.step == 9 and not self.spiked:
            self.spiked = True
            return loss * math.inf
        return loss

    def evaluate(self, model, batch):
        rows = len(batch["input"])
        return self.loss(model, batch), {"score": (rows, rows)}  # never better after the first


def rolled(folder, **guards):
    session = lockstep.Run(settings(folder, ckpt_freq=5, guards=guards), Spiked())
    return [(step.global_step, round(step.lr / 0.01, 6)) for step in session]


def test_a_rollback_goes_back_to_the_rate_of_its_step(tmp_path):
    """At steps 2, 4, 6, ...: the first is the best, so it falls after step 6 and after step 10."""
    plain = dict(rolled(tmp_path / "plain", nonfinite="skip"))
    assert plain == dict(zip(range(1, 13), [1.0] * 6 + [0.1] * 4 + [0.01] * 2, strict=True))
    found = rolled(tmp_path / "back", nonfinite="rollback")
    steps = [step for step, _ in found]
    assert steps == [*range(1, 10), *range(6, 13)]
    assert all(plain[step] == rate for step, rate in found)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="optim.schedule plateau needs eval_freq"):
        Config(eval_freq=0, optim={"schedule": "plateau"})
    with pytest.raises(ConfigError, match="plateau_patience is -1"):
        Config(eval_freq=1, optim={"schedule": "plateau", "plateau_patience": -1})
    with refuses(ConfigError, "--optim.schedule plateau", "dataset('evaluation')"):
        taken(settings(tmp_path, best_metric="loss"), Silent())
    assert not list(tmp_path.iterdir())


def test_a_resume_that_is_judged_otherwise_is_another_plan(tmp_path):
    go(None, tmp_path, 3)
    with pytest.raises(ResumeError, match=r"--min-delta 0.0 \(now 0.5\)"):
        go(None, tmp_path, changes={"min_delta": 0.5})
    own = {"patience": 9, "patience_metric": "loss"}
    go(None, tmp_path / "own", 3, changes={"min_delta": 0.5, **own})  # which is not of the best then
    with pytest.raises(ResumeError, match=r"--min-delta 0.0 \(now 0.5\)"):
        go(None, tmp_path / "own", changes={"min_delta": 0.5})
    assert go(None, tmp_path / "own", changes=own)
