"""Runs on a real Slurm of two nodes: how each begins, is ended, and goes on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm
from refusals import names
from slurm_cluster import cluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TASK = Path(__file__).with_name("slow_steps.py")
TRAIN = (
    f"--task {TASK}:Slow --device cpu --batch-size 8 --micro-batch-size 2 --ckpt-freq 1000 --log-freq 1 --no-report "
    "--timeout 60"
).split()
LOCKSTEP = (sys.executable, "-m", "lockstep")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(autouse=True)
def no_jobs_left(slurm):
    """Cancel the jobs that a test leaves: they would keep the nodes."""
    yield
    slurm.run("scancel", "--user=root", "--quiet")


class Submitted:
    """A run that was submitted: its jobs, folder and output."""

    def __init__(self, slurm, folder, *flags, steps=20, seconds=0.0, python=sys.executable, more=(), **variables):
        train = [*TRAIN, "--save-dir", folder, "--experiment-name", "run", "--max-steps", steps, *more]
        launch = [python, *LOCKSTEP[1:], "launch", "--slurm", "--set", "cpus-per-task=1", *flags, "--", "train"]
        self.slurm, self.folder = slurm, folder / "run"
        said = slurm.run(*launch, *train, STEP_SECONDS=str(seconds), **variables)
        assert said.returncode == 0, said.out
        self.jobs = re.search(r"scancel ([\d ]+)", said.out)[1].split()
        self.job = self.jobs[0]

    def output(self, job=None):
        """What the job printed, without the curve of the loss."""
        path = self.folder / "slurm" / f"{job or self.job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def last_line(self):
        return self.output().strip().splitlines()[-1]

    @property
    def steps(self):
        """The step of each record."""
        with contextlib.suppress(OSError):
            rows = (self.folder / "metrics.jsonl").read_text().splitlines()
            return [row["global_step"] for row in map(json.loads, rows) if "running_loss" in row]
        return []

    def until_step(self, step, seconds=120):
        deadline = time.monotonic() + seconds
        while not self.steps or self.steps[-1] < step:
            assert time.monotonic() < deadline, (self.slurm.state(self.job), self.output())
            time.sleep(0.1)

    @property
    def saved(self):
        """The step of each checkpoint."""
        return sorted(int(path.name.partition("-")[2]) for path in (self.folder / "checkpoints").glob("step-*"))

    def processes(self):
        """Ids of this run's processes: launchers as "launch", ranks as "train"."""
        found = {"launch": [], "train": []}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if str(self.folder.parent) in words and "lockstep" in words and "srun" not in words[0]:
                    environ = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                    node = next((each[15:] for each in environ if each.startswith("SLURMD_NODENAME=")), "")
                    kind = "launch" if "launch" in words else "train"
                    found[kind].append((node.removeprefix("="), int(path.name)))
        return {kind: sorted(each) for kind, each in found.items()}


def test_signal_ahead_of_the_limit_saves_and_requeues_to_the_end(slurm, tmp_path):
    """Two nodes, started twice: the whole way of a long run."""
    run = Submitted(slurm, tmp_path, "--nodes", 2, steps=60, seconds=0.1, python=warm.python())
    run.until_step(8)
    slurm.run("scancel", "--signal=USR1", run.job)  # what --signal=USR1@N makes Slurm do
    slurm.wait(run.job, "COMPLETED")
    assert run.steps[-1] == 60
    assert run.saved[-1] == 60
    assert 8 <= run.saved[0] < 60
    assert run.steps == sorted(set(run.steps))  # no step twice: it went on where it was saved
    assert json.loads((run.folder / "state.json").read_text())
    assert "the run continues in the next job" in run.output()
    assert "rank 1: raw words of 1" in run.output()
    for start in (0, 1):
        for rank in (0, 1):
            own = run.folder / "slurm" / f"{run.job}.{start}.stderr" / f"rank-{rank:05d}.err"
            # Twice: the check of the loss calls it too, and puts the task's counter back.
            assert set(re.findall("raw words of .", own.read_text())) == {f"raw words of {rank}"}


def test_srun_alone_starts_any_number_of_ranks(slurm, tmp_path):
    """Three tasks on two nodes, each a rank, without a launcher."""
    train = [*LOCKSTEP, "train", *TRAIN, "--save-dir", tmp_path, "--experiment-name", "a", "--max-steps", 6]
    done = slurm.run("srun", "-N2", "-n3", *train)
    assert done.returncode == 0, done.out
    assert re.search(r"processes +3\b", done.out)
    wrong = slurm.run("srun", "-N2", "-n2", *train, "--max-steps", "none")
    assert wrong.returncode == 2
    assert names(wrong.out, "--max-steps")


