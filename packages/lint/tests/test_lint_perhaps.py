"""LS027: reads of a model that only some ways wrap, and names of an enclosing function that are bound several times."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SOME = """
import torch
from torch import nn

class Net(nn.Module):
    def encode(self, x):
        return x

class Trainer:
    def __init__(self, config):
        self.model = {made}
        {early}
        if {several}:
            self.model = {wrapper}(self.model)
        {late}

    def warm_up(self):
        return self.model.encode(0)

    def train(self, loader):
        for x in loader:
            {read}

Trainer(None).train([])
"""
USUAL = {
    "made": "Net()",
    "early": "pass",
    "several": "torch.cuda.device_count() > 1",
    "wrapper": "nn.DataParallel",
    "late": "pass",
    "read": "self.model.encode(x)",
}
SINGLE = "if torch.cuda.device_count() == 1:\n                self.model.encode(x)"
OTHER = "if x.ready:\n                self.model.encode(x)"
TRIED = "try:\n                self.model.encode(x)\n            except AttributeError:\n                pass"


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 2),
        ({"early": "self.warm_up()"}, 1),  # runs before the model is wrapped
        ({"late": "self.warm_up()"}, 2),
        ({"early": "self.model.encode(0)"}, 2),  # before the wrapping
        ({"late": "self.model.encode(0)"}, 3),
        ({"read": SINGLE}, 1),
        ({"read": OTHER}, 2),
        ({"read": TRIED}, 1),
        ({"read": "self.model(x) if isinstance(self.model, Net) else self.model.encode(x)"}, 1),
        ({"read": "self.model.train()"}, 1),
        ({"late": "self.model = self.model.module if config else self.model"}, 0),
        ({"late": "self.model = unwrap_model(self.model)"}, 0),
        ({"made": "config.model"}, 0),  # may be anything, the wrapped one too
        ({"made": "prepare(Net())"}, 0),
        ({"wrapper": "torch.distributed.fsdp.FullyShardedDataParallel"}, 0),
    ],
)
def test_a_model_that_only_several_devices_wrap(change, number):
    assert len(check_text(SOME.format(**USUAL | change), configure({}, "LS027", ""))) == number


INNER = """
import torch
from torch.nn.parallel import DistributedDataParallel

def main(large, device, build_large, build_small):
    if large:
        model = build_large.model
    else:
        model = build_small.model
    {before}
    def step(x):
        return model.features(x)
    {after}
    return step
"""
WRAP = "model = DistributedDataParallel(model)"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (WRAP, "pass", True),
        ("pass", WRAP, False),  # the function may run before
        (WRAP, "model = model.module", False),
        (f"if device:\n        {WRAP}", "pass", False),
    ],
)
def test_a_name_of_the_function_around(before, after, told):
    text = INNER.format(before=before, after=after)
    assert bool(check_text(text, configure({}, "LS027", ""))) is told


METHOD = """
import torch
from torch import nn

class Net(nn.Module):
    def encode(self, x):
        return x

def shared(model):
    return nn.DataParallel(model)

class Trainer:
    def __init__(self, config):
        self.model = {made}

    def train(self, loader):
        {first}
        self.model = shared(self.model)
        for x in loader:
            self.model(x)

Trainer(None).train([])
"""


@pytest.mark.parametrize(
    ("made", "first", "number"),
    [
        ("Net()", "self.model.encode(0)", 0),
        ("shared(Net())", "self.model.encode(0)", 1),
        ("Net()", "pass", 0),
        (
            "Net()",
            "if loader:\n            self.model = shared(self.model)\n        else:\n            self.model.encode(0)",
            0,
        ),
        ("Net()", "if loader:\n            self.model = shared(self.model)\n            self.model.encode(0)", 1),
    ],
)
def test_a_read_before_the_method_wraps(made, first, number):
    assert len(check_text(METHOD.format(made=made, first=first), configure({}, "LS027", ""))) == number


OWN = """
import torch

def train(model, actor, loader, optimizer, actor_optimizer):
    for i, x in enumerate(loader):
        loss = model(x).mean() / 4
        loss.backward()
        if i % 50 == 0:
            actor_optimizer.zero_grad()
            actor_loss = actor(x).mean()
            actor_loss.backward()
            actor_optimizer.step()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_the_step_of_gradients_that_its_own_arm_computes_is_not_the_accumulations():
    found = check_text(OWN, configure({}, "LS012", ""))
    assert [(finding.line, "last full group" in finding.message) for finding in found] == [(13, True)]


PARTIAL = """
import functools
import torch

def train(model, loader, optimizer, every):
    for i, x in enumerate(loader):
        model(x).mean().backward()
        if (i + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()

def main(model, loader, optimizer):
    run = functools.partial(train, model, loader, {given})
    run()
"""


@pytest.mark.parametrize(
    ("given", "told"), [("optimizer, 1", False), ("optimizer, 4", True), ("optimizer, every=1", False)]
)
def test_what_partial_gives_a_function(given, told):
    assert bool(check_text(PARTIAL.format(given=given), configure({}, "LS012", ""))) is told
