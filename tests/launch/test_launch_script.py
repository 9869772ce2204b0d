"""A script of one's own under `lockstep launch`, as under torchrun: with restarts, names and codes."""

import subprocess

import pytest
import warm
from shell import environment

from lockstep import checkpoint, cli
from lockstep.errors import ConfigError

SCRIPT = """
import os, signal, sys
import torch
import lockstep

class Mine(lockstep.Task):
    def model(self): return torch.nn.Linear(4, 1)
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.ones(64, 4)) if split == "train" else None
    def loss(self, model, batch): return model(batch[0]).square().sum()

config = lockstep.Config.from_args(batch_size=8, max_steps=30, device="cpu", ckpt_freq=0)
run = lockstep.Run(config, Mine())
for step in run:
    if step.global_step == 3:
        if os.environ.get("FAIL") == os.environ["RANK"]:
            raise RuntimeError("the sky fell")
        if os.environ.get("SIGNAL") == os.environ["RANK"]:
            os.kill(os.getpid(), signal.SIGTERM)
if run.is_main:
    print("ended:", run.status, run.result.exit_code, flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def launched(script, *flags, **more):
    arguments = ["launch", "--nproc-per-node", "2", "--", str(script), "--save-dir", str(script.parent), *flags]
    return subprocess.run(
        [warm.python(), "-m", "lockstep", *arguments],
        env=environment(**more), capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def test_a_script_on_two_ranks_hears_of_a_signal(script):
    done = launched(script, "--experiment-name", "b", SIGNAL="1")
    assert (done.returncode, "ended: preempted 75" in done.stdout) == (75, True), done.stdout + done.stderr
    step = checkpoint.list_steps(script.parent / "b")[-1]
    assert step >= 3
    assert checkpoint.read_state(checkpoint.path_of(script.parent / "b", step))["world_size"] == 2


def test_a_scripts_error_is_told_with_its_rank(script):
    done = launched(script, FAIL="1")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "rank 1" in last, done.stderr
    assert "step 2" in last or "the sky fell" in last, last


def test_what_is_no_program_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*none.py; pass a script"):
        cli.dispatch(["launch", "--", str(tmp_path / "none.py")])
    with pytest.raises(
        ConfigError, match="launch starts `train`, `evaluate`, `profile`, `doctor` or a script, but 'bash'"
    ):
        cli.dispatch(["launch", "--", "bash"])
