"""bench/device: `make gpu`, rehearsed at tiny size on the CPU, so that it does not fail on its own mistakes."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "bench" / "device" / "run.py"


@pytest.fixture
def stages(monkeypatch):
    """The module of the stages."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    import run

    return run


def started(*flags, compiled=False, **variables):
    environment = os.environ | {"TORCH_COMPILE_DISABLE": str(int(not compiled))} | variables
    command = [sys.executable, str(RUN), *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)


def rehearse(folder, *only, compiled=False):
    done = started("--toy", "--out", str(folder), "--only", *only, compiled=compiled)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(folder / "logs.tgz") as archive:
        results = json.loads(archive.extractfile("results.json").read())
        assert {f"{name}.log" for name in only} <= set(archive.getnames())
    return {each["stage"]: each for each in results}, done.stdout


def figures(result):
    return {each["figure"]: each for each in result["figures"]}


def test_stages_rehearse_without_a_gpu_and_write_a_tarball(tmp_path):
    found, said = rehearse(tmp_path, "machine", "one")
    assert {name: each["ended"] for name, each in found.items()} == dict.fromkeys(found, "done"), said
    assert not [each for stage in found.values() for each in stage["other"] if "failed" in each], said
    seen = figures(found["one"])
    assert seen["waits for the device a step"]["value"] == 0
    saves = [each for name, each in seen.items() if "holds the loop" in name]
    assert len(saves) == 2
    assert all(each["aim"] == 0.1 for each in saves)
    found, _ = rehearse(tmp_path, "probe")  # a later call adds to what is there
    assert set(found) == {"machine", "one", "probe"}
    compiled = "head and cross entropy: compiled, forward and backward"
    assert {"product: head, forward", compiled, "AdamW, fused"} <= set(figures(found["probe"]))
    assert all(each["value"] > 0 for each in figures(found["probe"]).values())
    page = (tmp_path / "gpu-results.md").read_text()
    assert "A rehearsal" in page
    assert "| AdamW, fused |" in page
    assert "## one: done" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-results.md", "logs.tgz"]


def test_what_is_planned_is_rehearsed_beside_what_is_held(tmp_path):
    found, said = rehearse(tmp_path, "plan")
    assert found["plan"]["ended"] == "done", said
    assert not [each for each in found["plan"]["other"] if "failed" in each], said
    seen = figures(found["plan"])
    assert len(seen) == 12
    assert seen["plan, bf16"]["aim"] == 0.05
    assert all(each["planned_gib"] > 0 for name, each in seen.items() if not name.endswith("more than planned"))


