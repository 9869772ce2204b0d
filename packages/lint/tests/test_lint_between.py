"""LS017: an evaluation between two steps that leaves the model in eval mode, and held-out data without a loop."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text):
    """The lines and the messages of the rule in a text."""
    return [(finding.line, finding.message) for finding in check_text(text, configure({}, "LS017", ""))]


STEPS = """
import torch

@torch.no_grad()
def evaluate(model, test_loader):
    model.eval()
    total = sum((model(x).argmax(1) == y).sum() for x, y in test_loader)
    {last}
    return total

def train(model, raw_model, teacher, loader, test_loader, optimizer, criterion):
    step = 0
    for epoch in range(9):
        model.train()
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            step += 1
            if {test}:
                print(evaluate({given}, test_loader))
                {after}

train(None, None, None, [], [], None, None)
"""


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 1),
        ({"given": "raw_model"}, 1),
        ({"given": "teacher"}, 0),
        ({"last": "model.train()"}, 0),
        ({"after": "model.train()"}, 0),
        ({"after": "break"}, 0),
        ({"test": "i == len(loader) - 1"}, 0),
        ({"test": "epoch > 3 and i + 1 == len(loader)"}, 0),
        ({"test": "i % (len(loader) // 4) == 0"}, 1),
        ({"test": "step % 100 == 0 or i == len(loader) - 1"}, 1),
    ],
)
def test_an_evaluation_between_two_steps(change, number):
    parts = {"given": "model", "last": "pass", "after": "pass", "test": "step % 100 == 0"} | change
    found = told(STEPS.format(**parts))
    assert len(found) == number
    assert all("stays in eval mode" in message for _, message in found)


WHOLE = """
import torch

def fit(model, x_train, y_train, x_test, y_test, optimizer, criterion):
    for epoch in range(100):
        optimizer.zero_grad()
        criterion(model(x_train), y_train).backward()
        optimizer.step()
        {context}:
            {name} = model({given})
            score = criterion({name}, y_test)
            {use}
    {end}

fit(torch.nn.Linear(4, 2), None, None, None, None, None, None)
"""


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({}, 1),
        ({"context": "with torch.no_grad()"}, 0),
        ({"given": "x_train"}, 0),
        ({"given": "test"}, 0),  # which may be anything
        ({"use": "score.backward()"}, 0),
        ({"use": "torch.autograd.grad(score, model.parameters())"}, 0),
        ({"use": "print(score.grad_fn)"}, 0),
        ({"end": "return score"}, 0),
    ],
)
def test_held_out_data_that_is_given_as_a_whole(change, number):
    parts = {"context": "if epoch % 10 == 0", "given": "x_test", "name": "guess", "use": "print(score)", "end": "pass"}
    found = told(WHOLE.format(**parts | change))
    assert [line for line, _ in found] == [10] * number


CALLED = """
import torch

class Solver:
    def __init__(self, net, optimizer):
        self.net = net
        self.optimizer = optimizer

    def note(self, data):
        guess = self.net(data.X_test)
        self.losses.append((guess - data.U_test).abs().mean())

    def fit(self, data, criterion):
        for epoch in range(100):
            self.optimizer.zero_grad()
            criterion(self.net(data.X_train)).backward()
            self.optimizer.step()
            {context}:
                self.note(data)
"""


@pytest.mark.parametrize(("context", "lines"), [("if epoch % 10 == 0", [10]), ("with torch.no_grad()", [])])
def test_held_out_data_in_a_method_that_the_training_calls(context, lines):
    assert [line for line, _ in told(CALLED.format(context=context))] == lines
