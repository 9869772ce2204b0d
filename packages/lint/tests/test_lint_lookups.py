"""Models (LS005), and any other classes, that a name chooses at run time in a table, a module or a registry."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

NET = "import torch\nfrom torch import nn\nfrom registry import MODELS\n\n@MODELS.register()\nclass {0}(nn.Module):\n"
NET += "    def __init__(self):\n        super().__init__()\n        self.norm = nn.{1}(8)\n"
RUN = """
import importlib
import torch
import absent
from models import first, second
from registry import MODELS
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def get_model(name):
    {get}

class Outer(nn.Module):
    def __init__(self, name):
        super().__init__()
        chosen = importlib.import_module("models." + name).__getattribute__("Net")
        self.inner = chosen()

def wrap(name, local_rank):
    model = {made}
    return DDP(model.to(local_rank), device_ids=[local_rank])
"""
TABLE = "TABLE = {'a': first.Net, 'b': second.Net}\n    return TABLE[name]"
MADE = [
    ("get_model(name)()", TABLE),
    ("get_model(name)", TABLE + "()"),
    ("get_model(name)()", "return getattr(first, name)"),
    ("first.__dict__[name]()", "pass"),
    ("get_model(name)()", "return importlib.import_module('models.' + name).Net"),
    ("get_model(name)()", "return getattr(importlib.import_module(f'models.{name}'), 'Net')"),
    ("get_model(name)()", "return MODELS.get(name)"),
    ("MODELS[name]()", "pass"),
]


def told(folder, made, get, norms):
    (folder / "models").mkdir()
    (folder / "pyproject.toml").write_text("")
    (folder / "registry.py").write_text("class Registry(dict):\n    pass\n\nMODELS = Registry()\n")
    (folder / "models/__init__.py").write_text("")
    for name, norm in zip(("first", "second"), norms, strict=True):
        (folder / f"models/{name}.py").write_text(NET.format("Net", norm))
    (folder / "run.py").write_text(RUN.format(made=made, get=get))
    return bool(check_paths([str(folder / "run.py")], configure({}, "LS005", "")))


@pytest.mark.parametrize(("made", "get"), MADE)
def test_told_where_most_of_the_models_have_batch_norm(tmp_path, made, get):
    assert told(tmp_path, made, get, ("BatchNorm1d", "BatchNorm1d"))


@pytest.mark.parametrize(("made", "get"), MADE)
def test_silent_where_the_models_normalise_otherwise(tmp_path, made, get):
    assert not told(tmp_path, made, get, ("LayerNorm", "LayerNorm"))


def test_silent_where_half_of_a_table_is_not_known(tmp_path):
    get = "TABLE = {'a': first.Net, 'b': absent.Net}\n    return TABLE[name]"
    assert not told(tmp_path, "get_model(name)()", get, ("BatchNorm1d", "BatchNorm1d"))


@pytest.mark.parametrize(("made", "get"), [MADE[0], MADE[4], MADE[6]])
def test_silent_where_only_half_of_them_have(tmp_path, made, get):
    assert not told(tmp_path, made, get, ("BatchNorm1d", "LayerNorm"))


CHOSEN = """
import torch.distributed as dist
import trainers

class Base:
    def report(self, loss):
        dist.all_reduce(loss)

@TRAINERS.register()
class Small(Base):
    def size(self):
        return 1

@TRAINERS.register("large")
class Large(Base):
{body}

TABLE = {{"small": Small, "large": Large}}

def main(name, loss):
    dist.init_process_group("nccl")
    trainer = {made}
    if dist.get_rank() == 0:
        trainer.report(loss)
    dist.destroy_process_group()
"""
WAYS = ["TABLE[name]()", "TABLE.get(name)()", "{'a': Small, 'b': Large}[name]()", "TRAINERS.build(name)", "Large()"]


@pytest.mark.parametrize("made", WAYS)
def test_a_method_that_all_candidates_share_is_followed(made):
    assert chosen(made, "    pass") == ["LS018"]


@pytest.mark.parametrize("made", WAYS)
def test_a_method_that_a_candidate_has_of_its_own_is_not(made):
    assert chosen(made, "    def report(self, loss):\n        print(float(loss))") == []


@pytest.mark.parametrize("made", ["TABLE['large']()", "TABLE.get('large')()"])
def test_a_written_key_chooses_one(made):
    body = "    def report(self, loss):\n        dist.barrier()"
    assert chosen(made, body) == ["LS018"]


def test_a_table_with_an_entry_out_of_sight_is_not_followed():
    assert chosen("{'a': Small, 'b': trainers.Other}[name]()", "    pass") == []


def chosen(made, body):
    text = CHOSEN.format(made=made, body=body)
    return [finding.rule for finding in check_text(text, configure({}, "LS018", ""))]
