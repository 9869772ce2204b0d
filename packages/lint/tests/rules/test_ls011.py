"""LS011: clipping scaled or stepped gradients."""

import pytest
from rule_findings import count

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


STALE = """
import torch

def train(model, loader, optimizer, criterion):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        {lines}
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([CLIP, "optimizer.zero_grad()", "loss.backward()", "optimizer.step()"], True),
        (["optimizer.zero_grad()", CLIP, "loss.backward()", "optimizer.step()"], True),
        (["optimizer.zero_grad()", "loss.backward()", CLIP, "optimizer.step()"], False),
        (["loss.backward()", CLIP, "optimizer.step()", "optimizer.zero_grad()"], False),
        ([CLIP, "optimizer.step()", "optimizer.zero_grad()", "loss.backward()"], False),
        ([CLIP, "finish(optimizer)", "optimizer.zero_grad()", "loss.backward()"], False),
    ],
)
def test_a_clip_of_what_is_cleared_next(lines, expected):
    text = STALE.format(lines="\n        ".join(lines))
    assert bool(check_text(text, configure({}, "LS011", ""))) == expected


APEX = """
import torch
from apex import amp

def step(model, optimizer, loss):
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        {inner}
    {after}
    optimizer.step()
"""


CLIP_2 = "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)"


@pytest.mark.parametrize(("inner", "after", "number"), [(CLIP_2, "pass", 1), ("pass", CLIP_2, 0)])
def test_a_clip_before_apex_has_unscaled(inner, after, number):
    assert count(APEX.format(inner=inner, after=after), "LS011") == number