def test_a_wrong_partition_is_slurms_own_word_and_leaves_nothing(slurm, tmp_path):
    done = slurm.run(*LOCKSTEP, "launch", "--slurm", "--partition", "nowhere", "--", "train", "--save-dir", tmp_path)
    assert done.returncode == 2
    assert names(done.out, "nowhere")
    assert len(done.out.strip().splitlines()) == 1
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_launcher_for_each_of_an_odd_number_of_tasks(slurm, tmp_path):
    train = ["train", *TRAIN, "--save-dir", tmp_path, "--experiment-name", "a", "--max-steps", 6]
    done = slurm.run("srun", "-N2", "-n3", *LOCKSTEP, "launch", "--", *train)
    assert done.returncode == 0, done.out
    assert re.search(r"processes +3\b", done.out)


@pytest.mark.slow
def test_the_time_limit_itself_saves_and_ends_the_job(slurm, tmp_path):
    """`--signal` is off; the limit's SIGTERM leaves KillWait seconds."""
    run = Submitted(slurm, tmp_path, "--nodes", 2, "--time", "1", "--set", "signal=", steps=5000, seconds=0.1)
    assert slurm.wait(run.job, "TIMEOUT", "FAILED", seconds=200) == "TIMEOUT"
    time.sleep(1)
    assert run.saved


@pytest.mark.slow
def test_slurm_s_own_signal_comes_ahead_of_the_limit(slurm, tmp_path):
    """`--signal=USR1@N`: Slurm sends it up to a minute early, here perhaps before the first step."""
    run = Submitted(slurm, tmp_path, "--nodes", 2, "--time", "2", "--set", "signal=USR1@60", steps=400, seconds=0.05)
    slurm.wait(run.job, "COMPLETED", seconds=280)
    assert run.steps[-1] == 400
    assert run.steps == sorted(set(run.steps))


@pytest.mark.slow
def test_a_signal_before_the_first_step_does_not_lose_the_job(slurm, tmp_path):
    run = Submitted(slurm, tmp_path, "--nodes", 2, steps=6)
    slurm.wait(run.job, "RUNNING")
    while not run.processes()["launch"]:
        time.sleep(0.05)
    slurm.run("scancel", "--signal=USR1", run.job)
    slurm.wait(run.job, "COMPLETED")
    assert run.steps[-1] == 6
    assert "the run continues" in run.output()


@pytest.mark.slow
def test_scancel_saves_and_does_not_requeue(slurm, tmp_path):
    run = Submitted(slurm, tmp_path, "--nodes", 2, steps=5000, seconds=0.05)
    run.until_step(5)
    slurm.run("scancel", run.job)
    slurm.wait(run.job, "CANCELLED", "")
    time.sleep(8)
    assert slurm.state(run.job) in ("CANCELLED", "")
    assert run.saved
    assert not any(run.processes().values())


@pytest.mark.slow
def test_a_killed_rank_is_named_and_replaced(slurm, tmp_path):
    run = Submitted(slurm, tmp_path, "--nodes", 2, steps=200, seconds=0.05, more=["--timeout", "8"])
    run.until_step(5)
    rank = run.processes()["train"][-1][1]
    environ = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
    number = next(each[5:] for each in environ if each.startswith("RANK="))
    os.kill(rank, signal.SIGKILL)
    slurm.wait(run.job, "COMPLETED")
    said = run.output()
    assert names(said, f"rank {number} on", "was the first to end", "SIGKILL", "2 ranks continue", "1 of them new")
    assert run.steps == [*range(1, 201)]
    files = sorted(path.name for path in (run.folder / "slurm" / f"{run.job}.0.stderr").iterdir())
    assert files == sorted(["rank-00000.err", "rank-00001.err", f"rank-0000{number}.2.err"])


@pytest.mark.slow
def test_an_error_of_the_task_is_the_last_line_and_ends_a_chain(slurm, tmp_path):
    once = ("--max-losses", 0)
    run = Submitted(slurm, tmp_path, "--nodes", 2, "--chain", 2, *once, steps=50, seconds=0.02, FAIL_AT="40")
    slurm.wait(run.job, "FAILED")
    assert names(run.last_line, "rank 1", "ValueError", "planted")
    slurm.wait(run.jobs[1], "CANCELLED", "")


