"""Whole means usable: what is not finite is named, never resumed from, and never the last one that is kept."""

import itertools
import math
import re
from contextlib import contextmanager

import pytest
import torch
from ranks import run
from small_runs import config
from states import full, sharded
from torch import nn

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint import command
from lockstep.checkpoint.format import Manifest, read_manifest
from lockstep.config.sections import Checkpoint, Guards
from lockstep.distributed.world import World
from lockstep.engines.optimizer_step import OptimizerStep
from lockstep.errors import CheckpointError, LockstepError
from lockstep.guards.nonfinite import DeferredReader
from lockstep.logging.jsonl import read
from lockstep.tensors import local_of, not_finite
from lockstep.training.start.weights import select_checkpoint

BAD = [math.nan, math.inf, -math.inf]


def spoilt(values, bad=math.nan):
    values = values.clone()
    values[(-1,) * values.dim()] = bad
    return values


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64],
    ids=str,
)
def test_each_dtype_is_judged(dtype, bad):
    largest = torch.full((70, 3), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)  # its norm overflows
    tensors = {"a": largest, "b": torch.ones(3, dtype=torch.int64), "c": torch.empty(0, dtype=dtype)}
    tensors["d"] = torch.ones(70, 3).to(dtype)
    assert not_finite(tensors) == []
    tensors["d"] = spoilt(tensors["d"].to(torch.complex64 if dtype.is_complex else torch.float32), bad).to(dtype)
    assert not_finite(tensors) == ["d"]


def write(world, folder, step, name="", how="plain", exempt=()):
    """A checkpoint in which the tensor `name` is not finite; what the error names."""
    tensors = full()
    tensors |= {name: spoilt(tensors[name])} if name else {}
    try:
        checkpoint.save(folder, step, sharded(tensors, world, how), {}, world, engine="t", exempt=exempt)
    except LockstepError as error:
        return str(error)
    return ""


NAMES = ["model/blocks.0.weight", "optimizer/blocks.0.weight/exp_avg", "model/fourier"]


@pytest.mark.parametrize("how", ["plain", "rows"])
def test_what_one_rank_sees_in_its_part_is_said_on_all(tmp_path, how):
    run(write, 2, tmp_path, 1)
    for step, name in enumerate(NAMES, 2):
        assert all(name in said for said in run(write, 2, tmp_path, step, name, how))
    assert [checkpoint.is_marked(checkpoint.path_of(tmp_path, step)) for step in (1, 2, 3, 4)] == [False, *[True] * 3]
    lines = []
    assert checkpoint.find_newest(tmp_path, World(), lines.append) == checkpoint.path_of(tmp_path, 1)
    assert [name for line, name in zip(lines, reversed(NAMES), strict=True) if name not in line] == []
    assert (
        checkpoint.newest(tmp_path, say=str) == select_checkpoint(tmp_path, "last") == checkpoint.path_of(tmp_path, 1)
    )
    assert [len(checkpoint.verify(checkpoint.path_of(tmp_path, step))) for step in (1, 2, 3, 4)] == [0, 1, 1, 1]


def test_exempt_tensors_pass_and_a_good_save_replaces_a_bad(tmp_path):
    assert not write(World(), tmp_path, 1, name=NAMES[0], exempt=NAMES)
    assert write(World(), tmp_path, 2, name=NAMES[0])
    assert not write(World(), tmp_path, 2)
    assert [checkpoint.verify(checkpoint.path_of(tmp_path, step)) for step in (1, 2)] == [[], []]


def test_not_finite_checkpoints_are_passed_over_everywhere(tmp_path):
    for step, name in enumerate(["", "", "", NAMES[0], NAMES[0]], 1):
        write(World(), tmp_path, step, name=name)
    assert checkpoint.retain(tmp_path, last=2, best=None, every=0) == [1, 4]
    assert checkpoint.list_steps(tmp_path) == [2, 3, 5]


