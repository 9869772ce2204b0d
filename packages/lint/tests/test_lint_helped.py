"""LS017: a training whose gradients are computed by a helper is no evaluation, whatever its name says."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SCRIPT = """
import torch

def advance(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def show(loss, optimizer):
    print(loss.item())

def train_validate(model, loader, optimizer):
    for x in loader:
        loss = model(x).mean()
        {use}

def main(loader):
    model = torch.nn.Linear(2, 2)
    model.eval()
    train_validate(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))

main([])
"""


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("show(loss, optimizer)", True),
        ("print(loss)", True),
        ("advance(loss, optimizer)", False),
        ("loss.backward()", False),
    ],
)
def test_a_helper_that_computes_gradients_trains(use, told):
    assert bool(check_text(SCRIPT.format(use=use), configure({}, "LS017", ""))) is told
