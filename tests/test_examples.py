"""The examples run as they stand, alone and on two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from shell import environment, inspected

EXAMPLES = Path(__file__).parent.parent / "examples"


def go(name, *flags, processes=0):
    launcher = ["-m", "lockstep", "launch", f"--nproc-per-node={processes}", "--"] if processes else []
    arguments = [sys.executable, *launcher, str(EXAMPLES / name), *flags]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_own_task_has_the_same_bits_alone_and_on_two(tmp_path):
    shown = [
        go("own_task.py", "--max-steps", "60", "--eval-freq", "30", "--save-dir", str(tmp_path / f"{n}"), processes=n)
        for n in (0, 2)
    ]
    assert all(out.count("step 30: accuracy ") == out.count("step 60: accuracy ") == 1 for out in shown)
    assert inspected(tmp_path / "0" / "spirals") == inspected(tmp_path / "2" / "spirals")


@pytest.mark.parametrize("processes", [0, 2])
def test_own_loop(processes):
    shown = go("own_loop.py", "--steps", "100", processes=processes)
    losses = [float(line.split("rank ")[1].split(",")[0]) for line in shown.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_my_training_as_a_project_would_run_it():
    arguments = [sys.executable, "-m", "pytest", str(EXAMPLES / "test_my_training.py")]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_there_is_no_example_without_a_test():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"own_task.py", "own_loop.py", "test_my_training.py"}
