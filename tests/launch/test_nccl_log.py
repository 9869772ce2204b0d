"""`launch --nccl-debug`: where NCCL's logs go, and what is left where nothing is written."""

import shlex

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.launch import agent
from lockstep.launch.command import command
from lockstep.launch.job import create_log_folder


def shown(capsys, *flags, rest=("train",)):
    assert command([*flags, "--dry-run", "--", *rest]) == 0
    return shlex.split(capsys.readouterr().out)


def test_the_logs_go_into_the_runs_folder(capsys, tmp_path):
    run = ("train", "--save-dir", str(tmp_path), "--experiment-name", "a")
    words = shown(capsys, "--nccl-debug", rest=run)
    assert "NCCL_DEBUG=INFO" in words
    assert f"NCCL_DEBUG_FILE={tmp_path}/a/logs/nccl.%h.%p.log" in words
    assert not any(word.startswith("NCCL_") for word in shown(capsys, rest=run))
    assert f"NCCL_DEBUG_FILE={tmp_path}/b/logs/nccl.%h.%p.log" in shown(
        capsys, "--nccl-debug", rest=("evaluate", f"{tmp_path}/b")
    )
    assert list(tmp_path.iterdir()) == []


def test_a_script_says_where(capsys, tmp_path):
    (tmp_path / "mine.py").touch()
    script = (str(tmp_path / "mine.py"),)
    assert f"NCCL_DEBUG_FILE={tmp_path}/x/nccl.%h.%p.log" in shown(capsys, "--nccl-debug", f"{tmp_path}/x", rest=script)
    with pytest.raises(ConfigError, match="--nccl-debug DIR"):
        command(["--nccl-debug", "--", *script])


def test_a_run_that_writes_nothing_leaves_nothing(monkeypatch, tmp_path):
    def refused(job):
        assert (tmp_path / "a" / "logs").is_dir()
        raise LockstepError("no such data")

    monkeypatch.setattr(agent, "run", refused)
    run = ["train", "--save-dir", str(tmp_path), "--experiment-name", "a"]
    with pytest.raises(LockstepError, match="no such data"):
        command(["--nccl-debug", "--", *run])
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_stays(tmp_path):
    with create_log_folder(tmp_path / "a" / "logs"):
        (tmp_path / "a" / "logs" / "nccl.here.7.log").touch()
    assert (tmp_path / "a" / "logs" / "nccl.here.7.log").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--nccl-debug"), create_log_folder(tmp_path / "file" / "logs"):
        pass


def test_a_variable_of_the_persons_own_stays(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    assert "NCCL_DEBUG=TRACE" in shown(capsys, "--nccl-debug", str(tmp_path))
