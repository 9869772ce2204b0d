"""LS020: decay on biases and norms."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

BUILT = """
import itertools
import torch

def build(params, lr, {extra}):
    return torch.optim.AdamW({given}, lr=lr)

def main(model, other, rate):
    weights = [p for n, p in model.named_parameters() if "bias" not in n]
    both = list(model.parameters()) + list(other.parameters())
    groups = [dict(params=model.parameters(), lr=1.0)]
    {before}
    return build({passed}, rate)
"""


USUAL = {"extra": "*rest", "given": "params", "before": "pass", "passed": "model.parameters()"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, True),
        ({"passed": "both"}, True),
        ({"passed": "groups", "before": "groups.append(dict(params=weights, weight_decay=0.1))"}, False),
        ({"passed": "weights"}, False),
        ({"passed": "[dict(params=weights), dict(params=both, weight_decay=0.0)]"}, False),
        ({"given": "[p for p in params if p.requires_grad]"}, True),
        ({"given": "[p for p in params if p.ndim > 1]"}, False),
        ({"passed": "itertools.chain(model.parameters(), other.parameters()) if rate else model.parameters()"}, True),
        ({"passed": "both if rate else weights"}, False),
    ],
)
def test_parameters_that_are_handed(change, told):
    assert bool(check_text(BUILT.format(**USUAL | change), configure({}, "LS020", ""))) is told


MADE = """
import torch
import bitsandbytes as bnb

class Model(torch.nn.Module):
    def groups(self, rate):
        {body}

def main(models, rate):
    model = Model()
    params = []
    for each in models:
        {added}
    return {build}
"""


KEPT = {"body": "return [{'params': list(self.parameters()), 'lr': rate}]", "added": "pass"}


ASKED = "torch.optim.SGD(model.groups(rate), lr=rate, weight_decay=0.1)"


LISTED = "torch.optim.SGD(params, lr=rate, weight_decay=0.1)"


@pytest.mark.parametrize(
    ("change", "build", "told"),
    [
        ({}, ASKED, True),
        ({"body": "return [p for n, p in self.named_parameters() if 'bias' not in n]"}, ASKED, False),
        ({"body": "return [{'params': self.weights}, {'params': self.rest, 'weight_decay': 0.0}]"}, ASKED, False),
        ({"added": "params += [{'params': each.rest, 'weight_decay': 0.0}]"}, LISTED, False),
        ({}, "bnb.optim.AdamW8bit(model.parameters(), lr=rate)", True),
        ({}, "bnb.optim.AdamW8bit(model.parameters(), lr=rate, weight_decay=0)", False),
        ({}, "bnb.optim.Adam8bit(model.parameters(), lr=rate)", False),
    ],
)
def test_parameters_that_a_method_or_a_loop_gathers(change, build, told):
    text = MADE.format(**KEPT | change, build=build)
    assert bool(check_text(text, configure({}, "LS020", ""))) is told


PROXIES = """
import torch
from torch import nn

class Proxies(nn.Module):
    def __init__(self, count, dim):
        super().__init__()
        self.proxies = {made}
        {more}

def main(rate):
    proxies = Proxies(8, 4)
    return torch.optim.SGD(proxies.parameters(), lr=rate, weight_decay=rate)
"""


@pytest.mark.parametrize(
    ("made", "more", "told"),
    [
        ("nn.Parameter(torch.empty(count))", "pass", True),
        ("nn.Parameter(torch.empty(count, dim))", "self.shift = nn.Parameter(torch.zeros(dim))", True),
        ("nn.Parameter(torch.empty(count, dim))", "self.last = nn.Linear(4, 2)", True),
        ("nn.Linear(count, dim)", "pass", True),
        ("nn.Parameter(torch.full((count,), 1.0))", "pass", True),
        ("nn.Parameter(torch.randn(count, dim).mean(0, 1))", "pass", True),
        ("nn.Parameter(torch.empty(count, dim))", "self.norm = make(dim)", True),
        ("nn.Parameter(torch.empty(count, dim))", "self.encoder = dim", True),
        ("nn.Parameter(torch.empty(count, dim))", "self.add_module('norm', dim)", True),
        ("nn.Parameter(torch.empty(count, dim))", "\n    def build(self):\n        self.last = nn.Linear(4, 2)", True),
    ],
)
def test_a_module_of_one_matrix_has_nothing_to_spare(made, more, told):
    assert bool(check_text(PROXIES.format(made=made, more=more), configure({}, "LS020", ""))) is told


def told(text, code="LS017"):
    return bool(check_text(text, configure({}, code, "")))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("rate", False), ("0.0", False), ("other", True), ("args.decay", True), ("1e-4", True), ("ZERO", False)],
)
def test_a_decay_that_is_nothing_by_its_name(given, expected):
    text = f"""
import torch
ZERO = 0
def make(model, args):
    rate, other = 0, 0.1
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay={given})
"""
    assert told(text, "LS020") is expected
