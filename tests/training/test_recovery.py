"""What a process that joins a run takes from its folder, and which errors mean that a rank is gone."""

import pytest
import torch
from ranks import run
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.distributed.membership import Generation, LeaveReport
from lockstep.errors import PeerError
from lockstep.run_state import RunState
from lockstep.training import recovery
from lockstep.training.build import _read_newest_state
from lockstep.training.run_dir import RunFolder


def test_the_plan_of_a_run_is_seen_in_its_newest_checkpoint(tmp_path):
    folder = RunFolder(str(tmp_path), "r")
    assert _read_newest_state(folder) == RunState()
    lockstep.train(config(tmp_path), Ragged(dtype=torch.float64))
    assert _read_newest_state(folder).global_step == 12


def relayed():
    error = PeerError("rank 1: its own error")
    error.relayed = True
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (PeerError("rank 0 lost the other ranks"), True),
        (relayed(), False),
        (recovery.Rebuild("another rank was lost"), False),
    ],
)
def test_which_errors_only_say_that_a_rank_is_gone(error, lost):
    assert recovery.is_rank_loss(error) == lost


def called(**taken):
    reports = {name: LeaveReport(*each, "a", False, 60.0) for name, each in taken.items()}
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
    assert recovery._most_advanced(called(**taken)) == best


def state_of(rank):
    """Tensors of all kinds; those of rank 1 are what all are to have."""
    torch.manual_seed(rank)
    drawn = torch.randn(4, 6)
    return {
        "model/image": drawn.view(1, 4, 2, 3).contiguous(memory_format=torch.channels_last),
        "model/turned": drawn.t(),
        "model/flag": drawn[0] > 0,
        "model/odd": (drawn[0, :3] * 100).to(torch.int16),
        "model/small": drawn.to(torch.float8_e4m3fn),
        "model/wave": torch.view_as_complex(drawn.view(4, 3, 2).contiguous()).conj(),
        "optimizer/step": torch.tensor(float(rank)),
        "model/none": drawn[:0],
        **({"model/late": drawn * 2} if rank == 1 else {}),
    }


def handed_out(world, together):
    recovery._BUCKET_BYTES = together
    mine = state_of(world.rank)
    found = recovery._broadcast_state(mine, 1, world)
    wanted = state_of(1)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].stride() == tensor.stride() or name not in mine
        assert torch.equal(found[name].to(torch.complex128), tensor.to(torch.complex128)), name
        assert found[name] is mine.get(name, found[name])  # in place
    return True


@pytest.mark.parametrize("together", [1 << 26, 40])
def test_the_state_of_one_rank_comes_to_all_whatever_it_is_made_of(together):
    assert run(handed_out, 2, together) == [True, True]
