"""LS036: what runs in every step, in most of them, beside each step of the optimizer, now and then, and never."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

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
        ("noted = False\n        if noted: show(loss)", 0),
        ("noted = False\n        if noted and args.log: show(loss)", 0),
        ("noted = True\n        if not noted: show(loss)", 0),
        ("noted = True\n        if noted: pass\n        else: show(loss)", 0),
        ("if best is None: best = show(loss)", 0),
        ("best = None\n        if best is None: best = show(loss)", 1),
        ("if best is None: best = show(loss)\n        best = None", 1),
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
        ("if i % 10 == 0 and i != 0: pass\n        else: show(loss)", 1),
        ("if i % 10 != 0 and i != 0: pass\n        else: show(loss)", 0),
        ("if model.n_classes == 1: show(loss)", 1),
        ("if sample.n_classes == 1: show(loss)", 0),
        ("if model.updates_count == 1: show(loss)", 0),
        ("if sample.loss_conf.weight > 0: show(loss)", 1),
        ("if sample.weight > 0: show(loss)", 0),
        ("if (x > 0).any(): show(loss)", 1),
        ("if torch.isnan(x).any(): show(loss)", 0),
        ("if len(names) > 0: show(loss)", 1),
        ("if len(names) == 0: show(loss)", 0),
        ("if len(names) > 8: show(loss)", 0),
        ("if len(failed) > 0: show(loss)", 0),
    ],
)
def test_how_often_a_line_runs(line, told):
    assert found(SCRIPT.format(line=line)) == told


@pytest.mark.parametrize(
    ("test", "told"),
    [
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


FLAG = """
import torch

def train(model, loader, optimizer, rank, epochs):
    model.cuda()
    {before}
    for epoch in range(epochs):
        {between}
        for x in loader:
            loss = model(x.cuda())
            loss.backward()
            optimizer.step()
            if noted:
                print(loss.item())
"""


@pytest.mark.parametrize(
    ("before", "between", "told"),
    [
        ("noted = rank == 0", "pass", 1),
        ("noted = False\n    if rank == 0: noted = True", "pass", 1),
        ("noted = False", "if epoch == 9: noted = True", 0),
        ("pass", "noted = False\n        if epoch % 10 == 0: noted = True", 0),
    ],
)
def test_a_flag_that_is_set_before_the_epochs(before, between, told):
    assert found(FLAG.format(before=before, between=between)) == told


def test_a_flag_that_callers_give_and_some_runs_turn_off():
    text = FLAG.format(before="if epochs == 1: noted = False", between="pass")
    assert found(text.replace("rank, epochs", "epochs, noted=True")) == 1


@pytest.mark.parametrize(("before", "told"), [("noted = True", 1), ("noted = False", 0), ("noted = rank == 0", 1)])
def test_a_flag_that_callers_give_in_vain(before, told):
    text = FLAG.format(before=before, between="pass")
    assert found(text.replace("rank, epochs", "rank, epochs, noted=None")) == told


MICRO = """
import torch

def train(model, loader, optimizer, args):
    model.cuda()
    for i, x in enumerate(loader):
        steps = (i + 1) % args.steps == 0
        loss = model(x.cuda())
        if steps:
            loss.backward()
            optimizer.step()
        else:
            with model.no_sync():
                {line}
                print(loss.item())
"""


@pytest.mark.parametrize(("line", "told"), [("pass", 0)])
def test_gradients_that_another_arms_step_waits_for(line, told):
    assert found(MICRO.format(line=line)) == told


MADE = """
import torch

def make_step(model, criterion, optimizer):
    model.cuda()
    def step(x, y):
        loss = criterion(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        return loss.item()
    return {given}
"""


@pytest.mark.parametrize(("given", "told"), [("model", 0)])
def test_a_step_that_another_function_makes(given, told):
    assert found(MADE.format(given=given)) == told


AGENT = """
import torch

class Agent:
    def update(self, R, Q):
        loss = (R.cuda() + Q).sum()
        loss.backward()
        self.optimizer.step()
        self.error += loss.item()

    def learn(self, memory):
        self.update(memory.R, memory.Q)

{last}
"""


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("", 1),
        ("def run(agent: Agent, memory):\n    agent.update(memory.R, memory.Q)", 1),
        ("def main():\n    Agent().update(1, 2)", 0),
        ("Agent().update(1, 2)", 0),
    ],
)
def test_a_step_that_other_methods_call(last, told):
    assert found(AGENT.format(last=last)) == told


BATCHES = """
class Trainer(Base):
    def process(self, batch, metrics):
        batch.update(self.criterion(**batch))
        if self.is_train:
            batch["loss"].backward()
            self.optimizer.step()
        for name in self.names:
            metrics.update(name, batch[name].item())
"""


@pytest.mark.parametrize(("line", "told"), [("objective = torch.nn.NLLLoss()", 0)])
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
        ("normals", "self.optimizer.step()", 1),
    ],
)
def test_gradients_that_train_nothing(name, line, told):
    assert found(GRADIENTS.format(name=name, line=line)) == told


BEGUN = """
import torch

def train(model, loader, optimizer, steps):
    batches = iter(loader)
    for step in range(steps):
        x = {first}
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("next(iter(loader))", True),
        ("next(enumerate(loader))[1]", True),
        ("next(iter(enumerate(loader)))[1]", True),
        ("next(batches)", False),
        ("next(iter(batches))", False),  # goes on where it was
        ("next(iter(loader)) if step % 9 == 0 else x", False),
        ("next(iter(model.layers))", False),
    ],
)
def test_a_loader_that_is_begun_for_each_batch(first, found):
    assert bool(check_text(BEGUN.format(first=first), configure({}, "LS038", ""))) is found


TEXTS = """
import torch
import wandb

def train(model, loader, optimizer, args):
    model.cuda()
    first = True
    for i, x in enumerate(loader):
        out = model(x.cuda())
        loss = out.sum()
        loss.backward()
        optimizer.step()
        {line}
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("line = f'{out.shape} {out.size(0)}'", ""),
        ("out = 3\n        line = f'{out}'", ""),
        ("line = f'{out}' if i % 9 == 0 else ''", ""),
        ("print(loss.item()) if i % 9 == 0 else None", ""),
        ("i % 9 == 0 and print(loss.item())", ""),
        ("args.show and print(loss.item())", ".item()"),
        ("print(loss.item()) if i == 0 else None", ""),
        ("i == 0 and print(loss.item())", ""),
        ("print(loss.item()) if args.level == 0 else None", ".item()"),
        ("if first:\n            line = f'{out}'\n            first = False", ""),
        ("wandb.log({'epoch': i})", ""),
        ("wandb.log({'rate': args.rate.item()})", ""),
    ],
)
def test_a_text_of_what_stands_on_the_device(line, message):
    found = [finding.message for finding in check_text(TEXTS.format(line=line), configure({}, "LS036", ""))]
    assert [text.partition(" waits")[0] for text in found] == ([message] if message else [])
