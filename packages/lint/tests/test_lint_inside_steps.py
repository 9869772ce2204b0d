"""LS036: what runs now and then inside each step, what is asked or read elsewhere, what has no part in the training."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

CONFIG = configure({}, "LS036", "")
SCRIPT = """
import random
import time
import torch
import torch.nn.functional as F

def broken(value):
    return torch.isnan(value).any()

def empty(value):
    return len(value) == 0

def sample(model, x, way):
    kept = []
    for t in range(10):
        x = model(x)
        if t % 2 == 0:
            kept.append({kept})
        if way == {way!r}:
            size = {size}
    return kept

class Net(torch.nn.Module):
    def forward(self, x):
        y = self.layer(x)
        return y / {scale}

def train(loader, val_loader, optimizer, args, accelerator):
    model = Net().cuda()
    model, optimizer = accelerator.prepare(model, optimizer)
    last_time, seen = time.time(), 0
    for i, (x, y) in enumerate(loader):
        x = x.cuda()
        {before}
        kept = sample(model, x, "p2")
        losses = F.cross_entropy(model(x), y.cuda(), reduction="none")
        losses.mean().backward()
        optimizer.step()
        {after}
"""
USUAL = {"kept": "x", "way": "p2", "size": "0", "scale": "1", "before": "pass", "after": "pass"}


def told(**change):
    return bool(check_text(SCRIPT.format(**(USUAL | change)), CONFIG))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # every n-th turn of a loop inside the step, and a way to compute that a parameter names
        ({"size": "int(x.max().item())"}, True),
        ({"size": "int(x.max().item())", "way": "val"}, False),  # a part of the data, perhaps
        ({"after": "if i % 2 == 0: print(losses[0].item())"}, False),
        ({"after": "for j in range(9):\n            if i % 2 == 0: seen += losses[j].item()"}, False),
        # one of the losses of a batch
        ({"after": "seen += float(losses[0])"}, True),
        ({"after": "seen += float(args.losses[0])"}, False),
        # functions that ask of a loss
        ({"after": "if empty(losses): break"}, False),
        ({"after": "if i % 50 == 0 and broken(losses): break"}, False),
        ({"after": "if torch.isfinite(model(x)).all(): pass"}, True),
        # the model's own forward, of what is certainly on the device
        ({"scale": "self.scale.item()"}, False),
        # how long ago something was
        ({"after": "if time.time() - last_time > 30: print(losses.sum().item())"}, False),
        ({"after": "if args.rank == 0 and time.time() - last_time >= 30: print(losses.sum().item())"}, False),
        ({"after": "if time.time() - last_time > 3e4: break\n        print(losses.sum().item())"}, True),
        # an arm that ends the turn before anything is trained
        ({"before": "if args.show:\n            print(x.cpu())\n            continue"}, False),
        ({"after": "if args.show:\n            print(losses.cpu())\n            continue"}, True),
        # where the network chooses, not where an agent acts at random
        ({"after": "if random.random() < args.epsilon: pass\n        else: y = model(x).argmax().item()"}, True),
        ({"after": "if random.random() > args.epsilon: y = model(x).argmax().item()"}, True),
        ({"after": "if random.random() < args.epsilon: y = model(x).argmax().item()"}, False),
        ({"after": "if random.random() < args.share: y = model(x).argmax().item()"}, False),
        # a name that is made of itself
        ({"after": "y = model(x)\n        y = y.tolist()\n        if y > 3: break"}, True),
    ],
)
def test_what_runs_in_each_step(change, expected):
    assert told() is False
    assert told(**change) is expected


METRICS = """
def accuracy(output, target):
    right = (output.argmax(1) == target).float()
    return right.mean(){read}
"""
LOOP = """
import torch
import torch.nn.functional as F
from metrics import accuracy

def train(model, loader, optimizer):
    model.cuda()
    for i, (x, y) in enumerate(loader):
        output = model(x.cuda())
        loss = F.cross_entropy(output, y.cuda())
        loss.backward()
        optimizer.step()
        {line}
"""


@pytest.mark.parametrize(
    ("read", "line", "number"),
    [
        ("", "right = accuracy(output, y.cuda())", 0),
        (".item()", "right = accuracy([1, 2], [1, 2])", 0),
        (".item()", "if i % 10 == 0: right = accuracy(output, y.cuda())", 0),
    ],
)
def test_a_score_that_another_file_reads(tmp_path, read, line, number):
    (tmp_path / "metrics.py").write_text(METRICS.format(read=read))
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(line=line))
    assert len(check_paths([str(script)], CONFIG)) == number
