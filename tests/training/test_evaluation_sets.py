"""Several evaluation sets, limits, an evaluation's own loader processes and micro-batch: the same bits all over."""

import math
import os
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run
from small_runs import config, mark
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score, MulticlassJaccardIndex
from torchmetrics.text import Perplexity
from toys import Ragged, Sentences, taken

import lockstep
from lockstep.config.schema import Config
from lockstep.data.sampler import Begun, Sequential, Shuffled
from lockstep.errors import ConfigError, DataError, ResumeError
from lockstep.logging.jsonl import read
from lockstep.training.evaluation import sets_by_name
from lockstep.training.state.plan import samples_in_epoch
from lockstep.verify.wrappers import PreparedTask


class Two(Ragged):
    """A near set and a far one, with four metrics that have a state."""

    def __init__(self):
        super().__init__(samples=40)
        self.scores = {
            "f1": MulticlassF1Score(29, average="macro", ignore_index=-100),
            "auc": BinaryAUROC(),
            "iou": MulticlassJaccardIndex(29, ignore_index=-100),
            "perplexity": Perplexity(ignore_index=-100),
        }

    def dataset(self, split):
        return Sentences(40) if split == "train" else {"near": Sentences(14), "far": Sentences(9, length=7)}

    def evaluate(self, model, batch):
        logits, labels = model(batch["input"]), batch["labels"]
        kept = labels != -100
        self.scores["f1"].update(logits.flatten(0, 1), labels.flatten())
        self.scores["auc"].update(logits[kept][:, 0].sigmoid(), (labels[kept] < 10).int())
        self.scores["iou"].update(logits.flatten(0, 1), labels.flatten())
        self.scores["perplexity"].update(logits, labels)
        right = (logits.argmax(-1) == labels) & kept
        return self.loss(model, batch), {**self.scores, "accuracy": (right.sum(), kept.sum())}


class Near(Two):
    """The first of the two alone."""

    def dataset(self, split):
        found = super().dataset(split)
        return found if split == "train" else found["near"]


def trained(world, folder, kind, changes):
    """The last evaluation, and the weights' fingerprint."""
    result = lockstep.train(config(folder, **{"max_steps": 4, "eval_freq": 2, "exact": True} | changes), kind(), world)
    return result.evaluation, result.best.metric, mark(folder)


def test_each_set_has_its_numbers_and_the_first_is_as_if_alone(tmp_path, capsys):
    found, by, weights = trained(None, tmp_path / "two", Two, {})
    alone, _, weights_too = trained(None, tmp_path / "one", Near, {})
    assert weights == weights_too
    assert by == "loss"
    assert (found.loss, found.items) == (alone.loss, alone.items)
    for name, value in alone.metrics.items():
        assert found.metrics[f"near/{name}"] == value
    assert (found.metrics["near/loss"], found.metrics["near/items"]) == (alone.loss, alone.items)
    assert found.metrics["far/loss"] != found.loss
    assert found.metrics["far/items"] < found.items
    assert found.metrics["near/perplexity"] == pytest.approx(math.exp(found.loss), rel=1e-5)
    records = [one for one in read(tmp_path / "two" / "r" / "metrics.jsonl") if "evaluation/loss" in one]
    assert [one["global_step"] for one in records] == [2, 4]
    assert {name.removeprefix("evaluation/") for name in records[-1]} - {"global_step", "loss", "items"} == {
        f"{name}/{key}" for name in ("near", "far") for key in ("loss", "items", "accuracy", *Two().scores)
    }
    said = capsys.readouterr().out
    assert f"step 4/4  evaluation near/loss {found.loss:.4f}  near/f1 " in said
    for name in ("near/loss", "near/auc", "far/loss", "far/f1", "far/iou", "far/perplexity"):
        assert f"\nevaluation {name} " in said  # a row of the summary


