"""The golden set (golden/capture.py): help, bits and checkpoints of the past are what they were."""

import json
import shutil
import sys

import pytest
import warm
from golden import capture

PYTHON = (3, 11)  # whose argparse wrote help.txt


@pytest.fixture(autouse=True)
def started_fast(monkeypatch):
    monkeypatch.setattr(sys, "executable", warm.python())


@pytest.mark.skipif(sys.version_info[:2] != PYTHON, reason="argparse of another Python words help otherwise")
def test_help_is_what_it_was(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert capture.help_text() == (capture.HERE / "help.txt").read_text()


def test_exact_bits_are_what_they_were(tmp_path):
    """On the machine that wrote the certificate every bit, elsewhere within the rounding of its operations."""
    capture.lockstep(tmp_path, "verify", "--task", "task.py:Golden", "--against", capture.HERE / "certificate.json")


@pytest.mark.parametrize("engine", capture.ENGINES)
def test_a_checkpoint_of_the_past_resumes(engine, tmp_path):
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    shutil.copytree(capture.HERE / "checkpoints" / engine, tmp_path / engine)
    capture.train(tmp_path, engine)
    wanted = json.loads((capture.HERE / "checkpoints" / "losses.json").read_text())[engine]
    found = capture.losses(tmp_path / engine)
    assert list(found) == [int(step) for step in wanted] == list(range(capture.SAVED + 1, capture.STEPS + 1))
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-5)