def test_bad_input_is_one_line_before_anything_is_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for flags, word in (
        (("--only", "machine", "--out", str(tmp_path / "out")), "torch sees no CUDA device"),
        (("--toy", "--only", "machine", "--out", str(blocked / "out")), str(blocked / "out")),
    ):
        done = started(*flags, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 2
        (line,) = done.stdout.splitlines()
        assert word in line
    done = started("--toy", "--only", "machines")
    assert done.returncode == 2
    assert "'machine', 'tests', 'contest'" in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def call(stages, out, monkeypatch, programs, seconds=60.0):
    """Runs stages made of lines of Python, beside `tests` their rehearsals, as on a device."""
    kinds = {}
    for name, (code, rehearsed) in programs.items():
        (out / f"{name}.py").write_text(code)
        kinds[name] = stages.Stage(1, 30, str(out / f"{name}.py"), rehearsed)
    monkeypatch.setattr(stages, "STAGES", kinds)
    monkeypatch.setattr(stages, "BESIDE", {"warm": str(out / "tests.py")})
    made = stages.Call(out, False, seconds)
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    well = made.run(list(programs), logs)
    return well, {each["stage"]: each["ended"] for each in made.results}


LINE = json.dumps({"figure": "a", "value": 2.0, "unit": "s", "aim": 1.0, "better": "less"})
GOOD = f"print({LINE!r})\n"
BAD_REHEARSAL = f"import sys\nif '--tiny' in sys.argv: raise SystemExit(3)\n{GOOD}"


def test_failed_rehearsal_skips_its_stage_or_ends_an_essential(stages, tmp_path, monkeypatch):
    tests = ("print('1 passed')\n", None)
    programs = {"tests": tests, "contest": (BAD_REHEARSAL, ""), "one": (GOOD, "")}
    well, ended = call(stages, tmp_path, monkeypatch, programs)
    assert well
    assert ended["contest"] == "left out: its rehearsal failed"
    assert ended["rehearsal of contest"] == "exit 3"
    assert ended["one"] == ended["tests"] == "done"
    well, ended = call(stages, tmp_path, monkeypatch, programs | {"one": (BAD_REHEARSAL, ""), "after": (GOOD, "")})
    assert not well
    assert "after" not in ended


def test_stage_that_hangs_or_fails_ends_nothing_else(stages, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "LEAST", 1)
    monkeypatch.setattr(stages, "GRACE", 1)
    hangs = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('FAILED tests/a.py::b - x')\n"
    programs = {"fails": (f"{GOOD}raise SystemExit(4)\n", None), "hangs": (hangs, None), "late": (GOOD, None)}
    _, ended = call(stages, tmp_path, monkeypatch, programs, seconds=6)
    assert ended["fails"] == "exit 4"
    assert ended["hangs"].startswith("took longer than")  # interrupted first: it prints what failed
    assert "- `tests/a.py::b - x`" in (tmp_path / "gpu-results.md").read_text()
    assert ended["late"] == "left out: no time"
    figure = json.loads(LINE)
    assert stages.met(figure) == "no"
    assert stages.met(figure | {"value": 0.5}) == "yes"
    assert stages.met(figure | {"value": None}) == stages.met(figure | {"aim": None}) == ""
    assert "| a | 2 s | <= 1 | no |  |" in (tmp_path / "gpu-results.md").read_text()


def test_the_two_calls_fit_their_limits_and_stand_in_the_page(stages):
    page = (ROOT / "docs" / "inside" / "gpu.md").read_text()
    for number, limit in stages.LIMITS.items():
        mine = {name: stage for name, stage in stages.STAGES.items() if stage.call == number}
        assert sum(stage.limit for stage in mine.values()) <= limit
        for name, stage in mine.items():
            assert f"| {name} | {stage.limit} s |" in page
    assert stages.LIMITS == {1: 510, 2: 240}


def test_a_card_has_the_peak_of_its_own_kind(stages):
    import common

    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GeForce RTX 4090", None),
    ):
        assert common.peak_of(name) == peak


def test_an_error_in_one_contestant_is_a_line_and_not_the_end(stages, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import argparse

    import gpu
    import torch

    class Group:
        """A contestant that takes a second a turn, or fails in one."""

        def __init__(self, who, fails=99):
            self.who, self.fails, self.turns = who, fails, 0
            self.times, self.alive, self.ended = [], True, False
            self.began = {"start": 1.0, "first": 2.0}

        def turn(self, steps):
            self.turns += 1
            if self.turns == self.fails:
                raise RuntimeError("out of memory\nmore")
            return {"loss": 6.0, "memory": 1.0} if steps == 0 else 1.0

        def end(self):
            self.ended = True

    groups = {"bare": Group("bare"), "lockstep": Group("lockstep"), "hf": Group("hf", fails=3)}
    arguments = argparse.Namespace(
        model="gpt2", only=list(groups), scope="blocks", rounds=4, steps=2, seconds=60, at_once=3, micro=0, batch=0
    )
    arguments.small = arguments.toy = True
    arguments.device = torch.device("cpu")
    contest = gpu.Contest(arguments)
    monkeypatch.setattr(contest, "start", lambda who: contest.groups.append(groups[who]) or groups[who])
    contest.run()
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [each["failed"] for each in said if "failed" in each] == ["hf"]
    assert {"gpt2: speed of lockstep beside bare", "gpt2, compiled: blocks: bare"} <= {
        each["figure"] for each in said if "figure" in each
    }
    assert all(group.ended for group in groups.values())
    assert len(groups["lockstep"].times) == 4


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_all_of_it_is_rehearsed_compiled_and_beside_the_others(stages, tmp_path):
    names = [name for name, stage in stages.STAGES.items() if stage.call and name != "tests"]
    found, said = rehearse(tmp_path, *names, "default-loss", "llama", "large-options", compiled=True)
    assert {name: each["ended"] for name, each in found.items()} == dict.fromkeys(found, "done"), said
    assert figures(found["exact"])["exact, compiled: two runs have the same bits"]["value"] == 1
    assert "gpt2: speed of lockstep beside bare" in figures(found["contest"])
