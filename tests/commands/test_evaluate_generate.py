"""`lockstep evaluate` and `lockstep generate` on runs of a few steps."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import hub_files
import pytest
import warm
from refusals import refuses
from shell import environment
from small_runs import config
from toys import Ragged

import lockstep
from lockstep.cli import dispatch
from lockstep.config.schema import Config
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.logging.jsonl import read
from lockstep.tasks.language_model import CausalLM

MINE = """
import sys
sys.path.insert(0, {tests!r})
import torch
from toys import Network, Ragged

class Mine(Ragged):
    def __init__(self):
        super().__init__(samples=40)
        print("a task's own words")

class Wider(Mine):
    def model(self):
        return Network(width=24)

class Blind(Mine):
    def dataset(self, split):
        return super().dataset(split) if split == "train" else None
"""
TEXT = "".join(f"def function_{i}(x):\n    return x + {i * i}  # the square of {i}\n\n" for i in range(900))
OTHER = "".join(f"class Thing{i}:\n    size = {i * 7}\n\n" for i in range(900))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a task's file, texts, a run of that task and one of the built-in model."""
    folder = tmp_path_factory.mktemp("using")
    (folder / "mine.py").write_text(MINE.format(tests=str(Path(__file__).parents[1])))
    (folder / "code.txt").write_text(TEXT)
    (folder / "other.txt").write_text(OTHER)
    task = f"{folder / 'mine.py'}:Mine"
    settings = {"eval_freq": 3, "checkpoint": {"keep": 9}, "micro_batch_size": 4}
    lockstep.train(config(folder, experiment_name="mine", task=task, precision="float32", **settings))
    lockstep.train(config(folder, experiment_name="python", max_steps=3), Ragged())
    lockstep.train(
        Config(
            experiment_name="gpt",
            save_dir=str(folder),
            dataset_name=str(folder / "code.txt"),
            seq_len=32,
            batch_size=8,
            max_steps=12,
            eval_freq=6,
            ckpt_freq=6,
            exact=True,
            data={"vocab_size": 300, "cache": str(folder / "cache")},
            precision="bf16",
            device="cpu",
        )
    )
    return folder


def recorded(run):
    """step -> (loss, metrics) of each evaluation that the run recorded."""
    found = {}
    for record in read(run / "metrics.jsonl"):
        if "evaluation/loss" in record:
            values = {name.removeprefix("evaluation/"): value for name, value in record.items()}
            own = {name: values[name] for name in values if name not in ("loss", "items", "global_step")}
            found[record["global_step"]] = values["loss"], own
    return found


