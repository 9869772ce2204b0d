"""What one engine saved, any other loads at any world size: model and optimizer bitwise equal, by plain names."""

import itertools

import pytest
import torch
from ranks import run
from support import build, digest
from toys import Network, Ragged, train

from lockstep import checkpoint
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError

TASK = Ragged(dropout=0.1, dtype=torch.float32)


def _save(world, folder, kinds):
    """Trains with each of the engines, saves, and returns the state's digests."""
    found = []
    for step, (name, options) in enumerate(kinds, start=1):
        made, batches = build(world, TASK, name, **options)
        train(world, made, batches, TASK)
        checkpoint.save(folder, step, made.state_dict(), {}, world, engine=name)
        found.append(digest(made, world))
    return found


def _load(world, folder, kinds, steps):
    """For each engine and each saved step: the digest of the state after loading it into a fresh engine."""
    found = []
    for (name, options), step in itertools.product(kinds, steps):
        made, _ = build(world, TASK, name, **options)
        state = made.state_dict()
        checkpoint.load(checkpoint.path_of(folder, step), state, world)
        made.load_state_dict(state)
        found.append(digest(made, world))
    return found


def cross(folder, writers, readers):
    """`writers` and `readers`: {world size: [(engine, options)]}; world size 0 is a process without a launcher."""
    for number, (size, kinds) in enumerate(writers.items()):
        place = folder / str(number)
        wanted = _save(World(), place, kinds) if size == 0 else run(_save, size, place, kinds)[0]
        steps = range(1, len(kinds) + 1)
        for reader, others in readers.items():
            found = _load(World(), place, others, steps) if reader == 0 else run(_load, reader, place, others, steps)[0]
            assert found == wanted * len(others), (size, reader)


SPLIT = [("ddp", {}), ("zero", {}), ("fsdp", {})]


def test_two_processes_cross_into_each_other_and_into_one(tmp_path):
    cross(tmp_path, {2: SPLIT}, {2: SPLIT, 0: [("single", {})]})


class Filtered(Network):
    """With a convolution of one input channel: a dimension of size one, whose stride says nothing."""

    def __init__(self):
        super().__init__(dtype=torch.float32)
        self.filter = torch.nn.Conv2d(1, 16, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        return super().forward(x) + self.filter(x[:, None, None].float()).mean()


class ChannelsLast(Ragged):
    def model(self):
        return Filtered()


def test_moments_of_another_memory_format_are_loaded(tmp_path):
    run(_saved_and_loaded, 2, tmp_path)


def _saved_and_loaded(world, folder):
    task = ChannelsLast(dtype=torch.float32)
    for name in ("zero", "ddp"):
        made, batches = build(world, task, name)
        train(world, made, batches, task)
        checkpoint.save(folder / name, 1, made.state_dict(), {}, world, engine=name)
        other, _ = build(world, task, name)
        state = other.state_dict()
        checkpoint.load(checkpoint.path_of(folder / name, 1), state, world)
        other.load_state_dict(state)
        assert digest(other, world) == digest(made, world)


class Partly(Network):
    """One layer is frozen, and one is used by no loss: the optimizer has both, and steps neither."""

    def __init__(self):
        super().__init__(dtype=torch.float32)
        self.unused = torch.nn.Linear(4, 4)
        self.blocks[0][1].requires_grad_(False)


class PartlyTrained(Ragged):
    def model(self):
        return Partly()


def _momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _partly(world, folder):
    task, found = PartlyTrained(dtype=torch.float32), []
    for step, name in enumerate(("ddp", "zero", "fsdp"), start=1):
        made, batches = build(world, task, name, make=_momentum)
        train(world, made, batches, task)
        checkpoint.save(folder, step, made.state_dict(), {}, world, engine=name)
        wanted = digest(made, world)
        for reader in ("ddp", "zero", "fsdp"):
            other, _ = build(world, task, reader, make=_momentum)
            state = other.state_dict()
            assert "optimizer/unused.weight/momentum_buffer" in state
            checkpoint.load(checkpoint.path_of(folder, step), state, world)
            other.load_state_dict(state)
            found.append(digest(other, world) == wanted)
            stepped = {name for name in other.state_dict() if name.startswith("optimizer/")}
            assert not [name for name in stepped if "unused" in name or "blocks.0.1" in name]
    return found


def test_what_had_no_gradient_has_no_state_after_a_resume_either(tmp_path):
    assert run(_partly, 2, tmp_path) == [[True] * 9] * 2


@pytest.mark.slow
def test_every_crossing(tmp_path):
    writers = {4: [*SPLIT, ("fsdp", {"sharding": "hybrid", "shard_size": 2})], 3: SPLIT, 2: SPLIT, 1: SPLIT}
    writers[0] = [("single", {})]
    cross(tmp_path, writers, {0: [("single", {})], 1: SPLIT, 2: SPLIT, 3: SPLIT})


def _go_on(world, folder, first, second):
    """Three steps with one engine, then three with another, in exact mode."""
    made, batches = build(world, TASK, first, count=6, exact=True)
    train(world, made, batches, TASK, stop=3)
    checkpoint.save(folder, 3, made.state_dict(), {}, world, engine=first)
    made, batches = build(world, TASK, second, count=6, exact=True)
    state = made.state_dict()
    checkpoint.load(checkpoint.path_of(folder, 3), state, world)
    made.load_state_dict(state)
    losses, norms = train(world, made, batches, TASK, start=3)
    return losses, norms, digest(made, world)


def _straight(world):
    made, batches = build(world, TASK, "single", count=6, exact=True)
    losses, norms = train(world, made, batches, TASK)
    return losses[3:], norms[3:], digest(made, world)


@pytest.mark.parametrize(("first", "second"), [("fsdp", "zero"), ("ddp", "fsdp")])
def test_exact_run_that_changes_engines_is_bitwise(tmp_path, first, second):
    threads = torch.get_num_threads()
    try:
        wanted = _straight(World())
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert run(_go_on, 2, tmp_path, first, second) == [wanted] * 2


def _scaled(world, folder):
    """The loss's scale goes from one engine to another with the rest."""
    made, batches = build(world, TASK, "ddp", precision="fp16")
    train(world, made, batches, TASK)
    checkpoint.save(folder, 1, made.state_dict(), {}, world, engine="ddp")
    other, _ = build(world, TASK, "fsdp", precision="fp16")
    state = other.state_dict()
    checkpoint.load(checkpoint.path_of(folder, 1), state, world)
    other.load_state_dict(state)
    return [float(each.state_dict()["scaler/scale"]) for each in (made, other)]


def test_the_scale_of_the_loss_is_kept(tmp_path):
    before, after = run(_scaled, 2, tmp_path)[0]
    assert before == after


def _clones(world, name):
    made, batches = build(world, TASK, name)
    train(world, made, batches, TASK)
    state = {key: tensor.clone() for key, tensor in made.state_dict().items()}
    again, _ = build(world, TASK, name)
    again.load_state_dict(state)
    same = digest(made, world) == digest(again, world)
    with pytest.raises(CheckpointError, match="the model: model/other on one side only"):
        again.load_state_dict(state | {"model/other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="the model: model/a, model/b, model/c on one side only"):
        again.load_state_dict(state | {f"model/{key}": torch.zeros(1) for key in "bedac"})
    return same


@pytest.mark.parametrize("name", ["ddp", "zero", "fsdp"])
def test_engine_copies_a_state_and_refuses_another_models(name):
    assert run(_clones, 2, name) == [True, True]
