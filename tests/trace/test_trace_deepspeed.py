"""DeepSpeed's engine: its step is the update, and its weights are compared whole, also where stage 3 shards them."""

import os
import subprocess
import sys

import pytest
from shell import environment

from lockstep.trace.compare.judge import compare_runs
from lockstep.trace.compare.reading import read

SCRIPT = """
import os, sys, torch, deepspeed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
samples = TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,)))
model = torch.nn.Sequential(torch.nn.Linear(8, 15), torch.nn.ReLU(), torch.nn.Linear(15, 3))
adam = {"type": "AdamW", "params": {"lr": float(sys.argv[2]), "torch_adam": True}}
config = {"train_batch_size": 8, "optimizer": adam, "zero_optimization": {"stage": int(sys.argv[1])}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for x, y in DataLoader(samples, 8 // world, sampler=DistributedSampler(samples, world, rank)):
    loss = torch.nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_two_processes_against_one(stage, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def traced(name, world, rate):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone"]
        command = [sys.executable, "-m", "lockstep", "trace", "-o", name, "--", *launch, "train.py", str(stage), rate]
        kept = environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""))
        done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return read(tmp_path / name)

    one = traced("one", 1, "0.01")
    verdict = compare_runs(one, traced("two", 2, "0.01"))
    assert (verdict.finding, verdict.judged) == (None, 4)
    assert verdict.largest < 1e-5
    found = compare_runs(one, traced("other", 2, "0.02")).finding
    assert (found.step, found.cause) == (0, "world-rate")
