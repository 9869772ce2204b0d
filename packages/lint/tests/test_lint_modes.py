"""LS017: forwards by helpers and methods, methods that nothing in sight shields, and what a loop switches last."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text):
    return bool(check_text(text, configure({}, "LS017", "")))


SHARED = """
import torch

class Experiment:
    def check(self, test_loader, criterion):
        {mode}
        total = 0
        {context}
            for x, y in test_loader:
                {forward}
                total += criterion(guess, y).item()
        self.model.train()
        return total

    def fit(self, loader, test_loader, criterion, optimizer):
        self.model.train()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(self.process(x), y).backward()
            optimizer.step()
        self.check(test_loader, criterion)

    {decorator}
    def process(self, x):
        return self.model(x.cuda())

Experiment().fit([], [], None, None)
"""
USUAL = {
    "mode": "self.model.eval()",
    "context": "if True:",
    "forward": "guess = self.process(x)",
    "decorator": "# plain",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"forward": "guess = self.model.forward(x)"}, True),
        ({"forward": "guess = self.model.module.mean_loss(x)"}, True),
        ({"mode": "pass", "context": "with torch.no_grad():"}, True),
        ({"context": "with torch.no_grad():"}, False),
        ({"decorator": "@torch.no_grad()"}, False),
        ({"forward": "guess = self.prepare(x)"}, False),
        ({"forward": "guess = self.load_model(x)"}, False),
        ({"forward": "guess = self.process(x); torch.autograd.grad(guess, x)"}, False),
        ({"forward": "guess = torch.nn.functional.mse_loss(x, y)"}, False),
    ],
)
def test_an_evaluation_by_a_function_that_training_shares(change, expected):
    assert told(SHARED.format(**(USUAL | change))) is expected


METHOD = """
import torch
from library import Base

class Tester{base}:
    def test(self, test_loader):
        {mode}
        for x in test_loader:
            print(self.model(x))

def main(tester, loader):
    {use}
"""


@pytest.mark.parametrize(
    ("base", "mode", "use", "expected"),
    [
        ("", "self.model.eval()", "tester.test(loader)", True),
        ("(object)", "self.model.eval()", "pass", True),
        ("(Base)", "self.model.eval()", "tester.test(loader)", False),
        ("", "pass", "tester.test(loader)", False),
        ("", "self.model.eval()", "with torch.no_grad(): tester.test(loader)", False),
    ],
)
def test_a_method_of_an_object_whose_class_is_not_known(base, mode, use, expected):
    assert told(METHOD.format(base=base, mode=mode, use=use)) is expected


ORDER = """
import torch

@torch.no_grad()
def estimate(net):
    net.eval()
    print(net(1))
    {end}

@torch.no_grad()
def draw(net):
    net.eval()
    print(net(2))

class Metric:
    @torch.no_grad()
    def update(self, x):
        self.model.eval()
        return self.model(x)

def main(engine, loader):
    metric = Metric()
    raw_model = engine.module
    teacher = engine.teacher
    while True:
        {first}
        {second}
        loss = engine(next(loader)).mean()
        engine.backward(loss)
        engine.step()
        {last}
"""


@pytest.mark.parametrize(
    ("end", "first", "second", "last", "expected"),
    [
        ("net.train()", "estimate(raw_model)", "draw(raw_model)", "pass", True),
        ("pass", "raw_model.train()", "estimate(raw_model)", "pass", True),
        ("net.train()", "draw(raw_model)", "estimate(raw_model)", "pass", False),
        ("pass", "raw_model.train()", "pass", "draw(raw_model)", False),
        ("pass", "raw_model.train()", "draw(teacher)", "pass", False),
        ("pass", "raw_model.train()", "metric.update(1)", "pass", False),
    ],
)
def test_the_last_switch_before_training_counts(end, first, second, last, expected):
    assert told(ORDER.format(end=end, first=first, second=second, last=last)) is expected


OTHER = """
import torch

def main(loader, engine):
    {name} = engine.module
    for x in loader:
        {name}.eval()
        loss = engine(x).mean()
        engine.backward(loss)
        engine.step()
"""


@pytest.mark.parametrize(("name", "expected"), [("semantic_branch", True), ("ema_branch", False), ("net_ema", False)])
def test_an_average_of_the_weights_by_its_name(name, expected):
    assert told(OTHER.format(name=name)) is expected


@pytest.mark.parametrize(("mode", "expected"), [("model.eval()", True), ("model.train()", False), ("pass", False)])
def test_a_loop_of_a_notebook_after_a_switch(mode, expected):
    text = f"import torch\nmodel = make()\n{mode}\nfor i in range(0, len(rest), 8):\n    y = model(rest[i : i + 8])\n"
    assert told(text) is expected


EPOCH = """
import torch

class Trainer:
    def run(self, loader, optimizer=None, verbose=True):
        for x in loader:
            loss = self.step(x, optimizer)
            {inside}

    def made(self, x):
        return self.model(x).mean()

    def step(self, x, optimizer):
        {forward}
        if {test}:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def fit(self, loader, val_loader, optimizer):
        self.model.train()
        self.run(loader, optimizer)
        self.model.eval()
        with torch.no_grad():
            self.run(val_loader)

    def score(self, val_loader):
        self.model.eval()
        {call}

Trainer().score([])
"""

# as the phases of a loop that is told what it is for
TWO_WAYS = """if optimizer is not None:
            loss = self.made(x)
        else:
            with torch.no_grad(): loss = self.made(x)"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"call": "self.run(val_loader, optimizer=None)"}, True),
        ({"test": "optimizer"}, True),
        ({"call": "with torch.no_grad(): self.run(val_loader)"}, False),
        ({"call": "self.run(val_loader, self.optimizer)"}, False),
        ({"call": "self.run(val_loader, self.optimizer, verbose=False)"}, False),
        ({"test": "optimizer is None"}, False),
        ({"forward": "with torch.no_grad(): loss = self.model(x).mean()"}, False),
        ({"inside": "loss.backward()", "test": "optimizer is not None"}, False),
        ({"forward": TWO_WAYS}, False),
        ({"forward": TWO_WAYS.replace("torch.no_grad()", "open('log')")}, True),
    ],
)
def test_a_shared_loop_without_an_optimizer(change, expected):
    usual = {
        "inside": "print(loss.item())",
        "forward": "loss = self.model(x).mean()",
        "test": "optimizer is not None",
        "call": "self.run(val_loader)",
    }
    assert told(EPOCH.format(**(usual | change))) is expected


TWICE = """
import torch

@torch.no_grad()
def test(model, test_loader):
    total = 0.0
    for x in test_loader:
        total += model(x).item()
    return total

def main(model, loader, test_loader, optimizer):
    model.train()
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        {within}
    model.eval()
    test(model, test_loader)

main(None, [], [], None)
"""


@pytest.mark.parametrize(
    ("within", "expected"),
    [
        ("test(model, test_loader)", True),
        ("pass", False),
        ("model.eval(); test(model, test_loader); model.train()", False),
    ],
)
def test_an_evaluation_in_eval_mode_at_the_end_alone(within, expected):
    assert told(TWICE.format(within=within)) is expected


def test_a_method_of_a_text_is_no_model_though_eval_is_called():
    text = "def test(rows):\n    for x in rows:\n        kind = eval(x)\n        print('{}'.format(kind))\n\ntest([])\n"
    assert not told("import torch\n" + text)


PHASES = """
import torch

def run(model, loaders, criterion, optimizer):
    for phase in {phases}:
        model.train(phase == "train")
        for x, y in loaders[phase]:
            {around}:
                loss = criterion(model(x), y)
            if {test}:
                loss.backward()
                optimizer.step()
"""


@pytest.mark.parametrize(
    ("phases", "around", "test", "expected"),
    [
        ("['train', 'val']", "if True", "phase == 'train'", True),
        ("('training', 'test')", "if True", "phase == 'train'", True),
        ("['train', 'val']", "with torch.set_grad_enabled(phase == 'train')", "phase == 'train'", False),
        ("['train', 'extra']", "if True", "phase == 'train'", False),
        ("['train', 'val']", "if True", "phase != 'train'", False),
    ],
)
def test_a_phase_that_evaluates_keeps_no_graph(phases, around, test, expected):
    text = PHASES.format(phases=phases, around=around, test=test)
    assert bool(check_text(text, configure({}, "LS017", ""))) == expected


GIVEN = """
import torch
from transformers import AutoModel

def score(model, loader):
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum()
    return right

def main(train_loader, val_loader):
    model = {made}
    {before}
    for x, y in train_loader:
        model(x).loss.backward()
    {call}
    with torch.no_grad():
        for x in {loader}:
            model(x)

main([], [])
"""
BUILT, LOADED = "torch.nn.Linear(4, 2)", "AutoModel.from_pretrained('x')"


@pytest.mark.parametrize(
    ("made", "before", "call", "loader", "expected"),
    [
        (BUILT, "model.train()", "score(model, val_loader)", "[]", True),
        (BUILT, "model.train()", "score(model, train_loader)", "[]", False),
        (BUILT, "model.train()", "score(model, train_loader); score(model, val_loader)", "[]", True),
        (BUILT, "model.eval()", "score(model, val_loader)", "[]", False),
        (LOADED, "model.train()", "pass", "val_loader", True),
        (LOADED, "pass", "pass", "val_loader", False),
    ],
)
def test_held_out_data_that_a_caller_gives_and_a_loaded_model_that_is_trained(made, before, call, loader, expected):
    text = GIVEN.format(made=made, before=before, call=call, loader=loader)
    assert bool(check_text(text, configure({}, "LS017", ""))) == expected


# A network that the loop runs only by a method of it, and a helper that shows what it makes.
GENERATED = """
import torch
from nets import Maker, Judge

def show(model):
    model.eval()
    with torch.no_grad():
        print(model.generate(1))
    {after}

maker, judge = Maker(), Judge()
optimizer = torch.optim.Adam(maker.parameters())
for step in range(1000):
    optimizer.zero_grad()
    judge(maker.generate(64)).mean().backward()
    optimizer.step()
    if step % 100 == 0:
        show(maker)
"""


def test_a_helper_leaves_the_model_whose_parameters_are_trained_in_eval_mode():
    assert told(GENERATED.format(after="pass"))
    assert not told(GENERATED.format(after="model.train()"))


HOOK = """
import torch
import pytorch_lightning as pl

class Show(pl.Callback):
    def {hook}(self, trainer, pl_module):
        pl_module.eval()
        with torch.no_grad():
            print(pl_module.sample(8))
        {after}

class Net(pl.LightningModule):
    def training_step(self, batch, index):
        return self.net(batch).mean()

pl.Trainer(callbacks=[Show()]).fit(Net())
"""


def test_a_callback_of_lightning_leaves_the_module_in_eval_mode():
    assert told(HOOK.format(hook="on_train_epoch_end", after="pass"))
    assert not told(HOOK.format(hook="on_train_epoch_end", after="pl_module.train()"))
    assert not told(HOOK.format(hook="on_validation_epoch_end", after="pass"))


PROBE = """
import torch
from nets import Encoder, Head

def run(args, loader, features):
    encoder = Encoder()
    encoder.load_state_dict(torch.load(args.resume, weights_only=True))
    {mode}
    head = Head()
    optimizer = torch.optim.Adam({trained}.parameters())
    for epoch in range(args.start_epoch, 9):
        for x, y in loader:
            optimizer.zero_grad()
            (head(encoder(x)) - y).pow(2).mean().backward()
            optimizer.step()
"""


def test_a_model_that_only_gives_features_is_no_resume():
    rule = configure({}, "LS055", "")
    assert not check_text(PROBE.format(mode="encoder.eval()", trained="head"), rule)
    assert check_text(PROBE.format(mode="encoder.train()", trained="encoder"), rule)
