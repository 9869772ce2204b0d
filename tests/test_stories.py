"""bench/stories: the table of docs/benchmarks.md is that of the programs, and lockstep's do what their story says."""

import ast
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
STORIES = runpy.run_path(str(ROOT / "bench" / "stories.py"))


def test_the_document_has_the_table_of_the_programs():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert STORIES["BEGIN"] + STORIES["table"]() + STORIES["END"] in text


def test_a_statement_counts_once_however_it_is_broken(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""Said."""\n\n# why\nx = (\n    1,\n    2,\n)\n\n\ndef f():\n    """Said."""\n    return x\n'
    )
    (tmp_path / "a.sh").write_text("# why\nlockstep train \\\n    --lr 1\n\nlockstep export a b\n")
    assert [STORIES["lines"](tmp_path / name) for name in ("a.py", "a.sh")] == [3, 2]


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "stories").rglob("*.py")), ids=lambda path: str(path)[-24:])
def test_every_program_is_python(path):
    ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Runs lockstep's program of a story in an empty folder, and returns its last line and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench" / "stories"), *sys.path])

    def run(story):
        path = ROOT / "bench" / "stories" / story / "lockstep.py"
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
        shown = capsys.readouterr()
        return (shown.out.splitlines() or [""])[-1], shown.err

    return run


def test_own_cnn(program):
    assert 0.9 < float(program("cnn")[0].removeprefix("F1 ")) <= 1


def test_sweep(program):
    assert program("sweep")[0] == "best 0.01"


def test_resume_and_export(program, tmp_path):
    program("resume")
    first = load_file(tmp_path / "digits.safetensors")
    assert "finished" in "".join(program("resume"))
    again = load_file(tmp_path / "digits.safetensors")
    assert first.keys() == again.keys()
    assert all(first[name].equal(again[name]) for name in first)
