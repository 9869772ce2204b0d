"""LS036: device sync in every step."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def told(text, code="LS036"):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


LOOP = """
import torch
import torch.nn.functional as F

def train(model, loader, optimizer, args, writer, iterations):
    model.cuda()
    losses, best_loss = [], 9
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        {steps}
        {last}
"""


READ = "losses.append(loss.item())"


STEP = "optimizer.step()"


@pytest.mark.parametrize(
    ("steps", "last", "expected"),
    [
        (STEP, "if not args.multi or args.rank % args.gpus == 0:\n            " + READ, True),
        (STEP, "if args.rank % args.gpus == 0 and i % 10 == 0:\n            " + READ, False),
        (STEP, "if not args.multi or i % args.gpus == 0:\n            " + READ, False),
        (f"if i % 4 != 0:\n            continue\n        {STEP}", READ, True),
        (f"{STEP}\n        if i % 4 != 0:\n            continue", READ, False),
        ("pass", f"if i % 4 == 0:\n            if args.amp:\n                {STEP}\n            {READ}", True),
        ("pass", f"if i % 4 == 0:\n            if x.sum() > 0:\n                {STEP}\n            {READ}", True),
        (STEP, f"if i == 0:\n            losses = []\n        else:\n            {READ}", True),
        (STEP, f"if i > 0:\n            {READ}", True),
        (STEP, f"if i == 0:\n            {READ}", False),
        (STEP, "if writer:\n            " + READ, True),
        (STEP, "if iterations:\n            " + READ, False),
        (STEP, f"if best_loss > 10:\n            {READ}", False),
    ],
)
def test_what_runs_beside_the_step(steps, last, expected):
    assert bool(told(LOOP.format(steps=steps, last=last))) is expected


SUMMED = """
import torch

def train(model, loader, optimizer, mse, kld, args):
    model.cuda()
    for i, (x, y) in enumerate(loader):
        out = model(x.cuda())
        fit, far = mse(out, y.cuda()), kld(out)
        first = mse(out, y.cuda())
        second = kld(out)
        rate = min(1.0, i / 100)
        loss_scale = args.scale * rate
        loss = first + rate * second
        loss.backward()
        optimizer.step()
        print({shown})
"""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("second", True), ("f'{first:.3f}'", True), ("rate", False), ("loss_scale", False), ("i", False)],
)
def test_what_a_loss_is_the_sum(shown, expected):
    assert bool(told(SUMMED.format(shown=shown))) is expected


def found(text):
    """Count the reported syncs."""
    return len(check_text(text, configure({}, "LS036", "")))


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
