"""LS017: a model that an evaluator leaves in eval mode, and averaged weights that stay in the network."""

import pytest

from lockstep_lint.config import Config
from lockstep_lint.runner import check_text

CODE = frozenset({"LS017"})


def lines(text):
    return [finding.line for finding in check_text(text, Config(CODE, CODE))]


EVALUATOR = """import torch

class Scores:
    def __init__(self, rows):
        self.rows = rows

    @torch.no_grad()
    def run(self, net):
        net.eval()
        total = sum(net(row).mean() for row in self.rows)
        {after}
        return total

class Trainer:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def fit(self, loader, scores):
        for epoch in range(10):
            self.model.train()
            for i, x in enumerate(loader):
                self.model(x).mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if i % 100 == 0:
                    report(self.model, scores)

def report(model, scores):
    print(scores.run(model))

def main(model, optimizer, loader, held_out):
    scores = Scores(held_out)
    trainer = Trainer(model, optimizer)
    trainer.fit(loader, scores=scores)
"""


@pytest.mark.parametrize(("after", "expected"), [("pass", [27]), ("net.train()", [])])
def test_an_evaluator_that_a_method_is_handed(after, expected):
    assert lines(EVALUATOR.format(after=after)) == expected


AVERAGED = """import torch

def train(net, other, loader, optimizer, ema, epochs):
    for epoch in range(epochs):
        for x in loader:
            net(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.step(net.parameters())
        {test}
            {shadow}
            {put}
            torch.save(net.state_dict(), f"{{epoch}}.pt")
            {back}
"""
SELDOM = "if (epoch + 1) % 50 == 0:"


@pytest.mark.parametrize(
    ("test", "shadow", "put", "back", "expected"),
    [
        (SELDOM, "pass", "ema.copy_to(net.parameters())", "pass", [12]),
        (SELDOM, "shadow = net", "ema.copy_to(shadow.parameters())", "pass", [12]),
        (SELDOM, "ema.store(net.parameters())", "ema.copy_to(net.parameters())", "ema.restore(net.parameters())", []),
        (SELDOM, "kept = net.state_dict()", "ema.copy_to(net.parameters())", "net.load_state_dict(kept)", []),
        (SELDOM, "pass", "ema.copy_to(other.parameters())", "pass", []),
        (SELDOM, "pass", "ema.copy_to(net.parameters())", "break", []),
        ("if epoch == epochs - 1:", "pass", "ema.copy_to(net.parameters())", "pass", []),
    ],
)
def test_averaged_weights_that_stay(test, shadow, put, back, expected):
    assert lines(AVERAGED.format(test=test, shadow=shadow, put=put, back=back)) == expected


PHASES = """
import torch

def train(model, optimizer, criterion, loaders, epochs, phases):
    for _ in range(epochs):
        for phase in phases:
            if phase == "train":
                model.train()
            else:
                model.eval()
            {between}
            for images, labels in loaders[phase]:
                with torch.set_grad_enabled(phase == "train"):
                    loss = criterion(model(images), labels)
                    optimizer.zero_grad()
                    if {test}:
                        loss.backward()
                        optimizer.step()
"""


@pytest.mark.parametrize(
    ("between", "test", "told"),
    [
        ("pass", 'phase == "train"', 0),
        ("pass", 'phase != "val" and phase == "train"', 0),
        ("pass", "epochs > 1", 1),
        ("phase = loaders.next()", 'phase == "train"', 1),  # another phase than the one of the switch
    ],
)
def test_a_backward_under_the_same_test_as_the_switch(between, test, told):
    text = PHASES.format(between=between, test=test)
    assert len(lines(text)) == told
