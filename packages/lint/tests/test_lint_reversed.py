"""What training scripts get the wrong way round: the best score, loaders in a cycle, keys without values."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def levels(text, code):
    """The levels of what a rule tells about a script."""
    return [finding.severity for finding in check_text(text, configure({}, code, ""))]


BEST = """
import torch
from torch import nn

criterion = nn.CrossEntropyLoss()

def evaluate(model, loader):
    total, right = 0.0, 0.0
    for x, y in loader:
        loss = criterion(model(x), y)
        total += loss.item()
    return {given}

def main(model, loader, epochs):
    {name} = {start}
    for epoch in range(epochs):
        {score} = evaluate(model, loader)
        if {test}:
            {name} = {score}
            {then}
"""


@pytest.mark.parametrize(
    ("name", "start", "score", "test", "number"),
    [
        ("best_acc", "float('inf')", "acc", "acc > best_acc", 1),
        ("best_acc", "float('inf')", "acc", "best_acc < acc", 1),
        ("best_acc", "-float('inf')", "acc", "acc > best_acc", 0),
        ("best", "float('-inf')", "loss", "loss < best", 1),
        ("best", "float('inf')", "loss", "loss < best", 0),
        ("best_acc", "0", "acc", "acc < best_acc", 1),
        ("best_acc", "0", "acc", "acc > best_acc", 0),
        ("best", "0", "elbo", "elbo < best", 0),  # may be negative
        ("best_loss", "0.0", "val_loss", "val_loss > best_loss", 1),
        ("best_loss", "1e9", "val_loss", "val_loss > best_loss", 1),
        ("best_loss", "None", "val_loss", "best_loss is None or val_loss > best_loss", 0),
        ("best_loss", "1.0", "val_loss", "val_loss < best_loss", 0),
        ("best_loss", "start()", "val_loss", "val_loss > best_loss", 0),
    ],
)
def test_the_best_by_the_wrong_comparison(name, start, score, test, number):
    then = "torch.save(model.state_dict(), 'best.pt')"
    text = BEST.format(name=name, start=start, score=score, test=test, given="total / len(loader)", then=then)
    assert len(levels(text, "LS070")) == number


@pytest.mark.parametrize(
    ("given", "then", "number"),
    [
        ("total / len(loader)", "torch.save(model.state_dict(), 'best.pt')", 1),
        ("-total / len(loader)", "torch.save(model.state_dict(), 'best.pt')", 0),
        ("accuracy(model)", "torch.save(model.state_dict(), 'best.pt')", 0),
        ("0.6 * rank(model) + 0.4", "torch.save(model.state_dict(), 'best.pt')", 0),  # a score that is called a loss
        ("total / len(loader)", "print('harder')", 0),
    ],
)
def test_a_loss_that_is_a_loss(given, then, number):
    text = BEST.format(name="best_loss", start="0", score="loss", test="loss > best_loss", given=given, then=then)
    assert len(levels(text, "LS070")) == number
