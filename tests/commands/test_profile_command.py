"""`lockstep profile`: a run of its own under the command, the verdict over traces that are there, what is refused."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import warm
from handmade_traces import on_cpu
from shell import environment

from lockstep import cli
from lockstep.diagnose.profile.reading import read_all
from lockstep.errors import ConfigError

TASK = """
import time, torch
import lockstep

class Waits(lockstep.Task):
    items_per_sample = 1

    def model(self):
        return torch.nn.Linear(4, 2)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, dtype=torch.long))

    def collate(self, samples):
        time.sleep(0.05)
        return torch.utils.data.default_collate(samples)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
"""


def test_two_processes_are_profiled_in_a_folder_of_their_own(tmp_path):
    (tmp_path / "waits.py").write_text(TASK)
    (tmp_path / "outputs" / "mine").mkdir(parents=True)
    lockstep = [warm.python(), "-m", "lockstep"]
    flags = ["--task", "waits.py:Waits", "--experiment-name", "mine", "--batch-size", "8"]
    flags += ["--limit-train-batches", "2"]  # an epoch is shorter than what is traced
    done = subprocess.run(
        [*lockstep, "launch", "--nproc-per-node", "2", "--", "profile", *flags, "--steps", "4", "--warmup", "2"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((tmp_path / "outputs" / "mine").iterdir())
    (folder,) = tmp_path.glob("outputs/mine-profile-*")
    assert not (folder / "checkpoints").exists()
    verdict = json.loads((folder / "profile" / "3-6" / "verdict.json").read_text())
    assert verdict["steps"] == [3, 6]
    assert verdict["world_size"] == len(read_all(folder / "profile" / "3-6")) == 2
    assert verdict["bottleneck"] == "data"
    first = verdict["operations"][0]
    assert first["name"] in done.stderr
    assert first["calls"] >= 1
    assert first["share"] == pytest.approx(first["ms"] / verdict["step_ms"], abs=1e-3)
    assert verdict["sentence"] in done.stdout
    assert done.stderr.count(f"{folder.name}/profile/3-6\n") == 1


def test_a_terminal_has_each_line_once(tmp_path):
    (tmp_path / "waits.py").write_text(TASK)
    flags = ["--task", "waits.py:Waits", "--batch-size", "8", "--steps", "1", "--warmup", "0"]
    reader, terminal = os.openpty()
    process = subprocess.Popen(
        [warm.python(), "-m", "lockstep", "profile", *flags],
        cwd=tmp_path,
        env=environment(TERM="dumb", COLUMNS="500"),
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    said = b""
    with contextlib.suppress(OSError):  # a terminal whose last process has gone
        while found := os.read(reader, 1 << 16):
            said += found
    os.close(reader)
    assert process.wait(60) == 0, said
    (path,) = tmp_path.glob("outputs/*/profile/1-1/verdict.json")
    assert said.decode().count(json.loads(path.read_text())["sentence"]) == 1
    assert said.decode().count("/profile/1-1\r\n") == 1


def test_traces_that_are_there_are_judged(tmp_path, capsys):
    on_cpu(data=20000).write(tmp_path)
    assert cli.dispatch(["profile", "--read", str(tmp_path)]) == 0
    assert "The bottleneck is data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["--read", "nowhere"], "nowhere"),
        (["--stepps", "3"], "did you mean --steps"),
        (["--profile", "3:4"], "--profile .*--steps and --warmup"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_writing(tmp_path, monkeypatch, flags, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=why):
        cli.dispatch(["profile", *flags])
    assert not list(Path(tmp_path).iterdir())
