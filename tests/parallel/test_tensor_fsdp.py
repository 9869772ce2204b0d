"""Runs with --parallel.tensor whose parts --engine fsdp shards, against the same run on one process."""

import pytest
import small_runs
import torch
from divided_runs import Planned, TinyGPT, assert_close, train, weights
from ranks import run
from refusals import refuses
from torch import nn
from toys import Network

from lockstep.config.engine_options import EngineOptions
from lockstep.errors import ConfigError, DifferenceError
from lockstep.guards import desync
from lockstep.hooks import Hooks
from lockstep.tensors import local_of

AVERAGED = {"optim": {"clip": 0.5, "ema": 0.9}}


class Odd(Network):
    """With a layer that no forward uses, which decay would move if it had a gradient, and a 0-dim parameter."""

    def __init__(self, dropout):
        super().__init__(dropout)
        # 5 rows on each of two tensor ranks, so 3 and 2 in their shards.
        self.idle = nn.Linear(16, 10)
        self.wide = nn.Linear(16, 10)
        self.narrow = nn.Linear(10, 29)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x):
        return super().forward(x) * self.scale + self.narrow(self.wide(self.embedding(x)).tanh())


class Thaw(Hooks):
    """Train the second block from step 2 on, and see that the ranks count each micro-batch once."""

    def __init__(self, task):
        self._task = task
        self._counted = []

    def before_batch(self, step, index, slot, slots, *, counts):
        self._counted += [index] * counts

    def after_step(self, context, done):
        counted = sorted(index for own in context.gather(self._counted) for index in own)
        assert counted == list(range(max(counted) + 1))
        self._counted = []
        if done == 2:
            self._task.made.blocks[1].requires_grad_(True)


class Thawing(Planned):
    """An own plan for `Odd`, of which one block is frozen at first."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.hooks = Thaw(self)

    def model(self):
        self.made = Odd(self.dropout)
        self.made.blocks[1].requires_grad_(False)
        return self.made

    def parallelize(self, model):
        return {"blocks.*.1": "columns", "blocks.*.3": "rows", "idle": "columns", "wide": "columns", "narrow": "rows"}


def train_sharded(world, folder, task, changes, degree=2, **options):
    return train(world, folder, task, degree, engine="fsdp", engine_options=EngineOptions(**options), **changes)


@pytest.mark.parametrize("task", [TinyGPT, Thawing], ids=["gpt", "own"])
def test_shards_of_divided_layers_train_as_one_process(task, tmp_path):
    records, body = train(None, tmp_path / "one", task(dropout=0.1), 1, **AVERAGED)
    found = run(_train, 4, tmp_path / "four", task)
    assert [items for _, items in found[0][1]] == [items for _, items in body]
    assert [loss for loss, _ in found[0][1]] == pytest.approx([loss for loss, _ in body], rel=1e-12)
    for record, wanted in zip(found[0][0], records, strict=True):
        assert record == pytest.approx(wanted, rel=1e-9)
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "four"))


def _train(world, folder, task):
    return train_sharded(world, folder, task(dropout=0.1), AVERAGED)


def _exact(world, folder, engine):
    return train(world, folder, TinyGPT(dropout=0.1), 2, exact=True, max_steps=3, eval_freq=0, engine=engine)


def test_shards_do_not_change_the_bits_in_exact_mode(tmp_path):
    for ranks, engine in ((2, "ddp"), (2, "fsdp"), (4, "fsdp")):
        run(_exact, ranks, tmp_path / f"{engine}{ranks}", engine)
    assert small_runs.mark(tmp_path / "ddp2") == small_runs.mark(tmp_path / "fsdp2")
    assert small_runs.mark(tmp_path / "ddp2") == small_runs.mark(tmp_path / "fsdp4")


def _until(world, folder, engine, degree, stop, **options):
    changes = {"stop_at": stop, "max_steps": 5, "eval_freq": 0, "engine_options": EngineOptions(**options)}
    return train(world, folder, TinyGPT(dropout=0.1), degree, engine=engine, **changes)


def _copies(world, folder):
    return _until(world, folder, "fsdp", 2, 0, sharding="none")


def test_a_checkpoint_of_divided_shards_resumes_on_any_plan(tmp_path):
    _until(None, tmp_path / "one", "single", 1, 0)
    run(_until, 4, tmp_path / "moved", "fsdp", 2, 1)
    run(_until, 2, tmp_path / "moved", "ddp", 2, 2)
    _until(None, tmp_path / "moved", "single", 1, 3)
    run(_until, 2, tmp_path / "moved", "fsdp", 1, 4)
    run(_copies, 4, tmp_path / "moved")
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "moved"))


def _each_flipped(world, folder):
    return [_flipped(world, folder / sharding, sharding) for sharding in ("full", "none")]


def _flipped(world, folder, sharding):
    """Return the guard's errors after a flip on rank 1: in a norm's shard, and in a divided layer's."""
    task = KeepsModel()
    train_sharded(world, folder, task, {"max_steps": 1, "eval_freq": 0}, sharding=sharding)
    state = {f"model/{name}": tensor for name, tensor in task.made.state_dict().items()}
    found = []
    for name in ("model/norm.weight", "model/blocks.0.expand.weight"):
        for _ in range(2):  # the second flip puts it back
            if world.rank == 1:
                local_of(state[name]).view(torch.int64).reshape(-1)[-1] ^= 1
            try:
                desync.check(state, world, 1)
            except DifferenceError as error:
                found.append(str(error))
            else:
                found.append("")
    return found