def test_the_command_names_it(tmp_path, capsys):
    write(World(), tmp_path, 1)
    write(World(), tmp_path, 2, name=NAMES[0])
    assert command.run("verify", str(tmp_path), None) == 3
    assert NAMES[0] in capsys.readouterr().out
    assert command.run("inspect", str(tmp_path), None) == 0
    shown = capsys.readouterr()
    assert re.search(r"^step +1$", shown.out, re.MULTILINE)
    assert NAMES[0] in shown.err
    assert command.run("inspect", str(tmp_path), 2) == 0
    assert re.search(f"^not finite +{NAMES[0]}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("names", [["a", 3], "a", None, {}])
def test_a_mark_that_is_no_list_of_names_is_damage(tmp_path, names):
    path = checkpoint.path_of(tmp_path, 1)
    path.mkdir(parents=True)
    manifest = Manifest(1, 1, "t", 0, {"state.json": {"size": 0, "xxh3_64": "0" * 16}}, not_finite=names or [3])
    (path / "manifest.json").write_bytes(manifest.dump())
    with pytest.raises(CheckpointError, match="manifest.json"):
        read_manifest(path)


class Fit(lockstep.Task):
    """A regression; its model has a mask of infinities where that is asked for."""

    masked = False

    def model(self):
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
        if self.masked:
            model.register_buffer("mask", torch.full((2, 2), -math.inf))
        return model

    def dataset(self, split):
        return [*torch.randn(48, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]

    def loss(self, model, batch):
        return (model(batch[:, :3]) - batch[:, 3:]).square().sum()


@contextmanager
def spoilt_by_updates(*bad, state_alone=False):
    """Updates of these numbers, counted from 1 over the whole block, make a weight NaN, or a state of the optimizer."""
    real, count = OptimizerStep.__call__, itertools.count(1)

    def call(self, *args):
        result = real(self, *args)
        if result.applied and next(count) in bad:
            weight = self.parameters[0]
            with torch.no_grad():
                local_of(self.optimizer.state[weight]["exp_avg"] if state_alone else weight)[0, 0] = math.nan
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerStep, "__call__", call)
        yield


def settings(folder, policy="stop", **changes):
    return config(folder, **{"ckpt_freq": 1, "log_freq": 1, "guards": Guards(nonfinite=policy)} | changes)


def whole_steps(folder):
    return [step for step in checkpoint.list_steps(folder / "r") if not marked(folder, step)]


def marked(folder, step):
    return checkpoint.is_marked(checkpoint.path_of(folder / "r", step))


WEIGHT = "model/0.weight"


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_spoiled_weight_ends_the_run_and_resume_passes_over_it(tmp_path, monkeypatch, policy, lag):
    monkeypatch.setattr(DeferredReader, "lag", lag)
    made = settings(tmp_path, policy, checkpoint=Checkpoint(keep=1))
    with (
        spoilt_by_updates(5),
        pytest.raises(LockstepError, match=f"step 6: .*{WEIGHT} is not finite .*step 5") as found,
    ):
        lockstep.train(made, Fit())
    assert found.value.exit_code == 1
    assert "sample" not in str(found.value)
    assert (whole_steps(tmp_path), marked(tmp_path, 5)) == ([4], True)
    assert lockstep.train(made, Fit()).status == "finished"
    records = read(tmp_path / "r" / "metrics.jsonl")
    assert [record["global_step"] for record in records if "lr" in record] == [*range(1, 13)]


def test_a_rollback_leaves_the_update_out_that_spoilt_the_weight(tmp_path):
    with spoilt_by_updates(5), lockstep.Run(settings(tmp_path, "rollback"), Fit()) as session:
        taken = [step.global_step for step in session]
    assert (taken, session.result.status) == ([1, 2, 3, 4, 5, *range(5, 13)], "finished")
    assert '"skipped": [5]' in (tmp_path / "r" / "checkpoints" / "skips.json").read_text()
    assert not marked(tmp_path, 12)


@pytest.mark.parametrize(
    ("bad", "words"), [((1,), "complete"), (range(5, 99), "guards.limit")], ids=["no checkpoint is whole", "the limit"]
)
def test_a_rollback_that_does_not_help_ends_the_run(tmp_path, bad, words):
    made = settings(tmp_path, "rollback", guards=Guards(nonfinite="rollback", limit=2))
    with spoilt_by_updates(*bad), pytest.raises(LockstepError, match=words) as found:
        lockstep.train(made, Fit())
    assert found.value.exit_code == 1


@pytest.mark.parametrize("mode", ["async", "sync", "none"])
@pytest.mark.parametrize("state_alone", [False, True])
def test_a_run_that_ends_with_a_spoilt_state_is_not_finished(tmp_path, mode, state_alone):
    what = "optimizer/0.weight/exp_avg" if state_alone else WEIGHT
    made, ends = settings(tmp_path, checkpoint=Checkpoint(mode=mode)), spoilt_by_updates(12, state_alone=state_alone)
    with ends, pytest.raises(LockstepError, match=f"step 12 .*{what} is not finite") as found:
        lockstep.train(made, Fit())
    assert found.value.exit_code == 1
    assert '"failed", "code": 1' in (tmp_path / "r" / "ended.json").read_text()
    newest = None if mode == "none" else checkpoint.path_of(tmp_path / "r", 11)
    assert checkpoint.find_newest(tmp_path / "r", World(), str) == newest


def ends(world, folder, engine):
    made = settings(folder, engine=engine, eval_freq=0)
    with spoilt_by_updates(12), pytest.raises(LockstepError, match=WEIGHT):
        lockstep.train(made, Fit(), world)


@pytest.mark.parametrize("engine", ["zero", "fsdp"])
def test_an_engine_that_splits_the_state_finds_it_too(tmp_path, engine):
    run(ends, 2, tmp_path, engine)
    assert [marked(tmp_path, step) for step in (11, 12)] == [False, True]


def test_a_mask_of_infinities_is_no_fault(tmp_path):
    task = Fit()
    task.masked = True
    for last in (6, 12):
        lockstep.train(settings(tmp_path, stop_at=last), task)
    path = checkpoint.path_of(tmp_path / "r", 12)
    assert checkpoint.verify(path) == []
    assert checkpoint.read_state(path)["not_finite_at_start"] == ["model/mask"]
