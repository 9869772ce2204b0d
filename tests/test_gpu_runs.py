"""Whole runs on a CUDA device (make test-gpu), rehearsed on the CPU, so that none fails on a mistake of its own."""

import math
import subprocess
import sys

import pytest
import torch
from shell import environment
from small_runs import config, mark
from torch import nn
from torch.nn import functional as F
from toys import Ragged

import lockstep
from lockstep.logging.jsonl import read as records

_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # other versions of torch and its CUDA libraries have warnings of their own
]
pytestmark = pytest.mark.parametrize("device", [pytest.param("cuda", marks=_CUDA), "cpu"])


class Images(lockstep.Task):
    """A convolution with BatchNorm on noise, whose class is the sign of its mean."""

    nan_at = -1

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 2),
        )

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        x = torch.randn(64, 3, 8, 8, generator=generator)
        y = (x.mean(dim=(1, 2, 3)) > 0).long()
        if split == "train" and self.nan_at >= 0:
            x[self.nan_at] = math.nan
        return list(zip(x, y, strict=True))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def run(tmp_path, task, name="r", **settings):
    done = lockstep.Run(config(tmp_path, experiment_name=name, **{"precision": "float32"} | settings), task)
    done()
    return done


def losses(tmp_path, name="r"):
    return [record["running_loss"] for record in records(tmp_path / name / "metrics.jsonl") if "lr" in record]


def test_exact_with_batchnorm_repeats_and_resumes_bitwise(device, tmp_path):
    exact = {"exact": True, "device": device, "micro_batch_size": 4}
    run(tmp_path, Images(), "one", **exact)
    run(tmp_path, Images(), "two", **exact)
    run(tmp_path, Images(), stop_at=5, **exact)
    run(tmp_path, Images(), **exact)
    assert mark(tmp_path, "one") == mark(tmp_path, "two") == mark(tmp_path)


def test_not_finite_step_leaves_weights_and_batchnorm(device, tmp_path):
    task = Images()
    task.nan_at = 5
    done = run(tmp_path, task, device=device, micro_batch_size=4, guards={"nonfinite": "skip"})
    state = done.model.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert records(tmp_path / "r" / "metrics.jsonl")[-1]["global_step"] == 12
    assert all(map(math.isfinite, losses(tmp_path)))
    assert (tmp_path / "r" / "checkpoints" / "skips.json").is_file()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_learns_from_where_float32_does(device, precision, tmp_path):
    task = Ragged(dtype=torch.float32)
    run(tmp_path, task, "whole", device=device)
    run(tmp_path, task, "half", device=device, precision=precision, stop_at=6)
    run(tmp_path, task, "half", device=device, precision=precision)
    whole, half = losses(tmp_path, "whole"), losses(tmp_path, "half")
    assert half == pytest.approx(whole, rel=0.05)
    assert half[-1] < half[0]


def test_every_step_is_recorded_once_and_saves_go_on_beside(device, tmp_path):
    run(tmp_path, Ragged(dtype=torch.float32), device=device, log_freq=1, ckpt_freq=2, data={"workers": 1})
    found = [record["global_step"] for record in records(tmp_path / "r" / "metrics.jsonl") if "lr" in record]
    assert found == list(range(1, 13))
    run(tmp_path, Ragged(dtype=torch.float32), "sync", device=device, log_freq=1, checkpoint={"mode": "sync"})
    assert mark(tmp_path, "r")[0] == mark(tmp_path, "sync")[0]


def test_a_batch_that_moves_itself_is_moved(device, tmp_path):
    class Own:
        def __init__(self, rows):
            self.rows = rows

        def to(self, where):
            return Own({name: value.to(where) for name, value in self.rows.items()})

    class Task(Ragged):
        def collate(self, samples):
            return Own(super().collate(samples))

        def count(self, batch):
            return super().count(batch.rows)

        def loss(self, model, batch):
            return super().loss(model, batch.rows)

        def metrics(self, model, batch):
            return super().metrics(model, batch.rows)

    task = Task(dtype=torch.float32)
    run(tmp_path, task, "own", device=device)
    run(tmp_path, Ragged(dtype=torch.float32), "plain", device=device)
    assert losses(tmp_path, "own") == losses(tmp_path, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero", "fsdp"])
def test_each_engine_trains_under_the_launcher(device, engine, tmp_path):
    """One process; on a CUDA device its groups are NCCL's."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def function_{i}(x):\n    return x + {i * i}\n" for i in range(400)))
    flags = f"--engine {engine} --device {device} --precision bf16 --max-steps 6 --batch-size 4 --micro-batch-size 2"
    flags += " --seq-len 32 --data.vocab-size 300 --log-freq 1 --ckpt-freq 3 --experiment-name r"
    paths = ["--save-dir", str(tmp_path), "--dataset-name", str(text), "--data.cache", str(tmp_path / "cache")]
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "launch",
        "--nproc-per-node",
        "1",
        "--",
        "train",
        *flags.split(),
        *paths,
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path)
    assert len(found) == 6
    assert found[-1] < found[0]
