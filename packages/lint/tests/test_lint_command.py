"""`lockstep lint`: its arguments, exit codes and formats."""

import json
import subprocess
import sys

import pytest

from lockstep_lint.command import command

ADD = "parser.add_argument('--fast', type=bool)"
BAD = f"import argparse, torch\nparser = argparse.ArgumentParser()\n{ADD}\nprint(parser.parse_args().fast)\n"
CLEAN = "import torch\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "clean.py").write_text(CLEAN)
    return tmp_path


def test_exit_codes(folder, capsys):
    assert command(["clean.py"]) == 0
    assert command(["bad.py"]) == 1
    assert command([]) == 1
    assert command(["--ignore", "LS068"]) == 0
    assert command(["missing.py"]) == 2
    assert command(["--select", "nonsense"]) == 2
    assert command(["--format", "xml"]) == 2
    assert command(["--help"]) == 0
    capsys.readouterr()


def test_it_calls_itself_as_it_was_called(folder, capsys):
    for prog in ("lockstep lint", "lockstep-lint"):
        for argv in (["--help"], ["--nonsense"], ["missing.py"], ["--explain", "LS099"], ["bad.py"]):
            command(argv, prog)
            text = "".join(capsys.readouterr())
            assert prog in text
            assert ("lockstep-lint" if prog == "lockstep lint" else "lockstep lint") not in text
    module = [sys.executable, "-m", "lockstep_lint", "missing.py"]
    run = subprocess.run(module, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("python -m lockstep_lint: error: ")


def test_a_refusal_is_one_line(folder, capsys):
    for argv in (["--nonsense"], ["--format", "xml"], ["--select", "LS999"], ["--explain", "LS099"], ["missing.py"]):
        assert command(argv) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)


