"""LS016: what objects of the project's own collect in each step, and scores of the model's output with their graph."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import torch
import torch.nn.functional as F
from collections import deque

class Metric:
    def __init__(self):
        self.total, self.steps = 0, 0
        self.outputs = []
        self.last = deque(maxlen=10)

    def add(self, output, y):
        self.outputs.append({output})
        self.last.append(y)

    def count(self, loss, number):
        self.total += {loss}

    @torch.no_grad()
    def quiet(self, loss):
        self.total += loss

def dice(score, target):
    score = {score}
    both = torch.sum(score * target)
    result = 2 * both / (score.sum() + target.sum())
    return {result}

def train(model, loader, optimizer):
    metric = Metric()
    total, kept = 0, []
    for phase in ("train", "val"):
        for x, y in loader[phase]:
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output, y)
            if phase == "train":
                loss.backward()
                optimizer.step()
            {line}
    return metric, total, kept
"""
USUAL = {"output": "output", "loss": "loss * number", "score": "F.softmax(score, dim=1)", "result": "result"}


@pytest.mark.parametrize(
    ("change", "line", "number"),
    [
        ({}, "pass", 0),
        ({}, "metric.add(output, y)", 1),
        ({}, "metric.add(output.detach(), y)", 0),
        ({}, "metric.add(y, output)", 0),  # the list of the last ten
        ({"output": "output.detach()"}, "metric.add(output, y)", 0),
        ({}, "metric.count(loss, len(x))", 1),
        ({}, "metric.count(number=len(x), loss=loss)", 1),
        ({}, "metric.count(loss.item(), len(x))", 0),
        ({"loss": "loss.item() * number"}, "metric.count(loss, len(x))", 0),
        ({}, "metric.quiet(loss)", 0),
        ({}, "if phase == 'train': metric.count(loss, len(x))", 1),
        ({}, "if phase == 'val': metric.count(loss, len(x))", 0),
        ({}, "if phase != 'train': metric.count(loss, len(x))", 0),
        ({}, "kept.append(output)", 1),
        ({}, "kept.append(output.argmax(1))", 0),
        ({}, "total += dice(output, y)", 1),
        ({}, "score = dice(output, y); total += score", 1),
        ({}, "score = dice(output, y); total += score.item()", 0),
        ({}, "total += dice(y, y)", 0),
        ({"score": "(torch.sigmoid(score) > 0.5).float()"}, "total += dice(output, y)", 0),
        ({"result": "result.item()"}, "total += dice(output, y)", 0),
        ({"result": "len(target)"}, "total += dice(output, y)", 0),
    ],
)
def test_what_is_collected_in_each_step(change, line, number):
    found = check_text(SCRIPT.format(line=line, **(USUAL | change)), configure({}, "LS016", ""))
    assert len(found) == number


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
