"""Which checkpoints stay: the newest, the best and every K-th, whatever happens while the others go."""

import math
import os
import shutil
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ranks import run
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint import write
from lockstep.checkpoint.layout import share_out
from lockstep.config.schema import Config
from lockstep.config.sections import Checkpoint
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError
from lockstep.training.step import recorder as bookkeeper


def settings(folder, **changes):
    given = {"experiment_name": "r", "batch_size": 8, "micro_batch_size": 4, "lr": 0.01, "precision": "float64"}
    return Config(**given | {"save_dir": str(folder), "max_steps": 12, "eval_freq": 1, "ckpt_freq": 1} | changes)


LOSSES = {1: 9.0, 2: math.nan, 3: 8.0, 4: 2.5, 5: 2.5, 6: 4.0, 7: math.inf, 8: 3.0, 9: 7.0, 10: 2.75, 11: 6.0, 12: 5.0}


@pytest.mark.parametrize("stops", [[12], [3, 6, 12]])
def test_best_of_twelve_is_kept_outside_the_newest(tmp_path, monkeypatch, stops):
    """The lowest loss is that of step 4; an equal one later is not better, and what is not finite is not good."""
    told = []

    def evaluate(engine, task, sets, world, *, step, **_):
        told.append(step)
        return SimpleNamespace(step=step, loss=LOSSES[step], items=1, metrics={})

    monkeypatch.setattr(bookkeeper, "evaluate_all", evaluate)
    weights = {}
    for stop in stops:
        for step in lockstep.Run(settings(tmp_path, stop_at=stop, checkpoint=Checkpoint(keep=3)), Ragged()):
            if step.global_step == 5:  # a step is saved after its body
                checkpoint_of(tmp_path, 4, weights)
    assert told == list(range(1, 13))
    assert checkpoint.list_steps(tmp_path / "r") == [4, 10, 11, 12]
    assert checkpoint.read_state(checkpoint.path_of(tmp_path / "r", 12))["best"]["step"] == 4
    path = checkpoint.path_of(tmp_path / "r", 4)
    assert checkpoint.verify(path) == []
    assert checkpoint.read_state(path)["global_step"] == 4
    assert checkpoint.fingerprint(path) == weights[4]


def checkpoint_of(folder, step, weights):
    """Notes the fingerprint of the step's checkpoint, as soon as its writer is done."""
    path = checkpoint.path_of(folder / "r", step)
    while not path.exists():
        os.sched_yield()
    weights[step] = checkpoint.fingerprint(path)


def made(folder, *steps):
    for step in steps:
        checkpoint.path_of(folder, step).mkdir(parents=True)


@pytest.mark.parametrize(
    ("there", "last", "best", "every", "removed"),
    [
        (range(1, 6), 5, None, 0, []),  # as many as there are
        (range(1, 6), 6, None, 0, []),
        (range(1, 6), 4, None, 0, [1]),  # one more than may stay
        (range(1, 6), 1, None, 0, [1, 2, 3, 4]),
        (range(1, 6), 1, 1, 0, [2, 3, 4]),  # the best is the oldest
        (range(1, 6), 2, 4, 0, [1, 2, 3]),  # the best is among the newest: it counts as one of them
        (range(1, 6), 1, 9, 0, [1, 2, 3, 4]),  # the best is gone
        ((0, 3, 4, 5, 7, 8, 9, 12, 20, 21), 1, None, 4, [3, 5, 7, 9]),  # exactly the multiples, 0 too
        ((3, 4, 5, 8), 1, None, 1, []),  # every one
        ((3, 4, 5, 8), 1, None, 5, [3, 4]),
        ((100, 1000, 99999999, 100000000), 2, None, 0, [100, 1000]),  # by number, though a name has nine digits
    ],
)
def test_thresholds_of_what_is_kept(tmp_path, there, last, best, every, removed):
    made(tmp_path, *there)
    assert checkpoint.retain(tmp_path, last=last, best=best, every=every) == removed
    assert checkpoint.list_steps(tmp_path) == sorted(set(there) - set(removed))


