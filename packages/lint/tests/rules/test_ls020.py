"""LS020: decay on biases and norms."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

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
