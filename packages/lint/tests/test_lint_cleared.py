"""LS021: gradients that are cleared before the loop only. LS012: the optimizer that sets its own rate."""

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
    ("change", "told"),
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
def test_cleared_before_the_loop_only(change, told):
    clear = CLEAR if "clear" in change.get("head", "") else ""
    assert bool(check_text(LOOP.format(**USUAL | change, clear=clear), configure({}, "LS021", ""))) is told


RATED = """
import torch

def train(model, loader, optimizer, criterion, n):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y){divided}
        loss.backward()
        if (i + 1) % n == 0 or i + 1 == len(loader):
            optimizer.{step}()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("divided", "step", "told"),
    [("", "step_and_update_lr", True), (" / n", "step_and_update_lr", False), ("", "update_lr", False)],
)
def test_an_optimizer_that_sets_its_own_rate(divided, step, told):
    text = RATED.format(divided=divided, step=step)
    assert bool(check_text(text, configure({}, "LS012", ""))) is told
