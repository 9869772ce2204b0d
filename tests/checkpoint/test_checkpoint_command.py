import json
import re
import time

import pytest
import torch

from lockstep import checkpoint
from lockstep.cli import dispatch
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, ConfigError


@pytest.fixture
def folder(tmp_path):
    shared = torch.arange(12.0).reshape(3, 4)
    for step in (5, 10):
        tensors = {"model/a": shared + step, "model/b": torch.ones(2), "optimizer/a/step": torch.tensor(1.0)}
        tensors["model/tied"] = tensors["model/a"]
        checkpoint.save(tmp_path, step, tensors, {"epoch": step // 5}, World(), engine="single")
    return tmp_path


def damage(folder, step):
    file = checkpoint.path_of(folder, step) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def command(capsys, *argv):
    code = dispatch(["checkpoint", *map(str, argv)])
    return code, capsys.readouterr().out


def test_list_is_a_table(folder, capsys):
    damage(folder, 10)
    code, out = command(capsys, "list", folder)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["step", "epoch", "size", "written", "engine", "world", "whole"]
    assert [(line[0], line[1], line[-3], line[-2], line[-1]) for line in lines[1:3]] == [
        ("5", "1", "single", "1", "yes"),
        ("10", "2", "single", "1", "no"),
    ]
    assert "step-00000010/rank-00000.safetensors is damaged" in out
    (checkpoint.path_of(folder, 5) / "manifest.json").unlink()
    out = command(capsys, "list", folder)[1]
    assert out.splitlines()[1].split() == ["5", "?", "?", "?", "?", "?", "no"]
    assert "step-00000005/manifest.json is missing" in out  # of each that is damaged
    assert "step-00000010/rank-00000.safetensors is damaged" in out


def test_list_as_json_has_numbers_and_null_for_a_damaged_one(folder, capsys):
    (checkpoint.path_of(folder, 5) / "manifest.json").unlink()
    began = int(time.time())
    code, out = command(capsys, "list", folder, "--json")
    first, second = json.loads(out)
    size = sum(file.stat().st_size for file in checkpoint.path_of(folder, 10).iterdir() if file.stem != "manifest")
    assert code == 0
    assert first["problems"] == ["step-00000005/manifest.json is missing"]
    assert {key: first[key] for key in ("step", "epoch", "bytes", "written", "engine", "world", "whole")} == {
        **dict.fromkeys(("epoch", "bytes", "written", "engine", "world")), "step": 5, "whole": False
    }  # fmt: skip
    assert began - 60 <= second.pop("written") <= began
    assert second == {
        "step": 10, "epoch": 2, "bytes": size, "engine": "single", "world": 1, "whole": True, "problems": []
    }  # fmt: skip


def test_inspect_prints_the_fingerprint_on_its_own_line(folder, capsys):
    code, out = command(capsys, "inspect", folder, "--tensors")
    assert code == 0
    assert f"fingerprint {checkpoint.fingerprint(checkpoint.path_of(folder, 10))}" in out.splitlines()
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (rows["step"], rows["epoch"], rows["engine"], rows["tensors"], rows["parameters"]) == (
        "10",
        "2",
        "single",
        "4",
        "14",
    )
    assert [line for line in out.splitlines() if line.startswith(("model/", "optimizer/"))] == [
        "model/a  float32  [3, 4]  48 B",
        "model/b  float32  [2]  8 B",
        "model/tied  float32  [3, 4]  48 B",
        "optimizer/a/step  float32  []  4 B",
    ]


def test_inspect_takes_the_newest_whole_one_or_the_one_named(folder, capsys):
    damage(folder, 10)
    assert "step-00000005" in command(capsys, "inspect", folder)[1]
    assert "step-00000005" in command(capsys, "inspect", checkpoint.path_of(folder, 5))[1]
    assert "step-00000005" in command(capsys, "inspect", folder, "--step", 5)[1]
    with pytest.raises(CheckpointError, match="no checkpoint here is complete"):
        command(capsys, "inspect", folder, "--step", 10)


def test_inspect_counts_complex_elements_and_not_their_parts(tmp_path, capsys):
    for step, dtype in enumerate((torch.complex64, torch.complex128)):
        tensors = {"model/a": torch.randn(5, 2, dtype=dtype)}
        checkpoint.save(tmp_path, step, tensors, {}, World(), engine="single")
        out = command(capsys, "inspect", tmp_path, "--step", step, "--tensors")[1]
        assert f"model/a  complex{64 << step}  [5, 2]  {80 << step} B" in out
        assert "parameters   10" in out
        assert checkpoint.fingerprint_of({"a": tensors["model/a"]}) in out


def test_verify_ends_with_3_and_names_the_file(folder, capsys):
    assert command(capsys, "verify", folder) == (0, "step-00000005: whole\nstep-00000010: whole\n")
    damage(folder, 5)
    code, out = command(capsys, "verify", folder)
    assert code == 3
    assert "step-00000005: step-00000005/rank-00000.safetensors is damaged" in out
    assert command(capsys, "verify", folder, "--step", 10)[0] == 0


def test_a_wrong_run_is_one_line(folder, tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"neither a run's folder nor a checkpoint") as found:
        command(capsys, "list", tmp_path / "nothing\x1b[2J")
    assert str(found.value).isprintable()
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        command(capsys, "list", tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; the newest ones are 5, 10"):
        command(capsys, "verify", folder, "--step", 7)


def test_flags(folder, capsys):
    code, out = command(capsys, "--help")
    assert code == 0
    assert "verify" in out
    for argv, line in (
        (["list"], "the following arguments are required: RUN; `lockstep checkpoint list --help` lists the flags"),
        (["destroy", folder], "invalid choice: 'destroy'"),
        (["list", folder, "--stop", "1"], "unknown flag --stop: did you mean --step?"),
        (["list", folder, "--steps", "1"], "unknown flag --steps: did you mean --step?"),
        (["list", folder, "--zzz"], "unknown flag --zzz; `lockstep checkpoint --help` lists them"),
        (["list", folder, "--step", "x"], "--step: 'x' is not a whole number"),
    ):
        with pytest.raises(ConfigError, match=re.escape(line)):
            command(capsys, *argv)


def test_control_characters_are_escaped(tmp_path, capsys):
    tensors = {"model/\x1b[31mred": torch.ones(1)}
    checkpoint.save(tmp_path, 1, tensors, {"epoch": "\x1b[2J"}, World(), engine="[bold]\x07")
    for argv in (["list"], ["inspect", "--tensors"], ["verify"]):
        code, out = command(capsys, argv[0], tmp_path, *argv[1:])
        assert code == 0
        assert all(line.isprintable() for line in out.splitlines())
    assert r"[bold]\x07" in command(capsys, "list", tmp_path)[1]