def test_a_run_keeps_as_many_as_it_was_told(tmp_path):
    for keep in (1, 2, 6):
        kept = Checkpoint(keep=keep, every=4)
        config = settings(tmp_path, experiment_name=str(keep), max_steps=6, eval_freq=0, checkpoint=kept)
        for _ in lockstep.Run(config, Ragged()):
            pass
        best = (checkpoint.read_state(checkpoint.path_of(tmp_path / str(keep), 6))["best"] or {}).get("step")
        wanted = {4, best, *range(7 - keep, 7)} - {None}
        assert checkpoint.list_steps(tmp_path / str(keep)) == sorted(wanted)


CALLS = ["rename", "fsync", "open", "scandir", "unlink", "rmdir"]


def removes(folder, number):
    """Removes two of four checkpoints; killed (signal 9) just before its file-system call of this number."""
    count = 0

    def counting(real, *args, **kwargs):
        nonlocal count
        count += 1
        if count > number:
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)

    for name in CALLS:
        setattr(os, name, partial(counting, getattr(os, name)))
    checkpoint.retain(folder, last=1, best=1, every=0)
    return count


def killed(world, folder):
    """One removal for each of its calls, each in a process of its own that dies there; how they ended."""
    warnings.simplefilter("ignore")  # from Python 3.12 on a fork beside threads is warned about
    ends = {}
    for each in sorted(folder.iterdir(), key=lambda path: int(path.name)):
        pid = os.fork()
        if not pid:
            os._exit(removes(each, int(each.name)))
        ends[int(each.name)] = os.waitpid(pid, 0)[1]
    return ends


def test_a_kill_inside_a_removal_leaves_whole_checkpoints_alone(tmp_path):
    for step in range(1, 5):
        tensors = {"model/a": torch.full((8,), float(step))}
        checkpoint.save(tmp_path / "0", step, tensors, {"step": step}, World(), engine="single")
    for number in (*range(1, 40), 99):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    (ends,) = run(killed, 1, tmp_path)
    calls = os.waitstatus_to_exitcode(ends.pop(99))
    assert calls >= 2 + 1 + 2 * 6  # two renames, a sync, and of each folder its four files and itself
    assert all(os.waitstatus_to_exitcode(end) == (-9 if number < calls else calls) for number, end in ends.items())
    assert calls < 40
    for number in range(calls):
        folder = tmp_path / str(number)
        steps = checkpoint.list_steps(folder)
        assert {1, 4} <= set(steps)
        assert all(checkpoint.verify(checkpoint.path_of(folder, step)) == [] for step in steps), number
        path, state = checkpoint.find_resume(folder, World(), pytest.fail)
        assert (path, state) == (checkpoint.path_of(folder, 4), {"step": 4})
        wanted = {"model/a": torch.zeros(8)}
        checkpoint.load(path, wanted, None)
        assert wanted["model/a"].tolist() == [4.0] * 8
        checkpoint.clean(folder)
        checkpoint.retain(folder, last=1, best=1, every=0)
        assert sorted(each.name for each in (folder / "checkpoints").iterdir()) == ["step-00000001", "step-00000004"]


@pytest.mark.parametrize(("missing", "fails"), [(0, False), (1, True)])
def test_room_for_exactly_a_checkpoint_is_enough(tmp_path, monkeypatch, missing, fails):
    tensors = {"model/a": torch.ones(250), "optimizer/a/exp_avg": torch.ones(250)}
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: SimpleNamespace(free=2000 - missing))
    assert sum(piece.local.nbytes for piece in share_out(tensors, World()).pieces) == 2000
    if fails:
        with pytest.raises(CheckpointError, match="make room"):
            checkpoint.save(tmp_path, 1, tensors, {}, World(), engine="single")
    else:
        checkpoint.save(tmp_path, 1, tensors, {}, World(), engine="single")
    assert checkpoint.list_steps(tmp_path) == ([] if fails else [1])
