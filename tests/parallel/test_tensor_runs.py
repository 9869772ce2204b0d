"""Runs with --parallel.tensor against the same run on one process: weights, records, bits of replicas, resumes."""

import pytest
import small_runs
from divided_runs import Planned, TinyGPT, assert_close, train, weights
from ranks import run
from refusals import refuses
from torch import nn

from lockstep.errors import ConfigError, DifferenceError


class Unplanned(Planned):
    def parallelize(self, model):
        return None


class Parted(Planned):
    """The last layer's output stays cut, and the loss broadcasts it."""

    def model(self):
        return nn.Sequential(nn.Embedding(29, 8), nn.Linear(8, 8), nn.Linear(8, 2)).to(self.dtype)

    def loss(self, model, batch):
        kept = batch["labels"] != -100
        return ((model(batch["input"]) - batch["labels"][..., None]).square().mean(-1) * kept).sum()

    def metrics(self, model, batch):
        return {}

    def parallelize(self, model):
        return {"2": "columns"}


class OtherPlan(Planned):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def parallelize(self, model):
        return self.plan


class WithPenalty(Planned):
    def penalty(self, model):
        return sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("task", [TinyGPT(dropout=0.1), Planned(dropout=0.1)], ids=["gpt", "own"])
def test_a_run_with_divided_layers_trains_as_one_process(task, tmp_path):
    changes = {"optim": {"clip": 0.5, "ema": 0.9}}
    records, body = train(None, tmp_path / "one", task, 1, **changes)
    for ranks, degree in ((2, 2), (4, 2)):
        folder = tmp_path / f"{ranks}"
        found = run(_train, ranks, folder, task, degree)
        assert [items for _, items in found[0][1]] == [items for _, items in body]
        assert [loss for loss, _ in found[0][1]] == pytest.approx([loss for loss, _ in body], rel=1e-12)
        for record, wanted in zip(found[0][0], records, strict=True):
            assert record == pytest.approx(wanted, rel=1e-9)
        assert_close(weights(tmp_path / "one"), weights(folder))


def _train(world, folder, task, degree):
    return train(world, folder, task, degree, optim={"clip": 0.5, "ema": 0.9})


def _exact(world, folder, task, degree, steps=4, stop=0):
    return train(world, folder, task, degree, exact=True, max_steps=steps, stop_at=stop)


def test_replicas_do_not_change_the_bits_in_exact_mode(tmp_path):
    task = TinyGPT(dropout=0.1)
    for ranks in (2, 4):
        run(_exact, ranks, tmp_path / f"{ranks}", task, 2)
    assert small_runs.mark(tmp_path / "2") == small_runs.mark(tmp_path / "4")


def _until(world, folder, task, degree, stop):
    return train(world, folder, task, degree, stop_at=stop)


def test_a_checkpoint_of_any_degree_resumes_on_any_other(tmp_path):
    task = TinyGPT(dropout=0.1)
    train(None, tmp_path / "one", task, 1)
    run(_until, 2, tmp_path / "moved", task, 2, 1)
    run(_until, 4, tmp_path / "moved", task, 4, 2)
    train(None, tmp_path / "moved", task, 1, stop_at=3)
    run(_until, 2, tmp_path / "moved", task, 2, 0)
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "moved"))


def refused(world, folder):
    for task, degree, changes, words in (
        (Unplanned(), 2, {}, ("--parallel.tensor 2", "Unplanned", "parallelize(model)")),
        (WithPenalty(), 2, {}, ("--parallel.tensor 2", "penalty")),
        (TinyGPT(), 3, {}, ("--parallel.tensor 3", "2 ranks", "multiple of 3")),
        (Parted(), 2, {}, ("--parallel.tensor 2", "its loss is", "as 'rows'")),
        (OtherPlan({}), 2, {}, ("the plan is {}",)),
        (OtherPlan(["blocks"]), 2, {}, ("the plan is ['blocks']", "dict")),
        (OtherPlan({1: "rows"}), 2, {}, ("the plan is {1: 'rows'}", "dict")),
    ):
        with refuses(DifferenceError if isinstance(task, Parted) else ConfigError, *words):
            train(world, folder, task, degree, **changes)
    return (folder / "r").exists()


def test_what_cannot_be_divided_is_refused_first(tmp_path):
    assert run(refused, 2, tmp_path) == [False, False]
    for changes, flag in (
        ({"engine": "zero"}, "engine zero"),
        ({"engine": "fsdp", "engine_options": {"cpu_offload": True}}, "engine_options.cpu_offload"),
        ({"engine": "fsdp", "engine_options": {"meta_init": True}}, "engine_options.meta_init"),
        ({"precision": "fp16"}, "precision fp16"),
        ({"optim": {"name": "muon"}}, "optim.name muon"),
        ({"lora": {"rank": 2}}, "lora.rank"),
        ({"compile": True}, "compile"),
    ):
        with refuses(ConfigError, flag, "parallel.tensor 2"):
            small_runs.config(tmp_path, parallel={"tensor": 2}, **changes)
    with refuses(ConfigError, "parallel.vocabulary", "parallel.tensor"):
        small_runs.config(tmp_path, parallel={"vocabulary": False})
