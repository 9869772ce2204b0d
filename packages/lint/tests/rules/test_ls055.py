"""LS055: resume without the optimizer."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def found(text, rule):
    """Return the lines of a rule's findings in a script."""
    return [text.splitlines()[finding.line - 1].strip() for finding in check_text(text, configure({}, rule, ""))]


NAMED = """
import torch

def train(model, loader, loss_of, args):
    adam = torch.optim.Adam(model.parameters())
    start_epoch = 0
    if args.resume:
        state = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        {load}
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        for batch in loader:
            adam.zero_grad()
            loss_of(model, batch).backward()
            adam.step()
"""


@pytest.mark.parametrize(
    ("load", "told"),
    [
        ("pass", 1),
        ('adam.load_state_dict(state["adam"])', 0),
        ('for each, part in zip([adam, args.opt], state["adam"]): each.load_state_dict(part)', 0),
    ],
)
def test_an_optimizer_by_any_name(load, told):
    assert len(found(NAMED.format(load=load), "LS055")) == told
    assert not found(NAMED.replace("adam", "opt").format(load='opt.load_state_dict(state["opt"])'), "LS055")
