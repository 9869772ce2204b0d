"""bench/trace: mistakes planted into scripts of four frameworks are named, and the correct scripts raise no alarm."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from lockstep.verify import FAULTS
from lockstep.verify.faults import fault

BENCH = Path(__file__).parents[2] / "bench" / "trace"
SCRIPTS = ("ddp", "accelerate", "lightning", "hf")


def cases(*names: str, seconds: float) -> str:
    """What cases.py prints of these; it ends with 0 only where 0.9 of the mistakes are named and no pair alarms."""
    words = [warm.python(), str(BENCH / "cases.py"), "--only", ",".join(names)]
    source = str(BENCH.parents[1] / "src")
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=seconds, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needs(script: str) -> None:
    """Skips where the framework of a script is not installed; CI installs all of them (the extra `dev`)."""
    names = {"accelerate": "accelerate", "lightning": "lightning", "hf": "transformers"}
    if script in names:
        pytest.importorskip(names[script], reason=f"train_{script}.py is a script of {names[script]}")


def table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "table", raising=False)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    import table

    monkeypatch.delitem(sys.modules, "table")
    monkeypatch.delitem(sys.modules, "toy")
    return table


def test_every_verify_mistake_is_in_every_script_or_has_a_reason(monkeypatch):
    found = table(monkeypatch)
    planted = {(case.script, case.mistake) for case in found.CASES if not case.own}
    # The scripts' models are not divided over ranks.
    wanted = {(script, name) for script in SCRIPTS for name in FAULTS if not fault(name).divided}
    assert planted | set(found.LEFT_OUT) == wanted
    assert not planted & set(found.LEFT_OUT)
    assert all(found.LEFT_OUT.values())
    assert sum(case.own for case in found.CASES) >= 6
    assert len(found.HEALTHY) >= 24


def test_the_scripts_have_the_mistakes_of_the_table(monkeypatch):
    found = table(monkeypatch)
    for script in (*SCRIPTS, "kinds"):
        tree = ast.parse((BENCH / f"train_{script}.py").read_text(encoding="utf-8"))
        value = next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "MISTAKES")
        offered = {node.value for node in ast.walk(value) if isinstance(node, ast.Constant)}
        assert offered == {case.mistake for case in found.CASES if case.script == script}


@pytest.mark.parametrize(
    ("script", "mistakes"),
    [
        ("ddp", ("rank-average", "other-rate")),
        pytest.param("accelerate", ("rank-average", "scheduler-twice"), marks=pytest.mark.slow),
        ("lightning", ("rank-average",)),
        pytest.param("hf", ("tokens-per-device",), marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_named_and_the_correct_script_is_silent(script, mistakes):
    needs(script)
    names = [f"{script}:{mistake}" for mistake in mistakes]
    said = cases(f"healthy:{script}:ragged labels", *names, seconds=280)
    assert f"mistakes: {len(names)} of {len(names)}" in said
    assert "healthy pairs: 1 of 1" in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("script", SCRIPTS)
def test_nearly_all_mistakes_are_named_without_false_alarms(script):
    needs(script)
    said = cases(f"{script}:", seconds=3500)
    assert "healthy pairs: 8 of 8" in said
