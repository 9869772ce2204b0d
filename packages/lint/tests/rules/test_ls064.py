"""LS064: mean over the wrong count."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

class Config:
    limit = 3

def validate(model, data, sampler, crit):
    loader = DataLoader(data, batch_size={size}, sampler=sampler)
    criterion = torch.nn.CrossEntropyLoss({options})
    model.eval()
    total, seen, right = 0.0, 0, 0
    losses = []
    with torch.no_grad():
        for step, (x, y) in enumerate(loader):
            out = model(x)
            loss = {loss}
            guess = out.argmax(1)
            {also}
            total += {add}
            right += (guess == y).sum().item()
            seen += {count}
    {then}
"""


USUAL = {
    "size": "64", "options": "", "loss": "criterion(out, y)", "also": "pass", "add": "loss.item()", "count": "len(y)",
    "then": "return total / len(loader)",
}  # fmt: skip


SAMPLES, BATCHES, INDEX, LAST = "number of samples, not", "count of matches", "last index", "last batch"


def told(script, changes, rule="LS064"):
    found = [each.message for each in check_text(script.format(**USUAL | changes), configure({}, rule, ""))]
    assert len(found) < 2
    return found[0] if found else ""


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"options": "reduction='sum'"}, False),
        ({"options": "size_average=False"}, False),
        ({"loss": "F.cross_entropy(out, y, reduction='sum')"}, False),
        ({"loss": "crit(out, y)"}, False),
        ({"loss": "(out - y).pow(2).sum()"}, False),
        ({"also": "loss = loss * len(y)"}, False),
        ({"also": "loss *= len(y)"}, False),
        ({"count": "1"}, False),
        ({"size": "1"}, False),
        ({"size": "None"}, False),
        ({"then": "return total / seen * Config.batch_size"}, False),
    ],
)
def test_what_is_a_mean_of_a_batch(changes, wrong):
    assert (SAMPLES in told(SCRIPT, {"then": "return total / seen", **changes})) is wrong


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"then": "return right / len(data)"}, ""),
        ({"then": "return right / seen"}, ""),
        ({"then": "return total / (step + 1)"}, ""),
        ({"then": "return total / step", "also": "if step == 3: break"}, ""),
        ({"then": "return total / step", "also": "if x is None: continue"}, ""),
        ({"then": "print(loss.item())"}, ""),
        ({"then": "return loss, total", "also": "losses.append(loss)"}, ""),
        ({"then": "return (guess == y).float().mean()"}, ""),
        ({"then": "print(loss.item())", "add": "0", "also": "break"}, ""),
        ({"then": "print(loss.item())", "add": "0", "size": "len(data)"}, ""),
        ({"then": "return out"}, ""),
    ],
)
def test_other_counts(changes, expected):
    found = told(SCRIPT, changes)
    assert expected in found
    assert bool(found) is bool(expected)


OUTSIDE = """
import torch

def evaluate(model, loader):
    right, seen = 0, 0
    for x, y in loader:
        guess = model(x).argmax(1)
{indent}    right += (guess == y).sum().item()
{indent}    seen += len(y)
    return right / seen
"""


@pytest.mark.parametrize(
    ("indent", "expected"),
    [
        ("    ", ""),
    ],
)
def test_a_score_that_fell_out_of_its_loop(indent, expected):
    found = told(OUTSIDE, {"indent": indent})
    assert expected in found
    assert bool(found) is bool(expected)
