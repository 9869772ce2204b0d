"""LS006: criterion or target on the CPU."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

TARGETS = """
import torch
import torch.nn.functional as F
from torch import nn
from losses import Own

def train(model, loader, optimizer):
    model.cuda()
    criterion = {criterion}
    for inputs, targets in loader:
        inputs = inputs.cuda()
        loss = {loss}
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("criterion", "loss", "told"),
    [
        ("nn.CrossEntropyLoss()", "criterion(model(inputs), targets)", True),
        ("None", "F.cross_entropy(model(inputs), targets)", True),
        ("nn.CTCLoss()", "criterion(model(inputs), targets, 3, 4)", False),  # its targets may be on the CPU
        ("None", "F.ctc_loss(model(inputs), targets, 3, 4)", False),
        ("Own()", "criterion(model(inputs), targets)", False),  # may move them
        ("nn.CrossEntropyLoss()", "criterion(model(inputs), targets.cuda())", False),
    ],
)
def test_whose_targets_must_be_on_the_device(criterion, loss, told):
    assert bool(check_text(TARGETS.format(criterion=criterion, loss=loss), configure({}, "LS006", ""))) is told
