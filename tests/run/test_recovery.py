"""What a process that joins a run takes from its folder, and which errors mean that a rank is gone."""

import pytest
import torch
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.distributed.members import Generation, Report
from lockstep.errors import LockstepError, PeerError
from lockstep.run import recovery
from lockstep.run.build import _glimpsed
from lockstep.run.folder import RunFolder


def test_the_plan_of_a_run_is_seen_in_its_newest_checkpoint(tmp_path):
    folder = RunFolder(str(tmp_path), "r")
    assert _glimpsed(folder) == {}
    lockstep.train(config(tmp_path), Ragged(dtype=torch.float64))
    assert _glimpsed(folder)["global_step"] == 12


def relayed():
    error = PeerError("rank 1: its own error")
    error.relayed = True
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (PeerError("rank 0 lost the other ranks"), True),
        (RuntimeError("gloo: Connection closed by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (LockstepError("gloo"), False),
        (relayed(), False),
        (recovery.Anew("another rank was lost"), False),
    ],
)
def test_which_errors_only_say_that_a_rank_is_gone(error, lost):
    assert recovery.is_lost(error) == lost


def called(**taken):
    reports = {name: Report(*each, "a", False, 60.0) for name, each in taken.items()}
    return Generation(1, list(taken), reports, [], [])


@pytest.mark.parametrize(
    ("taken", "best"),
    [
        ({"0": (7, -1), "1": (8, -1), "2": (8, -1)}, "1"),  # the first of those that are furthest
        ({"0": (8, 4), "1": (8, 8)}, "1"),  # it has made the evaluation, too
        ({"0": (0, -1), "1": (-2, -1)}, "0"),  # new ones have no state
        ({"0": (-2, -1), "1": (-2, -1)}, None),
        ({"0": (8, -1), "1": (-1, -1)}, None),  # one is going back to a checkpoint: all do
    ],
)
def test_whose_state_all_take_over(taken, best):
    assert recovery._furthest(called(**taken)) == best
