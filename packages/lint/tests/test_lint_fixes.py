"""`--fix`: the safe corrections, and nothing else."""

import importlib

import pytest

from lockstep_lint import fixes
from lockstep_lint.command import command
from lockstep_lint.fixes import FixProblem, fix_text
from lockstep_lint.runner import check_text

SCRIPT = """\
import torch
from torch.utils.data import DataLoader


def train(model, data, optimizer, criterion, device):
    loader = DataLoader(data, num_workers=2, pin_memory=True)
    scaler = torch.cuda.amp.GradScaler(enabled=True)  # ünïcode
    total = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device, torch.long)
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss
    return total
"""
FIXED = (
    SCRIPT.replace("torch.cuda.amp.GradScaler(enabled", 'torch.amp.GradScaler("cuda", enabled')
    .replace("torch.cuda.amp.autocast()", 'torch.amp.autocast("cuda")')
    .replace("x.to(device), y", "x.to(device, non_blocking=True), y")
    .replace("+= loss", "+= loss.detach()")
)


def test_the_safe_corrections(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    command(["--hints", "--fix", "train.py"])
    once = path.read_text(encoding="utf-8")
    command(["--hints", "--fix", "train.py"])
    capsys.readouterr()
    assert path.read_text(encoding="utf-8").replace("torch.long, non_blocking=True", "torch.long") == FIXED
    assert "non_blocking" in once


def test_what_is_not_safe_stays(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import torch\nx = torch.load('cuda.pt')\n")
    assert command(["--hints", "--fix", str(path)]) == 0
    assert path.read_text() == "import torch\nx = torch.load('cuda.pt')\n"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "from nets import one\nm = torch.nn.DataParallel(one)\n",
            "fixed nothing: 1 finding, none that --fix can correct\n",
        ),
        (
            "from nets import one, two\nm = torch.nn.DataParallel(one)\nn = torch.nn.DataParallel(two)\n",
            "fixed nothing: 2 findings, none that --fix can correct\n",
        ),
        (
            "x = torch.load('a')\n",
            "fixed nothing: 1 finding, none that --fix can correct; --unsafe-fixes prints corrections to read first\n",
        ),
        ("s = torch.cuda.amp.GradScaler()\nx = torch.load('a')\n", "fixed 1 place\n"),
        ("x = 1\n", ""),
    ],
    ids=["one", "two", "proposed", "one of two", "no findings"],
)
def test_fix_says_what_it_did(tmp_path, capsys, text, said):
    (tmp_path / "requirements.txt").write_text("torch>=2.4\n")
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{text}")
    command(["--hints", "--fix", str(path)])
    assert capsys.readouterr().err == said


def test_positional_arguments_are_left_to_the_user():
    (finding,) = check_text("import torch\nwith torch.cuda.amp.autocast(True):\n    pass\n")
    assert finding.edit is None


def test_an_edit_of_a_chain_takes_the_whole_call():
    text = "import torch\nx = a.b(1).c(2)\n"
    edit = fixes.Edit("keyword", (2, 4, 2, 15), "d", "3")
    assert fix_text(text, [edit]) == ("import torch\nx = a.b(1).c(2, d=3)\n", 1)


def test_without_libcst_the_pip_line_is_given(monkeypatch, tmp_path, capsys):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(FixProblem, match=r"pip install libcst"):
        fix_text("x = 1\n", [])


def test_a_file_in_another_encoding_stays(tmp_path, capsys):
    path = tmp_path / "train.py"
    text = "# -*- coding: latin-1 -*-\n# é\nimport torch\nscaler = torch.cuda.amp.GradScaler()\n"
    path.write_bytes(text.encode("latin-1"))
    assert command(["--hints", "--fix", str(path)]) == 0
    assert path.read_bytes() == text.encode("latin-1")
    capsys.readouterr()
