"""Records where a device tells a step's numbers after it: the same, in the same order, there when they must be."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from ranks import run
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.errors import LockstepError
from lockstep.guards.nonfinite import DeferredReader
from lockstep.logging.jsonl import read
from lockstep.training.step.recorder import RunRecorder

TIMED = ("items_per_second", "memory")


@dataclass
class Failing(Ragged):
    """In the forward of a step, and at a place in its body."""

    forward: int = 0
    calls: int = 0

    def loss(self, model, batch):
        if self.forward and torch.is_grad_enabled():
            self.calls += 1
            if self.calls == 4 * self.forward:
                raise LockstepError("as planned")
        return super().loss(model, batch)


def records(folder, name="r"):
    """Without what differs from run to run."""
    found = read(folder / name / "metrics.jsonl")
    assert all(record["time/total"] >= 0 for record in found if "running_loss" in record)
    return [{k: v for k, v in each.items() if k not in TIMED and not k.startswith("time/")} for each in found]


def trained(world, folder, lag, task=None, leave=0, raises=0, stop=0, **changes):
    """(records, the state's running sum, how it ended) of a run whose body logs and reads the loss now and then."""
    DeferredReader.lag, losses = lag, []
    saving = RunRecorder.save

    def save(self, done, *, final=False):
        """By the time a checkpoint is begun all records up to its step are there."""
        saving(self, done, final=final)
        if self._built.world.is_main:
            there = [r["global_step"] for r in records(folder) if "running_loss" in r]
            freq = self._built.config.log_freq
            assert [step for step in range(freq, done + 1, freq) if step not in there] == [], (done, there)

    RunRecorder.save = save
    made, ended = lockstep.Run(config(folder, **changes), task or Ragged(), world), ""
    try:
        with contextlib.suppress(ZeroDivisionError):
            for step in made:
                if step.global_step % 2:
                    made.log({"mine": step.global_step})
                    losses.append(step.loss)
                    assert step.norm > 0
                if step.global_step == leave:
                    break
                if step.global_step == raises:
                    raise ZeroDivisionError
                if step.global_step == stop:
                    made.stop()
    except LockstepError as error:
        ended = str(error)
    finally:
        DeferredReader.lag, RunRecorder.save = None, saving
    newest = checkpoint.newest(folder / "r", say=print)
    state = checkpoint.read_state(newest) if newest else {}
    marks = (state.get("running_loss"), state.get("running_missed"), newest and checkpoint.fingerprint(newest))
    return records(folder) if world is None or world.is_main else [], marks, (made.status, ended), losses


CASES = {
    "each": {"log_freq": 1, "eval_freq": 4},
    "windows": {"log_freq": 3, "eval_freq": 3, "ckpt_freq": 4},
    "seldom": {"log_freq": 5, "ckpt_freq": 0},
    "left": {"log_freq": 1, "leave": 7},
    "left at a window's end": {"log_freq": 7, "leave": 7, "ckpt_freq": 0},
    "stopped": {"log_freq": 1, "stop": 7, "eval_freq": 7},
    "its body fails": {"log_freq": 1, "raises": 7},
    "its forward fails": {"log_freq": 1, "task": {"forward": 8}},
    "workers": {"log_freq": 1, "data": {"workers": 1}},
    "exact": {"log_freq": 2, "exact": True, "precision": "float32"},
}


def each(world, folder, cases, lags):
    found = {}
    for name in cases:
        for lag in lags:
            given = dict(CASES[name])
            task = Failing(**given.pop("task", {}))
            place = folder / f"{name}-{lag}-{world.size if world else 0}"
            found[name, lag] = trained(world, place, lag, task, **given)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_records_are_those_that_are_read_at_once(tmp_path, name):
    found = each(None, tmp_path, [name], [0, 1, 2])
    assert found[name, 1] == found[name, 0]
    assert found[name, 2] == found[name, 0]
    assert found[name, 0][0]


def test_on_two_ranks_too_and_with_the_same_numbers(tmp_path):
    cases = ["windows", "stopped", "exact"]
    found, other = run(each, 2, tmp_path, cases, [0, 1, 2], timeout=120.0)
    for name in cases:
        assert found[name, 1] == found[name, 2] == found[name, 0]
        assert found[name, 0][1:] == other[name, 0][1:]
    alone = each(None, tmp_path, ["exact"], [1])["exact", 1]
    assert alone[0] == found["exact", 1][0]
    assert alone[1] == found["exact", 1][1]


def test_a_run_goes_on_in_the_middle_of_a_window(tmp_path):
    given = {"log_freq": 4, "ckpt_freq": 2}
    whole = trained(None, tmp_path / "whole", 0, **given)
    for lag in (0, 1, 2):
        for stop in (6, 7, 8):
            folder = tmp_path / f"{lag}-{stop}"
            trained(None, folder, lag, stop=stop, **given)
            again = trained(None, folder, 1 - min(lag, 1), **given)
            assert (again[0], again[1]) == (whole[0], whole[1])


def test_what_fails_on_several_ranks_lacks_one_record_at_most(tmp_path):
    """The sum over the ranks takes the others; a restart writes it."""
    found = run(failing, 2, tmp_path)[0]
    assert [record["global_step"] for record in found if "running_loss" in record] == [1, 2, 3, 4, 5, 6]


def failing(world, folder):
    return trained(world, folder, 1, Failing(forward=4), log_freq=1)[0]  # of two micro-batches a step: in the eighth
