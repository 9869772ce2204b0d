"""A whole run through `lockstep.train`: its folder, its records, its resume."""

import dataclasses
import json
import platform
import tomllib

import pytest
import torch
from ranks import run
from refusals import names, refuses
from small_runs import config, mark
from toys import HolesMean, Ragged, taken

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.export import export
from lockstep.config.cli import flatten, parse, read_toml
from lockstep.config.schema import Config
from lockstep.config.sections import Checkpoint
from lockstep.data.sampler import Sequential
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, ConfigError, DataError, LockstepError, ResumeError
from lockstep.files import bytes_text
from lockstep.logging.jsonl import read as records
from lockstep.training.start.build import build
from lockstep.training.start.resolve import Facts, resolve
from lockstep.training.start.resume import compare_plans
from lockstep.training.state.run_dir import RunFolder


def go(world, settings, task=None, leave_at=None):
    """Trains; (steps taken, exit code or None where the loop was left)."""
    return taken(settings, task or Ragged(dropout=0.1), world, leave_at)


def test_the_folder_of_a_run(tmp_path):
    settings = config(tmp_path)
    assert go(None, settings) == (list(range(12)), 0)
    path = tmp_path / "r"
    written, given = flatten(Config(**read_config(path / "config.toml"))), flatten(settings)
    assert {name: value for name, value in written.items() if value != given[name]} == {
        "num_epochs": 1,
        "optim.beta2": 0.999,
        "optim.weight_decay": 0.01,
        "optim.warmup_steps": 0,
        "optim.floor": 0.1,
        "eval_micro_batch_size": settings.micro_batch_size,
        "eval_workers": 0,
        "eval_freq": 0,
        "compile": False,
    }  # which are chosen by the task, the plan and the device
    state = json.loads((path / "state.json").read_text())
    saved = checkpoint.read_state(checkpoint.newest(path, say=print))  # after the evaluation, and the loop's body
    assert state["best"]["step"] == 12
    assert saved == state
    wanted = {"global_step": 12, "epoch": 2, "epoch_step": 2, "position": 96, "running_loss": 0.0, "world_size": 1}
    assert {key: state[key] for key in wanted} == wanted
    assert "versions" in json.loads((path / "environment.json").read_text())
    log = (path / "logs" / "rank-00000.log").read_text()
    assert f"rank 0: {platform.node()}, cpu" in log
    assert '"batch_size": 8' in log
    steps = [r for r in records(path / "metrics.jsonl") if "running_loss" in r]
    assert [r["global_step"] for r in steps] == [2, 4, 6, 8, 10, 12]
    names = "global_step epoch epoch_progress num_batches_remaining lr running_loss grad_norm items_per_second memory "
    names += "time/data time/forward time/backward time/update time/total"
    assert set(names.split()) == set(steps[0])
    assert steps[-1]["running_loss"] < steps[0]["running_loss"]
    assert steps[0]["time/total"] == pytest.approx(sum(v for k, v in steps[0].items() if k[:5] == "time/") / 2)
    assert records(path / "metrics.jsonl")[-1]["evaluation/items"] > 0


def read_config(path):
    with path.open("rb") as handle:
        loaded = tomllib.load(handle)
    kinds = {spec.name: spec.type for spec in dataclasses.fields(Config)}
    return {k: kinds[k](**v) if isinstance(v, dict) else v for k, v in loaded.items()}


def test_the_written_config_is_one_that_config_reads(tmp_path):
    settings = config(tmp_path, experiment_name='a "quoted" näme')
    go(None, settings)
    chosen = resolve(settings, Facts.of(Ragged(), Ragged().model(), 40)).config
    assert read_toml(tmp_path / settings.experiment_name / "config.toml") == flatten(chosen, own_task=True)
    assert parse(["--config", str(tmp_path / settings.experiment_name / "config.toml")]) == chosen


