"""Whole runs: the source document's command on what lies in HF_HOME, on one rank and on two, and its resume."""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

import hub_files
import pytest
import torch
from ranks import run
from refusals import names

import lockstep
from lockstep import checkpoint
from lockstep.config import cli
from lockstep.errors import LockstepError
from lockstep.logging.jsonl import read as records

pytestmark = pytest.mark.usefixtures("no_network")

COMMIT = "c" * 40
NAMED = ["--dataset-name", "tatsu-lab/alpaca", "--model-name", "openai-community/gpt2"]


def held(home, kind, name):
    """The folder in HF_HOME of a hub's model or dataset that was downloaded."""
    root = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.fixture
def places(tmp_path):
    """What a process has to know: the server that ranks are forked from has the environment of its own start."""
    places = {name: os.environ[name] for name in ("HF_ENDPOINT", "HF_HOME", "LOCKSTEP_CACHE")}
    return {**places, "HF_DATASETS_CACHE": str(tmp_path / "hf" / "datasets")}


@pytest.fixture
def home(tmp_path, weights_folder):
    """HF_HOME as `hf download` leaves it."""
    home = tmp_path / "hf"
    shutil.copytree(weights_folder, held(home, "model", "openai-community/gpt2"), dirs_exist_ok=True)
    folder = held(home, "dataset", "tatsu-lab/alpaca")
    hub_files.write_parquet(folder / "train-00000-of-00001.parquet", hub_files.rows(120))
    return home


def _use_home(places):
    """Set HF_HOME in packages that the server of the ranks may have imported, since they read it then."""
    hub = Path(places["HF_HOME"]) / "hub"
    for module, name, value in (
        ("huggingface_hub.constants", "HF_HOME", places["HF_HOME"]),
        ("huggingface_hub.constants", "HF_HUB_CACHE", str(hub)),
        ("datasets.config", "HF_DATASETS_CACHE", Path(places["HF_DATASETS_CACHE"])),
    ):
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, value)


def go(world, places, argv):
    """(exit code, fingerprint of the weights) of a run in a process of its own, which knows HF_HOME by `places`."""
    os.environ |= places
    _use_home(places)
    config = cli.parse([*NAMED, "--device", "cpu", *argv])
    result = lockstep.train(config, None, world)
    return result.exit_code, checkpoint.fingerprint(checkpoint.newest(result.folder, say=print))


def test_the_source_documents_command(tmp_path, home, places):
    argv = ["--experiment-name", "E", "--save-dir", str(tmp_path), "--max-steps", "4", "--log-freq", "1"]
    [said] = run(told, 1, places, argv)
    assert said.count("preset source: seed 0, 100 epochs, lr 3e-05") == 1
    assert said.count("preset source: blocks of 64 tokens") == 1  # the model's context, as in the script
    folder = tmp_path / "E"
    sources = json.loads((folder / "environment.json").read_text())["sources"]
    assert sources == {"openai-community/gpt2": COMMIT, "tatsu-lab/alpaca": COMMIT}
    kept = cli.read_toml(folder / "config.toml")
    assert (kept["precision"], kept["data.packing"], kept["batch_size"]) == ("bf16-true", "blocks", 1)
    assert kept["seq_len"] == 64
    logged = [record for record in records(folder / "metrics.jsonl") if "lr" in record]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000, eta_min=3e-7)
    for record in logged:
        assert record["lr"] == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        schedule.step()
    assert len(logged) == 4


def test_two_ranks_have_the_bits_of_one_and_a_run_resumes(tmp_path, home, places):
    exact = ["--exact", "--batch-size", "4", "--micro-batch-size", "1", "--precision", "float32", "--max-steps", "6"]
    exact += ["--save-dir", str(tmp_path), "--model.pretrained", "--preset", "source", "--lr", "0.01"]
    one, two, parted = ([*exact, "--experiment-name", name] for name in ("one", "two", "parted"))
    pairs = run(each, 2, places, [two, [*parted, "--stop-at", "3"]])  # to import transformers takes a second
    ((whole, again),) = run(each, 1, places, [one, parted])
    assert whole[0] == 0
    assert [found[0] for found in pairs] == [whole, whole]
    assert again == whole


def each(world, places, runs):
    return [go(world, places, argv) for argv in runs]


def fails(world, places, argv):
    try:
        go(world, places, argv)
    except LockstepError as error:
        return str(error)


def told(world, places, argv):
    """What a rank prints to stderr: the server that ranks are forked from holds on to the one of its own start."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        go(world, places, argv)
    return said.getvalue()


def test_one_micro_batch_over_two_ranks_is_explained(tmp_path, home, places):
    argv = ["--experiment-name", "E", "--save-dir", str(tmp_path), "--max-steps", "2"]
    said = "".join(run(told, 2, places, argv))
    assert said.count("1 micro-batch of 1 for 2 ranks") == 1
    assert names(said, "--batch-size 1", "1 of them", "--batch-size 2", "--micro-batch-size 1")


def test_without_a_network_no_rank_waits_and_nothing_is_written(tmp_path, places):
    found = run(fails, 2, places, ["--experiment-name", "E", "--save-dir", str(tmp_path / "runs")], timeout=30.0)
    assert all("openai-community/gpt2: no such folder, not in HF_HOME" in text for text in found)
    assert not (tmp_path / "runs").exists()
