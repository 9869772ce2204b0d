"""LS036: what is on the device because a model gave it or it was moved there, also in what a step calls."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

LOOP = """
import torch
import torch.nn.functional as F
from importlib import import_module

class Scores:
    def __init__(self):
        self.hits, self.seen = 0, 0

    def update(self, logits, target, names):
        guess = torch.sigmoid(logits.detach()) > 0.5
        {score}

def objective(logits, target, weight):
    weights = torch.where(target > 0, weight, 1.0)
    bce = (F.binary_cross_entropy_with_logits(logits, target, reduction="none") * weights).mean()
    {inner}
    return bce, {parts}

def train(model, loader, optimizer, config):
    model = model.cuda()
    scores = Scores()
    count, library = 0, import_module(config.library)
    limit = library.limit(config)
    for i, (x, y, names) in enumerate(loader):
        mask = y > 0
        x, target = x.cuda(), y.cuda()
        out = model(x)
        loss, parts = objective(out, target, 2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scores.update(out, target, names)
        {last}
"""


def told(**lines):
    text = LOOP.format(**{"score": "pass", "inner": "pass", "parts": "{}", "last": "pass"} | lines)
    return bool(check_text(text, configure({}, "LS036", "")))


@pytest.mark.parametrize(
    ("place", "line", "expected"),
    [
        # a helper of the step
        ("parts", "{'bce': bce.detach()}", False),
        ("parts", "{'weight': float(weight)}", False),
        ("inner", "bce = bce if any([weight]) else 0 * bce", False),
        ("inner", "if (target > 1).all(): raise ValueError", True),
        ("inner", "if target.size(0) > 1: raise ValueError", False),
        ("inner", "if target.shape[0] == 1 or weight > 3: raise ValueError", False),
        # an object that the step hands its tensors
        ("score", "self.hits += int((guess & (target > 0)).sum())", True),
        ("score", "self.seen += int(guess.numel())", False),
        ("score", "self.hits += guess.sum()", False),
        ("score", "self.seen += int(names.sum())", False),  # the loader's, on the CPU
        ("score", "print(guess.shape, len(guess))", False),
        # the loop itself
        ("last", "count += int((out.argmax(1) == target).sum())", True),
        ("last", "count += int(mask.sum())", False),
        ("last", "if i % 10 == 0: count += int((out.argmax(1) == target).sum())", False),
        ("last", "norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))", True),
        ("last", "for name, value in (('a', loss), ('b', out.mean())): count += float(value.detach())", True),
        ("last", "for name, value in (('a', i), ('b', 3)): count += float(value)", False),
        ("last", "if out.max() > 100: break", True),
        ("last", "if mask.any(): count += 1", False),
        ("last", "if model.training == config.training: count += 1", False),
        ("last", "if i >= limit: break", False),
        ("last", "count += int(model.depth)", False),
    ],
)
def test_what_is_on_the_device(place, line, expected):
    assert told(**{place: line}) is expected


STEPS = """
import torch

def number(value):
    if hasattr(value, "item"):
        return value.item()
    return value

def write(batch, file):
    file.write(str(batch.sum().item()))

def train(model, loader, optimizer, scaler, accelerator, params, file):
    model.cuda()
    total = 0
    for i, (x, y) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        {step}
        {last}
"""


@pytest.mark.parametrize(
    ("step", "last", "expected"),
    [
        # a scaler's helper, which is given loss and optimizer by name
        ("scaler(optimizer=optimizer)", "total += loss.item()", False),
        # a helper that asks what it was given
        ("loss.backward(); optimizer.step()", "total += number(loss)", True),
        ("loss.backward(); optimizer.step()", "total += 1", False),
        # beside the update of an accumulation
        ("accelerator.backward(loss); optimizer.step()", "if accelerator.sync_gradients: total += loss.item()", True),
        (
            "accelerator.backward(loss); optimizer.step()",
            "if accelerator.sync_gradients and i % 9 == 0: total += loss.item()",
            False,
        ),
        # in the other arm of a test, nothing trains
        (
            "if params.export: write(loss, file)\n        else:\n            loss.backward(); optimizer.step()",
            "total += 1",
            False,
        ),
        (
            "if params.train:\n            loss.backward(); optimizer.step(); write(loss, file)",
            "total += 1",
            True,
        ),
    ],
)
def test_what_belongs_to_the_step(step, last, expected):
    assert bool(check_text(STEPS.format(step=step, last=last), configure({}, "LS036", ""))) is expected
