"""What a process that joins a run takes from its folder, and which errors mean that a rank is gone."""

import pytest
import torch
from ranks import run
from small_runs import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from toys import Ragged

import lockstep
from lockstep.config.engine_options import EngineOptions
from lockstep.distributed.membership import Generation, LeaveReport
from lockstep.engines.registry import explain_no_replica
from lockstep.errors import PeerError
from lockstep.run_state import RunState
from lockstep.tensors import local_of
from lockstep.training.recovery import regroup as recovery
from lockstep.training.start import load
from lockstep.training.start.build import _read_newest_state
from lockstep.training.state.run_dir import RunFolder


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
        ({"0": (7, -1), "1": (8, -1), "2": (8, -1)}, ["1"]),  # the first of those that are furthest
        ({"0": (8, 4), "1": (8, 8)}, ["1"]),  # it has made the evaluation, too
        ({"0": (0, -1), "1": (-2, -1)}, ["0"]),  # new ones have no state
        ({"0": (-2, -1), "1": (-2, -1)}, []),
        ({"0": (8, -1), "1": (-1, -1)}, []),  # one is going back to a checkpoint: all do
    ],
)
def test_whose_state_all_take_over(taken, best):
    assert recovery._sources(called(**taken)) == best


@pytest.mark.parametrize(
    ("steps", "best"),
    [
        ((7, 8, 8, 8), ["2", "1"]),  # rank 2 has the part of rank 0, and has made the update
        ((7, 8, 8, 7), ["2", "1"]),
        ((7, 8, 7, 8), []),  # nobody has the first part of step 8, nor the second of step 7
        ((7, 7, 8, 7), ["0", "1"]),  # rank 2 goes back
        ((7, 7, -2, -2), ["0", "1"]),
        ((7, -2, -2, 7), ["0", "3"]),  # each part from another replica
        ((-1, 7, 7, 7), []),
    ],
)
def test_last_step_with_both_parts_is_chosen(steps, best):
    assert recovery._sources(called(**{str(rank): (step, -1) for rank, step in enumerate(steps)}), 2) == best


def test_loss_is_survived_where_other_ranks_have_the_states():
    def why(name, optimizer=None, **options):
        return explain_no_replica(name, EngineOptions(**options), optimizer)

    class Gathering(torch.optim.SGD):
        """One that might gather a matrix in its step."""

    weights = [torch.nn.Parameter(torch.zeros(2))]
    sgd, own = torch.optim.SGD(weights, lr=0.1), Gathering(weights, lr=0.1)
    assert not why("ddp", own)
    assert not why("fsdp", sgd, sharding="hybrid")
    assert not why("fsdp", sgd, sharding="none")
    assert "Gathering" in why("fsdp", own, sharding="hybrid")
    for name, sharding in [("fsdp", "full"), ("fsdp", "grad-op"), ("zero", "full")]:
        assert f"--engine {name} splits the states" in why(name, sgd, sharding=sharding)


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
    load._BUCKET_BYTES = together
    mine = state_of(world.rank)
    found = load.broadcast_state(mine, [1], world)
    wanted = state_of(1)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].stride() == tensor.stride() or name not in mine
        assert torch.equal(found[name].to(torch.complex128), tensor.to(torch.complex128)), name
        assert found[name] is mine.get(name, found[name])  # in place
    return True


def parts_handed_out(world):
    """Ranks 0 and 1 have nothing, and get the part of ranks 2 and 3: one in DTensors, of a mesh of its own."""
    mine = {"model/flag": torch.full((3,), 10 * world.rank)} if world.rank > 1 else {}
    if world.rank == 2:
        mesh = init_device_mesh("cpu", (1, 4))
        part = torch.full((2, 3), 2.0)
        mine["model/rows"] = DTensor.from_local(part, mesh, [Replicate(), Shard(0)], run_check=False)
    else:
        init_device_mesh("cpu", (1, 4))
    if world.rank == 3:
        mine["model/rows"] = torch.full((1, 3), 3.0)
    found = load.broadcast_state(mine, [2, 3], world)
    return {name: local_of(tensor).tolist() for name, tensor in found.items()}


def test_parts_of_a_state_come_from_ranks_with_the_same_part():
    even, odd = ({"model/flag": [10 * r] * 3, "model/rows": [[float(r)] * 3] * n} for r, n in ((2, 2), (3, 1)))
    assert run(parts_handed_out, 4) == [even, odd, even, odd]


@pytest.mark.parametrize("together", [1 << 26, 40])
def test_state_of_one_rank_reaches_all_whatever_it_contains(together):
    assert run(handed_out, 2, together) == [True, True]
