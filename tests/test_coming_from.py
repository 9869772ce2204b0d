"""docs/coming-from.md: our lines run, each block is about twenty lines of Python, the flags exist."""

import ast
import re
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep import checkpoint
from lockstep.config.cli import option_list

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "coming-from.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
DIFFS = dict(re.findall(r"<!-- (\w+) kept -->\n```diff\n(.*?)```", TEXT, re.DOTALL))


def side(name, sign):
    """The lines of a diff before ("-") or after ("+") it."""
    lines = DIFFS[name].splitlines()
    assert all(line[:1] in ("", " ", "-", "+") for line in lines)
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", sign))


def test_our_lines_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS["shared"] + BLOCKS["lockstep"], "coming-from.md", "exec"), {})
    assert checkpoint.newest(tmp_path / "outputs" / "mine", say=print).name == "step-00000020"


def test_the_diffs_are_of_scripts_in_python():
    assert DIFFS.keys() == {"accelerate", "ddp", "hf"}
    for name in DIFFS:
        ast.parse(side(name, "-"))
        assert len(side(name, "-").splitlines()) < 32


@pytest.mark.parametrize(("name", "folder", "steps"), [("ddp", "model", 24), ("accelerate", "state", 8)])
def test_the_kept_loops_train(tmp_path, monkeypatch, name, folder, steps):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(BLOCKS["shared"] + side(name, "+"), "coming-from.md", "exec"), names)
    assert checkpoint.newest(tmp_path / folder, say=print).name == f"step-{steps:08d}"
    assert side(name, "+").count("\n") <= 20
    assert isinstance(names["model"][0], torch.nn.Linear)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_a_block_is_short_python(name):
    ast.parse(BLOCKS[name])
    assert len(BLOCKS[name].splitlines()) < 32


def test_every_flag_that_is_named_exists():
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z.-]+[a-z])", TEXT)}
    theirs = {"standalone", "nproc_per_node", "help", "help_all", "gradient_clip_val"}  # or of other commands
    theirs |= {"hf_script", "hf_args"}
    assert named - theirs <= set(option_list())
    assert lockstep.__all__


@pytest.mark.filterwarnings("ignore:::lightning")
def test_a_lightning_module_trains_here(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    theirs = BLOCKS["lightning"].replace("lightning.Trainer(", 'lightning.Trainer(accelerator="cpu", logger=False, ')
    made = "\n".join(line for line in theirs.splitlines() if not line.startswith("trainer.fit"))
    names = {}
    code = BLOCKS["shared"] + "import lockstep\n" + made + "\n" + BLOCKS["lightning_module"]
    exec(compile(code, "coming-from.md", "exec"), names)
    assert names["result"].global_step == 20
    assert checkpoint.newest(tmp_path / "outputs" / "Module", say=print).name == "step-00000020"


def test_a_trainer_trains_here(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    made = side("hf", "+").replace('"out", ', '"out", use_cpu=True, report_to="none", ')
    names = {}
    code = BLOCKS["shared"] + made
    exec(compile(code, "coming-from.md", "exec"), names)
    assert names["result"].global_step == 20
    assert checkpoint.newest(tmp_path / "out", say=print).name == "step-00000020"
