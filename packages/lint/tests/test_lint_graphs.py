"""LS016: the terms of a loss, losses handed to a step, what an object keeps of each step, blocks without a graph."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text):
    return len(check_text(text, configure({}, "LS016", "")))


TERMS = """
import torch

def train(model, loader, optimizer, meter, weight):
    total, rest, seen = 0.0, 0.0, {{"all": []}}
    for x in loader:
        y, spread = model(x)
        fit = (y - x).pow(2).sum() / x.shape[0]
        size = {size}
        loss = fit + {product}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {add}
    return total
"""


@pytest.mark.parametrize(
    ("size", "product", "add", "expected"),
    [
        ("spread.mean()", "size", "total += fit\n        rest += size", 2),
        ("spread.mean()", "0.5 * size", "rest += size / len(loader)", 1),
        ("spread.mean()", "size", "seen['all'].append(fit)", 1),
        ("spread.mean()", "size", "seen['all'].append(fit.detach())", 0),
        ("spread.mean().item()", "size", "rest += size", 0),
        ("next(weight)", "size * spread.mean()", "rest += size", 0),
        ("0.1", "size", "rest += size", 0),
    ],
)
def test_the_terms_of_a_loss(size, product, add, expected):
    assert told(TERMS.format(size=size, product=product, add=add)) == expected


SHARED = """
import torch
import torch.distributed as dist

def average(values):
    for i in range(len(values)):
        dist.all_reduce(values[i])
        values[i] = values[i]{read}
    return values

def train(model, loader, optimizer):
    total = 0.0
    for x in loader:
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        [loss] = average([loss])
        total += loss
    return total
"""


def test_items_that_a_helper_reads_in_place():
    assert told(SHARED.format(read=".item()")) == 0
    assert told(SHARED.format(read=".mean()")) == 1


STEP = """
import torch

class Trainer:
    def __init__(self):
        self.seen, self.total = [], 0.0

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        {keep}

    def epoch(self, train):
        mean = 0.0
        for x in self.loader:
            with {context}:
                loss = self.criterion(self.model(x), x)
                {add}
            if train:
                self.step(loss)
        return mean
"""


@pytest.mark.parametrize(
    ("keep", "context", "add", "expected"),
    [
        ("pass", "torch.set_grad_enabled(train)", "mean += loss", 1),
        ("pass", "torch.enable_grad() if train else torch.no_grad()", "mean += loss", 1),
        ("pass", "torch.inference_mode(not train)", "mean += loss", 1),
        ("pass", "torch.no_grad()", "mean += loss", 0),
        ("pass", "torch.set_grad_enabled(False)", "mean += loss", 0),
        ("pass", "torch.set_grad_enabled(train)", "mean += loss.item()", 0),
        ("self.seen.append(loss)", "torch.set_grad_enabled(train)", "pass", 1),
        ("loss = loss * 1; self.seen.append(loss)", "torch.set_grad_enabled(train)", "pass", 1),
    ],
)
def test_a_loss_handed_to_the_step(keep, context, add, expected):
    assert told(STEP.format(keep=keep, context=context, add=add)) == expected


OBJECT = """
import torch

class Agent:
    def learn(self, batch):
        loss = self.net(batch).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        {keep}

def main(agent, memory):
    agent = Agent()
    for batch in memory:
        agent.learn(batch)
"""


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("self.losses.append(loss)", 1),
        ("self.log['loss'].append(loss)", 1),
        ("self.total += loss", 1),
        ("self.losses.append(loss.item())", 0),
        ("self.losses = []; self.losses.append(loss)", 0),
        ("kept = []; kept.append(loss)", 0),
        ("self.total = loss", 0),
    ],
)
def test_what_an_object_keeps_of_each_step(keep, expected):
    assert told(OBJECT.format(keep=keep)) == expected


MODULE = """
import pytorch_lightning as pl

class Net(pl.LightningModule):
    def training_step(self, batch, number):
        x, y = batch
        guess = self(x)
        loss = self.criterion(guess, y)
        {keep}
        return loss

    def validation_step(self, batch, number):
        loss = self(batch).mean()
        self.held.append(loss)
        return loss
"""


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("self.outputs.append(loss)", 1),
        ("self.outputs['guess'].append(guess); self.outputs['y'].append(y)", 1),
        ("self.outputs.append(guess.detach())", 0),
        ("self.log('loss', loss)", 0),
    ],
)
def test_what_a_module_of_lightning_keeps_of_each_step(keep, expected):
    assert told(MODULE.format(keep=keep)) == expected


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