def test_a_folder_without_python_files_is_a_warning(folder, capsys):
    (folder / "empty").mkdir()
    assert command(["empty"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "'empty'" in err
    assert command(["empty", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_text(folder, capsys):
    command(["bad.py"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("bad.py:3:1: LS068 error: ")
    assert out[1:] == [
        f"    | {ADD}",
        "    | ^",
        "1 finding in 1 file: LS068 1",
        "why, and what to write instead: lockstep lint --explain LS068",
    ]


def test_json(folder, capsys):
    command(["--format", "json"])
    (finding,) = json.loads(capsys.readouterr().out)
    assert list(finding) == ["path", "line", "column", "rule", "severity", "confidence", "message", "fix"]
    assert (finding["path"], finding["line"], finding["column"], finding["rule"]) == ("bad.py", 3, 1, "LS068")
    assert (finding["severity"], finding["confidence"]) == ("error", "high")
    command(["clean.py", "--format", "json"])
    assert json.loads(capsys.readouterr().out) == []


def test_a_habit_is_told_once_to_a_person_and_whole_to_a_program(folder, capsys):
    prints = "".join(f"    print({i})\n" for i in range(3))
    code = f"import torch.distributed as dist\n\ndef main():\n    dist.init_process_group()\n{prints}"
    (folder / "bad.py").write_text(f"{code}    dist.destroy_process_group()\n")
    command(["--hints", "bad.py"])
    out = capsys.readouterr().out
    assert out.count("LS028 hint") == 1
    assert "print on rank 0 only (and 2 more places in this file)" in out
    assert "3 findings in 1 file: LS028 3" in out
    command(["--hints", "bad.py", "--format", "github"])
    assert capsys.readouterr().out.count("title=LS028") == 1
    command(["--hints", "bad.py", "--format", "json"])
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_hints_are_looked_for_on_request_and_are_no_failure(folder, capsys):
    (folder / "bad.py").write_text("import torch\nfrom nets import model\nmodel.load(torch.load('cuda.pt'))\n")
    for argv, code, found in (
        ([], 0, False),
        (["--hints"], 0, True),
        (["--select", "LS015"], 1, True),  # asked for by name
        (["--select", "LS015,LS068"], 1, True),
        (["--hints", "--ignore", "LS015"], 0, False),
    ):
        assert command(argv) == code
        assert ("LS015 hint" in capsys.readouterr().out) is found
    command([])
    assert "--hints" in capsys.readouterr().out
    (folder / "pyproject.toml").write_text("[tool.lockstep.lint]\nhints = true\n")
    assert command([]) == 0
    assert "LS015 hint" in capsys.readouterr().out
    (folder / "pyproject.toml").write_text("[tool.lockstep.lint]\nhints = 1\n")
    assert command([]) == 2


def test_an_error_and_a_hint_beside_it(folder, capsys):
    load = "model.load(torch.load('cuda.pt'))\n"
    (folder / "bad.py").write_text(f"{BAD}import torch\nfrom nets import model\n{load}{load}")
    assert command(["bad.py"]) == 1
    assert "LS015" not in capsys.readouterr().out
    assert command(["--hints", "bad.py"]) == 1
    out = capsys.readouterr().out
    assert out.index("LS068 error") < out.index("LS015 hint")
    assert out.count("LS015 hint") == 1
    assert "(and 1 more place in this file)" in out


def test_github(folder, capsys):
    command(["--format", "github"])
    assert capsys.readouterr().out.startswith(
        "::error file=bad.py,line=3,col=1,title=LS068::type=bool makes every text True"
    )


def test_explain(capsys):
    assert command(["--explain", "ls018"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# LS018 ")
    assert "```python" in out
    assert command(["--explain", "LS099"]) == 2
    assert "no rule 'LS099'" in capsys.readouterr().err


def test_the_settings_of_the_project(folder, capsys):
    (folder / "pyproject.toml").write_text('[tool.lockstep.lint]\nignore = ["LS068"]\n')
    assert command([]) == 0
    (folder / "pyproject.toml").write_text("[tool.lockstep.lint]\nlevel = 3\n")
    assert command([]) == 2
    (folder / "pyproject.toml").write_text("[tool.lockstep\n")
    assert command([]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "has no key 'level'" in errors[0]
    assert "not valid TOML" in errors[1]


def test_each_file_has_the_settings_of_its_own_project(folder, capsys):
    for name in ("one", "two"):
        (folder / name / "inner").mkdir(parents=True)
        (folder / name / "inner" / "x.py").write_text(BAD)
    (folder / "one" / "pyproject.toml").write_text('[tool.lockstep.lint]\nignore = ["LS068"]\n')
    (folder / "one" / "inner" / "pyproject.toml").write_text("[project]\n")  # says nothing of lint
    for paths in (["one", "two"], ["two", "one"], ["one/inner/x.py", "two/inner/x.py"]):
        command([*paths, "--format", "json"])
        assert [f["path"] for f in json.loads(capsys.readouterr().out)] == ["two/inner/x.py"]


def test_a_file_that_does_not_parse_is_reported(folder, capsys):
    (folder / "broken.py").write_text("import torch\n\ndef f(:\n")
    assert command(["--format", "json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [(f["path"], f["line"], f["rule"]) for f in findings] == [("bad.py", 3, "LS068"), ("broken.py", 3, "LS000")]


def test_hidden_and_installed_folders_are_left_out(folder, capsys):
    for name in (".venv", "__pycache__", "node_modules"):
        (folder / name).mkdir()
        (folder / name / "x.py").write_text(BAD)
    command(["--format", "json"])
    assert [f["path"] for f in json.loads(capsys.readouterr().out)] == ["bad.py"]


def test_many_files_are_shared_among_processes(tmp_path, capsys):
    for i in range(120):
        (tmp_path / f"s{i:03d}.py").write_text(BAD if i % 2 else CLEAN)
    assert command([str(tmp_path), "--format", "json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [f["path"] for f in findings] == [str(tmp_path / f"s{i:03d}.py") for i in range(1, 120, 2)]


def test_nothing_heavy_is_imported():
    script = (
        "import sys, lockstep_lint.command\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'libcst', 'rich')"
        " or m.split('.')[0] == 'lockstep'])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
