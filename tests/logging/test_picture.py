"""`lockstep train --find-lr` where the extra `plot` is not installed: all but the picture."""

import sys
from pathlib import Path

from lockstep.cli import dispatch

MINE = """
import sys
sys.path.insert(0, {tests!r})
from toys import Ragged

class Mine(Ragged):
    pass
"""


def test_a_plain_install_finds_the_rate_and_says_how_to_have_the_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "mine.py").write_text(MINE.format(tests=str(Path(__file__).parents[1])))
    flags = ["--task", f"{tmp_path / 'mine.py'}:Mine", "--device", "cpu", "--batch-size", "8", "--experiment-name", "r"]
    assert dispatch(["train", "--find-lr", *flags, "--save-dir", str(tmp_path / "out")]) == 0
    *curve, last = capsys.readouterr().out.strip().splitlines()
    assert last == "no picture: plotting needs matplotlib: install the extra plot of torch-lockstep"
    assert any("--lr" in line for line in curve)
    assert not (tmp_path / "out" / "r").exists()
