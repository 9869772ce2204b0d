"""`--optim.ema` in whole runs: evaluated, kept, resumed, loaded and exported, while the weights train as without it."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_runs import config, mark
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.cli import dispatch
from lockstep.errors import CheckpointError, ResumeError
from lockstep.logging.jsonl import read

EMA = {"ema": 0.8}
MINE = """
import sys
sys.path.insert(0, {tests!r})
from toys import Ragged

class Mine(Ragged):
    pass
"""


def evaluations(folder, name):
    return [
        record["evaluation/loss"] for record in read(folder / name / "metrics.jsonl") if "evaluation/loss" in record
    ]


def of(folder, name, group="average/"):
    """The fingerprint of the newest checkpoint's averages."""
    return checkpoint.fingerprint(checkpoint.newest(folder / name, say=print), group)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run with the average, one without it, and a task's file."""
    folder = tmp_path_factory.mktemp("average")
    (folder / "mine.py").write_text(MINE.format(tests=str(Path(__file__).parents[1])))
    task = f"{folder / 'mine.py'}:Mine"
    lockstep.train(config(folder, experiment_name="with", task=task, eval_freq=6, optim=EMA))
    lockstep.train(config(folder, experiment_name="without", task=task, eval_freq=6))
    return folder


def test_weights_train_as_without_it_and_evaluation_uses_it(place):
    assert mark(place, "with") == mark(place, "without")
    assert evaluations(place, "with") != evaluations(place, "without")
    assert of(place, "with") != of(place, "with", "model/")


def test_evaluate_load_and_export_take_the_average(place, tmp_path, capsys):
    evaluated = {}
    for name, flags in (("with", ["--ema"]), ("with", []), ("without", [])):
        assert dispatch(["evaluate", str(place / name), "--json", *flags]) == 0
        evaluated[name, *flags] = json.loads(capsys.readouterr().out)["loss"]
    assert evaluated["with", "--ema"] == evaluations(place, "with")[-1]
    assert evaluated["with",] == evaluated["without",] == evaluations(place, "without")[-1]
    assert dispatch(["evaluate", str(place / "with"), "--ema"]) == 0
    assert " after step 12, averaged weights, on " in capsys.readouterr().out
    model = lockstep.load(place / "with", Ragged(), "last", ema=True)
    plain = lockstep.load(place / "with", Ragged(), "last")
    assert model.head.weight is model.embedding.weight
    out = tmp_path / "model.safetensors"
    assert dispatch(["export", str(place / "with"), str(out), "--ema"]) == 0
    capsys.readouterr()
    tensors = safetensors.torch.load_file(out)
    named = dict(model.named_parameters())
    assert tensors.keys() == named.keys()
    assert all(torch.equal(tensors[name], parameter) for name, parameter in named.items())
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert dispatch(["export", str(place / "with"), str(tmp_path / "model.pt"), "--ema"]) == 0
    assert torch.equal(torch.load(tmp_path / "model.pt")["head.weight"], model.embedding.weight)


def test_what_is_not_there_is_one_line(place, tmp_path):
    with pytest.raises(CheckpointError, match="has no averaged weights, since its run had no --optim.ema; omit --ema"):
        lockstep.load(place / "without", Ragged(), ema=True)
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        dispatch(["export", str(place / "without"), str(tmp_path / "a"), "--ema"])
    assert not (tmp_path / "a").exists()


def test_a_resume_goes_on_with_it(place, tmp_path):
    settings = {"experiment_name": "with", "eval_freq": 6, "optim": EMA}
    lockstep.train(config(tmp_path, stop_at=5, **settings), Ragged())
    lockstep.train(config(tmp_path, **settings), Ragged())
    assert mark(tmp_path, "with") == mark(place, "with")
    assert of(tmp_path, "with") == of(place, "with")
    assert evaluations(tmp_path, "with") == evaluations(place, "with")


def test_another_decay_is_another_plan_and_may_begin_midway(tmp_path):
    lockstep.train(config(tmp_path, stop_at=5), Ragged())
    with pytest.raises(ResumeError, match=r"--optim.ema 0.0 \(now 0.8\)"):
        lockstep.train(config(tmp_path, optim=EMA), Ragged())
    lockstep.train(config(tmp_path, stop_at=6, optim=EMA, resume_anyway=True), Ragged())
    before = lockstep.load(tmp_path / "r", Ragged(), 5)
    state = lockstep.load(tmp_path / "r", Ragged(), 6)
    found = lockstep.load(tmp_path / "r", Ragged(), 6, ema=True)
    for first, second, average in zip(*(model.parameters() for model in (before, state, found)), strict=True):
        torch.testing.assert_close(average.detach(), first.detach() + 0.9 * (second - first).detach())
    lockstep.train(config(tmp_path, optim={"ema": 0.0}, resume_anyway=True), Ragged())
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        lockstep.load(tmp_path / "r", Ragged(), "last", ema=True)


def test_it_begins_at_the_weights_of_init_from(place, tmp_path):
    lockstep.train(config(tmp_path, init_from=str(place / "without"), optim=EMA, lr=0.0, max_steps=2), Ragged())
    average = lockstep.load(tmp_path / "r", Ragged(), "last", ema=True)
    weights = lockstep.load(place / "without", Ragged(), "last")
    assert all(torch.equal(a, b) for a, b in zip(average.parameters(), weights.parameters(), strict=True))
