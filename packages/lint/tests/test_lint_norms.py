"""LS005: where BatchNorm layers come from, through wrappers, builders, options and the settings that they are given."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

NETS = """
import torch
from torch import nn

def norm(kind, width):
    if kind == "BN":
        return nn.BatchNorm2d(width)
    elif kind == "GN":
        return nn.GroupNorm(4, width)

class Block(nn.Module):
    def __init__(self, kind="BN", width=8):
        super().__init__()
        self.kind = kind
        self.layer = norm(self.kind, width)
        for layer in self.modules():
            if isinstance(layer, (nn.BatchNorm2d, nn.SyncBatchNorm)):
                nn.init.ones_(layer.weight)

class Switched(nn.Module):
    def __init__(self, bn=False):
        super().__init__()
        self.bn = bn
        if self.bn == True:
            self.layer = nn.BatchNorm2d(8)
        self.last = nn.BatchNorm2d(8) if bn else nn.Identity()

class Normed(nn.Module):
    def __init__(self, norm_layer=nn.BatchNorm2d):
        super().__init__()
        self.layer = norm_layer(8)

class Chosen(nn.Module):
    def __init__(self, layers):
        super().__init__()
        if isinstance(layers, tuple):
            self.body = Block()
        else:
            self.body = nn.Linear(4, 4)

