"""The best evaluation by any metric, and the end of a run that gets no better: the same on any ranks and resumed."""

import json
import math

import pytest
from ranks import run
from refusals import refuses
from small_runs import config
from toys import Ragged, taken

import lockstep
from lockstep import checkpoint
from lockstep.config.schema import Config
from lockstep.errors import ConfigError
from lockstep.records import EvaluationRecord
from lockstep.run_state import BestEvaluation, Selection
from lockstep.training.state.selection import describe_best, explain_early_stop, out_of_patience, select_best

SCORES = [0.5, 0.8, 0.7, 0.8, 0.75, 0.9]  # of the evaluations after steps 2, 4, ...


class Scored(Ragged):
    """Its evaluations have a score that is known, and a loss that only falls."""

    now = 0.0

    def evaluate(self, model, batch):
        rows = len(batch["input"])
        return self.loss(model, batch), {"score": (self.now * rows, rows)}


def settings(folder, **changes):
    return config(folder, **{"eval_freq": 2, "ckpt_freq": 0, "best_metric": "score:max"} | changes)


def go(world, folder, leave_at=None, **changes):
    """(status, steps taken, the best, its checkpoint is there): each evaluation has the next of SCORES."""
    task = Scored()
    with lockstep.Run(settings(folder, **changes), task, world) as session:
        newest = checkpoint.list_steps(folder / "r")[-1:] if (folder / "r").exists() else []
        task.now = SCORES[sum(newest) // 2]
        for step in session:
            task.now = SCORES[min(step.global_step // 2, 5)]  # of the evaluation after it
            if step.global_step == leave_at:
                break
    best = session.best
    kept = best is not None and best.step in checkpoint.list_steps(folder / "r")
    return session.status, session.result.global_step, best and (best.step, best.metric, best.value), kept


def patient(world, folder, patience, **more):
    return go(world, folder, patience=patience, **more)


def patient_by_another(world, folder, patience):
    return patient(world, folder, patience, best_metric="loss", patience_metric="score:max")


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_ends_by_its_own_metric_on_any_number_of_ranks(tmp_path, ranks):
    found = run(patient_by_another, ranks, tmp_path, 3)
    assert [(status, steps, best[:2]) for status, steps, best, _ in found] == [("stopped", 10, (10, "loss"))] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_ends_after_so_many_evaluations_that_were_no_better(tmp_path, ranks):
    """0.5, 0.8, 0.7, 0.8, 0.75: one that equals the best is no better."""
    ended = ("stopped", 10, (4, "score", 0.8), True)
    assert run(patient, ranks, tmp_path, 3) == [ended] * ranks
    assert checkpoint.list_steps(tmp_path / "r")[-1] == 10
    assert run(patient, ranks, tmp_path, 3) == [ended] * ranks  # nothing is left to do
    assert run(patient, ranks, tmp_path, 4) == [("finished", 12, (12, "score", 0.9), True)] * ranks


@pytest.mark.parametrize("leave_at", [3, 4, 7, 8])
def test_how_long_it_was_no_better_survives_a_resume(tmp_path, leave_at):
    assert go(None, tmp_path, leave_at, patience=3)[:2] == ("stopped", leave_at)
    assert go(None, tmp_path, patience=3) == ("stopped", 10, (4, "score", 0.8), True)
    assert json.loads((tmp_path / "r" / "state.json").read_text())["since_best"] == 3


def test_by_the_loss_alone_it_trains_to_the_end(tmp_path):
    status, steps, best, kept = go(None, tmp_path, best_metric="loss", patience=1)
    assert (status, steps, best[:2], kept) == ("finished", 12, (12, "loss"), True)


def evaluated(values, **changes):
    settings = Config(eval_freq=1, patience=2, **changes)
    state, best, ended = Selection(), [], []
    for step, value in enumerate(values):
        better = select_best(settings, state, EvaluationRecord(step, value, 8, {"a": value, "b": -value}))
        best.append(better)
        ended.append(out_of_patience(settings, state))
    return best, ended, state


def test_what_is_better_is_said_by_direction_and_by_how_much():
    values = [math.nan, 1.0, 1.0, 1.05, 0.5, 1.3]
    assert evaluated(values, best_metric="a:max")[0] == [False, True, False, True, False, True]
    assert evaluated(values, best_metric="a:max", min_delta=0.1)[0] == [False, True, False, False, False, True]
    best, _, state = evaluated(values, best_metric="a:min")
    assert best == [False, True, False, False, True, False]
    assert (state.since_best, state.best.step, describe_best(state.best)) == (1, 4, "a 0.5 after step 4")
    assert select_best(Config(), state, EvaluationRecord(9, 7.0, 8, {}))  # judged by something else before
    assert describe_best(BestEvaluation(3, 2.0)) == "loss 2 after step 3"  # of an earlier version
    assert describe_best(None) == "none that is finite"


def test_patience_may_go_by_another_metric_than_the_best():
    values = [1.0, 1.05, 1.2, 0.9, 0.95]
    waits = {"best_metric": "a:max", "patience_metric": "b:max", "min_delta": 0.2}
    best, ended, state = evaluated(values, **waits)
    assert best == [True, True, True, False, False]  # min_delta is of the patience's metric alone
    assert ended == [False, False, True, True, True]  # and 0.9 is better than 1.0, but not by 0.2
    assert explain_early_stop(Config(eval_freq=1, patience=2, **waits), state) == (
        "the best was a 1.2 after step 2, of --patience-metric b -1 after step 0"
    )
    best, ended, _ = evaluated(values, **waits | {"min_delta": 0.0})
    assert ended == [False, False, True, False, False]
    settings = Config(eval_freq=1, patience=2, best_metric="a:max")  # a resume without it
    select_best(settings, state, EvaluationRecord(5, 2.0, 8, {"a": 2.0}))
    assert state.patience is None
    assert not out_of_patience(settings, state)


@pytest.mark.parametrize("leave_at", [3, 8])
def test_what_patience_goes_by_survives_a_resume(tmp_path, leave_at):
    waits = {"patience_metric": "score:max", "best_metric": "loss", "patience": 3}
    assert go(None, tmp_path, leave_at, **waits)[:2] == ("stopped", leave_at)
    assert go(None, tmp_path, **waits)[:2] == ("stopped", 10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patience_metric": "score", "patience": 1}, "patience_metric is 'score': it must be loss, or a metric"),
        ({"patience_metric": "score:max"}, "patience_metric .* patience; "),
        ({"best_metric": "score"}, "best_metric is 'score': .* accuracy:max or error:min"),
        ({"best_metric": "loss:max"}, "best_metric is 'loss:max'"),
        ({"best_metric": ":max"}, "best_metric is ':max'"),
        ({"best_metric": "score:up"}, "best_metric is 'score:up'"),
        ({"patience": 2, "eval_freq": 0}, "patience 2 needs eval_freq"),
        ({"patience": -1}, "patience is -1: it must be a number of evaluations"),
        ({"min_delta": -0.5}, "min_delta is -0.5"),
    ],
)
def test_what_cannot_be_is_refused_at_once(changes, said):
    with pytest.raises(ConfigError, match=said):
        Config(**{"eval_freq": 2} | changes)


class Silent(Ragged):
    def dataset(self, split):
        return super().dataset(split) if split == "train" else None


def test_resume_is_judged_by_what_exists_before_its_first_step(tmp_path):
    go(None, tmp_path, 3, best_metric="loss")
    with pytest.raises(ConfigError, match="the task's evaluation has no 'scores'; did you mean score"):
        taken(settings(tmp_path, best_metric="scores:max"), Scored())
    assert checkpoint.list_steps(tmp_path / "r") == [2, 3]
    assert go(None, tmp_path, patience=3) == ("stopped", 10, (4, "score", 0.8), True)


def test_metric_that_the_task_lacks_is_refused_before_writing(tmp_path):
    with pytest.raises(ConfigError, match="the task's evaluation has no 'scores'; did you mean score"):
        taken(settings(tmp_path, best_metric="scores:max"), Scored())
    with pytest.raises(ConfigError, match="--patience-metric: the task's evaluation has no 'scores'; did you mean sc"):
        taken(settings(tmp_path, patience=1, patience_metric="scores:max"), Scored())
    for changes in ({"best_metric": "loss", "patience": 2}, {"best_metric": "score:max"}):
        with refuses(ConfigError, "--patience" if "patience" in changes else "--best-metric", "dataset('evaluation')"):
            taken(settings(tmp_path, **changes), Silent())
    assert not list(tmp_path.iterdir())
