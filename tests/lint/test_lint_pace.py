"""LS036: what runs in every step, in most of them, beside each step of the optimizer, now and then, and never."""

import pytest

from lockstep.lint.config import configure
from lockstep.lint.runner import check_text

SCRIPT = """
import torch

def show(x):
    return x.detach().cpu().numpy()

def train(model, loader, optimizer, args, sample, example):
    model.cuda()
    for i, (x, names) in enumerate(loader):
        loss = model(x.cuda())
        loss.backward()
        optimizer.step()
        {line}
"""
ENGINE = """
import torch
import deepspeed

def train(engine, loader, args):
    engine.to("cuda")
    for step, x in enumerate(loader):
        loss = engine(x.cuda())
        engine.backward(loss)
        engine.step()
        if {test}:
            print(loss.item())
"""
ARMS = """
import torch

def train(model, loader, optimizer, args):
    model.cuda()
    for i, x in enumerate(loader):
        loss = model(x.cuda())
        if (i + 1) % args.steps == 0 or i + 1 == len(loader):
            {stepped}
            loss.backward()
            optimizer.step()
        else:
            with model.no_sync():
                {summed}
                loss.backward()
"""
HIDDEN = """
import torch

def objective(params):
    return float(params["lr"])

def search(params, model, loader, optimizer):
    {line}
    model.cuda()
    for x, y in loader:
        loss = objective(model(x.cuda()))
        loss.backward()
        optimizer.step()
"""


def found(text):
    """How many syncs are told."""
    return len(check_text(text, configure({}, "LS036", "")))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("show(loss)", 1),
        ("if args.amp: show(loss)", 1),
        ("if example in names: show(loss)", 0),
        ("if sample == names: show(loss)", 0),
        ("if False: show(loss)", 0),
        ("if True: show(loss)", 1),
        ("if i % 10 == 0: show(loss)", 0),
        ("if i % 10 != 0: show(loss)", 1),
        ("if i % 10: show(loss)", 1),
        ("if not i % 10: show(loss)", 0),
        ("if i % 10 == 0 and args.log: show(loss)", 0),
        ("if i % 10 == 0 or i + 1 == len(loader): show(loss)", 0),
        ("if i % 10: continue\n        show(loss)", 0),
        ("if i % 10 == 0: continue\n        show(loss)", 1),
        ("if i % 10 != 0 or args.quiet: continue\n        show(loss)", 0),
        ("if args.debug: break\n        show(loss)", 1),
        ("if args.debug: show(loss)", 0),
        ("if i < args.log_interval: continue\n        show(loss)", 0),
    ],
)
def test_how_often_a_line_runs(line, told):
    assert found(SCRIPT.format(line=line)) == told


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("step % args.accumulation_steps == 0", 1),
        ("(step + 1) % args.accum == 0 or step + 1 == len(loader)", 1),
        ("step % args.accumulation_steps != 0", 1),
        ("step % (args.accum * args.log_steps) == 0", 0),
        ("step % args.accum == 0 and step % 100 == 0", 0),
        ("step % args.steps == 0", 0),
    ],
)
def test_the_update_that_an_engine_makes_by_itself(test, told):
    assert found(ENGINE.format(test=test)) == told


def test_each_arm_of_a_test_that_steps_now_and_then():
    read, rest = "total = loss.item()", "pass"
    assert found(ARMS.format(stepped=read, summed=rest)) == 1
    assert found(ARMS.format(stepped=rest, summed=read)) == 1


@pytest.mark.parametrize(("line", "told"), [("pass", 1), ("objective = torch.nn.NLLLoss()", 0)])
def test_a_variable_hides_what_the_file_calls_so(line, told):
    assert found(HIDDEN.format(line=line)) == told


GRADIENTS = """
import torch

class Surface:
    def {name}(self, points, model, lr):
        model.cuda()
        for point in points:
            point = point.cuda().requires_grad_()
            value = model(point).sum()
            value.backward()
            {line}
            self.normals.append(point.grad.cpu().numpy())
"""


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("normals", "pass", 0),
        ("normals", "self.engine.step()", 1),
        ("normals", "self.optimizer.step()", 1),
        ("normals", "self.update_weights(value)", 1),
        ("normals", "model.weight.data -= lr * model.weight.grad", 1),
        ("train_points", "pass", 1),
    ],
)
def test_gradients_that_train_nothing(name, line, told):
    assert found(GRADIENTS.format(name=name, line=line)) == told