@pytest.mark.slow
def test_a_lost_launcher_s_node_is_left_out_of_the_requeue(slurm, tmp_path):
    """The other node goes on alone to the plan's end; the job then waits for a node that is not excluded."""
    run = Submitted(slurm, tmp_path, "--nodes", 2, steps=60, seconds=0.1, more=["--timeout", "8"])
    run.until_step(5)
    launcher = next(pid for node, pid in run.processes()["launch"] if node == "n2")
    os.kill(launcher, signal.SIGKILL)
    slurm.wait(run.job, "PENDING")
    assert run.steps == [*range(1, 61)]
    time.sleep(2)
    shown = slurm.run("scontrol", "show", "job", run.job).out
    slurm.run("scancel", run.job)
    assert names(shown, "ExcNodeList=n2")
    assert names(run.output(), "lost n2")
    assert run.saved or run.steps


@pytest.mark.slow
def test_a_node_that_slurm_loses_requeues_the_job(slurm, tmp_path):
    run = Submitted(slurm, tmp_path, "--nodes", 2, steps=200, seconds=0.1, more=["--timeout", "8", "--ckpt-freq", "10"])
    run.until_step(12)
    slurm.kill_node("n2")
    slurm.wait(run.job, "PENDING")
    for _, pid in run.processes()["train"] + run.processes()["launch"]:  # the node is gone, and all that ran on it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    slurm.start_node("n2")
    slurm.await_nodes()
    slurm.wait(run.job, "COMPLETED", seconds=200)
    assert run.steps[-1] == 200


@pytest.mark.slow
def test_an_array_of_seeds(slurm, tmp_path):
    run = Submitted(slurm, tmp_path, "--seeds", "3-4", steps=8)
    slurm.wait(run.job, "COMPLETED", "")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("run-seed*/checkpoints/step-*8"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    losses = []
    for seed in (3, 4):
        folder = tmp_path / f"run-seed{seed}"
        assert f"seed = {seed}" in (folder / "config.toml").read_text()
        assert (folder / "slurm" / f"{run.job}.out").exists()
        losses.append((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_two_jobs_in_one_folder(slurm, tmp_path):
    first = Submitted(slurm, tmp_path, steps=5000, seconds=0.05)
    first.until_step(3)
    second = Submitted(slurm, tmp_path, steps=5000, seconds=0.05)
    slurm.wait(second.job, "FAILED")
    assert "in use" in second.last_line or names(second.last_line, str(first.folder))
    assert slurm.state(first.job) == "RUNNING"
    slurm.run("scancel", first.job)
    slurm.wait(first.job, "CANCELLED", "")


@pytest.mark.slow
def test_a_full_disk(slurm, tmp_path):
    """The run ends in one line, is not requeued for ever, and no node is blamed for it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    try:
        output = tmp_path / "out.txt"
        more = ["--ckpt-freq", "5", "--checkpoint.on-failure", "stop"]
        run = Submitted(slurm, disk, "--nodes", 2, "--set", f"output={output}", steps=4000, seconds=0.01, more=more)
        run.until_step(2)
        (disk / "filler").write_bytes(b"")
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        state = slurm.wait(run.job, "FAILED", "PENDING", seconds=120)
        slurm.run("scancel", run.job)
        text = output.read_text(errors="replace")
        assert "lost n" not in text
        assert state == "FAILED", text
        assert text.strip().splitlines()[-1].startswith("lockstep: error: ")
    finally:
        slurm.run("scancel", run.job)
        time.sleep(2)
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_chain_ends_with_the_plan(slurm, tmp_path):
    run = Submitted(slurm, tmp_path, "--nodes", 2, "--chain", 4, steps=120, seconds=0.1)
    run.until_step(5)
    slurm.run("scancel", "--signal=USR1", run.job)
    slurm.wait(run.jobs[1], "RUNNING")
    assert slurm.state(run.job) in ("FAILED", "")  # 75
    slurm.wait(run.jobs[1], "COMPLETED")
    assert run.steps[-1] == 120
    assert run.steps == sorted(set(run.steps))
    assert {slurm.wait(job, "CANCELLED", "") for job in run.jobs[2:]} <= {"CANCELLED", ""}
