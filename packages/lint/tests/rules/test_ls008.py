"""LS008: no seed."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text, code="LS008"):
    return bool(check_text(text, configure({}, code, "")))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("resnet18 = models.resnet18()", True),
        ("torch.manual_seed(0); resnet18 = models.resnet18()", False),
        ("resnet18 = models.get_weight('resnet18')", False),
        ("model = models.list_models()", False),
        ("model = models.get_model_weights('resnet18')", False),
        ("model = models.get_model('resnet18')", True),
        ("rates = hydra.utils.instantiate(cfg.rates)", False),
    ],
)
def test_a_known_model_by_any_name(made, expected):
    text = (
        "import hydra\nimport torch\nfrom torchvision import models\n\ndef main(cfg, loader, resnet18=None):\n    {}\n"
    )
    text += "    opt = torch.optim.SGD(resnet18.parameters(), lr=0.1)\n    for x in loader:\n"
    text += "        resnet18(x).sum().backward()\n        opt.step()\n\nmain(None, [])\n"
    assert told(text.format(made)) is expected


SCRIPT = """
import random
import sys
import numpy as np
import torch
import torchvision.models as models
from torch import nn

class Net(nn.Module):
    pass

def new_model(options):
    return Net()

def seed_all(seed):
    torch.manual_seed(seed)

def main(data):
    {before}
    model = {model}
    {after}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        {step}

main([])
"""


USUAL = {"before": "pass", "model": "nn.Linear(4, 2)", "after": "pass", "step": "optimizer.step()"}


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 1),
        ({"model": "new_model(1)"}, 1),
        ({"model": "models.resnet18()"}, 1),
        ({"model": "models.__dict__[sys.argv[1]](num_classes=4)"}, 1),
        ({"model": "sys.argv[1]"}, 0),
        ({"step": "pass"}, 0),
        ({"before": "torch.manual_seed(0)"}, 0),
        ({"before": "seed_all(0)"}, 0),
        ({"before": "fabric.seed_everything(0)"}, 0),
        ({"after": "torch.manual_seed(0)"}, 1),
        ({"before": "np.random.seed(0); random.seed(0)"}, 1),
    ],
)
def test_a_seed_before_the_model(change, number):
    assert len(check_text(SCRIPT.format(**USUAL | change), configure({}, "LS008", ""))) == number


@pytest.mark.parametrize(
    ("test", "idle", "line"),
    [
        ("False", "torch.manual_seed(0)", 4),
        ("0", "torch.manual_seed(0)", 4),
        ("False", "model = torch.nn.Linear(3, 3)", 4),
        ("args.seed", "torch.manual_seed(0)", None),
        ("True", "torch.manual_seed(0)", None),
    ],
)
def test_what_never_runs_mends_nothing(test, idle, line):
    text = f"import torch\nif {test}:\n    {idle}\nmodel = torch.nn.Linear(2, 2)\n"
    text += "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nfor x in loader:\n    optimizer.zero_grad()\n"
    text += "    model(x).sum().backward()\n    optimizer.step()\n"
    assert [f.line for f in check_text(text, configure({}, "LS008", ""))] == ([line] if line else [])
