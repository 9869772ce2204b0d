"""Replicas of several ranks: the groups of the ranks, and a run in which every rank of a replica computes the same."""

import json
from contextlib import nullcontext

import pytest
import small_runs
import torch
import torch.distributed as dist
from ranks import run
from refusals import refuses
from toys import Ragged

import lockstep
from lockstep.config.engine_options import ENGINES, EngineOptions
from lockstep.config.sections import Guards
from lockstep.distributed.replicas import form_replicas
from lockstep.errors import ConfigError, LockstepError

DEGREES = ("tensor", "context", "pipeline")


def divided(world, degrees):
    """Return the size and ranks of this rank's groups, measured by collectives in them."""
    form_replicas(world, **dict(zip(DEGREES, degrees, strict=True)))
    found = {"counts": world.counts, "all": world.gather(world.rank), "label": world.data_parallel.label}
    for name in ("replica", "data_parallel"):
        part = getattr(world, name)
        ranks = torch.tensor([world.rank + 1])
        dist.all_reduce(ranks, group=part.group)
        with part.together():
            part.check_same("device", {"device": str(part.device)})
            gathered = part.gather([world.rank, part.rank])
        # An error names the ranks of the run.
        with refuses(LockstepError, *(f"rank {rank}" for rank, _ in gathered[:2])) if part.size > 1 else nullcontext():
            part.check_same("place", {"rank": part.rank})
        part.barrier()
        found[name] = [part.size, gathered, part.broadcast(world.rank), part.global_rank, int(ranks)]
    found["parts"] = [world.part(name).gather(world.rank) for name in ("pp", "cp", "tp")]
    found["counted"] = world.gather_counted(world.rank)
    # A further group of a part has its ranks alone, as the step exchange's has.
    found["more"] = dist.get_process_group_ranks(world.data_parallel.new_group())
    return found


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)], ids=str)
def test_replicas_and_data_parallel_groups_of_four_ranks(degrees):
    tensor, context, pipeline = degrees
    size = tensor * context * pipeline
    # The mesh (dp, pp, cp, tp), tensor ranks closest.
    mesh = torch.arange(4).view(4 // size, pipeline, context, tensor)
    leaders = mesh[:, -1, 0, 0].tolist()
    for rank, found in enumerate(run(divided, 4, degrees)):
        mine = [int(at) for at in (mesh == rank).nonzero()[0]]
        groups = {"replica": mesh[mine[0]].flatten().tolist(), "data_parallel": mesh[(slice(None), *mine[1:])].tolist()}
        for name, ranks in groups.items():
            members = [[member, at] for at, member in enumerate(ranks)]
            summed = sum(member + 1 for member in ranks)
            assert found[name] == [len(ranks), members, ranks[0], rank, summed], (rank, name)
        assert found["parts"] == [
            mesh[mine[0], :, mine[2], mine[3]].tolist(),
            mesh[mine[0], mine[1], :, mine[3]].tolist(),
            mesh[(*mine[:3],)].tolist(),
        ]
        assert found["all"] == [0, 1, 2, 3]
        assert found["counts"] == (rank in leaders)
        assert found["counted"] == leaders
        assert found["label"] == f"rank {rank}"
        assert found["more"] == groups["data_parallel"]


def plain(world):
    form_replicas(world)
    replica = world.replica
    return [
        world.data_parallel is world,
        world.group is None,
        world.counts,
        [replica.size, replica.rank, replica.global_rank, replica.gather("x")],
        world.gather_counted(world.rank),
    ]


def test_without_replicas_the_data_parallel_group_is_the_world():
    for rank, found in enumerate(run(plain, 2)):
        assert found == [True, True, True, [1, 0, rank, ["x"]], [0, 1]]
    alone = lockstep.World()
    assert (alone.data_parallel is alone, alone.replica.size, alone.counts) == (True, 1, True)


def refused(world, folder):
    for degrees in ({"tensor": 3}, {"pipeline": 8}, {"context": 0}):
        with refuses(ConfigError, "2 ranks", "replicas"):
            form_replicas(world, **degrees)
    form_replicas(world, tensor=2)
    model = torch.nn.Linear(2, 2)
    for name, entry in ENGINES.items():
        if not entry.replicas:
            with refuses(ConfigError, f"--engine {name}", "replicas of 2 ranks", "--engine ddp"):
                lockstep.engine(name, model, lambda held: torch.optim.SGD(held.parameters()), world)
    for flag, changes in (("--shares", {"shares": "auto"}), ("--guards.audit", {"guards": Guards(audit=0.5)})):
        with refuses(ConfigError, flag, "replicas of 2 ranks"):
            lockstep.train(small_runs.config(folder, max_steps=1, **changes), Ragged(), world)
    return (folder / "r").exists()


def test_what_does_not_know_replicas_is_refused(tmp_path):
    assert run(refused, 2, tmp_path) == [False, False]


class Counted(Ragged):
    """With numbers of its own, one of which is a sum and a count."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss, {"seen": (len(batch["input"]), 1), "half": loss / 2}


# What the clock, the memory and the number of ranks decide.
_OF_THE_MACHINE = ("time", "memory", "second", "world_size", "mfu", "eta", "run_id", "seconds")


def trained(world, folder, tensor, exact, compression="none"):
    """(digests of the weights, records without times) of three steps with an evaluation."""
    form_replicas(world, tensor=tensor)
    config = small_runs.config(
        folder,
        max_steps=3,
        engine="ddp",
        exact=exact,
        log_freq=1,
        eval_freq=2,
        report=False,
        engine_options=EngineOptions(compression=compression),
    )
    with lockstep.Run(config, Counted(), world) as made:
        body = [(step.loss, step.items, step.numbers) for step in made]
    weights = {name: tensor.numpy().tobytes().hex() for name, tensor in made.model.state_dict().items()}
    records = []
    for line in (folder / "r" / "metrics.jsonl").read_text().splitlines() if world.rank == 0 else ():
        record = json.loads(line)
        records.append({key: value for key, value in record.items() if not any(w in key for w in _OF_THE_MACHINE)})
    return weights, body, records


@pytest.mark.parametrize(("exact", "compression"), [(True, "none"), (False, "none"), (False, "bf16")])
def test_a_replica_counts_once(exact, compression, tmp_path):
    """Two replicas of two ranks train as two ranks: the same bits, and every item, loss and number once."""
    wanted = run(trained, 2, tmp_path / "plain", 1, exact, compression)
    found = run(trained, 4, tmp_path / "replicas", 2, exact, compression)
    assert wanted[0][2][-1]["global_step"] == 3
    for weights, body, _ in found:
        assert weights == wanted[0][0]
        assert body == wanted[0][1]
    assert found[0][2] == wanted[0][2]
