"""LS008: a model that a program makes and trains, and what seeds its weights before."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

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


@pytest.mark.parametrize(("seed", "expected"), [("pass", [("run.py", 4)]), ("torch.manual_seed(0)", [])])
def test_a_model_that_another_file_makes_is_told_where_the_program_has_it_made(tmp_path, seed, expected):
    helper = f"import torch\n\ndef build():\n    {seed}\n    net = torch.nn.Linear(2, 2)\n    return net\n"
    run = "import torch\nfrom helper import build\n\nmodel = build()\n"
    run += "optimizer = torch.optim.SGD(model.parameters(), 1)\n"
    run += "for x in range(3):\n    model(torch.ones(2)).sum().backward()\n    optimizer.step()\n"
    for name, text in (("helper.py", helper), ("run.py", run)):
        (tmp_path / name).write_text(text)
    found = check_paths([str(tmp_path / "run.py"), str(tmp_path / "helper.py")], configure({}, "LS008", ""))
    assert [(finding.path.rpartition("/")[2], finding.line) for finding in found] == expected
