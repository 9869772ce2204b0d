"""LS011: clipping scaled or stepped gradients."""

import pytest
from rule_findings import count, severities

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

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
    assert len(severities(text, "LS011")) == number


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
