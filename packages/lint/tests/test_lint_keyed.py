"""LS027: models that a dictionary holds, some of them wrapped; reads that come before the wrapping."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import torch
from torch import nn
from nets import Net

class Trainer:
    def __init__(self, args, table):
        self.models = {{}}
        self.models["pose"] = {made}
        self.models["depth"] = Net()
        {early}
        if args.several:
            self.models["pose"] = nn.DataParallel(self.models["pose"])

    def warm_up(self):
        return self.models["pose"].encode(0)

    def step(self, x, args, other, name):
        {read}
"""
READ = 'return self.models["pose"].decode(x)'


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 2),
        ({"early": "self.warm_up()"}, 1),
        ({"read": 'return self.models["depth"].decode(x)'}, 1),
        ({"read": 'return self.models["pose"].module.decode(x)'}, 1),
        ({"read": 'return self.models["pose"].state_dict()'}, 1),
        ({"read": "return self.models[name].decode(x)"}, 1),
        ({"read": 'return other["pose"].decode(x)'}, 1),
        ({"read": f"if args.several: pass\n        else: {READ}"}, 1),
        ({"made": "table['pose']"}, 0),
    ],
)
def test_a_model_of_a_dictionary(change, number):
    text = SCRIPT.format(**({"made": "Net()", "early": "pass", "read": READ} | change))
    assert len(check_text(text, configure({}, "LS027", ""))) == number


CERTAIN = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self, model, rank, path):
        self.model = model
        {early}
        self.model = DDP(self.model, device_ids=[rank])
        {late}

    def load(self):
        for name in self.model.parts:
            print(name)
"""


@pytest.mark.parametrize(("early", "late", "number"), [("pass", "self.load()", 1), ("self.load()", "pass", 0)])
def test_a_method_that_runs_before_the_wrapping(early, late, number):
    assert len(check_text(CERTAIN.format(early=early, late=late), configure({}, "LS027", ""))) == number