def test_sets_are_bitwise_on_any_ranks_cuts_and_loaders(tmp_path):
    changes = {"eval_micro_batch_size": 3, "best_metric": "far/f1:max"}
    alone = trained(None, tmp_path / "one", Two, changes)
    assert alone[1] == "far/f1"
    assert run(trained, 2, tmp_path / "ranks", Two, changes) == [alone] * 2
    assert trained(None, tmp_path / "workers", Two, changes | {"eval_workers": 1}) == alone


class Seen(Ragged):
    """Notes the samples of each forward of an evaluation, and who loaded them."""

    def __init__(self):
        super().__init__(samples=40)
        self.sizes, self.loaders = [], set()

    def dataset(self, split):
        rows = super().dataset(split)
        return rows if split == "train" else [{**rows[index], "pid": os.getpid()} for index in range(len(rows))]

    def collate(self, samples):
        batch = super().collate([{name: each[name] for name in ("input", "labels")} for each in samples])
        return {**batch, "pid": torch.tensor(os.getpid())}

    def evaluate(self, model, batch):
        self.sizes.append(len(batch["labels"]))
        self.loaders.add(int(batch["pid"]))
        return self.loss(model, batch), {}


@pytest.mark.parametrize(
    ("changes", "sizes", "here"),
    [
        ({}, [2] * 7, True),
        ({"eval_micro_batch_size": 5}, [5, 5, 4], True),
        ({"limit_eval_batches": 3}, [2, 2, 2], True),
        ({"limit_eval_batches": "40%"}, [2, 2, 2], True),
        ({"limit_eval_batches": 2, "eval_micro_batch_size": 13}, [13, 1], True),
        ({"limit_eval_batches": 900}, [2] * 7, True),
        ({"eval_workers": 1}, [2] * 7, False),
        ({"data": {"workers": 1}}, [2] * 7, False),
        ({"data": {"workers": 1}, "eval_workers": 0}, [2] * 7, True),
    ],
)
def test_how_an_evaluation_is_cut_and_who_loads_it(tmp_path, changes, sizes, here):
    task = Seen()
    settings = config(tmp_path, max_steps=1, batch_size=2, **changes)
    lockstep.train(settings, task)
    assert task.sizes[-len(sizes) :] == sizes  # what comes before is the trial before step 1
    assert (task.loaders == {os.getpid()}) is here


# an epoch of some of its batches


@given(st.integers(1, 300), st.data(), st.integers(0, 5))
def test_the_first_samples_of_each_epoch_as_one_stream(size, data, seed):
    kept = data.draw(st.integers(1, size))
    start = data.draw(st.integers(0, 4 * kept))
    stop = data.draw(st.integers(start, start + 3 * kept))
    for order in (Shuffled(size, seed), Sequential(size)):
        wanted = [order.at(epoch * size, epoch * size + kept) for epoch in range(8)]
        epochs, samples = (np.concatenate(part)[start:stop] for part in zip(*wanted, strict=True))
        found = Begun(order, size, kept).at(start, stop)
        assert found[0].tolist() == epochs.tolist()
        assert found[1].tolist() == samples.tolist()


@pytest.mark.parametrize(
    ("limit", "samples"), [(0, 40), (2, 16), (5, 40), (99, 40), ("50%", 16), ("1%", 8), ("100%", 40), ("30%", 16)]
)
def test_the_samples_of_an_epoch(limit, samples):
    assert samples_in_epoch(Config(batch_size=8, limit_train_batches=limit), 40) == samples


class Drawn(Ragged):
    """Notes the samples that were trained on, by what their rows hold."""

    seen: ClassVar[list[int]] = []  # of the class: --exact refuses attributes that a loss changes

    def __init__(self):
        super().__init__(samples=40)
        self.seen.clear()

    def loss(self, model, batch):
        if model.training:
            self.seen.extend(int(row) for row in batch["input"].sum(1))
        return super().loss(model, batch)


def limited(world, folder, changes=None):
    task = Drawn()
    settings = {"max_steps": 0, "num_epochs": 3, "limit_train_batches": 2, "exact": True, "ckpt_freq": 100}
    with lockstep.Run(config(folder, **settings | (changes or {})), task, world) as made:
        task.seen.clear()  # what the trial has seen
        found = [(step.global_step, step.epoch) for step in made]
    return found, [*task.seen], mark(folder)