class KeepsModel(TinyGPT):
    def model(self):
        self.made = super().model()
        return self.made


def test_a_flipped_bit_is_found_where_another_rank_has_a_copy(tmp_path):
    for each in run(_each_flipped, 4, tmp_path):
        # Tensor ranks have the same shards of what is not divided; data-parallel ranks have copies without sharding.
        for has_copy, (whole, whole_back, part, part_back) in zip((False, True), each, strict=True):
            assert "rank 1" in whole
            assert "model/norm.weight" in whole
            assert ("rank 1" in part and "model/blocks.0.expand.weight" in part) is has_copy
            assert (whole_back, part_back) == ("", "")


def _in_bf16(world, folder):
    options = {"param_dtype": "bf16", "reduce_dtype": "float32", "output_dtype": "float32"}
    changes = {"max_steps": 2, "precision": "float32", "eval_freq": 0}
    mixed = train_sharded(world, folder / "dtype", TinyGPT(dtype=torch.float32), changes, **options)
    autocast = train_sharded(world, folder / "autocast", TinyGPT(), changes | {"precision": "bf16"})
    return [loss for loss, _ in mixed[1]], [loss for loss, _ in autocast[1]]


def test_half_precision_is_close_to_one_process(tmp_path):
    _, body = train(None, tmp_path / "one", TinyGPT(), 1, max_steps=2, precision="bf16", eval_freq=0)
    for losses in run(_in_bf16, 4, tmp_path)[0]:
        assert losses == pytest.approx([loss for loss, _ in body], rel=1e-2)


def _refused(world, folder):
    for options, words in (
        ({"sharding": "hybrid", "shard_size": 2}, ("--engine.sharding hybrid", "groups of 2 from 2 processes")),
        ({"sharding": "hybrid", "shard_size": 1}, ("--engine.sharding hybrid", "groups of 1")),
    ):
        with refuses(ConfigError, *words):
            train_sharded(world, folder, TinyGPT(), {}, **options)
    with refuses(ConfigError, "--exact", "--engine.sharding"):
        train_sharded(world, folder, TinyGPT(), {"exact": True}, sharding="none")
    return (folder / "r" / "checkpoints").exists()


def test_what_shards_cannot_do_is_refused_first(tmp_path):
    assert run(_refused, 4, tmp_path) == [False] * 4
