"""Runs that end without a save: `run.abandon()`."""

import json

import pytest
import torch
from ranks import RankError, run
from toys import Ragged, taken

import lockstep
from lockstep import checkpoint
from lockstep.errors import UsageError
from lockstep.run import after_step


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
def test_an_abandoned_run_writes_no_more_and_keeps_its_checkpoints(tmp_path, way, ranks):
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
    after_step._PATIENCE = 1.0
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
