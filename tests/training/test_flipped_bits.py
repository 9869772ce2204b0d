"""A bit that flips on one rank gets into no checkpoint: the run ends, and a resume trains on from before it."""

import pytest
import torch
from ranks import run
from small_runs import config, mark
from torch import nn

import lockstep
from lockstep import checkpoint
from lockstep.config.engine_options import EngineOptions
from lockstep.errors import DifferenceError
from lockstep.tensors import local_of

STEPS = 8


class Points(torch.utils.data.Dataset):
    draws_random = False

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


class Net(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(0.9))  # 0-dim: whole on every rank, with any engine

    def forward(self, x):
        return super().forward(x) * self.scale


class Task(lockstep.Task):
    reduction = "sum"

    def model(self):
        model = Net(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
        model.register_buffer("table", torch.ones(3))
        return model

    def dataset(self, split):
        return Points() if split == "train" else None

    def loss(self, model, batch):
        return (model(batch) - batch.sum(1, keepdim=True)).square().sum()


def trained(world, folder, kind="", at=0, **changes):
    """The error's line, or "", of a run where a bit of one state flips on the last rank after step `at`."""
    settings = {"max_steps": STEPS, "optim": {"ema": 0.9}, "exact": True, "engine": "ddp", "report": False} | changes
    training = lockstep.Run(config(folder, **settings), Task(), world)
    try:
        for step in training:
            if kind and step.global_step == at:
                state = training._status.built.all_tensors()  # collective under zero
                name = next(name for name in sorted(state) if kind in name)
                bits = local_of(state[name]).detach().view(-1).view(torch.int64)
                bits[-1] ^= (1 << 20) * (world.rank == world.size - 1)
    except DifferenceError as error:
        assert error.goes_back
        return str(error)
    return ""


def cases(world, folder, table, settings=None):
    """By case: the error's line and the newest checkpoint then; and the end, resumed after an error."""
    said, ends = [], []
    for number, (kind, at, changes) in enumerate(table):
        place = folder / str(number)
        line = trained(world, place, kind, at, **(settings or {}) | changes)
        world.barrier()
        newest = checkpoint.newest(place / "r", say=print)
        said.append((line, newest and newest.name))
        assert not line or trained(world, place, **settings or {}, ckpt_freq=changes["ckpt_freq"]) == ""
        world.barrier()
        ends.append(mark(place))
    return said, ends


FLIPS = [
    ("model/0.weight", 4, {"ckpt_freq": 1}),  # the save after this step's body finds it
    ("model/0.weight", 4, {"ckpt_freq": 3}),
    ("exp_avg_sq", 2, {"ckpt_freq": 3}),
    ("exp_avg", 7, {"ckpt_freq": 3}),  # the end's save
    ("average/0.bias", 1, {"ckpt_freq": 4}),
    ("running_var", 5, {"ckpt_freq": 2}),
    ("table", 1, {"ckpt_freq": 0}),  # nothing is saved: a resume begins with step 1
    ("model/3.weight", 6, {"ckpt_freq": 5, "stop_at": 7}),  # as at a signal
]
FOUND = [(4, 3), (6, 3), (3, 0), (8, 6), (4, 0), (6, 4), (8, 0), (7, 5)]  # by case: after which step, the checkpoint


def test_flipped_bit_is_in_no_checkpoint_and_resume_is_bitwise(tmp_path):
    (said, ends), *_ = run(cases, 2, tmp_path, [("", 0, {"ckpt_freq": 3}), *FLIPS], timeout=120)
    assert ends == [ends[0]] * len(ends)
    for (line, newest), (step, kept) in zip(said[1:], FOUND, strict=True):
        assert line.startswith(f"after step {step} rank 0 and rank 1 differ"), line
        assert newest == (checkpoint.path_of(tmp_path, kept).name if kept else None)
        assert (f"of step {kept}, is from before it" in line) == (kept > 0), line


def test_of_three_ranks_the_one_is_named(tmp_path):
    table = [("", 0, {"ckpt_freq": 3}), ("model/0.weight", 4, {"ckpt_freq": 3})]
    (said, ends), *_ = run(cases, 3, tmp_path, table)
    assert said[1][0].startswith("after step 6 rank 2 differs from the other ranks in "), said
    assert ends[0] == ends[1]


_EVERY = {"ckpt_freq": 3}
_HYBRID = {"exact": False, "engine_options": EngineOptions(sharding="hybrid", shard_size=2)}


@pytest.mark.parametrize(
    ("world", "settings", "flips"),
    [
        # The owner's update replaces a copy with its own: what a gradient was made of is found nevertheless.
        (2, {"engine": "zero"}, [("model/0.weight", 4, _EVERY), ("average/0.bias", 4, _EVERY)]),
        (2, {"engine": "fsdp"}, [("model/scale", 4, _EVERY), ("scale/exp_avg", 5, _EVERY), ("table", 4, _EVERY)]),
        (4, {"engine": "fsdp", **_HYBRID}, [("model/0.weight", 4, _EVERY)]),  # a shard of each replica
    ],
    ids=["zero", "fsdp", "hybrid"],
)
def test_what_several_ranks_hold_is_compared_with_each_engine(tmp_path, world, settings, flips):
    (said, ends), *_ = run(cases, world, tmp_path, [("", 0, _EVERY), *flips], settings, timeout=120)
    assert ends == [ends[0]] * len(ends)
    for (line, newest), (kind, *_) in zip(said[1:], flips, strict=True):
        assert line.startswith("after step 6 "), (kind, line)
        assert newest == checkpoint.path_of(tmp_path, 3).name
