"""LS013: scheduler at the wrong place."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

TEXT = """
import torch
from torch.optim.lr_scheduler import StepLR

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scheduler = StepLR(optimizer, step_size=30)

    def train_epoch(self, loader, epoch):
        {head}
        for x in loader:
            self.optimizer.zero_grad()
            self.model(x).backward()
            self.optimizer.step()
        {tail}

    def train(self, loader):
        {calls}
"""


CALLS = "for epoch in range(9):\n            self.train_epoch(loader, epoch)"


@pytest.mark.parametrize(
    ("head", "tail", "calls", "number"),
    [
        ("self.scheduler.step()", "pass", CALLS, 1),
        ("self.model.train()\n        if self.scheduler:\n            self.scheduler.step()", "pass", CALLS, 1),
        ("self.scheduler.step()\n        self.model.train()", "return 1", CALLS, 1),
        ("pass", "self.scheduler.step()", CALLS, 0),
        ("if epoch > 0:\n            self.scheduler.step()", "pass", CALLS, 0),
        ("self.scheduler.step()", "pass", "self.train_epoch(loader, 0)", 0),
        ("self.optimizer.step()\n        self.scheduler.step()", "pass", CALLS, 0),
    ],
)
def test_a_schedule_at_the_head_of_an_epochs_function(tmp_path, head, tail, calls, number):
    path = tmp_path / "run.py"
    path.write_text(TEXT.format(head=head, tail=tail, calls=calls))
    assert len(check_paths([str(path)], configure({}, "LS013", ""))) == number


@pytest.mark.parametrize(
    ("test", "number"),
    [
        ("if accelerator.sync_gradients:\n            if not accelerator.skipped:", 1),
        ("if ready:\n            with quiet():", 1),
        ("if ready:\n            if i > 0:", 0),
        ("if ready:\n            if i % 4 == 0:", 0),
        ("if ready:\n            for _ in range(3):", 0),
    ],
)
def test_a_schedule_stepped_first_under_flags(tmp_path, test, number):
    path = tmp_path / "run.py"
    text = "from torch.optim.lr_scheduler import StepLR\n\ndef train(accelerator, model, optimizer, loader, ready):\n"
    text += "    scheduler = StepLR(optimizer, 30)\n    for i, x in enumerate(loader):\n        model(x).backward()\n"
    text += f"        {test}\n                scheduler.step()\n"
    path.write_text(f"{text}        optimizer.step()\n        optimizer.zero_grad()\n")
    assert len(check_paths([str(path)], configure({}, "LS013", ""))) == number


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
        ("OneCycleLR(optimizer, 0.1, total_steps=total)", "pass", "scheduler.step()", True),
        ("CosineAnnealingLR(optimizer, T_max=total)", "scheduler.step()", "pass", False),
        ("CosineAnnealingLR(optimizer, T_max=epochs)", "pass", "scheduler.step()", False),
        (JOINED.format("epochs"), "pass", "scheduler.step()", False),
        ("OneCycleLR(optimizer, 0.1, total_steps=epochs)", "pass", "scheduler.step()", False),
        ("OneCycleLR(optimizer, 0.1, epochs=epochs, steps_per_epoch=1)", "pass", "scheduler.step()", False),
        ("StepLR(optimizer, step_size=total)", "pass", "scheduler.step()", False),
        ("CosineAnnealingLR(optimizer, T_max=total)", "pass", "if len(loader) % 4:\n        scheduler.step()", True),
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
