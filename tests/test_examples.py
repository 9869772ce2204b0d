"""The examples run as they stand, alone and on two processes.

Those whose training other tests have are marked slow; that what they import is there is checked of all.
"""

import ast
import importlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import warm
from hub_files import texts, write_jsonl
from shell import await_listener, environment, free_port, inspected

from lockstep.logging.jsonl import read

EXAMPLES = Path(__file__).parent.parent / "examples"


def go(name, *flags, processes=0):
    launcher = ["-m", "lockstep", "launch", f"--nproc-per-node={processes}", "--"] if processes else []
    arguments = [warm.python(), *launcher, str(EXAMPLES / name), *flags]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_own_task_has_the_same_bits_alone_and_on_two(tmp_path):
    shown = [
        go("own_task.py", "--max-steps", "60", "--eval-freq", "30", "--save-dir", str(tmp_path / f"{n}"), processes=n)
        for n in (0, 2)
    ]
    assert all(out.count("step 30: accuracy ") == out.count("step 60: accuracy ") == 1 for out in shown)
    assert inspected(tmp_path / "0" / "spirals") == inspected(tmp_path / "2" / "spirals")


def test_own_loop_is_the_same_alone_on_two_and_after_a_resume(tmp_path):
    alone = go("own_loop.py", "--epochs", "4", "--folder", str(tmp_path / "alone"))
    go("own_loop.py", "--epochs", "2", "--folder", str(tmp_path / "two"))
    assert go("own_loop.py", "--epochs", "4", "--folder", str(tmp_path / "two"), processes=2) == alone
    assert 2 < numbers(alone, "error")[0] < 8  # 16 before training
    loop = (
        (EXAMPLES / "own_loop.py").read_text().partition("world = ")[2].partition("for step in lockstep.loader(held")[0]
    )
    assert len(loop.splitlines()) <= 20


@pytest.mark.slow
def test_segmentation_has_the_same_bits_alone_and_on_two(tmp_path):
    for processes in (0, 2):
        shown = go(
            "segmentation.py", "--max-steps", "20", "--save-dir", str(tmp_path / f"{processes}"), processes=processes
        )
        assert float(shown.rpartition("'iou': ")[2].partition("}")[0]) > 0.3
    assert inspected(tmp_path / "0" / "discs") == inspected(tmp_path / "2" / "discs")
    assert len((EXAMPLES / "segmentation.py").read_text().splitlines()) < 40


def test_my_training_as_a_project_would_run_it():
    quiet = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    arguments = [warm.python(), "-m", "pytest", *quiet, str(EXAMPLES / "test_my_training.py")]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def numbers(shown, word):
    """What stands behind `word` in each line that has it."""
    return [float(found) for found in re.findall(rf"{word} (-?[\d.]+(?:e-?\d+)?)", shown)]


def test_images_learns_and_says_its_f1(tmp_path):
    shown = go("images.py", "--max-steps", "60", "--eval-freq", "30", "--save-dir", str(tmp_path))
    (f1,) = numbers(shown, "best F1")
    assert 0.8 < f1 <= 1
    assert "one-cycle" in (tmp_path / "digits" / "config.toml").read_text()


def test_a_gan_of_two_engines_is_the_same_alone_and_on_two():
    alone, two = (numbers(go("gan.py", "--steps", "50", processes=count), "off") for count in (0, 2))
    assert len(alone) == len(two) == 1
    assert two == pytest.approx(alone, abs=0.02)  # rank 0 prints its own points