BUILTIN = {"model_name", "dataset_name", "seq_len", "tokenizer", "preset", "model.dropout", "data.text_column"}


def test_built_in_tasks_fields_are_not_written_for_a_custom_task(tmp_path):
    """But for what was changed. The run resumes, loads and exports as ever, and another value is told on a resume."""
    model = {"dropout": 0.25}  # such as a task may be made from
    common = {"model": model, "ckpt_freq": 2, "max_steps": 4}
    go(None, config(tmp_path, stop_at=2, **common))
    path = tmp_path / "r"
    written = read_toml(path / "config.toml")
    assert not written.keys() & (BUILTIN - {"model.dropout"})
    assert written["model.dropout"] == 0.25
    assert "data.workers" in written
    (tmp_path / "mine.py").write_text("from toys import Ragged\n")
    lockstep.train(config(tmp_path, experiment_name="named", task=f"{tmp_path}/mine.py:Ragged", max_steps=2))
    assert not read_toml(tmp_path / "named" / "config.toml").keys() & BUILTIN
    log = (path / "logs" / "rank-00000.log").read_text()
    assert '"model.dropout": 0.25' in log
    assert "seq_len" not in log
    with pytest.raises(ResumeError, match=r"seq.len 128 \(now 64\)"):
        go(None, config(tmp_path, seq_len=64, **common))
    plan = json.loads((path / "state.json").read_text())["plan"]
    assert plan.keys() & BUILTIN == {"model.dropout"}
    with pytest.raises(ResumeError, match=r"model.dropout 0.25 \(now 0.0\)"):
        go(None, config(tmp_path, ckpt_freq=2, max_steps=4))
    assert compare_plans(plan | {"seq_len": 128}, plan) == compare_plans(plan, plan | {"seq_len": 128}) == []
    assert compare_plans(plan | {"seq_len": 64}, plan) == [("seq_len", 64, 128)]
    older = {name: value for name, value in plan.items() if name not in ("optim.power", "dataset_samples")}
    assert compare_plans(older, plan) == []
    changed = plan | {"optim.power": 9.0, "dataset_samples": 41}
    assert compare_plans(older, changed) == [("dataset_samples", 40, 41), ("optim.power", 1.0, 9.0)]
    assert go(None, parse(["--config", str(path / "config.toml"), "--stop-at", "0"]))[0] == [2, 3]
    go(None, config(tmp_path, experiment_name="whole", **common))
    assert mark(tmp_path) == mark(tmp_path, "whole")
    assert lockstep.load(path, Ragged(), "last").training is False
    export(checkpoint.newest(path, say=print), tmp_path / "out.safetensors", "safetensors")
    with pytest.raises(CheckpointError, match="neither the built-in GPT nor one from transformers"):
        export(checkpoint.newest(path, say=print), tmp_path / "hf", "hf")