def test_an_epoch_is_that_many_steps_and_each_has_other_samples(tmp_path, capsys):
    found, seen, whole = limited(None, tmp_path / "whole")
    assert "6 steps of 8 samples in 4 micro-batches of 2; an epoch is 16 of 40 samples" in capsys.readouterr().err
    assert found == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.5), (6, 3.0)]
    rows = Sentences(40).rows[:, :-1].sum(1)
    order = Shuffled(40, 0)
    wanted = [int(rows[index]) for epoch in range(3) for index in order.at(40 * epoch, 40 * epoch + 16)[1]]
    assert seen == wanted
    records = read(tmp_path / "whole" / "r" / "metrics.jsonl")
    assert [one["epoch"] for one in records if "running_loss" in one] == [1, 2, 2]  # the last is at its end
    assert limited(None, tmp_path / "again", {"stop_at": 3})[0] == found[:3]
    again = run(limited, 2, tmp_path / "again")
    assert [(each[0], each[2]) for each in again] == [(found[3:], whole)] * 2


def test_a_resume_with_another_limit_is_refused(tmp_path):
    limited(None, tmp_path, {"stop_at": 3})
    with pytest.raises(ResumeError, match=r"16 samples in an epoch \(now 24 with --limit-train-batches 3\)"):
        limited(None, tmp_path, {"limit_train_batches": 3})
    limited(None, tmp_path)


def test_what_cannot_be_is_refused_at_once():
    for name in ("limit_train_batches", "limit_eval_batches"):
        for value in ("2epochs", "0%", "101%", -1):
            with pytest.raises(ConfigError, match=f"{name} is {value}: it must be a number of .* share up to 100%"):
                Config(**{name: value})
    with pytest.raises(ConfigError, match="limit_eval_batches is 'some': it must be a whole number, or a share such"):
        Config(limit_eval_batches="some")
    with pytest.raises(ConfigError, match="eval_workers is -2"):
        Config(eval_workers=-2)


# names


def test_mapping_of_numbers_is_a_dataset_and_of_texts_several():
    assert list(sets_by_name({0: 1.0, 1: 2.0})) == [""]
    assert list(sets_by_name({"b": [1], "a": [1, 2]})) == ["b", "a"]
    assert sets_by_name(None) == sets_by_name({}) == {}
    with pytest.raises(DataError, match=r"dataset\('evaluation'\) is empty: return None"):
        sets_by_name([])
    with pytest.raises(DataError, match=r"dataset\('evaluation'\)\['far'\] is empty: leave it out"):
        sets_by_name({"near": [1], "far": []})
    with pytest.raises(DataError, match="has a set named 'a/b': use letters"):
        sets_by_name({"a/b": [1]})
    with pytest.raises(DataError, match=r"dataset\('evaluation'\)\['near'\] returned int, which has no __len__"):
        sets_by_name({"near": 3})
    loader = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(DataError, match=r"dataset\('evaluation'\)\['far'\] returned a DataLoader; return its dataset"):
        sets_by_name({"near": [1], "far": loader})
    with pytest.raises(DataError, match=r"dataset\('evaluation'\) returned a DataLoader; return its dataset"):
        sets_by_name(loader)


def test_the_judge_names_the_sets_metrics(tmp_path):
    with pytest.raises(ConfigError, match="the task's evaluation has no 'f1'; it has loss, near/loss, near/items"):
        taken(config(tmp_path, best_metric="f1:max"), Two())
    assert not list(tmp_path.iterdir())


def test_a_proof_evaluates_on_few_samples_of_each():
    few = PreparedTask(Two(), wide=True, samples=5).dataset("evaluation")
    assert {name: len(each) for name, each in few.items()} == {"near": 5, "far": 5}
    assert len(PreparedTask(Near(), wide=True, samples=5).dataset("evaluation")) == 5
