"""LS011: clipping scaled or stepped gradients."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def levels(text, code):
    """The levels of what a rule tells about a script."""
    return [finding.severity for finding in check_text(text, configure({}, code, ""))]


MANAGED = """
import torch
from {package} import {name}

def main(model, loader, optimizer, args):
    table = {{"precision": "16-mixed"}}
    engine = {name}({option})
    for batch in loader:
        engine.backward(model(batch).sum())
        {clip}
        optimizer.step()
        optimizer.zero_grad()
"""


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("package", "name", "option", "clip", "number"),
    [
        ("accelerate", "Accelerator", "mixed_precision='fp16'", CLIP, 1),
        ("accelerate", "Accelerator", "mixed_precision='bf16'", CLIP, 0),
        ("accelerate", "Accelerator", "mixed_precision=args.precision", CLIP, 0),
        ("accelerate", "Accelerator", "", CLIP, 0),
        ("accelerate", "Accelerator", "mixed_precision='fp16'", "engine.clip_grad_norm_(model.parameters(), 1.0)", 0),
        ("accelerate", "Accelerator", "mixed_precision='fp16'", f"engine.unscale_gradients()\n        {CLIP}", 0),
        ("lightning", "Fabric", "precision=table['precision']", CLIP, 1),
        ("lightning.fabric", "Fabric", "precision='16-mixed'", CLIP, 1),
        ("lightning.fabric", "Fabric", "precision='bf16-mixed'", CLIP, 0),
    ],
)
def test_clips_where_a_framework_scales(package, name, option, clip, number):
    text = MANAGED.format(package=package, name=name, option=option, clip=clip)
    assert len(levels(text, "LS011")) == number


def told(text, code):
    return bool(check_text(text, configure({}, code, "")))


CLIPPED = """
import torch

def clip_gradient(parameters, value):
    parameters = [p for p in parameters if p.grad is not None]
    torch.nn.utils.{clip}(parameters, value)

def unscale(scaler, optimizer):
    scaler.unscale_(optimizer)

def step(model, optimizer, scaler, loss):
    optimizer.zero_grad()
    {backward}
    {before}
    {call}
    {after}
    {step}
"""


SCALED = {
    "clip": "clip_grad_norm_",
    "backward": "scaler.scale(loss).backward()",
    "before": "pass",
    "call": "clip_gradient(model.parameters(), 1.0)",
    "after": "pass",
    "step": "scaler.step(optimizer)",
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"after": "scaler.unscale_(optimizer)"}, True),
        ({"clip": "clip_grad_value_"}, True),
        (
            {"call": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "after": "scaler.unscale_(optimizer)"},
            True,
        ),
        ({"call": "pass", "step": "optimizer.step()\n    clip_gradient(model.parameters(), 1.0)"}, True),
        ({"before": "scaler.unscale_(optimizer)"}, False),
        ({"before": "unscale(scaler, optimizer)"}, False),
        ({"backward": "loss.backward()", "step": "optimizer.step()"}, False),
        ({"clip": "get_total_norm"}, False),
    ],
)
def test_a_helper_that_clips(change, found):
    assert told(CLIPPED.format(**SCALED | change), "LS011") is found


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
