"""LS036: the other ways in which scripts read the device in every step; LS029: the old launcher's flag."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

LOOP = """
import torch

def train(model, loader, optimizer, criterion, losses):
    model.cuda()
    total = 0
    for i, (x, y) in enumerate(loader):
        x, name = x.to("cuda"), "x"
        y = y.cuda()
        optimizer.zero_grad()
        err_d = model(x).mean()
        {make}
        {back}.backward()
        optimizer.step()
        {last}
    return total
"""


def lines(text, code="LS036"):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


def step(last, make="loss = criterion(model(x), y)", back="loss"):
    return LOOP.format(last=last, make=make, back=back)


TABLE = "parts = criterion(model(x), y)"
SUMMED = {"make": TABLE + "; loss = sum(parts.values())"}
TERM = {"make": "kl_weight = ramp(i); kl = criterion(model(x), x); loss = criterion(model(x), y) + kl_weight * kl"}
TAKEN = {"make": TABLE + "; loss = parts['total'] / 2"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # as torch's first versions read a number
        (step("print('%f' % err_d.data[0])"), True),
        (step("if i % 100 == 0: print(loss.data[0])"), False),
        (step("total = x.data[0]"), False),  # a row, which stays where it is
        (step("total = loss.data[1]"), False),
        # a tensor that the loop has moved
        (step("print(y)"), True),
        (step("print('labels', y)"), True),
        (step("print(y.shape)"), False),
        (step("print(name)"), False),
        (step("if i % 10 == 0: print(y)"), False),
        # a dictionary of losses
        (step("print('%.3f' % parts['total'])", **TAKEN), True),
        (step("print(f'{parts[name]:.3f}', parts['kl'])", **SUMMED), True),
        (step("total += float(parts['a'])", make=TABLE, back="parts['total']"), True),
        (step("print(parts['total'].shape)", **TAKEN), False),
        (step("print(losses['total'])", **TAKEN), False),  # another dictionary
        (step("if i % 9 == 0: print({k: v.item() for k, v in parts.items()})", **SUMMED), False),
        # a term of a loss, and the number that stands before it
        (step("log.add_scalar('kl', kl, i)", **TERM), True),
        (step("log.add_scalar('kl', kl_weight, i)", **TERM), False),
    ],
)
def test_the_read_in_a_step(text, told):
    assert bool(lines(text)) is told


ENGINE = """
import torch
from ignite.engine import Engine, Events
{before}
def update(engine, batch):
    x, y = batch[0].cuda(), batch[1].cuda()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    {back}
    optimizer.step()
    {first}
    return {value}

def evaluate(engine, batch):
    return model(batch.cuda()).mean().item()

trainer = {made}
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, [12]),
        ({"value": "{'loss': loss.item(), 'n': len(x)}"}, [12]),
        ({"first": "print(loss)", "value": "loss.detach()"}, [11]),
        ({"value": "loss.detach()"}, []),
        ({"first": "if engine.state.iteration % 50 == 0: print(loss)", "value": "loss.detach()"}, []),
        ({"made": "Engine(evaluate)"}, []),
        ({"back": "pass"}, []),
        ({"before": "from motors import Engine"}, [12]),  # the first of two imports of a name is taken
        ({"made": "Motor(update)"}, []),
    ],
)
def test_the_function_that_an_engine_of_ignite_runs(change, told):
    usual = {"before": "", "first": "pass", "value": "loss.item()", "made": "Engine(update)", "back": "loss.backward()"}
    assert lines(ENGINE.format(**(usual | change))) == told


FLAG = """
import argparse
import os
import torch
import torch.multiprocessing as mp
{before}
parser = argparse.ArgumentParser()
parser.add_argument({flag})
{after}
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, True),
        ({"flag": "'--local-rank', type=int, default=0"}, True),
        (
            {"after": "args = parser.parse_args()\nif args.local_rank < 0: args.local_rank = os.environ['LOCAL_RANK']"},
            True,
        ),
        ({"after": "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"}, False),  # the flag is left over
        ({"after": "torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', args.local_rank)))"}, True),
        ({"flag": "'--local_rank', default=int(os.environ['LOCAL_RANK'])"}, False),
        ({"flag": "'--local_rank', default=os.getenv('LOCAL_RANK', 0)"}, False),
        ({"after": "def work(rank): pass\nmp.spawn(work, nprocs=2)"}, False),
        ({"before": "import deepspeed", "after": "deepspeed.initialize(parser)"}, False),
        ({"flag": "'--local_batch', type=int"}, False),
    ],
)
def test_the_flag_of_the_old_launcher(change, told):
    text = FLAG.format(**({"before": "", "flag": "'--local_rank', type=int, default=-1", "after": ""} | change))
    assert bool(lines(text, "LS029")) is told


SCORES = """
import torch

class Accuracy:
    def update(self, output, target):
        with {context}:
            right = output.argmax(1).eq(target).sum().item()
        self.right += right

    def whole(self, model, loader):
        with torch.no_grad():
            for x in loader:
                self.right += model(x).sum().item()

def train(model, loader, optimizer, criterion):
    score = Accuracy()
    model.cuda()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        criterion(output, y).backward()
        optimizer.step()
        {call}
"""


@pytest.mark.parametrize(
    ("context", "call", "told"),
    [
        ("torch.no_grad()", "score.update(output, y)", [7]),
        ("torch.inference_mode()", "score.update(output, y)", [7]),
        ("open('x')", "score.update(output, y)", [7]),
        ("torch.no_grad()", "score.whole(model, loader)", []),  # an evaluation
        ("torch.no_grad()", "if x.step % 10 == 0: score.update(output, y)", []),
        ("torch.no_grad()", "pass", []),
    ],
)
def test_the_score_of_a_step_without_its_graph(context, call, told):
    assert lines(SCORES.format(context=context, call=call)) == told


FORWARD = """
import torch
from torch import nn

class Loss(nn.Module):
    def forward(self, x, y):
        {line}
        return (x - y).mean()

class Plain:
    def forward(self, x, y):
        return x.mean().item()

def train(model, loader, optimizer):
    model.cuda()
    criterion = {made}
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = {call}
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, [7]),
        ({"made": "Loss().cuda()"}, [7]),
        ({"line": "if x.mean().item() > 3: x = x / 2"}, [7]),
        ({"line": "if self.step % 50 == 0: print(x.mean().item())"}, []),
        ({"line": "x = x.detach()"}, []),
        ({"made": "nn.MSELoss()"}, []),
        ({"made": "Plain()"}, []),  # no module: a call of it does not run its forward
        ({"call": "model(x).mean()"}, []),
    ],
)
def test_the_forward_of_a_loss_of_its_own(change, told):
    usual = {"line": "self.seen = y.sum().item()", "made": "Loss()", "call": "criterion(model(x), y.cuda())"}
    assert lines(FORWARD.format(**(usual | change))) == told
