"""LS021: zero_grad."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

LOOP = """
import torch

{clear}
def train(model, loader, optimizer, criterion, every):
    for epoch in range(9):
        {first}
        for i, (x, y) in enumerate(loader):
            {head}
            loss = criterion(model(x), y)
            loss.backward()
            {step}
        {last}
"""


CLEAR = "def clear(optimizer):\n    optimizer.zero_grad()\n"


USUAL = {
    "first": "optimizer.zero_grad()",
    "head": "pass",
    "step": "optimizer.step()",
    "last": "pass",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"head": "optimizer.zero_grad()"}, False),
        ({"head": "clear(optimizer)"}, False),
        ({"step": "optimizer.step()\n            model.zero_grad()"}, False),
        ({"step": "pass", "last": "optimizer.step()"}, False),  # all batches are one step
        ({"step": "if i % every == 0: optimizer.step()"}, True),
        ({"step": "if i % every == 0: scaler.step(optimizer)"}, True),
        ({"step": "if i % every == 0: optimizer.step(); optimizer.zero_grad()"}, False),
        ({"step": "if loss < every: optimizer.step()"}, False),
        ({"first": "other.zero_grad()"}, False),
        ({"step": "optimizer.step()\n            for p in model.parameters():\n                p.grad = None"}, False),
    ],
)
def test_cleared_before_the_loop_only(change, expected):
    clear = CLEAR if "clear" in change.get("head", "") else ""
    assert bool(check_text(LOOP.format(**USUAL | change, clear=clear), configure({}, "LS021", ""))) is expected


HEAD = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""


def count_findings(text, rule):
    """Count a rule's findings in a script."""
    return len(check_text(HEAD + text, configure({}, rule, "")))


MICRO = """
def train(model, batches, optimizer, n):
    for step in range(100):
        {outer}
        for micro_step in range(n):
            {inner}
            loss = model(batches.next()) / n
            loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("outer", "inner", "number"),
    [
        ("optimizer.zero_grad()", "optimizer.zero_grad()", 1),
        ("pass", "optimizer.zero_grad()", 1),
        ("optimizer.zero_grad()", "pass", 0),
        ("pass", "if micro_step == 0: optimizer.zero_grad()", 0),
    ],
)
def test_gradients_that_are_cleared_in_every_micro_batch(outer, inner, number):
    assert count_findings(MICRO.format(outer=outer, inner=inner), "LS021") == number
