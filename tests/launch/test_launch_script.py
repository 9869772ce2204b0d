"""A script of one's own under `lockstep launch`, as under torchrun: with restarts, names and codes."""

import os
import signal
import subprocess
import sys
import time

import pytest
import warm
from refusals import refuses
from shell import environment

from lockstep import checkpoint, cli
from lockstep.errors import ConfigError

SCRIPT = """
import os, signal, sys, time
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
    if os.environ.get("SLOW"):
        open(os.environ["SLOW"], "w").close()
        time.sleep(0.5)
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


def test_ctrl_c_ends_a_script_on_two_ranks_with_one_line(script):
    mark, flags = script.parent / "mark", ["--save-dir", str(script.parent), "--experiment-name", "c"]
    command = [warm.python(), "-m", "lockstep", "launch", "--nproc-per-node", "2", "--", str(script), *flags]
    process = subprocess.Popen(command, env=environment(SLOW=str(mark)), stdout=-1, stderr=-1, text=True)
    try:
        until = time.monotonic() + 60
        while not mark.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    saved = checkpoint.list_steps(script.parent / "c")[-1]
    assert process.returncode == 130, out + err
    assert f"interrupted: saved after step {saved} of 30;" in out.strip().splitlines()[-1]
    assert "Traceback" not in err
    assert "lockstep:" not in err


def test_a_refusal_of_a_script_is_one_line_and_its_own_exit_code(script):
    done = launched(script, "--engine", "single")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("lockstep: error: before step 1: --engine single with 2")
    assert "Traceback" not in done.stderr


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
        ConfigError, match="launch starts `train`, `evaluate`, `profile`, `doctor`, a script or a module, but 'bash'"
    ):
        cli.dispatch(["launch", "--", "bash"])


RAW = """
import os, signal, sys, time
rank, mark, until = os.environ["RANK"], __file__ + ".dead", time.monotonic() + 10
while len(os.sched_getaffinity(0)) == CPUS and time.monotonic() < until:
    time.sleep(0.01)  # the launcher binds a process once all have started
os.write(2, f"rank {rank}: may run on {sorted(os.sched_getaffinity(0))}\\n".encode())
if rank == "1" and not os.path.exists(mark):
    open(mark, "w").close()
    os.write(2, b"cut o")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided")
def test_ranks_in_a_slurm_step_have_cores_and_a_kept_stderr_file(tmp_path):
    script, errors = tmp_path / "raw.py", tmp_path / "deep" / "errors"
    cpus = sorted(os.sched_getaffinity(0))
    script.write_text(RAW.replace("CPUS", str(len(cpus))))
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1", "SLURM_CPUS_ON_NODE": str(len(cpus))}
    flags = ["--nproc-per-node", "2", "--max-losses", "0", "--max-restarts", "1", "--stderr", str(errors)]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "launch", *flags, "--", str(script)],
        env=environment(**step), stderr=subprocess.PIPE, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_text() for path in errors.iterdir()}
    assert sorted(found) == ["rank-00000.2.err", "rank-00000.err", "rank-00001.2.err", "rank-00001.err"]
    assert found["rank-00001.err"].endswith("cut o")
    assert found["rank-00001.2.err"] + "cut o" == found["rank-00001.err"]
    own = [eval(found[f"rank-0000{rank}.err"].splitlines()[0].rpartition(" on ")[2]) for rank in (0, 1)]
    assert sorted(own[0] + own[1]) == cpus
    shown = done.stderr.splitlines()
    assert shown.count(found["rank-00001.2.err"].strip()) == 2  # "rank 1" is not put before it again
    assert shown.index("rank 1: cut o") < shown.index(found["rank-00001.2.err"].strip(), 2)
    (tmp_path / "file").touch()
    with refuses(ConfigError, "--stderr", tmp_path / "file"):
        cli.dispatch(["launch", "--stderr", str(tmp_path / "file"), "--", str(script)])
