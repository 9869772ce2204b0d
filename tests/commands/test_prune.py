"""`lockstep checkpoint list --json` and `prune`."""

import json
import subprocess

import pytest
import warm
from refusals import refuses
from shell import environment
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.cli import dispatch
from lockstep.errors import CheckpointError, ConfigError
from lockstep.run_state import BestEvaluation, Selection
from lockstep.training.state.run_dir import RunFolder


@pytest.fixture
def folder(tmp_path):
    """A run with checkpoints of the steps 2, 4, .. 10, the evaluation of step 4 the best."""
    settings = {"max_steps": 10, "ckpt_freq": 2, "checkpoint": {"keep": 9}, "micro_batch_size": 8}
    result = lockstep.train(config(tmp_path, **settings), Ragged())
    assert checkpoint.list_steps(result.folder) == [2, 4, 6, 8, 10]
    RunFolder(str(tmp_path), "r").write_evaluated(10, Selection(BestEvaluation(4, 1.0)))
    return result.folder


def damage(folder, step):
    file = checkpoint.path_of(folder, step) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def go(capsys, *argv):
    capsys.readouterr()
    assert dispatch(["checkpoint", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_the_list_as_json_has_numbers_as_numbers(folder, capsys):
    damage(folder, 8)
    (checkpoint.path_of(folder, 6) / "manifest.json").write_text("{")
    found = json.loads(go(capsys, "list", folder, "--json"))
    assert [row["step"] for row in found] == [2, 4, 6, 8, 10]
    assert [row["whole"] for row in found] == [True, True, False, False, True]
    assert found[2]["bytes"] is None
    assert "manifest.json" in found[2]["problems"][0]
    newest = found[4]
    assert (newest["engine"], newest["world"], newest["epoch"], newest["problems"]) == ("single", 1, 1, [])
    assert newest["bytes"] > 10_000
    assert newest["written"] > 1_700_000_000
    assert len(json.loads(go(capsys, "list", folder, "--json", "--step", "4"))) == 1


def test_prune_keeps_the_newest_and_the_best_and_says_the_rest(folder, capsys):
    sizes = {step: sum(f.stat().st_size for f in checkpoint.path_of(folder, step).iterdir()) for step in (2, 6)}
    would = go(capsys, "prune", folder, "--keep", "2", "--dry-run")
    assert checkpoint.list_steps(folder) == [2, 4, 6, 8, 10]
    sized = [{"step": step, "bytes": size} for step, size in sizes.items()]
    would_json = json.loads(go(capsys, "prune", folder, "--keep", "2", "--dry-run", "--json"))
    assert would_json == [{**row, "removed": False} for row in sized]
    assert checkpoint.list_steps(folder) == [2, 4, 6, 8, 10]
    did = go(capsys, "prune", folder, "--keep", "2")
    assert did == would.replace("would remove", "removed")
    lines = did.splitlines()
    assert lines[0].startswith("removed step-00000002: ")
    assert [f"({sizes[step]:,} bytes)" in line for step, line in zip(sizes, lines, strict=False)] == [True, True]
    assert lines[2].startswith("removed 2 checkpoints, ")
    assert f"({sum(sizes.values()):,} bytes)" in lines[2]
    assert checkpoint.list_steps(folder) == [4, 8, 10]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")) == []
    found = json.loads(go(capsys, "prune", folder, "--keep", "1", "--no-keep-best", "--json"))
    assert [(row["step"], row["removed"]) for row in found] == [(4, True), (8, True)]
    assert checkpoint.list_steps(folder) == [10]
    assert json.loads(go(capsys, "prune", folder, "--keep", "1", "--json")) == []
    assert "removed 0 checkpoints, 0 B" in go(capsys, "prune", folder, "--keep", "1")


def test_what_is_damaged_counts_for_nothing(folder, capsys):
    damage(folder, 10)
    damage(folder, 6)
    go(capsys, "prune", folder, "--keep", "1")
    assert checkpoint.list_steps(folder) == [4, 8]
    for step in (4, 8):
        damage(folder, step)
    with refuses(CheckpointError, folder, "none of its 2 checkpoints"):
        dispatch(["checkpoint", "prune", str(folder), "--keep", "1"])
    assert checkpoint.list_steps(folder) == [4, 8]


def test_refusals_are_one_line_and_remove_nothing(folder, tmp_path, capsys):
    for flags, line in (
        (["--keep", "0"], "--keep is 0: it must be at least 1"),
        ([], "the following arguments are required: --keep"),
    ):
        with pytest.raises(ConfigError, match=line):
            dispatch(["checkpoint", "prune", str(folder), *flags])
    with pytest.raises(CheckpointError, match="nowhere has no checkpoint"):
        dispatch(["checkpoint", "prune", str(tmp_path / "nowhere"), "--keep", "1"])
    owner = RunFolder(str(tmp_path), "r")
    owner.claim()
    try:
        command = [warm.python(), "-m", "lockstep", "checkpoint", "prune", str(folder), "--keep", "1"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert f"{folder} is in use by process" in done.stderr
    finally:
        owner.release()
    assert checkpoint.list_steps(folder) == [2, 4, 6, 8, 10]
