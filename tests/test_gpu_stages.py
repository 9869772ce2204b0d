"""bench/device: `make gpu`, rehearsed at tiny size on the CPU, so that it does not fail on its own mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "bench" / "device" / "run.py"


def rehearse(folder, *only, compiled=False):
    environment = os.environ | {"TORCH_COMPILE_DISABLE": str(int(not compiled))}
    command = [sys.executable, str(RUN), "--toy", "--out", str(folder), "--only", *only]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in only}, done.stdout


def figures(result):
    return {each["figure"]: each for each in result["figures"]}


def test_stages_are_rehearsed_without_a_gpu_and_write_their_page(tmp_path):
    found, said = rehearse(tmp_path, "machine", "probe", "waits")
    assert {name: each["ended"] for name, each in found.items()} == dict.fromkeys(found, "done"), said
    probed = figures(found["probe"])
    compiled = "head and cross entropy: compiled, forward and backward"
    assert {"product: head, forward", compiled, "AdamW, fused"} <= set(probed)
    assert all(each["value"] > 0 for each in probed.values())
    assert all(each["value"] == 0 for each in figures(found["waits"]).values())
    page = (tmp_path / "gpu-results.md").read_text()
    assert "A rehearsal" in page
    assert "| AdamW, fused |" in page
    assert "## probe: done" in page


def test_what_is_planned_is_rehearsed_beside_what_is_held(tmp_path):
    found, said = rehearse(tmp_path, "plan")
    assert found["plan"]["ended"] == "done", said
    assert not [each for each in found["plan"]["other"] if "failed" in each], said
    seen = figures(found["plan"])
    assert len(seen) == 12
    assert seen["plan, bf16"]["aim"] == 0.05
    assert all(each["planned_gib"] > 0 for name, each in seen.items() if not name.endswith("more than planned"))


def test_without_a_gpu_it_ends_before_anything_is_written(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(RUN), "--only", "machine", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert "torch sees no CUDA device; name a Python that has both" in line
    assert not (tmp_path / "out").exists()


def test_a_stage_that_hangs_or_fails_ends_nothing_else(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RUN.parent))
    import run

    hung = run.run("hung", "-c 'import time; print(\"began\", flush=True); time.sleep(60)'", 2, tmp_path, False)
    assert (hung["ended"], hung["last"]) == ("took longer than 2 s", "began")
    line = json.dumps({"figure": "a", "value": 2.0, "unit": "s", "aim": 1.0, "better": "less"})
    (tmp_path / "fails.py").write_text(f"print({line!r})\nraise SystemExit(4)\n")
    failed = run.run("failed", str(tmp_path / "fails.py"), 30, tmp_path, False)
    assert failed["ended"] == "exit 4"
    (figure,) = failed["figures"]
    assert run.met(figure) == "no"
    assert run.met(figure | {"value": 0.5}) == "yes"
    assert run.met(figure | {"value": None}) == run.met(figure | {"aim": None}) == ""
    assert "| a | 2 s | <= 1 | no |  |" in run.document([failed], False)


def test_all_stages_together_take_25_minutes_at_most(monkeypatch):
    monkeypatch.syspath_prepend(str(RUN.parent))
    import run

    assert sum(limit for limit, _ in run.STAGES.values()) <= 1500
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert all(f"| {name} | {limit} s |" in page for name, (limit, _) in run.STAGES.items())


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_all_of_it_is_rehearsed_compiled_and_beside_the_others(tmp_path):
    found, said = rehearse(tmp_path, "parts", "contest", "exact", "large", compiled=True)
    assert {name: each["ended"] for name, each in found.items()} == dict.fromkeys(found, "done"), said
    assert figures(found["exact"])["exact, compiled: two runs have the same bits"]["value"] == 1
    assert "gpt2: throughput beside bare" in figures(found["contest"])