@pytest.mark.slow
def test_lora_trains_adapters_and_exports_them(tmp_path, weights_folder):
    notes = write_jsonl(tmp_path / "notes.jsonl", [{"text": text} for text in texts(60)])
    flags = (
        f"--max-steps 4 --eval-freq 2 --batch-size 4 --seq-len 16 --save-dir {tmp_path} --data.cache {tmp_path}/cache"
    )
    names = ["--model-name", str(weights_folder), "--dataset-name", str(notes)]
    shown = go("lora.py", *flags.split(), *names)
    assert len(numbers(shown, "step [24]: evaluation loss")) == 2
    assert re.search(r"^\d+ numbers of adapters$", shown, re.MULTILINE)
    assert (tmp_path / "tuned-adapters" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_a_sweep_takes_the_best_and_tells_what_it_has(tmp_path):
    flags = ("--max-steps", "40", "--save-dir", str(tmp_path))
    shown = [go("sweep.py", *flags).splitlines()[-1] for _ in range(2)]
    assert shown[0] == shown[1]
    losses = {}
    for rate in ("0.001", "0.01", "0.1"):
        records = read(tmp_path / f"lr-{rate}" / "metrics.jsonl")
        (losses[rate],) = [record["evaluation/loss"] for record in records if "evaluation/loss" in record]
    best = min(losses, key=losses.get)
    assert shown[0] == f"best: lr {best}, evaluation loss {losses[best]:.4f}, 4482 parameters"


def test_find_lr_continues_until_divergence_and_names_a_rate(tmp_path):
    shown = go("find_lr.py", "--save-dir", str(tmp_path))
    rates, losses = numbers(shown, "rate"), numbers(shown, "loss")
    assert rates[:2] == [1e-7, 1.2e-7]
    assert 70 < len(losses) <= 100
    assert losses[-1] > 2 * losses[0]
    (fastest,) = numbers(shown, "at a rate of")
    assert 3e-4 < fastest < 0.01


@pytest.mark.slow
def test_the_notebooks_cells_run_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, names = notebook(), {}
    for cell in code:
        exec(compile(cell, "notebook.ipynb", "exec"), names)
    assert names["run"].result.status == "finished"
    assert len(names["losses"]) == 250
    assert names["run"].best.value > 0.8
    for cell in code:  # once more: the run is finished, and says so
        exec(compile(cell, "notebook.ipynb", "exec"), names)
    assert names["losses"] == []


def lines(text):
    """Lines that hold more than space and comments; docstrings count."""
    return sum(bool(row.strip()) and not row.strip().startswith("#") for row in text.splitlines())


def notebook():
    """The text of each of the notebook's code cells."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_an_example_is_short(path):
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" else "\n".join(notebook())
    assert lines(text) < 40


@pytest.mark.parametrize(
    "path", [*sorted(EXAMPLES.glob("*.py")), EXAMPLES / "notebook.ipynb"], ids=lambda path: path.name
)
def test_what_an_example_uses_of_lockstep_exists(path):
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" else "\n".join(notebook())
    used = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lockstep":
            used += [(node.module, alias.name) for alias in node.names]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lockstep":
            used.append(("lockstep", node.attr))
    assert not [name for module, name in used if not hasattr(importlib.import_module(module), name)]


def test_there_is_no_example_without_a_test():
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    own = Path(__file__).read_text(encoding="utf-8")
    assert {name for name in files if f'"{name}"' not in own} == set()


@pytest.mark.slow
def test_the_command_for_skypilot_trains_on_two_machines(tmp_path):
    """Its file says what each machine runs; SkyPilot sets these variables."""
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    program = tmp_path / "lockstep"
    program.write_text(f'#!/bin/sh\nexec {warm.python()} -m lockstep "$@"\n')
    program.chmod(0o755)
    variables = {"SKYPILOT_NUM_NODES": str(job["num_nodes"]), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    variables |= {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    variables |= {"SAVE_DIR": str(tmp_path / "runs"), "FLAGS": "--max-steps 4 --device cpu --timeout 30"}
    port, machines = free_port(), []
    variables |= {"PET_MASTER_PORT": str(port)}  # the test's own, in place of the default
    for rank in range(2):
        environ = environment(**variables, SKYPILOT_NODE_RANK=str(rank))
        words = ["bash", "-c", job["run"]]
        machines.append(subprocess.Popen(words, env=environ, cwd=EXAMPLES.parent, stdout=-1, stderr=-2, text=True))
        await_listener(port, machines[0])
    shown = [machine.communicate(timeout=120)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], shown
    assert "over 2 ranks" in shown[0]
    assert job["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
