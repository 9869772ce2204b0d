"""LS020: optimizers of other libraries, and groups that all decay."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import composer
import torch
import torch_optimizer
from lion_pytorch import Lion
from transformers.optimization import Adafactor

OPTIMIZERS = {{"lamb": torch_optimizer.Lamb, "adam": torch.optim.Adam}}

def scores(parameters, weight_decay):
    return [weight_decay for _ in parameters]

def make(model, name, rate):
    optimizer_class = OPTIMIZERS[name]
    backbone = [p for n, p in model.named_parameters() if "backbone" in n]
    head = [p for n, p in model.named_parameters() if "backbone" not in n]
    {before}
    optimizer = {make}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return optimizer
"""
BIASES = "biases = [p for n, p in model.named_parameters() if 'bias' in n]"

CHOSEN = "params = []\n    for p in model.parameters():\n        if {}:\n            params.append(p)"
FILLED = "params = []\n    for _, p in model.named_parameters():\n        params.append({})"


def script(make, before="pass"):
    return SCRIPT.format(make=make, before=before)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # other optimizers
        (script("Adafactor(model.parameters())"), False),
        (script("optimizer_class(model.parameters(), weight_decay=0)"), False),
        (script("torch_optimizer.LARS(model.parameters(), weight_decay=0.1, weight_decay_filter=True)"), False),
        (script("scores(model.parameters(), weight_decay=0.1)"), False),
        (script("composer.optim.DecoupledAdamW(model.parameters(), lr=rate)"), True),
        (script("composer.optim.DecoupledAdamW(model.parameters(), weight_decay=0.0)"), False),
        # of a class that an option holds, with a list that a loop fills
        (script("options['class'](params, weight_decay=rate)", "params = []"), False),
        (script("options['class'](params, weight_decay=rate)", CHOSEN.format("matrix(p)")), False),
        (script("options['class'](params, weight_decay=0.0)", FILLED.format("p")), False),
        (
            script(
                "options['class'](params, weight_decay=rate)",
                FILLED.format("dict(params=p, weight_decay=rate * (p.ndim > 1))"),
            ),
            False,
        ),
        # options that are unpacked
        (script("torch.optim.Adam(model.parameters(), rate, **{'weight_decay': 0.0})"), False),
        (script("torch.optim.AdamW(model.parameters(), rate, **{'weight_decay': 0})"), False),
        (script("torch.optim.Adam(model.parameters(), rate, **{'eps': 1e-5})"), False),
        (script("torch.optim.Adam(model.parameters(), rate, **options)"), False),
        # groups
        (script("torch.optim.AdamW([{'params': backbone, 'weight_decay': 0.0}, {'params': head}])"), False),
        (script("torch.optim.AdamW([{'params': biases, 'weight_decay': rate}, {'params': head}])", BIASES), False),
        (script("torch.optim.SGD([{'params': backbone}, {'params': head}])"), False),
        # groups with rates of their own, for an optimizer without one
        (script("torch.optim.SGD([{'params': backbone, 'weight_decay': rate}, {'params': head}])"), False),
        (script("torch.optim.SGD([{'params': model.parameters(), 'weight_decay': 0.0}], lr=0.1)"), False),
        (script("torch.optim.SGD([{'params': biases, 'weight_decay': rate}])", BIASES), False),
        (script("torch.optim.SGD(model.parameters(), lr=0.1)"), False),
        # rates without a name
        (script("torch.optim.SGD(model.parameters(), 0.1, 0.9, 0, 5e-4, True)"), True),
        (script("torch.optim.Adam(model.parameters(), rate, (0.9, 0.99), 1e-8, rate)"), True),
        (script("torch.optim.SGD(model.parameters(), 0.1, 0.9, 0, 0, True)"), False),
        (script("torch.optim.SGD(model.parameters(), 0.1, 0.9, 0.1)"), False),
    ],
)
def test_what_decays_alike(text, told):
    assert bool(check_text(text, configure({}, "LS020", ""))) is told


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
def test_parameters_that_are_handed_in(change, told):
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