def evaluated(capsys, *argv):
    capsys.readouterr()
    assert dispatch(["evaluate", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_numbers_are_bitwise_those_that_the_run_recorded(place, capsys):
    for name, steps in (("mine", (3, 6, 12)), ("gpt", (6, 12))):
        known = recorded(place / name)
        for step in steps:
            found = evaluated(capsys, place / name, "--step", step)
            assert (found["loss"], found["metrics"]) == known[step]
            assert found["step"] == step
        newest = evaluated(capsys, place / name)
        assert newest["step"] == 12
        best = evaluated(capsys, place / name, "--best")
        assert best["loss"] == min(loss for loss, _ in known.values())
    assert dispatch(["evaluate", str(place / "mine")]) == 0
    said, *lines = capsys.readouterr().out.splitlines()
    assert said == "a task's own words"  # which --json leaves to stderr
    assert lines[0].startswith(f"{place / 'mine'} after step 12, on ")
    assert lines[1].split() == ["loss", f"{recorded(place / 'mine')[12][0]:.6g}"]
    assert lines[2].split()[0] == "accuracy"
    assert dispatch(["evaluate", str(place / "gpt")]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    loss, tokens = recorded(place / "gpt")[12][0], evaluated(capsys, place / "gpt")["items"]
    assert first.endswith(f"on {tokens:,} tokens")
    assert [row.split() for row in rows] == [["loss", f"{loss:.6g}"], ["perplexity", f"{math.exp(loss):.6g}"]]


def test_a_run_from_python_needs_its_task_named(place, capsys):
    with refuses(ConfigError, place / "python", "--task FILE.py:Ragged"):
        dispatch(["evaluate", str(place / "python")])
    found = evaluated(capsys, place / "python", "--task", f"{place / 'mine.py'}:Mine")
    assert (found["loss"], found["metrics"]) == recorded(place / "python")[3]


def test_other_data_is_read_in_the_runs_own_tokens(place, capsys):
    same = evaluated(capsys, place / "gpt", "--data", place / "code.txt")
    assert same["loss"] == recorded(place / "gpt")[12][0]
    other = evaluated(capsys, place / "gpt", "--data", place / "other.txt")
    assert other["loss"] > same["loss"]


@pytest.mark.parametrize(
    ("argv", "kind", "line"),
    [
        (["nowhere"], CheckpointError, "nowhere"),
        (["mine", "--step", "7"], CheckpointError, "has no checkpoint of step 7; it has 3, 6, 9, 12"),
        (["mine", "--task", "mine.py:Wider"], CheckpointError, "the task Wider does not fit the checkpoint: "),
        (["mine", "--task", "mine.py:Blind"], DataError, "the task has no evaluation set"),
        (["mine", "--task", "nothing.py:Mine"], ConfigError, "no such file"),
        (["mine", "--data", "code.txt"], ConfigError, "--data code.txt: the task Mine "),
        (["gpt", "--data", "nothing.txt"], DataError, "nothing.txt"),
        (["gpt", "--step", "6", "--best"], ConfigError, "not allowed with"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(place, monkeypatch, argv, kind, line):
    monkeypatch.chdir(place)
    with pytest.raises(kind) as caught:
        dispatch(["evaluate", *argv])
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_processes_say_the_same_once(place):
    flags = ["launch", "--nproc-per-node", "2", "--", "evaluate", str(place / "gpt"), "--json"]
    command = [warm.python(), "-m", "lockstep", *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loss"] == recorded(place / "gpt")[12][0]


def texts(capsys, *argv):
    capsys.readouterr()
    assert dispatch(["generate", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_same_seed_writes_the_same_text_alone_and_in_a_batch(place, capsys, monkeypatch):
    run, short = place / "gpt", ["--max-tokens", "12"]
    first, second = ((texts(capsys, run, *short, "--prompt", text)) for text in ("def f", "return"))
    assert first.startswith("def f")
    assert len(first) > len("def f\n")
    assert texts(capsys, run, *short, "--prompt", "def f", "--prompt", "return") == first + "\n" + second
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f\n\nreturn\n"))
    assert texts(capsys, run, *short) == first + "\n" + second
    assert texts(capsys, run, *short, "--prompt", "def f", "--seed", "1") != first
    assert texts(capsys, run, *short, "--prompt", "def f", "--step", "6") != first
    greedy = [texts(capsys, run, *short, "--prompt", "def f", "--temperature", "0", "--seed", s) for s in (0, 1)]
    assert greedy[0] == greedy[1]
    assert greedy[0] == texts(capsys, run, *short, "--prompt", "def f", "--top-k", "1", "--best", "--seed", "5")


def test_prompts_of_one_length_go_through_the_model_together(place, capsys, monkeypatch):
    """As few forwards as lengths; the texts, which end at different tokens, are in the prompts' order and as alone."""
    run, words = place / "gpt", ["def f", "return", "a", "b", "class", "d", "e", "import os", "", "g"]
    flags = ["--max-tokens", "40", "--temperature", "1.5", "--top-k", "0"]
    alone = [texts(capsys, run, *flags, "--prompt", word) for word in words]
    assert len({len(text) for text in alone}) > 3
    rows = []
    continued = CausalLM._continue

    def noted(self, model, begins, *others, **named):
        rows.append(begins)
        return continued(self, model, begins, *others, **named)

    monkeypatch.setattr(CausalLM, "_continue", noted)
    prompts = [flag for word in words for flag in ("--prompt", word)]
    assert texts(capsys, run, *flags, *prompts) == "\n".join(alone)
    lengths = [{len(begin) for begin in part} for part in rows]
    assert all(len(part) == 1 for part in lengths)
    assert len({min(part) for part in lengths}) == len(rows) < len(words)
    monkeypatch.setattr("lockstep.tasks.language_model._GROUP_SIZE", 2)
    rows.clear()
    assert texts(capsys, run, *flags, *prompts) == "\n".join(alone)
    assert max(map(len, rows)) == 2


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["mine", "--prompt", "x"], "mine trained Mine"),
        (["gpt", "--prompt", "x", "--max-tokens", "0"], "--max-tokens is 0: it must be at least 1"),
        (["gpt", "--prompt", "x", "--temperature", "-1"], "--temperature is -1.0: it must be at least 0"),
        (["gpt", "--prompt", "x", "--temperature", "nan"], "--temperature is nan"),
        (["gpt"], "no prompt: give --prompt TEXT, or lines on stdin"),
    ],
)
def test_what_cannot_be_generated_is_one_line(place, monkeypatch, argv, line):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    with pytest.raises(ConfigError) as caught:
        dispatch(["generate", *argv])
    assert str(caught.value).startswith(line)


def test_a_hub_model_writes_too(tmp_path, model_folder, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("\n".join(hub_files.texts(400)))
    settings = {"experiment_name": "hub", "save_dir": str(tmp_path), "model_name": str(model_folder), "seq_len": 16}
    data = {"cache": str(tmp_path / "cache")}
    text = str(tmp_path / "text.txt")
    lockstep.train(Config(**settings, dataset_name=text, batch_size=4, max_steps=2, data=data, device="cpu"))
    run = tmp_path / "hub"
    assert evaluated(capsys, run)["loss"] == recorded(run)[2][0]
    first, second = (texts(capsys, run, "--max-tokens", "8", "--prompt", word) for word in ("add the", "name"))
    assert first.startswith("add the")
    assert texts(capsys, run, "--max-tokens", "8", "--prompt", "add the", "--prompt", "name") == first + "\n" + second
