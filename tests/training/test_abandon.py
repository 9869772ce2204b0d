"""Runs that end without a save: `run.abandon()`, and `--checkpoint.mode none`."""

import json

import pytest
import torch
from ranks import RankError, run
from toys import Ragged, taken

import lockstep
from lockstep import checkpoint
from lockstep.config.fields import FieldError
from lockstep.errors import UsageError
from lockstep.logging.jsonl import read
from lockstep.training.state.run_dir import RunFolder
from lockstep.training.step import components


def config(folder, **changes):
    settings = {"experiment_name": "r", "batch_size": 8, "micro_batch_size": 2, "log_freq": 1, "ckpt_freq": 3}
    return lockstep.Config(**settings | {"save_dir": str(folder), "max_steps": 8, "lr": 0.01} | changes)


def task():
    return Ragged(dropout=0.1, dtype=torch.float32)


def body_goes_on(run, steps):
    for step in steps:
        if step.global_step == 5:
            run.abandon()


def body_breaks(run, steps):
    for step in steps:
        if step.global_step == 5:
            run.abandon()
            break


def body_raises(run, steps):
    def loop():
        for step in steps:
            if step.global_step == 5:
                run.abandon()
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        loop()


def caller_closes(run, steps):
    while next(steps).global_step != 5:
        pass
    run.abandon()
    steps.close()


WAYS = (body_goes_on, body_breaks, body_raises, caller_closes)


def abandoning(world, folder, way):
    with lockstep.Run(config(folder, engine="auto"), task(), world) as run:
        way(run, iter(run))
    return run.result.status, run.result.global_step, run.result.exit_code


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_abandoned_run_writes_no_more_and_keeps_checkpoints(tmp_path, way, ranks):
    assert run(abandoning, ranks, tmp_path, way) == [("abandoned", 5, 0)] * ranks
    assert checkpoint.list_steps(tmp_path / "r") == [3]
    assert json.loads((tmp_path / "r" / "ended.json").read_text())["status"] == "abandoned"
    assert not (tmp_path / "r" / "report.html").exists()
    assert run(resumed, ranks, tmp_path) == [([3, 4, 5, 6, 7], 0)] * ranks


def resumed(world, folder):
    return taken(config(folder), task(), world)


def test_a_run_that_is_abandoned_before_its_loop_takes_no_step(tmp_path):
    with lockstep.Run(config(tmp_path), task()) as run:
        run.abandon()
        assert list(run) == []
    assert (run.result.status, run.result.global_step) == ("abandoned", 0)
    assert checkpoint.list_steps(tmp_path / "r") == []


def test_only_a_run_that_goes_on_can_be_abandoned(tmp_path):
    run = lockstep.Run(config(tmp_path, max_steps=1), task())
    with pytest.raises(UsageError):
        run.abandon()
    run()
    with pytest.raises(UsageError):
        run.abandon()


def test_the_next_run_of_a_process_saves_no_abandoned_one(tmp_path):
    first = lockstep.Run(config(tmp_path), task())
    steps = iter(first)
    next(steps)
    first.abandon()
    lockstep.train(config(tmp_path, experiment_name="next", max_steps=1), task())
    assert first.status == "abandoned"
    assert checkpoint.list_steps(tmp_path / "r") == []


def abandoning_alone(world, folder):
    with lockstep.Run(config(folder), task(), world) as run:
        for step in run:
            if step.global_step == 5 and world.rank == 1:
                run.abandon()
    raise ArithmeticError(f"status {run.status}")


def test_a_rank_that_abandons_alone_has_failed(tmp_path):
    with pytest.raises(RankError) as caught:
        run(abandoning_alone, 2, tmp_path)
    assert caught.value.rank == 1
    assert "ArithmeticError: status failed" in str(caught.value)
    assert checkpoint.list_steps(tmp_path / "r") == [3]


def abandoning_or_leaving(world, folder):
    components._LEAVE_TIMEOUT = 1.0
    with lockstep.Run(config(folder), task(), world) as run:
        for step in run:
            if step.global_step == 5:
                if world.is_main:
                    run.abandon()
                break
    return run.status


def test_ranks_that_abandon_and_ranks_that_leave_do_not_meet(tmp_path):
    assert run(abandoning_or_leaving, 2, tmp_path) == ["failed", "failed"]
    assert checkpoint.list_steps(tmp_path / "r") == [3]


UNSAVED = {"checkpoint": {"mode": "none"}, "ckpt_freq": 2, "eval_freq": 3}


def unsaved(world, folder, leave_at, **changes):
    run, seen = lockstep.Run(config(folder, **UNSAVED | changes), task(), world), []
    for step in run:
        seen.append(step.global_step)
        if step.global_step == leave_at:
            break
    return run.result.status, seen, run.best and (run.best.step, run.best.path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_checkpoints_does_all_else(tmp_path, ranks):
    found = run(unsaved, ranks, tmp_path, None)
    status, seen, (best, path) = found[0]
    assert found == [found[0]] * ranks
    assert (status, seen, path) == ("finished", list(range(1, 9)), "")
    assert not list(tmp_path.glob("r/checkpoints/step-*"))
    records = read(tmp_path / "r" / "metrics.jsonl")
    evaluated = {record["global_step"]: record["evaluation/loss"] for record in records if "evaluation/loss" in record}
    assert min(evaluated, key=evaluated.get) == best
    assert [record["global_step"] for record in records if "running_loss" in record] == seen
    assert list(evaluated) == [3, 6, 8]
    assert json.loads((tmp_path / "r" / "state.json").read_text())["global_step"] == 8
    logs = [file.read_text() for file in sorted((tmp_path / "r" / "logs").iterdir())]
    assert [log.count("--checkpoint.mode") for log in logs] == [1] + [0] * (ranks - 1)  # one rank says it


@pytest.mark.parametrize("ranks", [1, 2])
def test_loop_without_checkpoints_is_unsaved_and_starts_over(tmp_path, ranks):
    for _ in range(2):
        status, seen, _ = run(unsaved, ranks, tmp_path, 4)[0]
        assert (status, seen) == ("stopped", [1, 2, 3, 4])
    assert not list(tmp_path.glob("r/checkpoints/step-*"))


def test_run_without_saves_resumes_from_existing_checkpoints(tmp_path):
    lockstep.train(config(tmp_path, ckpt_freq=1, stop_at=4, checkpoint={"keep": 4}), task())
    assert unsaved(None, tmp_path, None, eval_freq=0)[:2] == ("finished", [5, 6, 7, 8])
    assert checkpoint.list_steps(tmp_path / "r") == [1, 2, 3, 4]


def test_no_room_is_asked_for_where_nothing_is_written(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(RunFolder, "check_writable", lambda self, least: asked.append(least))
    lockstep.train(config(tmp_path, max_steps=1), task())
    lockstep.train(config(tmp_path, experiment_name="unsaved", max_steps=1, checkpoint={"mode": "none"}), task())
    assert asked[0] > 0
    assert asked[1] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"guards": {"nonfinite": "rollback"}},
        {"guards": {"spike": "rollback"}},
        {"checkpoint": {"mode": "none", "keep": 2}},
        {"checkpoint": {"mode": "none", "every": 2}},
        {"checkpoint": {"mode": "none", "on_failure": "stop"}},
    ],
)
def test_what_needs_checkpoints_is_refused(tmp_path, changes):
    with pytest.raises(FieldError):
        config(tmp_path, **{"checkpoint": {"mode": "none"}} | changes)
