"""Muon where matrices are split: the owner of a matrix computes its update whole, with the bits of one process."""

import pytest
import torch
from ranks import run
from support import alone, build, digest, each
from torch import nn
from toys import Network, Ragged, train

from lockstep import checkpoint
from lockstep.distributed.rows import assign_owners, gather_rows, scatter_rows
from lockstep.engines.blocks import repeated_layers
from lockstep.optim.groups import Rules, freeze, parse
from lockstep.optim.optimizers import muon

SHAPES = [(3, 16), (1, 5), (8, 2), (5, 7), (0, 4), (6,)]


def _there_and_back(world):
    """Uneven rows, fewer rows than ranks, none at all: the owner has the whole tensor, and each rank gets its own."""
    wholes = [
        torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 100 * k
        for k, shape in enumerate(SHAPES)
    ]
    cut = [(*whole.chunk(world.size), *[whole[:0]] * world.size) for whole in wholes]
    parts, owners = [each[world.rank] for each in cut], assign_owners([whole.numel() for whole in wholes], world.size)
    mine = gather_rows(parts, SHAPES, owners, None)
    expected = [whole for whole, owner in zip(wholes, owners, strict=True) if owner == world.rank]
    assert all(map(torch.equal, mine, expected))
    back = scatter_rows([2 * whole for whole in mine], SHAPES, owners, parts[0], None)
    return len(mine) == len(expected) and all(torch.equal(a, 2 * b) for a, b in zip(back, parts, strict=True))


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_come_together_at_their_owner_and_go_back(ranks):
    assert run(_there_and_back, ranks) == [True] * ranks
    assert assign_owners([1, 5, 3, 3], 2) == [0, 0, 1, 1]


class Uneven(Network):
    """Tall, wide and odd matrices, one of fewer rows than ranks, and a layer that no loss uses."""

    def __init__(self, dtype):
        super().__init__(dtype=dtype)
        self.blocks.extend(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for width in (3, 37)
        )
        self.to(dtype)
        self.unused = nn.Linear(4, 4).to(dtype)


class Task(Ragged):
    def model(self):
        return Uneven(self.dtype)


TASK = Task(dtype=torch.float32)


def make(held):
    rules = Rules(parse("unused.weight: muon; blocks.0.1.*: freeze"), blocks=repeated_layers(held))
    freeze(held, rules)
    return muon(held, lr=0.01, muon_lr=0.02, fused=False, rules=rules)


CASES = {"make": make, "clip": 1.0}


@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_muon_has_the_bits_of_one_process_in_every_engine(ranks):
    settings = CASES | {"exact": True}
    wanted = alone(TASK, **settings)
    cases = [(TASK, name, settings) for name in ("ddp", "zero", "fsdp")]
    cases.append((TASK, "fsdp", settings | {"sharding": "grad-op", "blocks": True}))
    for found in run(each, ranks, cases):
        assert [one == wanted for one in found] == [True] * len(cases)


def _resumed(world, folder, first, second, ranks_before):
    """Three steps of one engine, saved; then three of another, perhaps with other ranks; or the three alone."""
    settings = {"count": 6, "exact": True, "make": make}
    if ranks_before:
        made, batches = build(world, TASK, first, **settings)
        train(world, made, batches, TASK, stop=3)
        checkpoint.save(folder, 3, made.state_dict(), {}, world, engine=first)
        return None
    made, batches = build(world, TASK, second, **settings)
    state = made.state_dict()
    checkpoint.load(checkpoint.path_of(folder, 3), state, world)
    made.load_state_dict(state)
    train(world, made, batches, TASK, start=3)
    return digest(made, world)


def test_checkpoint_moves_between_engines_and_to_fewer_ranks(tmp_path):
    wanted = alone(TASK, **CASES | {"exact": True, "count": 6})[2]
    run(_resumed, 4, tmp_path / "a", "fsdp", "", True)
    assert run(_resumed, 2, tmp_path / "a", "", "zero", False) == [wanted] * 2
    run(_resumed, 2, tmp_path / "b", "zero", "", True)
    assert run(_resumed, 2, tmp_path / "b", "", "fsdp", False) == [wanted] * 2


def _left_out(world, name):
    """A step left out moves neither weights nor states; what is asked for before the first step changes nothing."""
    found = []
    for ask in (False, True):
        made, batches = build(world, TASK, name, make=make, exact=True)
        if ask:
            made.state_dict()
        for index, (_, group) in enumerate(batches.from_step(0)):
            for batch in group:
                with made.accumulate(batch is group[-1]):
                    made.backward(TASK.loss(made.model, batch.data), batch.weight / 50)
            before = digest(made, world) if index else ""
            made.step(1.0 if index != 2 else 0.0, limit=float("inf") if index != 1 else -float("inf"))
            assert (digest(made, world) == before) is (index == 1)
        found.append(digest(made, world))
    return found[0] == found[1] and found[0]


def test_skipped_step_changes_nothing_and_zero_rate_momentum():
    (wanted,) = {*run(_left_out, 1, "ddp")}
    assert wanted
    for name in ("zero", "fsdp"):
        assert run(_left_out, 2, name) == [wanted] * 2


def test_muon_without_exact_agrees_with_one_process():
    hybrid = CASES | {"sharding": "hybrid", "shard_size": 2}
    found = run(each, 4, [(TASK, "fsdp", hybrid)], timeout=120.0)
    found[0] += run(each, 2, [(TASK, "fsdp", CASES | {"sharding": "none"}), (TASK, "zero", CASES)])[0]
    wanted = alone(TASK, **CASES)
    for one in found[0]:
        for mine, other in zip(one[0], wanted[0], strict=True):
            assert mine == pytest.approx(other, rel=1e-2)  # bfloat16 turns a last bit of a gradient into more