def test_a_task_that_is_named_keeps_all_fields(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four " * 400)
    common = {"save_dir": str(tmp_path), "max_steps": 1, "batch_size": 2, "device": "cpu"}
    data = {"cache": str(tmp_path / "cache"), "vocab_size": 300}
    lockstep.train(Config(dataset_name=str(tmp_path / "text.txt"), seq_len=16, data=data, **common))
    assert read_toml(tmp_path / "default" / "config.toml").keys() == flatten(Config()).keys()


@pytest.mark.parametrize("leave_at", [4, 7, 11])
def test_a_run_that_was_left_resumes_to_the_same_bits(tmp_path, leave_at):
    go(None, config(tmp_path, experiment_name="whole"))
    go(None, config(tmp_path), leave_at=leave_at)
    steps, code = go(None, config(tmp_path))
    assert steps == list(range(leave_at, 12))  # leaving the loop saves
    assert code == 0
    assert mark(tmp_path) == mark(tmp_path, "whole")
    steps = [
        [
            (r["global_step"], r["running_loss"], r["grad_norm"])
            for r in records(tmp_path / name / "metrics.jsonl")
            if "lr" in r
        ]
        for name in ("r", "whole")
    ]
    assert steps[0] == steps[1]  # nothing twice, nothing missing, sums over the gap included


def test_it_resumes_on_another_number_of_ranks(tmp_path):
    task = Ragged(dropout=0.1, samples=200)
    exact = {"exact": True, "precision": "float32"}
    task32 = dataclasses.replace(task, dtype=torch.float32)
    run(go, 1, config(tmp_path, experiment_name="whole", **exact), task32)
    run(go, 2, config(tmp_path, **exact), task32, 7)
    run(go, 4, config(tmp_path, **exact, stop_at=9), task32)
    assert run(go, 1, config(tmp_path, **exact), task32) == [([9, 10, 11], 0)]
    assert mark(tmp_path) == mark(tmp_path, "whole")


def test_stop_at_changes_neither_plan_nor_result(tmp_path, capsys):
    go(None, config(tmp_path, experiment_name="whole"))
    assert go(None, config(tmp_path, stop_at=5)) == ([0, 1, 2, 3, 4], 0)
    assert "stopped: saved after step 5 of 12;" in capsys.readouterr().out
    assert go(None, config(tmp_path, stop_at=5)) == ([], 0)
    assert names(capsys.readouterr().err, "step 5 of 12", "--stop-at 5")
    assert go(None, config(tmp_path))[0] == list(range(5, 12))
    assert mark(tmp_path) == mark(tmp_path, "whole")


def test_a_finished_run_says_so_and_is_left_alone(tmp_path, capsys):
    go(None, config(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("*")}
    assert go(None, config(tmp_path)) == ([], 0)
    said = capsys.readouterr().err
    assert names(said, "finished", "12 steps", "--extend-to")
    assert said.count(str(tmp_path)) == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("*")} == before


def test_the_last_three_and_the_best_are_kept(tmp_path):
    go(None, config(tmp_path, ckpt_freq=1, eval_freq=2, checkpoint=Checkpoint(keep=2)))
    state = json.loads((tmp_path / "r" / "state.json").read_text())
    evaluations = {
        r["global_step"]: r["evaluation/loss"] for r in records(tmp_path / "r" / "metrics.jsonl") if "lr" not in r
    }
    best = min(evaluations, key=evaluations.get)
    loss = evaluations[best]
    assert state["best"] == {"step": best, "loss": loss, "metric": "loss", "value": loss}
    assert checkpoint.list_steps(tmp_path / "r") == sorted({best, 11, 12})


def test_a_plan_that_differs_is_refused_with_its_keys(tmp_path, capsys):
    go(None, config(tmp_path), leave_at=4)
    before = sorted(str(path) for path in (tmp_path / "r").rglob("*"))
    with pytest.raises(ResumeError, match=r"seed 0 \(now 1\), 12 steps \(now 10 with .*max.steps 10\).*stop.at 10"):
        go(None, config(tmp_path, seed=1, max_steps=10))
    with pytest.raises(ResumeError, match=r"batch.size 8 \(now 4\)"):
        go(None, config(tmp_path, batch_size=4))
    with pytest.raises(ResumeError, match="samples"):
        go(None, config(tmp_path), Ragged(samples=41))
    assert sorted(str(path) for path in (tmp_path / "r").rglob("*")) == before
    assert go(None, config(tmp_path, max_steps=10, resume_anyway=True))[0][0] == 4
    assert "12 steps (now 10 with " in capsys.readouterr().err


class Listed(Ragged):
    """Notes the samples that the model learns from."""

    def __init__(self, samples):
        super().__init__(samples)
        self.seen = []

    def dataset(self, split):
        rows = super().dataset(split)
        return [{**rows[index], "index": torch.tensor(index)} for index in range(len(rows))]

    def loss(self, model, batch):
        if model.training:
            self.seen += batch["index"].tolist()
        return super().loss(model, batch)


@pytest.mark.parametrize("epochs", [1, 2])
def test_changed_batch_size_skips_and_repeats_no_sample(tmp_path, epochs):
    task = Listed(108)
    common = {"max_steps": 0, "num_epochs": epochs, "micro_batch_size": 4}
    assert go(None, config(tmp_path, **common, stop_at=3), task)[0] == [0, 1, 2]
    with pytest.raises(ResumeError, match="batch_size"):
        go(None, config(tmp_path, **common, batch_size=32), task)
    changed = {"batch_size": 32, "resume_anyway": True, "stop_at": 4}
    assert go(None, config(tmp_path, **common, **changed), task)[0] == [3]
    taken, _ = go(None, config(tmp_path, **common, batch_size=32, stop_at=5), task)  # agrees: nothing changes now
    again, _ = go(None, config(tmp_path, **common, batch_size=4, resume_anyway=True), task)
    last = 5 + (108 * epochs - 3 * 8 - 2 * 32) // 4
    assert taken + again == list(range(4, last))
    assert sorted(task.seen) == sorted(epochs * list(range(108)))
    state = json.loads((tmp_path / "r" / "state.json").read_text())
    assert (state["position"], state["origin"], state["epoch"]) == (108 * epochs, [5, 88], epochs - 1)
    assert go(None, config(tmp_path, **common, batch_size=4), task) == ([], 0)


def test_batch_size_that_changes_epochs_is_refused_by_name(tmp_path):
    common = {"max_steps": 0, "num_epochs": 3, "micro_batch_size": 4}
    assert go(None, config(tmp_path, **common, limit_train_batches=3, stop_at=2), Listed(108))[0] == [0, 1]
    smaller = {**common, "batch_size": 4, "resume_anyway": True}
    for limit in (3, 0):
        with pytest.raises(ResumeError, match=r"--limit-train-batches"):
            go(None, config(tmp_path, **smaller, limit_train_batches=limit), Listed(108))
    task = Listed(108)
    assert go(None, config(tmp_path, **smaller, limit_train_batches=6, stop_at=4), task)[0] == [2, 3]  # 24 as before
    assert len(set(task.seen)) == 8


def test_corrupt_newest_checkpoint_is_named_and_passed_over(tmp_path, capsys):
    go(None, config(tmp_path), leave_at=7)
    shard = next((tmp_path / "r" / "checkpoints" / "step-00000007").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert go(None, config(tmp_path))[0] == list(range(6, 12))
    assert "step-00000007" in (said := capsys.readouterr().err)
    assert shard.name in said


def test_a_new_run_from_the_weights_of_another(tmp_path):
    go(None, config(tmp_path, experiment_name="first"))
    settings = config(tmp_path, init_from=str(tmp_path / "first"), lr=0.0)
    assert go(None, settings) == (list(range(12)), 0)
    assert mark(tmp_path)[0] == mark(tmp_path, "first")[0]  # at rate 0 nothing moves
    with refuses(ConfigError, f"--init-from {tmp_path / 'nowhere'}"):
        go(None, config(tmp_path, experiment_name="n", init_from=str(tmp_path / "nowhere")))


class Masked(Ragged):
    def collate(self, samples):
        batch = super().collate(samples)
        batch["labels"][:] = -100
        return batch


class Gap(Ragged):
    """The samples of steps 3 and 8 have no label."""

    def order(self, samples, seed):
        return Sequential(samples)

    def dataset(self, split):
        rows = super().dataset(split)
        if split == "train":
            rows.kept[24:32] = 0
        return rows


def test_step_without_a_label_stops_neither_run_nor_resume(tmp_path):
    """Its gradient is zero; a run that ended before it goes on as one that did not end."""
    assert go(None, config(tmp_path, experiment_name="whole"), Gap()) == (list(range(12)), 0)
    assert go(None, config(tmp_path), Gap(), leave_at=3) == (list(range(3)), None)
    assert go(None, config(tmp_path), Gap()) == (list(range(3, 12)), 0)
    assert mark(tmp_path) == mark(tmp_path, "whole")


def test_losses_of_micro_batches_are_averaged_as_means_are(tmp_path):
    """By their items; a micro-batch without items has no part in it."""
    for reduction in ("mean", "micro-batch"):
        task = HolesMean()
        task.reduction = reduction
        assert go(None, config(tmp_path, experiment_name=reduction), task) == (list(range(12)), 0)
    assert mark(tmp_path, "mean") == mark(tmp_path, "micro-batch")
    mean, by_itself = (records(tmp_path / name / "metrics.jsonl")[-1] for name in ("mean", "micro-batch"))
    assert mean["evaluation/loss"] == by_itself["evaluation/loss"]


def test_labels_that_are_all_masked_are_refused_before_training(tmp_path):
    with pytest.raises(DataError, match="no micro-batch of steps 1 to 12 has an item"):
        go(None, config(tmp_path), Masked())
    assert not list((tmp_path / "r").rglob("step-*"))


class Empty(Ragged):
    def dataset(self, split):
        return []


def test_no_samples_are_refused(tmp_path):
    with pytest.raises(DataError, match="the training set is empty"):
        go(None, config(tmp_path), Empty())
    assert list(tmp_path.iterdir()) == []


class Streamed(Ragged):
    def dataset(self, split):
        return iter([1]) if split == "train" else super().dataset(split)


def test_samples_that_cannot_be_had_by_their_index_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"the task's dataset\('train'\) returned list_iterator, an iterator"):
        go(None, config(tmp_path), Streamed())
    assert list(tmp_path.iterdir()) == []


class Graph(Ragged):
    """Its model has what no checkpoint can keep."""

    def model(self):
        model = super().model()
        model.register_buffer("graph", torch.eye(2).to_sparse())
        return model


def test_what_no_checkpoint_can_hold_is_refused_before_writing(tmp_path):
    with pytest.raises(CheckpointError, match="'graph' cannot be stored in a checkpoint: it has no dense values"):
        go(None, config(tmp_path), Graph())
    assert list(tmp_path.iterdir()) == []
    refused = pytest.raises(CheckpointError, match="cannot be stored in a checkpoint: it has no dense values")
    with lockstep.Run(config(tmp_path), Ragged()) as session, refused:
        session.keep("graph", Graph().model())


class Asked(Ragged):
    """Notes for which steps its own schedule is asked."""

    def schedule(self, step, steps):
        self.asked = [*getattr(self, "asked", []), (step, steps)]
        return 1.0


def test_custom_schedule_is_asked_only_for_planned_steps(tmp_path):
    task = Asked()
    built = build(config(tmp_path, max_steps=5), task, World(), resume=False)
    assert (built.start, built.last_step, built.run_plan.step_plan.steps) == (0, 5, 5)
    assert set(task.asked) == {(0, 5), (4, 5)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_the_cut_is_checked_once_and_when_it_is_known(tmp_path, monkeypatch, micro_batch_size):
    checked = []
    monkeypatch.setattr(
        "lockstep.training.start.sharing.check_batches", lambda _, **cut: checked.append(cut["micro_batch_size"])
    )
    built = build(config(tmp_path, micro_batch_size=micro_batch_size), Ragged(), World())
    assert checked == [built.config.micro_batch_size]
    assert checked[0] > 0


def test_a_folder_in_use_is_refused(tmp_path):
    folder = RunFolder(str(tmp_path), "r")
    folder.claim()  # not by a run of this process, which would end for the next one
    with pytest.raises(ConfigError, match=r"is in use by process \d+ on .*choose another --experiment-name"):
        go(None, config(tmp_path))
    folder.release()
    assert go(None, config(tmp_path))[1] == 0


def test_too_little_room_is_said_before_training(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    numbers = sum(parameter.numel() for parameter in Ragged().model().parameters())  # of eight bytes, and two moments
    with refuses(ConfigError, "--save-dir", "0 B free", bytes_text(3 * 8 * numbers)):
        go(None, config(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_save_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--save-dir: cannot write to"):
        go(None, config(tmp_path / "file"))


def test_the_last_step_of_the_last_epoch_may_be_short(tmp_path):
    """41 samples, twice, in steps of 8: the last step holds 2 samples; each sample counts twice in all."""
    task = Ragged(samples=41)
    assert go(None, config(tmp_path, max_steps=0, num_epochs=2, experiment_name="one"), task) == (list(range(11)), 0)
    assert run(go, 3, config(tmp_path, max_steps=0, num_epochs=2), task) == [(list(range(11)), 0)] * 3
    one, three = (
        [r["running_loss"] for r in records(tmp_path / name / "metrics.jsonl") if "lr" in r] for name in ("one", "r")
    )
    assert one == pytest.approx(three, rel=1e-12)
    state = json.loads((tmp_path / "r" / "state.json").read_text())
    assert (state["position"], state["epoch"], state["epoch_progress"]) == (82, 1, 1.0)


class Mean(Ragged):
    """The same loss, given as a mean over the items."""

    reduction = "mean"

    def loss(self, model, batch):
        return super().loss(model, batch) / self.count(batch)


def test_a_mean_loss_is_the_same_training(tmp_path):
    go(None, config(tmp_path, experiment_name="sum"), Ragged())
    go(None, config(tmp_path, experiment_name="mean"), Mean())
    one, other = (
        [r["running_loss"] for r in records(tmp_path / name / "metrics.jsonl") if "lr" in r] for name in ("sum", "mean")
    )
    assert one == pytest.approx(other, rel=1e-10)


class Three(Ragged):
    """Three items in each sample, whatever is masked."""

    def count(self, batch):
        return 3 * len(batch["labels"])


class Told(Three):
    items_per_sample = 3


def test_task_that_declares_items_trains_like_one_that_counts(tmp_path):
    """Also in the last step, which is short."""
    for name, task in (("counted", Three(samples=42)), ("said", Told(samples=42))):
        go(None, config(tmp_path, experiment_name=name, max_steps=0, num_epochs=1), task)
    assert mark(tmp_path, "said") == mark(tmp_path, "counted")


def shared_name(world, folder):
    settings = config(folder, experiment_name=f"at-{world.rank}", max_steps=2)
    return go(world, settings)


def test_all_ranks_use_the_name_of_rank_0(tmp_path):
    run(shared_name, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["at-0"]
    assert len(list((tmp_path / "at-0" / "logs").iterdir())) == 2


def other_config(world, folder):
    return go(world, config(folder, lr=0.01 * (1 + world.rank)))


class Apart(Ragged):
    """Each rank's is another."""

    def __init__(self, rank, what):
        super().__init__()
        self.rank, self.what = rank, what
        self.sources = {"data": f"v{rank}" if what == "source" else "v0"}

    def model(self):
        model = super().model()
        with torch.no_grad():
            model.head.weight += self.rank if self.what == "weights" else 0
        return model


def tasks_apart(world, folder):
    said = []
    for what in ("source", "weights"):
        with pytest.raises(LockstepError) as found:
            go(world, config(folder), Apart(world.rank, what))
        said.append(str(found.value))
    return said


def test_ranks_whose_tasks_differ_are_refused(tmp_path):
    for source, weights in run(tasks_apart, 2, tmp_path):
        assert "the source of rank 1 differs from rank 0's: data ('v0' on rank 0, 'v1')" in source
        assert "the initial weights differ" in weights
    assert list(tmp_path.iterdir()) == []


def test_ranks_started_differently_are_refused(tmp_path):
    with pytest.raises(
        AssertionError, match=r"the configuration of rank 1 differs from rank 0's: lr \(0.01 on rank 0, 0.02\)"
    ):
        run(other_config, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []
