"""Gradient accumulation in the forms that scripts give it: what steps and computes gradients, and how often."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEAD = """
import torch
from apex import amp
from ignite.engine import Engine
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, rank):
    return DDP(model.to(rank), device_ids=[rank])
"""
SWITCHED = """
def train(model, loader, optimizer, args):
    for i, (x, y) in enumerate(loader):
        loss = model(x, y)
        if args.steps > 1:
            {scaled}
            loss.backward()
            if {test}:
                optimizer.step()
                optimizer.zero_grad()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
HELPED = """
class Trainer:
    def update(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train(self, loader):
        for i, (x, y) in enumerate(loader):
            loss = self.criterion(self.model(x), y){divided}
            self.scaler.scale(loss).backward()
            if (i + 1) % self.every == 0:
                self.update()
        {end}
"""
HANDED = """
def update(loss, optimizer, now=True):
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    if now:
        optimizer.step()
        optimizer.zero_grad()

def train(model, loader, optimizer, every):
    count = 0
    for x in loader:
        count += 1
        {line}
"""
BESIDE = """
def train(model, loader, optimizer, scaler, args):
    for i, x in enumerate(loader):
        {head}
        if args.amp:
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
        elif args.steps > 1:
            loss = model(x){divided}
            if {test}:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                loss.backward()
        else:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
"""
SPARED = """
def train(model, loader, optimizer, every):
    for i, x in enumerate(loader):
        if (i + 1) % every != 0 and i + 1 != len(loader):
            {first}
        else:
            loss = model(x){divided}
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
ENGINE = """
def run(model, optimizer, every, loader):
    def update(engine, batch):
        loss = model(batch){divided}
        loss.backward()
        {guard}
            optimizer.step()
            optimizer.zero_grad()

    Engine(update).run(loader)
"""
PARTS = """
def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        for {names} in {parts}:
            {line}
            loss.backward()
        optimizer.step()
"""
COUNTED = """
def train(model, loader, optimizer, every, epochs):
    {epochs}
        for i, x in enumerate(loader):
            step = {step}
            {first}
            (model(x){divided}).backward()
            if {test}:
                {grads}
                optimizer.step()
                optimizer.zero_grad()
"""
LONG = {
    "epochs": "for epoch in range(epochs):",
    "step": "i + epoch * len(loader)",
    "first": "pass",
    "divided": " / every",
    "test": "step % every == 0",
    "grads": "pass",
}
ACCUMULATED = {"head": "pass", "divided": " / args.steps", "test": "(i + 1) % args.steps == 0"}
RIGHT_END = "(i + 1) % args.steps == 0 or i + 1 == len(loader)"
WHOLE = {"divided": "", "test": RIGHT_END}
WITHOUT = "with model.no_sync():\n                model(x).backward()"
# A name: the rule, the script, and whether it is told.
FORMS = {
    "a switch, undivided": ("LS012", SWITCHED.format(scaled="", test=RIGHT_END), True),
    "a switch, leftovers": ("LS012", SWITCHED.format(scaled="loss = loss / args.steps", test="(i + 1) % 8 == 0"), True),
    "a switch, all right": ("LS012", SWITCHED.format(scaled="loss /= args.steps", test=RIGHT_END), False),
    "a switch, exchanging": ("LS009", SWITCHED.format(scaled="loss /= args.steps", test=RIGHT_END), True),
    "a switch that never accumulates": ("LS009", SWITCHED.format(scaled="", test="args.clip"), False),
    "a helper, undivided": ("LS012", HELPED.format(divided="", end="self.update()"), True),
    "a helper, leftovers": ("LS012", HELPED.format(divided=" / self.every", end="pass"), True),
    "a helper, all right": ("LS012", HELPED.format(divided=" / self.every", end="self.update()"), False),
    "handed, exchanging": ("LS009", HANDED.format(line="update(model(x), optimizer, count % every == 0)"), True),
    "handed by a name": (
        "LS009",
        HANDED.format(line="now = True if count % every == 0 else False\n        update(model(x), optimizer, now=now)"),
        True,
    ),
    "handed, undivided": ("LS012", HANDED.format(line="update(model(x), optimizer, count % every == 0)"), True),
    "handed, divided": ("LS012", HANDED.format(line="update(model(x) / every, optimizer, count % every == 0)"), False),
    "handed by somebody out of sight": (
        "LS012",
        "def update(loss, optimizer, every):\n    for i in range(9):\n        loss.backward()\n"
        "        if i % every == every - 1:\n            optimizer.step()\n    optimizer.step()\n",
        False,
    ),
    "handed always": ("LS009", HANDED.format(line="update(model(x), optimizer, True)"), False),
    "spared, undivided": ("LS012", SPARED.format(first=WITHOUT, divided=""), True),
    "spared, divided": (
        "LS012",
        SPARED.format(first=WITHOUT.replace("(x)", "(x).div(every)"), divided=" / every"),
        False,
    ),
    "two models in turns": (
        "LS012",
        SPARED.format(first="model.a(x).backward()\n            optimizer.step()", divided=""),
        False,
    ),
    "beside a step in every turn, leftovers": ("LS012", BESIDE.format(**ACCUMULATED), True),
    "beside a step in every turn, all right": ("LS012", BESIDE.format(**ACCUMULATED | {"test": RIGHT_END}), False),
    "beside a step in every turn, undivided": ("LS012", BESIDE.format(**ACCUMULATED | WHOLE), True),
    "cleared in every turn": ("LS021", BESIDE.format(**ACCUMULATED | {"head": "optimizer.zero_grad()"}), True),
    "cleared after each step": ("LS021", BESIDE.format(**ACCUMULATED), False),
    "cleared before steps in every turn": (
        "LS021",
        BESIDE.format(**ACCUMULATED | {"head": "optimizer.zero_grad()", "test": "args.amp"}),
        False,
    ),
    "an engine, undivided": ("LS012", ENGINE.format(divided="", guard="if engine.state.iteration % every == 0:"), True),
    "an engine, exchanging": (
        "LS009",
        ENGINE.format(divided=" / every", guard="if engine.state.iteration % every == 0:"),
        True,
    ),
    "an engine, all right": (
        "LS012",
        ENGINE.format(divided=" / every", guard="if engine.state.iteration % every == 0:"),
        False,
    ),
    "an engine, every step": ("LS009", ENGINE.format(divided="", guard="if True:"), False),
    "chunks, exchanging": (
        "LS009",
        PARTS.format(names="a, b", parts="zip(x.chunk(4), y.chunk(4))", line="loss = criterion(model(a), b) / 4"),
        True,
    ),
    "micro-batches, undivided": (
        "LS012",
        PARTS.format(names="a, b", parts="split_microbatches(x, y)", line="loss = criterion(model(a), b)"),
        True,
    ),
    "micro-batches, summed": (
        "LS012",
        PARTS.format(
            names="a, b",
            parts="split_microbatches(x, y)",
            line="loss = torch.nn.CrossEntropyLoss(reduction='sum')(model(a), b)",
        ),
        False,
    ),
    "what was done before a resume is passed over": (
        "LS009",
        "def train(model, loader, optimizer, count, every):\n    done = count % 100\n"
        "    for i, x in enumerate(loader):\n"
        "        if i < done:\n            continue\n        (model(x) / every).backward()\n"
        "        if (i + 1) % every == 0:\n            optimizer.step()\n",
        True,
    ),
    "a step over epochs": ("LS012", COUNTED.format(**LONG), True),
    "a step over epochs, turned round": ("LS012", COUNTED.format(**LONG | {"step": "len(loader) * epoch + i"}), True),
    "a step over epochs from one": ("LS012", COUNTED.format(**LONG | {"step": "i + 1 + epoch * len(loader)"}), False),
    "a step over epochs, at its end": ("LS012", COUNTED.format(**LONG | {"test": "(step + 1) % every == 0"}), False),
    "gradients divided": (
        "LS012",
        COUNTED.format(
            **LONG
            | {
                "divided": "",
                "test": "(step + 1) % every == 0",
                "grads": "[p.grad.div_(every) for p in model.parameters()]",
            }
        ),
        False,
    ),
    "one pass that ends by itself": (
        "LS012",
        COUNTED.format(
            **LONG
            | {
                "epochs": "if epochs:",
                "first": "if i > 1000:\n                break",
                "test": "(i + 1) % every == 0",
            }
        ),
        False,
    ),
    "epochs that end by themselves": (
        "LS012",
        COUNTED.format(**LONG | {"first": "if i > 1000:\n                break", "test": "(i + 1) % every == 0"}),
        True,
    ),
    "losses of several heads": (
        "LS009",
        PARTS.format(names="head", parts="model.heads", line="loss = criterion(head(model(x)), y)"),
        False,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_told_where_it_is_wrong_only(name):
    rule, script, told = FORMS[name]
    assert bool(check_text(HEAD + script, configure({}, rule, ""))) is told


APART = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self, model):
        self.model = DDP(model)

    def step(self, batch):
        self.compute(batch)
        {after}

    def compute(self, batch):
        self.optimizer.zero_grad()
        for part in {parts}:
            {loss}.backward()
        {here}

    def run(self, loader):
        {loop}:
            self.step(batch)
"""


@pytest.mark.parametrize("loop", ["for batch in loader", "with loader as batch"])
@pytest.mark.parametrize(
    ("parts", "here", "after", "expected"),
    [
        ("batch.chunk(4)", "self.optimizer.step()", "pass", True),
        ("torch.split(batch, 4)", "pass", "self.optimizer.step()", True),
        ("zip(batch.split(2), batch.split(2))", "pass", "self.optimizer.step()", True),
        ("'a b'.split()", "self.optimizer.step()", "pass", False),
        ("batch.tasks", "self.optimizer.step()", "pass", False),
        ("batch.chunk(4)", "pass", "pass", False),
    ],
)
def test_the_parts_of_a_batch_in_a_function_and_the_step_after_it(loop, parts, here, after, expected):
    text = APART.format(parts=parts, here=here, after=after, loop=loop, loss="(self.model(part).mean() / 4)")
    assert bool(check_text(text, configure({}, "LS009", ""))) == (expected and loop.startswith("for"))


OWN = """
def train(model, agent, loader, optimizer, other, criterion, args):
    {steps}
    for i, x in enumerate(loader):
        loss = criterion(model(x)){divided}
        if torch.isnan(loss):
            quit()
        loss.backward()
        if i != 0 and i % 50 == 0:
            agent(x).backward()
            other.step()
        if {test}:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("steps", "test", "told"),
    [
        ("every = 1", "(i + 1) % every == 0", False),
        ("every = 4", "(i + 1) % every == 0", True),
        ("every = args.every", "(i + 1) % every == 0", True),
        ("args.every = 1", "(i + 1) % args.every == 0", True),  # an option
        ("every = 4 if args.big else 1", "(i + 1) % every == 0", True),
        ("every = 4", "(i + 1) % every == 0 or i + 1 == len(loader)", False),
    ],
)
def test_a_step_for_gradients_of_its_own(steps, test, told):
    text = HEAD + OWN.format(steps=steps, test=test, divided=" / every")
    line = text.split("\n").index(f"        if {test}:") + 1
    assert [finding.line for finding in check_text(text, configure({}, "LS012", ""))] == [line] * told


@pytest.mark.parametrize(("steps", "number"), [("1", 0), ("2", 1)])
def test_micro_batches_of_which_there_is_one(steps, number):
    text = HEAD + "def train(model, optimizer, batches):\n    model = wrap(model, 0)\n"
    text += f"    accum = {steps}\n    for x in batches:\n        for micro in range(accum):\n"
    text += "            (model(x) / accum).backward()\n        optimizer.step()\n        optimizer.zero_grad()\n"
    assert len(check_text(text, configure({}, "LS009", ""))) == number


def test_a_loss_of_the_accumulation_that_is_asked_whether_it_is_finite():
    text = HEAD + OWN.format(steps="every = 4", test="(i + 1) % every == 0", divided=" / every")
    assert len(check_text(text.replace("loss", "accum_loss"), configure({}, "LS012", ""))) == 1
