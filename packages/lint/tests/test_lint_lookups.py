"""LS005: models that a name chooses at run time, in a table, a module, a package or a registry."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

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
