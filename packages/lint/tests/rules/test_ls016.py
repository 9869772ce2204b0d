"""LS016: graph kept alive."""

import pytest
from rule_findings import count

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

PARTS = """
import torch

def train(model, loader, optimizer):
    total = 0
    for x in loader:
        loss, right = model(x)
        loss.backward()
        optimizer.step()
        total += {added}
    return total
"""


@pytest.mark.parametrize(("added", "number"), [("loss", 1), ("right", 0), ("right * len(x)", 0)])
def test_a_part_of_what_the_model_gives(added, number):
    assert len(check_text(PARTS.format(added=added), configure({}, "LS016", ""))) == number


def told(text):
    return len(check_text(text, configure({}, "LS016", "")))


CUT = """
import torch

class Trainer:
    def epoch(self, model, loader, optimizer, criterion):
        total, seen = 0.0, []
        for i, x in enumerate(loader):
            loss = criterion(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            {between}
            total += loss
            seen.append(loss)
            self.seen.append(loss)
        return total
"""


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("loss = loss.item()", 0),
        ("loss, current = loss.item(), i * len(x)", 0),
        ("loss = loss.detach().cpu().numpy() / 2", 0),
        ("loss = float(loss)", 0),
        ("loss = loss.data[0]", 0),
        ("loss = loss.cpu()", 3),
        ("loss = loss / x.shape[0].item()", 3),
        ("if i % 10 == 0:\n                loss = loss.item()", 3),
        ("pass", 3),
    ],
)
def test_a_loss_that_is_read_before_it_is_added(between, expected):
    assert told(CUT.format(between=between)) == expected


KEPT = """
import torch
from torch.nn import functional as F

def test(model, test_loader, criterion):
    model.eval()
    total, guesses = 0.0, []
    {context}:
        for x, y in test_loader:
            {forward}
            {keep}
    return total, guesses

def train(model, loader, test_loader, criterion):
    for x, y in loader:
        criterion(model(x), y).backward()
    test(model, test_loader, criterion)

train(torch.nn.Linear(4, 2), [], [], F.mse_loss)
"""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1),
        ({"keep": "loss = criterion(output, y); total += loss"}, 1),
        ({"keep": "loss = criterion(output, y).item(); total += loss"}, 0),
        ({"keep": "total += criterion(output, y) * len(x)"}, 1),
        ({"keep": "total += criterion(output, y).item()"}, 0),
        ({"keep": "total += criterion(output.detach(), y)"}, 0),
        ({"keep": "total += (output.argmax(1) == y).sum()"}, 0),
        ({"keep": "guesses.append(output.squeeze())"}, 1),
        ({"keep": "guesses.append(output.detach())"}, 0),
        ({"keep": "output = output.argmax(1); guesses.append(output)"}, 0),
        ({"forward": "result = model(x); output = result.logits", "keep": "guesses.append(output)"}, 1),
        ({"context": "with torch.no_grad()"}, 0),
    ],
)
def test_what_an_evaluation_with_a_graph_keeps(change, found):
    usual = {"context": "if True", "forward": "output = model(x)", "keep": "total += F.cross_entropy(output, y)"}
    assert count(KEPT.format(**usual | change), "LS016") == found
