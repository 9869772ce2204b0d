"""SARIF, the GitHub action and the pre-commit hook."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep_lint.command import command, parser
from lockstep_lint.output import LEVELS

ROOT = Path(__file__).parents[3]
BAD = "import torch\nfrom nets import model\nmodel.load(torch.load('cuda.pt'))\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "bäd.py").write_text(BAD, encoding="utf-8")
    (tmp_path / "broken.py").write_text("import torch\ndef f(:\n")
    (tmp_path / "idle.py").write_text("import torch\nx = 1  # noqa: LS015\n")
    return tmp_path


def check_sarif(log):
    """Check what the schema of SARIF 2.1.0 requires of the parts used here."""
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    assert set(log) <= {"$schema", "version", "runs"}
    for run in log["runs"]:
        driver = run["tool"]["driver"]
        assert isinstance(driver["name"], str)
        assert driver["name"]
        rules = driver["rules"]
        assert len({rule["id"] for rule in rules}) == len(rules)
        for rule in rules:
            assert rule["shortDescription"]["text"]
            assert rule.get("defaultConfiguration", {"level": "note"})["level"] in ("none", "note", "warning", "error")
        assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        for result in run["results"]:
            assert result["message"]["text"]
            assert result["level"] in LEVELS.values()
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
            (place,) = (item["physicalLocation"] for item in result["locations"])
            assert re.fullmatch(r"[\w.~%:/!$&'()*+,;=@-]+", place["artifactLocation"]["uri"], re.ASCII)
            assert all(isinstance(n, int) and n >= 1 for n in place["region"].values())
            assert re.fullmatch(r"[0-9a-f]{16}:\d+", result["partialFingerprints"]["primaryLocationLineHash"])


def test_sarif(folder, capsys):
    assert command([".", "--hints", "--format", "sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    check_sarif(log)
    (run,) = log["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["LS015", "LS000", "LS900"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place == {
        "artifactLocation": {"uri": "a%20folder/b%C3%A4d.py"},
        "region": {"startLine": 3, "startColumn": 12, "endLine": 3, "endColumn": 33},
    }
    command(["idle.py", "--ignore", "LS015", "--format", "sarif"])
    empty = json.loads(capsys.readouterr().out)
    check_sarif(empty)
    assert empty["runs"][0]["results"] == []


def prints(path, text, capsys):
    path.write_text(text, encoding="utf-8")
    command([path.name, "--hints", "--format", "sarif"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    return [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]


def test_a_finding_is_known_again_when_its_line_moves(folder, capsys):
    path = folder / "twice.py"
    before = prints(path, BAD + BAD.splitlines()[-1] + "\n", capsys)
    assert len(set(before)) == 2
    assert prints(path, BAD.replace("model\n", "model\n\nx = 1\n") + "y = 2\n" + BAD.splitlines()[-1], capsys) == before
    assert prints(path, BAD.replace("cuda.pt", "other.pt"), capsys)[0] not in before


def test_sarif_beside_another_format(folder, capsys):
    assert command([".", "--select", "LS015", "--sarif-file", "found.sarif"]) == 1
    assert "bäd.py:3:12: LS015" in capsys.readouterr().out
    check_sarif(json.loads((folder / "found.sarif").read_text(encoding="utf-8")))
    assert command([".", "--sarif-file", "nowhere/found.sarif"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def run_action(folder, **inputs):
    """Run the action's step as the runner would, with defaults and these inputs."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    (step,) = action["runs"]["steps"]
    values = {name: given["default"] for name, given in action["inputs"].items()} | {"python": sys.executable} | inputs
    known = {f"inputs.{name}": value for name, value in values.items()} | {"github.action_path": str(ROOT)}
    env = {
        name: re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda match: known[match[1]], text)
        for name, text in step["env"].items()
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=plain | env, capture_output=True, text=True, check=False)


def test_the_action(folder):
    done = run_action(folder, **{"sarif-file": "found.sarif", "arguments": "--select LS015"})
    assert done.returncode == 1, done.stderr
    assert "::warning file=a folder/bäd.py,line=3,col=12,title=LS015::" in done.stdout
    check_sarif(json.loads((folder / "found.sarif").read_text(encoding="utf-8")))
    clean = run_action(folder, paths="idle.py", arguments="--ignore LS015")
    assert (clean.returncode, clean.stdout.strip()) == (0, "")
    for paths in ("'a folder' idle.py", '"a folder"\nidle.py\n', "'a folder/bäd.py'"):
        assert run_action(folder, paths=paths, arguments="--hints").stdout.count("title=LS015") == 1
    unclosed = run_action(folder, paths="'a folder")
    assert (unclosed.returncode != 0, unclosed.stdout) == (True, "")
    wrong = run_action(folder, **{"paths": "missing.py", "sarif-file": "x.sarif"})
    assert wrong.returncode == 2
    assert "no file or folder 'missing.py'" in wrong.stderr


def test_the_hook(folder):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"]) == ("lockstep-lint", "script")  # python would install all of lockstep
    assert set(hook["types_or"]) == {"python", "jupyter"}
    for words, code in ((["idle.py", "broken.py"], 1), (["idle.py", "--ignore", "LS015"], 0)):
        command = [
            sys.executable,
            "-I",
            ROOT / hook["entry"],
            *words,
        ]  # as pre-commit does
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, "")
    assert os.access(ROOT / hook["entry"], os.X_OK)


def test_every_format_is_offered():
    text = parser().format_help()
    assert all(form in text for form in ("text", "json", "github", "sarif"))
