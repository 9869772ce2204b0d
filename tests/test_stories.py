"""bench/stories: the table of docs/benchmarks.md is that of the programs, and lockstep's do what their story says."""

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path

import hub_files
import pytest
from safetensors.torch import load_file

from lockstep.cli import dispatch

ROOT = Path(__file__).parents[1]
STORIES = runpy.run_path(str(ROOT / "bench" / "stories.py"))


def test_the_document_has_the_table_of_the_programs():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert STORIES["BEGIN"] + STORIES["table"]() + STORIES["END"] in text


def test_statement_counts_once_however_split_and_imports_do_not(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""Said."""\n\nimport os\nfrom sys import (\n    argv,\n)\n\n'
        '# why\nx = (\n    1,\n    2,\n)\n\n\ndef f():\n    """Said."""\n    return x\n'
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


def test_chat_is_learned_exported_and_answered_by_the_docs(tmp_path, monkeypatch, capsys):
    chats = runpy.run_path(str(ROOT / "bench" / "chats.py"))
    model = hub_files.write_model(tmp_path / "model", weights=True, n_positions=256, pad_token_id=0)
    (model / "chat_template.jinja").write_text(STORIES["TEMPLATE"])
    (tmp_path / "chats").mkdir()
    for split, count, seed in (("train", 40, 0), ("validation", 8, 1)):
        hub_files.write_jsonl(tmp_path / "chats" / f"{split}.jsonl", chats["chats"](count, seed))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    story = (ROOT / "bench" / "stories" / "chats" / "lockstep.sh").read_text().replace("$SEED", "0 --no-report")
    train, export = (shlex.split(line)[1:] for line in story.splitlines())
    assert dispatch([*train, "--data.cache", "cache"]) == 0
    said = capsys.readouterr()
    assert re.search(r"40 conversations, [\d,]+ of [\d,]+ tokens learned; 10 steps an epoch, 30 in the run\n", said.err)
    assert re.search(r"warning: the run has 30 steps.*--num-epochs 5", said.err)
    log = (tmp_path / "outputs" / "tuned" / "logs" / "rank-00000.log").read_text()
    assert "attention: " in log
    assert "attention: " not in said.err + said.out
    assert dispatch(export) == 0
    assert (tmp_path / "tuned" / "config.json").is_file()
    assert dispatch(["evaluate", "outputs/tuned"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert dispatch(["generate", "outputs/tuned", "--prompt", "where does the fox live?"]) == 0
    assert capsys.readouterr().out.strip()
