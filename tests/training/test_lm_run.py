"""Whole runs of the language models: prompts masked out, every packing, the loss in chunks, on one rank and on two."""

import os
import re

import hub_files
import pytest
from ranks import run

import lockstep
from lockstep import checkpoint
from lockstep.config import cli

pytestmark = pytest.mark.usefixtures("no_network")


def rows(count):
    """Prompts of very different lengths; a few completions are cut away at 48 tokens."""
    found = hub_files.rows(count)
    return [
        {"prompt": (row["instruction"] + " ") * (1 + 5 * (n % 9 == 0)), "completion": row["output"][: 5 + n % 40]}
        for n, row in enumerate(found)
    ]


@pytest.fixture
def places(tmp_path):
    return {name: os.environ[name] for name in ("HF_ENDPOINT", "HF_HOME", "LOCKSTEP_CACHE")} | {
        "HF_DATASETS_CACHE": str(tmp_path / "hf" / "datasets")
    }


def go(world, places, argv):
    """(exit code, fingerprint of the weights) of a run."""
    os.environ |= places
    result = lockstep.train(cli.parse(argv), None, world)
    return result.exit_code, checkpoint.fingerprint(checkpoint.newest(result.folder, say=print))


def each(world, places, commands):
    return [go(world, places, argv) for argv in commands]


@pytest.mark.parametrize(
    ("packing", "chunk", "engine", "hub"),
    [("padded", 8, "ddp", False), ("documents", 16, "fsdp", True), ("stream", 0, "zero", False)],
)
def test_two_ranks_have_the_bits_of_one(tmp_path, places, weights_folder, packing, chunk, engine, hub):
    path = hub_files.write_jsonl(tmp_path / "a.jsonl", rows(60))
    argv = f"--dataset-name {path} --seq-len 48 --data.vocab-size 300 --data.evaluation 0.2 --data.packing {packing}"
    argv += f" --exact --batch-size 8 --micro-batch-size 2 --max-steps 3 --save-dir {tmp_path} --device cpu --lr 0.01"
    argv += f" --model.loss-chunk {chunk}" + f" --model-name {weights_folder} --model.pretrained" * hub
    one, two, parted = ([*argv.split(), "--experiment-name", name] for name in ("one", "two", "parted"))
    again = [parted] if packing == "padded" else []
    ((whole, *_),) = run(each, 1, places, [one, *([*some, "--stop-at", "1"] for some in again)], timeout=240.0)
    more = ["--engine", engine, *(["--shares", "auto"] if again else [])]  # which cuts each step by its documents
    pairs = run(each, 2, places, [[*some, *more] for some in (two, *again)], timeout=240.0)
    assert whole[0] == 0
    assert pairs == [[whole] * (1 + len(again))] * 2
    log = (tmp_path / "one" / "logs" / "rank-00000.log").read_text()
    assert re.search(r"\d+ prompts, [\d,]+ of [\d,]+ tokens learned; \d+ steps? an epoch, 3 in the run", log)
    assert "the run has 3 steps" in log
