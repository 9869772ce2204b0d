"""LS013: lengths that are computed from a loader's, schedulers in one, steps at the end of a function for an epoch."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR, StepLR

def train_one(model, loader, optimizer, scheduler):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        {batch}
    {epoch}

def main(model, loader, optimizer, epochs):
    per_epoch = len(loader)
    total = epochs * per_epoch
    warm = 100
    scheduler = {made}
    for epoch in range(epochs):
        train_one(model, loader, optimizer, scheduler)
"""
JOINED = "SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, {})], milestones=[warm])"


@pytest.mark.parametrize(
    ("made", "batch", "epoch", "expected"),
    [
        ("CosineAnnealingLR(optimizer, T_max=total)", "pass", "scheduler.step()", True),
        ("CosineAnnealingLR(optimizer, total - warm)", "pass", "scheduler.step()", True),
        (JOINED.format("T_max=total - warm"), "pass", "scheduler.step()", True),
        ("OneCycleLR(optimizer, 0.1, total_steps=total)", "pass", "scheduler.step()", True),
        ("CosineAnnealingLR(optimizer, T_max=total)", "scheduler.step()", "pass", False),
        ("CosineAnnealingLR(optimizer, T_max=epochs)", "pass", "scheduler.step()", False),
        (JOINED.format("epochs"), "pass", "scheduler.step()", False),
        (JOINED.format("epochs"), "scheduler.step()", "pass", True),
        ("OneCycleLR(optimizer, 0.1, total_steps=epochs)", "pass", "scheduler.step()", False),
        ("OneCycleLR(optimizer, 0.1, epochs=epochs, steps_per_epoch=1)", "pass", "scheduler.step()", False),
        ("StepLR(optimizer, step_size=total)", "pass", "scheduler.step()", False),
        ("CosineAnnealingLR(optimizer, T_max=total)", "pass", "if len(loader) % 4:\n        scheduler.step()", True),
        ("CosineAnnealingLR(optimizer, T_max=total)", "scheduler.step()", "scheduler.step()", True),
        (  # one more for the last group
            "CosineAnnealingLR(optimizer, T_max=total)",
            "scheduler.step()",
            "if len(loader) % 4:\n        scheduler.step()",
            False,
        ),
    ],
)
def test_a_length_and_where_it_is_counted(made, batch, epoch, expected):
    text = SCRIPT.format(made=made, batch=batch, epoch=epoch)
    assert bool(check_text(text, configure({}, "LS013", ""))) is expected


TWO = """
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

def main(model, loader, optimizer, epochs):
    long = {"a": OneCycleLR(optimizer, 0.1, total_steps=epochs * len(loader))}
    short = {"a": StepLR(optimizer, 3)}
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            short["a"].step()
        if epoch > 3:
            long["a"].step()
"""


def test_one_more_step_is_of_the_same_scheduler():
    assert [f.line for f in check_text(TWO, configure({}, "LS013", ""))] == [15]


EARLY = """
import torch
from torch.optim.lr_scheduler import StepLR

def main(model, loader, optimizer, late):
    scheduler = StepLR(optimizer, 3)
    started = False
    for x in loader:
        if {test}:
            scheduler.step()
        {then}
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        started = True
"""


@pytest.mark.parametrize(
    ("test", "then", "told"),
    [("late", "if True:", True), ("started", "if True:", False), ("late", "else:", False), ("True", "if late:", True)],
)
def test_a_step_before_the_optimizer_in_the_same_turn(test, then, told):
    assert bool(check_text(EARLY.format(test=test, then=then), configure({}, "LS013", ""))) is told


NESTED = """
import torch
from torch.optim.lr_scheduler import StepLR

def main(model, loader, optimizer, args, ready):
    scheduler = StepLR(optimizer, 3)
    for i, x in enumerate(loader):
        if args.late:
            {block}
                scheduler.step()
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("if args.fused:", True),
        ("if args.fused:\n                pass\n            else:", True),
        ("with args.lock:", True),
        ("if i % 2:", False),
        ("if ready(i):", False),
        ("if i > 3:", False),
        ("for _ in range(2):", False),
    ],
)
def test_a_step_under_several_tests(block, told):
    assert bool(check_text(NESTED.format(block=block), configure({}, "LS013", ""))) is told
