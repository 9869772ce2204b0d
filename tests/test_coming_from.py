"""docs/coming-from.md: our lines run, and every block is Python of about twenty lines."""

import ast
import re
from pathlib import Path

import pytest

import lockstep
from lockstep import checkpoint
from lockstep.config.options import option_list

TEXT = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))


def test_our_lines_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS["shared"] + BLOCKS["lockstep"], "coming-from.md", "exec"), {})
    assert checkpoint.newest(tmp_path / "outputs" / "mine", say=print).name == "step-00000020"


def test_the_kept_loop_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS["shared"] + "import lockstep\n" + BLOCKS["kept"], "coming-from.md", "exec"), {})
    assert checkpoint.newest(tmp_path / "model", say=print).name == "step-00000024"


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_a_block_is_short_python(name):
    ast.parse(BLOCKS[name])
    assert len(BLOCKS[name].splitlines()) < 32


def test_every_flag_that_is_named_exists():
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z.-]+[a-z])", TEXT)}
    theirs = {"standalone", "nproc_per_node", "help", "help_all", "gradient_clip_val"}
    assert named - theirs <= set(option_list())
    assert lockstep.__all__


def test_a_trainer_trains_here(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    theirs = BLOCKS["hf"].replace('"out", ', '"out", use_cpu=True, report_to="none", ')
    made = theirs.replace("trainer.train(resume_from_checkpoint=None)\n", "")
    assert made.count("\n") == theirs.count("\n") - 1
    names = {}
    code = BLOCKS["shared"] + "import lockstep\n" + made + BLOCKS["trainer"]
    exec(compile(code, "coming-from.md", "exec"), names)
    assert names["result"].global_step == 20
    assert checkpoint.newest(tmp_path / "out", say=print).name == "step-00000020"
