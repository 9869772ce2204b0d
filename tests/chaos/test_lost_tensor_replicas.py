"""A rank of a divided model is lost: its replica leaves whole, and the others go on from memory to the same bits.

With --exact these are the bits of one replica that nothing disturbed.
"""

import functools
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import warm

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import BEAT, Run, end, finish, start, until_step

from lockstep import checkpoint

UPDATE = "lockstep.engines.optimizer_step:OptimizerStep.__call__"
TASK = """
import torch
from torch.nn.functional import cross_entropy
import lockstep
from lockstep.models.gpt import GPT, GPTConfig


class Divided(lockstep.Task):
    reduction = "sum"

    def model(self):
        return GPT(GPTConfig(layers=2, heads=2, width=8, vocab_size=16, context=8, dropout=0.1)).double()

    def sequence(self, batch):
        return {"inputs": 1, "labels": 1, "positions": 1}

    def dataset(self, split):
        tokens = torch.randint(16, (64, 9), generator=torch.Generator().manual_seed(0))
        return [{"inputs": row[:-1], "labels": row[1:]} for row in tokens]

    def count(self, batch):
        return batch["labels"].numel()

    def loss(self, model, batch):
        logits = model(batch["inputs"], positions=batch.get("positions"))
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
"""
SLOW_CONTEXT = pytest.param("context", marks=pytest.mark.slow)
SETTINGS = "--device cpu --batch-size 8 --micro-batch-size 2 --optim.clip 0.5 --optim.ema 0.9"
SETTINGS += " --log-freq 1 --ckpt-freq 5 --eval-freq 5"


def begin(folder, degree, *flags, faults=(), processes=4):
    task = folder.parent / "divided.py"
    task.write_text(TASK)
    launcher = ["launch", "--nproc-per-node", str(processes), "--max-restarts", "0", "--max-losses", "8", "--"]
    settings = ["train", "--task", f"{task}:Divided", "--save-dir", str(folder), *SETTINGS.split()]
    settings += [f"--parallel.{degree}", "2", *flags]
    return start([warm.python(), "-m", "lockstep", *launcher, *settings], faults)


def launched(folder, degree, *flags, **more):
    """A run to its end."""
    began = time.monotonic()
    return finish(begin(folder, degree, *flags, **more), folder, began)


def tensors(run):
    """All tensors of the newest checkpoint, complete: weights, moments, the average."""
    with checkpoint.read.open_tensors(checkpoint.newest(run.folder, say=print)) as stored:
        return {name: stored.read(name) for name in stored.contents}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Return a run of one replica that nothing disturbed, by degree."""

    @functools.cache
    def run_whole(degree):
        run = launched(tmp_path_factory.mktemp("whole") / "runs", degree, "--exact", "--max-steps", "14", processes=2)
        assert run.code == 0, run.said
        return run

    return run_whole


@pytest.mark.parametrize("degree", ["tensor", SLOW_CONTEXT, pytest.param("pipeline", marks=pytest.mark.slow)])
def test_other_replica_trains_to_the_end_with_the_same_bits(tmp_path, undisturbed, degree):
    fault = {"rank": 1, "step": 6, "at": UPDATE, "do": "kill"}
    run = launched(tmp_path / "runs", degree, "--exact", "--max-steps", "14", faults=[fault])
    assert run.code == 0, run.said
    assert run.mark()[:3] == undisturbed(degree).mark()[:3]
    assert "rank 0, with other parts of the same replica, left with it; the others continue" in run.said
    assert "INFO 2 ranks continue after step" in run.log(0)
    assert run.state["losses"] == 1


@pytest.mark.parametrize("degree", ["tensor", SLOW_CONTEXT, "pipeline"])
def test_new_replica_joins_with_the_parts_of_the_other(tmp_path, degree):
    slow = [{"rank": rank, "at": BEAT, "do": "sleep", "seconds": 0.03, "always": True} for rank in range(4)]
    fault = {"rank": 1, "step": 6, "at": UPDATE, "do": "kill"}
    flags = ("--exact", "--max-steps", "400")
    process = begin(tmp_path / "lost", degree, *flags, faults=[fault, *slow])
    log, deadline = tmp_path / "lost" / "default" / "logs" / "rank-00000.log", time.monotonic() + 60
    try:
        until_step(tmp_path / "lost", 5, process)
        while "4 ranks continue" not in log.read_text() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert process.returncode == 75, said
    assert re.search(r"INFO 4 ranks continue after step \d+, 2 of them new", log.read_text())
    run = Run(75, said, 0.0, tmp_path / "lost" / "default")
    stop = re.search(r"saved after step (\d+) of", said)[1]
    alone = launched(tmp_path / "alone", degree, *flags, "--stop-at", stop, processes=2)
    assert run.mark()[:3] == alone.mark()[:3]


HYBRID = ("--engine.sharding", "hybrid", "--engine.shard-size", "2")


@pytest.mark.parametrize(
    ("processes", "flags"),
    [(4, ("--engine.sharding", "none")), pytest.param(8, HYBRID, marks=pytest.mark.slow)],
    ids=["copies", "shards"],
)
def test_fsdp_goes_on_with_another_replica(tmp_path, undisturbed, processes, flags):
    """In hybrid sharding a replica of the states has two of the layers, on four ranks."""
    fault = {"rank": 1, "step": 6, "at": UPDATE, "do": "kill"}
    flags = ("--engine", "fsdp", *flags, "--max-steps", "14")
    run = launched(tmp_path / "runs", "tensor", *flags, faults=[fault], processes=processes)
    assert run.code == 0, run.said
    assert f"{processes // 2} ranks continue after step" in "".join(map(run.log, range(processes)))
    assert run.state["losses"] == 1
    # In float64 another order of sums shows in the last digits alone.
    torch.testing.assert_close(tensors(run), tensors(undisturbed("tensor")), rtol=1e-9, atol=1e-12)