class Around(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

class Holder(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

class Teacher(nn.Module):
    def __init__(self, like):
        super().__init__()
        self.layer = nn.Linear(like.width, 4)

def small(width):
    return Block(width=width), width

def plain(width):
    return nn.Linear(width, 4), width

def build(width):
    return small(width)

def build_all(width):
    return build(width)
"""
RUN = """
import torch
import torchvision
import nets
from torch import nn
from torchvision import models
from torch.nn.parallel import DistributedDataParallel as DDP
from fastargs import Param, Section

Section("model").params(arch=Param(str, default="{default}"))

CFG = Section("all")
CFG.MODEL.KIND = "resnet50"

class Options:
    kind: str = "resnet50"

def pick_one(kind):
    return getattr(torchvision.models, kind)()

def pick(module, config):
    return getattr(module, config["arch"]["type"])(**config["arch"]["args"])

def wrap(model, local_rank):
    model = DDP(
        model,
        device_ids=[local_rank],
    )
    return model

def main(name, config, local_rank):
    {made}
    return wrap(model.cuda(), local_rank)
"""


def told(folder, made, default="resnet18"):
    (folder / "pyproject.toml").write_text("")
    (folder / "nets.py").write_text(NETS)
    (folder / "run.py").write_text(RUN.format(made=made, default=default))
    return bool(check_paths([str(folder / "run.py")], configure({}, "LS005", "")))


@pytest.mark.parametrize(
    "made",
    [
        "model = nets.Block()",
        "model = nets.Block(**config)",
        "model = nets.Block('BN')",
        "model = nets.Switched(bn=True)",
        "model = nets.Normed()",
        "model = nets.Holder(nets.Block())",
        "body = nets.Block()\n    model = nets.Holder(body=body)",
        "model = nn.Sequential(nets.Block(), nn.Linear(8, 2))",
        "model, width = nets.build_all(8)",
    ],
)
def test_told_where_the_model_has_batch_norm_by_what_it_is_given(tmp_path, made):
    assert told(tmp_path, made)


@pytest.mark.parametrize(
    "made",
    [
        "model = torchvision.models.__dict__[CFG.MODEL.KIND]()",
        "model = pick_one('densenet121')",
    ],
)
def test_the_name_that_is_looked_up_counts_more_than_other_options(tmp_path, made):
    assert told(tmp_path, made, "vit_b_16")


@pytest.mark.parametrize(
    ("made", "default"),
    [
        ("model = nets.Block('GN')", ""),
        ("model = nets.Block(kind='GN')", ""),
        ("model = nets.Switched()", ""),
        ("model = nets.Normed(norm_layer=nn.LayerNorm)", ""),
        ("model = nets.Chosen(name)", ""),
        ("model = nets.Teacher(nets.Block())", ""),
        ("model = nets.Holder(nets.Block('GN'))", ""),
        ("model, width = nets.plain(8)", ""),
        ("model = getattr(models, name)(pretrained=True)", "vit_b_16"),
        ("model = pick_one('vit_b_16')", "resnet18"),
    ],
)
def test_silent_where_it_has_not(tmp_path, made, default):
    assert not told(tmp_path, made, default)


@pytest.mark.parametrize("norm", ["BatchNorm2d", "GroupNorm"])
def test_a_helper_is_handed_the_package_that_it_looks_the_model_up_in(tmp_path, norm):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("from .net import Net\n")
    net = "import torch\nfrom torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n"
    (tmp_path / "models/net.py").write_text(f"{net}        super().__init__()\n        self.norm = nn.{norm}(8, 8)\n")
    run = RUN.replace("from torchvision import models", "import models")
    (tmp_path / "run.py").write_text(run.format(made="model = pick(models, config)", default=""))
    assert bool(check_paths([str(tmp_path / "run.py")], configure({}, "LS005", ""))) is (norm == "BatchNorm2d")


@pytest.mark.parametrize(("table", "expected"), [("normed", True), ("plain", False)])
def test_a_model_that_a_table_gives_beside_its_width_is_wrapped_in_another(tmp_path, table, expected):
    layer = {"normed": "BatchNorm1d", "plain": "LayerNorm"}
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "nets.py").write_text(NETS)
    for name, norm in layer.items():
        text = f"import torch\nfrom torch import nn\n\ndef net(wide):\n    return nn.Sequential(nn.{norm}(8)), 8\n"
        (tmp_path / f"{name}.py").write_text(text)
    made = f"import {table}\n    body, width = {table}.__dict__[name](wide=True)\n    "
    made += "model = nets.Around(body, nn.Linear(8, 2))"
    (tmp_path / "run.py").write_text(RUN.format(made=made, default=""))
    assert bool(check_paths([str(tmp_path / "run.py")], configure({}, "LS005", ""))) is expected


def test_silent_where_the_model_is_converted(tmp_path):
    assert not told(tmp_path, "model = nn.SyncBatchNorm.convert_sync_batchnorm(nets.Block())")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("model = nn.Linear(8, 2)\n    model.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))", False),
        ("model, other = nn.Linear(8, 2), name\n    other.head = nn.BatchNorm1d(8)", False),
    ],
)
def test_a_layer_that_a_model_is_given_before_it_is_wrapped(tmp_path, made, expected):
    run = RUN.format(made=made, default="").replace("return wrap(model.cuda(), local_rank)", "return DDP(model)")
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "run.py").write_text(run)
    assert bool(check_paths([str(tmp_path / "run.py")], configure({}, "LS005", ""))) is expected


SHARED = """
from torch import nn
import argparse
from blocks import InPlaceABNSync{name}

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.SyncBatchNorm(8)

class Either(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.layer = nn.SyncBatchNorm(8) if shared else nn.BatchNorm2d(8)

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = {first}(8)

parser = argparse.ArgumentParser()
parser.add_argument("--sync_bn", action="store_true")
args = parser.parse_args()
{more}
"""


@pytest.mark.parametrize(
    ("name", "first", "more", "expected"),
    [
        ("", "nn.BatchNorm2d", "", True),
        (" as BatchNorm2d", "nn.BatchNorm2d", "", True),
        (" as BatchNorm2d", "BatchNorm2d", "", False),
        ("", "nn.BatchNorm2d", "if args.sync_bn:\n    print('shared')", False),
        ("", "nn.BatchNorm2d", "NORM = InPlaceABNSync", False),
        ("", "nn.BatchNorm2d", "either = Either(True)", False),
    ],
)
def test_layers_that_share_beside_others_that_do_not(tmp_path, name, first, more, expected):
    text = SHARED.format(name=name, first=first, more=more)
    if "Either(" not in more:
        text = text.replace("nn.SyncBatchNorm(8) if shared else nn.BatchNorm2d(8)", "nn.Identity()")
    (tmp_path / "blocks.py").write_text("from torch import nn\n\nclass InPlaceABNSync(nn.Module):\n    pass\n")
    (tmp_path / "nets.py").write_text(text)
    (tmp_path / "run.py").write_text(RUN.format(made="model = nets.Mixed()", default=""))
    assert bool(check_paths([str(tmp_path / "run.py")], configure({}, "LS005", ""))) is expected


@pytest.mark.parametrize(("norm", "expected"), [("BatchNorm2d", True), ("GroupNorm", False)])
def test_a_model_of_an_object_that_is_wrapped_in_its_place(tmp_path, norm, expected):
    text = "from torch import nn\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n"
    text += f"class Trainer:\n    def __init__(self):\n        self.model = nn.Sequential(nn.{norm}(8, 8))\n\n"
    text += "def main(rank):\n    trainer = Trainer()\n    trainer.model = DDP(trainer.model, device_ids=[rank])\n"
    (tmp_path / "run.py").write_text(text)
    assert bool(check_paths([str(tmp_path / "run.py")], configure({}, "LS005", ""))) is expected
