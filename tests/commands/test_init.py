"""`lockstep init`: what it writes trains and is proved at once, and nothing is overwritten."""

import resource
import subprocess
from pathlib import Path

import pytest
import torch
import warm
from refusals import refuses
from shell import environment

import lockstep
from lockstep import checkpoint, cli
from lockstep.errors import ConfigError
from lockstep.logging.jsonl import read
from lockstep.training.start.named_task import load_task

TEMPLATES = Path(lockstep.__file__).parent / "templates"
NAMES = ["config.toml", "task.py", "test_task.py"]


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.dispatch(["init", "mine"]) == 0
    return tmp_path / "mine"


def test_it_writes_the_templates_and_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.dispatch(["init", "mine"]) == 0
    made = tmp_path / "mine"
    assert sorted(path.name for path in made.iterdir()) == NAMES
    assert all((made / name).read_text() == (TEMPLATES / name).read_text() for name in NAMES)
    assert len((made / "task.py").read_text().splitlines()) <= 40
    shown = capsys.readouterr().out
    assert "  cd mine && lockstep train --config config.toml\n  cd mine && pytest\n" in shown


def test_its_points_lie_on_two_spirals(made):
    task = load_task(f"{made}/task.py:MyTask")
    points, labels = task.dataset("train").tensors
    turn = 3 * points.norm(dim=1)
    angle = turn + torch.pi * labels
    torch.testing.assert_close(3 * points, turn[:, None] * torch.stack([angle.cos(), angle.sin()], 1))
    assert (len(points), int(labels.sum()), 5 < turn.max() < 6) == (1000, 500, True)
    assert not torch.equal(points, task.dataset("evaluation").tensors[0])
    batch = points[:4], torch.tensor([0, 1, 0, 0])
    right, whole = task.metrics(lambda points: torch.tensor([[1.0, 0.0]] * 4), batch)["accuracy"]
    assert (int(right), whole) == (3, 4)


def test_what_it_writes_trains(made):
    command = [warm.python(), "-m", "lockstep", "train", "--config", "config.toml", "--num-epochs", "5"]
    done = subprocess.run(
        command, cwd=made, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = made / "outputs" / "first"
    assert checkpoint.list_steps(run)
    *_, evaluation = [record for record in read(run / "metrics.jsonl") if "evaluation/accuracy" in record]
    assert evaluation["evaluation/accuracy"] > 0.6  # it learns


def test_its_own_tests_pass(made):
    quiet = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    command = [warm.python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", *quiet]
    done = subprocess.run(
        command, cwd=made, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_an_empty_folder_is_taken_and_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert cli.dispatch(["init", "empty"]) == 0
    for argv, *words in (
        (["empty"], "init empty", "config.toml, task.py, test_task.py", "overwritten"),
        (["."], "init .", "not empty", "empty; give a new one"),
        (["empty/task.py"], "init empty/task.py", "Not a directory"),
        (["empty/task.py/x"], "init empty/task.py/x", "Not a directory"),
    ):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with refuses(ConfigError, *words):
            cli.dispatch(["init", *argv])
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for name in "abcdef":
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="a, b, c and 4 more; give a new one"):
        cli.dispatch(["init", "."])


def test_a_file_that_cannot_be_written_leaves_none_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, old[1]))  # bytes: config.toml fits, task.py does not
    try:
        with refuses(ConfigError, "init mine", "another folder"):
            cli.dispatch(["init", "mine"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [*(tmp_path / "mine").iterdir()] == []
    assert cli.dispatch(["init", "mine"]) == 0
