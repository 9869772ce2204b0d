"""LS036: what is on the CPU already, what no tensor is, and evaluations that a step now and then makes."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

MASKED = """
import copy
import numpy as np
import torch
from torch.utils.data import DataLoader
{above}

def mask(tokens, tokenizer):
    labels = tokens.clone()
    {read}
    return tokens, labels

def train(model, data, optimizer, tokenizer, device):
    model.cuda()
    train_loader = DataLoader(data)
    for batch in train_loader:
        tokens = batch["tokens"]{moved}
        tokens, labels = mask(tokens, tokenizer)
        loss = model({given})
        loss.backward()
        optimizer.step()
"""
USUAL = {"above": "", "read": "labels.tolist()", "moved": "", "given": "tokens.cuda(), labels.cuda()"}


def found(text):
    """How many syncs are told."""
    return len(check_text(text, configure({}, "LS036", "")))


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 0),
        ({"read": "[row.tolist() for row in labels]"}, 0),
        ({"read": "labels = labels.cuda()\n    labels.tolist()"}, 1),
        ({"read": "torch.where(labels != 0)[0].tolist()"}, 0),
        ({"read": "rows = copy.deepcopy(labels); rows[0].tolist()"}, 0),
        ({"read": "for i, row in enumerate(labels): row.tolist()"}, 0),
        ({"read": "chunks = np.array_split(tokenizer.ids, 4); [c.tolist() for c in chunks]"}, 0),
    ],
)
def test_the_batch_before_it_is_moved(change, number):
    assert found(MASKED.format(**USUAL | change)) == number


STEP = """
import torch

def preference(logits, loss, beta):
    {first}
    return (logits * beta).mean()

def train(model, loader, optimizer, cfg, use_cuda):
    model.cuda()
    for i, x in enumerate(loader):
        logits = model(x.cuda(), steps=cfg["steps"], out={{}})
        loss = preference(logits, cfg["kind"], 2.0)
        loss.backward()
        optimizer.step()
        {last}
"""


@pytest.mark.parametrize(
    ("first", "last", "number"),
    [
        ("if loss == 'dpo': beta = 1.0", "pass", 0),
        ("pass", "if i >= cfg['total']: break", 0),
        ("pass", "if loss > cfg['most']: break", 1),
        ("pass", "print(loss.item())", 1),
        ("pass", "if i % 100 == 0: loss = loss.cpu()\n        print(loss.item())", 1),
    ],
)
def test_what_a_step_asks_of_a_loss(first, last, number):
    assert found(STEP.format(first=first, last=last)) == number


EVALUATED = """
import torch
from torch.utils.data import DataLoader

class Trainer:
    {decorator}
    def eval_step(self, loader, x):
        {body}
        return self.model.steps.item()

    def train(self, data, held_out):
        self.model.cuda()
        for x in DataLoader(data):
            loss = self.model(x.cuda())
            loss.backward()
            self.optimizer.step()
            self.eval_step(DataLoader(held_out), x)
"""


@pytest.mark.parametrize(
    ("decorator", "body", "number"),
    [
        ("@torch.no_grad()", "for y in loader: self.model(y.cuda()).item()", 0),
    ],
)
def test_a_function_that_evaluates_without_a_graph(decorator, body, number):
    assert found(EVALUATED.format(decorator=decorator, body=body)) == number


UNIT = """
import torch
import {library}

def test_it_learns(model, loader, optimizer):
    model.cuda()
    for x in loader:
        loss = model(x.cuda())
        loss.backward()
        optimizer.step()
        assert loss.item() < 9
"""


@pytest.mark.parametrize(("name", "number"), [("test_model.py", 0), ("model.py", 1)])
def test_a_unit_test_may_wait(tmp_path, name, number):
    (tmp_path / name).write_text(UNIT.format(library="pytest"))
    assert len(check_paths([str(tmp_path / name)], configure({}, "LS036", ""))) == number
