"""LS036: which tests hold in every step, what else waits for the device, and what stays on the host."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

LOOP = """
import argparse
import logging
import math
import numpy as np
import torch
import torch.nn.functional as F
import wandb

TRACK = True
LEVEL = 1
LEVEL = 2
args = argparse.ArgumentParser().parse_args()
logger = logging.getLogger()

def score(loss, counts):
    with torch.no_grad():
        for count in counts:
            last = loss.sum().item()
    return last

def score_all(loss, val_loader):
    with torch.no_grad():
        for x in val_loader:
            last = loss.sum().item()
    return last

def train(model, loader, optimizer, config, noisy, epoch):
    model.cuda()
    table = np.zeros(3)
    first = True
    total, best, shown = 0, 9, 0
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        rows = np.mean([table], axis=0)
        {last}
        first = False
    return total
"""


def told(text, code="LS036"):
    return bool(check_text(text, configure({}, code, "")))


READ = "total += loss.item()"


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        # tests that come out alike in every step
        (f"if args.mask: {READ}", True),
        (f"if not args.mask and args.chunks > 1: {READ}", True),
        (f"if config['mask']: {READ}", True),
        (f"if TRACK: {READ}", True),
        (f"if noisy: {READ}", True),
        # and those that do not
        (f"if False: {READ}", False),
        (f"if True: {READ}", True),
        (f"if args.step: {READ}", False),
        (f"if args.mask and i > 3: {READ}", False),
        (f"if config['best_epoch']: {READ}", False),
        (f"if LEVEL: {READ}", False),
        (f"if first: {READ}", False),
        (f"if shown > 3: {READ}", True),
        (f"if i > shown: {READ}", False),
        (f"if args.log_interval: {READ}", False),
        (f"if args.evaluate: {READ}", False),
        # Python decides by a number on the device
        ("if torch.isnan(loss): raise ValueError", True),
        ("assert not loss.isnan()", True),
        ("assert torch.isfinite(loss).all()", True),
        ("if loss > 100: break", True),
        ("if i % 10 == 0 and torch.isnan(loss): break", False),
        ("if i % 10 == 0:\n            assert not torch.isnan(loss)", False),
        ("if loss is None: break", False),
        ("if torch.isnan(y).any(): break", False),  # the loader's, on the CPU
        ("if total > 100: break", False),
        # in every step of some epochs
        (f"if epoch > args.first_epoch: {READ}", True),
        (f"if epoch == 3: {READ}", False),
        # the arm of an evaluation
        (f"if noisy.is_train:\n            pass\n        else:\n            {READ}", False),
        (f"if not noisy.training: {READ}", False),
        (f"if noisy.training: {READ}", True),
        # a score without a graph, in a function of its own
        ("if i % 10 == 0: total += score(loss, [1, 5])", False),
        ("total += score_all(loss, loader)", False),
        # records
        ("wandb.log({'loss': loss.detach()})", True),
        ("print(f'{loss.data:.3f}')", True),
        ("print(f'{loss.mean():.3f}')", True),
        ("print(y.mean())", False),
        ("wandb.log({'loss': loss})", True),
        ("logger.info(f'{i}: {loss:.3f}')", True),
        ("logger.info('%d %f', i, loss)", True),
        ("total += loss.detach().to('cpu')", True),
        ("total += loss.detach().to(torch.device('cpu'))", True),
        ("total += loss.detach().to(config.device)", False),
        ("total += math.exp(y)", False),
        ("wandb.log({'i': i})", False),
        ("logger.info('%s', loss.shape)", False),
        ("if i % 10 == 0: wandb.log({'loss': loss})", False),
        ("return float(loss)", False),  # ends the loop
        ("y = x.cuda()\n        if torch.is_tensor(y) != True: break", False),
        ("y = x.cuda()\n        if torch.sum(y) != 0: break", True),
        ("y = y.to('cuda')", False),
        # what is on the host already
        ("y = [part.tolist() for part in y]", False),
        ("print(table.tolist())", False),
        ("print(rows.tolist())", False),
        ("total += torch.tensor([1, 2]).sum().item()", False),
        ("total += torch.zeros(3).cpu()", False),
        ("total += torch.zeros(3, device='cuda').sum().item()", True),
        ("total += loss.sum().tolist()", True),
    ],
)
def test_what_waits_in_every_step(last, expected):
    assert told(LOOP.format(last=last)) is expected


CLASS = """
import torch

class Trainer:
    def __init__(self, model, noisy):
        self.model = model.cuda()
        self.noisy = noisy
        self.shown = False

    def show(self):
        self.shown = True

    def train(self, loader, optimizer, criterion):
        for x, y in loader:
            loss = criterion(self.model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if {test}:
                print(loss)
"""


@pytest.mark.parametrize(("test", "expected"), [("self.noisy", True), ("not self.noisy", True), ("self.shown", False)])
def test_an_attribute_that_only_init_binds(test, expected):
    assert told(CLASS.format(test=test)) is expected


CLOSURE = """
import torch

def train(model, loader, criterion):
    model.cuda()
    optimizer = torch.optim.LBFGS(model.parameters())
    for x, y in loader:
        def closure():
            optimizer.zero_grad()
            loss = criterion(model(x.cuda()), y.cuda())
            loss.backward()
            {inner}
            return loss
        {step}
"""


@pytest.mark.parametrize(
    ("inner", "step", "expected"),
    [
        ("print(loss)", "optimizer.step(closure)", True),
        ("print(loss.item())", "optimizer.step(closure)", True),
        ("pass", "optimizer.step(closure)", False),
        ("print(loss)", "print(closure)", False),
    ],
)
def test_the_closure_of_an_optimizer_runs_in_every_step(inner, step, expected):
    assert told(CLOSURE.format(inner=inner, step=step)) is expected


NUMBERED = """
import torch

device = {device}

def train(model, loader, optimizer, criterion):
    model.to(device)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        print(loss.item())
"""


@pytest.mark.parametrize(("device", "expected"), [("0", True), ("'cpu'", False), ("torch.device('mps')", True)])
def test_a_device_that_is_a_number_or_apples_is_a_gpu(device, expected):
    assert told(NUMBERED.format(device=device)) is expected


SERVED = """
import torch
import deepspeed

def train(model, loader, args):
    engine, _, _, _ = {made}
    for x, y in loader:
        loss = engine(x.to(engine.local_rank), y.to(engine.local_rank))
        engine.backward(loss)
        engine.step()
        print(loss.item())
"""


@pytest.mark.parametrize(("made", "expected"), [("model, 0, 0, 0", False)])
def test_an_engine_of_deepspeed_runs_on_gpus(made, expected):
    assert told(SERVED.format(made=made)) is expected
