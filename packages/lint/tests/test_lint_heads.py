"""LS013: a schedule stepped at the head of the function that trains one epoch."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

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


@pytest.mark.parametrize(("event", "number"), [("EPOCH_STARTED", 1), ("EPOCH_COMPLETED", 0), ("STARTED", 0)])
def test_a_schedule_stepped_by_an_event_of_ignite(tmp_path, event, number):
    path = tmp_path / "run.py"
    text = "from ignite.engine import Events\nfrom torch.optim.lr_scheduler import StepLR\n\n"
    text += "def train(trainer, optimizer):\n    scheduler = StepLR(optimizer, 30)\n\n"
    path.write_text(f"{text}    @trainer.on(Events.{event})\n    def adjust(engine):\n        scheduler.step()\n")
    assert len(check_paths([str(path)], configure({}, "LS013", ""))) == number
