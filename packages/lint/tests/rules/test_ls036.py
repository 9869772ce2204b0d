"""LS036: device sync in every step."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text


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


HEAD = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""


def told_2(text, rule):
    """How often a rule is told in a script."""
    return len(check_text(HEAD + text, configure({}, rule, "")))


STEP_2 = """
def train(model, loader, optimizer, scheduler, draw):
    model.cuda()
    for x, y in loader:
        x = x.cuda()
        loss = step(model, x)
        loss.backward()
        optimizer.step()

def step(model, x, optim=None):
    flow = model(x)
    size = {size}
    {test}
    return flow.mean()
"""


@pytest.mark.parametrize(
    ("size", "test", "number"),
    [
        ("1", "assert not torch.isnan(flow).any()", 1),
        ("1", "assert torch.isfinite(flow[0]).all() and True", 1),
        ("1", "assert flow.shape.any()", 0),
        ("(torch.rand(4) * 8).long().tolist()", "pass", 0),
        ("torch.randint(4, (2,)).tolist()", "pass", 0),
        ("torch.rand(4, device='cuda').tolist()", "pass", 1),
        ("(torch.rand(4).cuda() * 8).tolist()", "pass", 1),
        ("torch.rand(4).to(x.device).tolist()", "pass", 1),
        ("1", "crop = torch.rand(4) * 8; print(crop.tolist())", 0),
        ("1", "if optim == None: flow.sum().item()", 1),
        ("1", "if optim is not None: flow.sum().item()", 0),  # no call gives one
    ],
)
def test_what_a_step_reads(size, test, number):
    assert told_2(STEP_2.format(size=size, test=test), "LS036") == number


def found(text):
    """How many syncs are told."""
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


@pytest.mark.parametrize(
    ("device", "number"),
    [
        ("torch.device(cfg.device)", 1),
        ("torch.device(args.trainer.device)", 1),
        ("torch.device(self.target)", 1),
        ("torch.device('cpu')", 0),
        ("torch.get_device(cfg.device)", 0),
        ("cfg.device", 1),
        ("x.device", 0),
    ],
)
def test_a_device_that_an_option_names_may_be_one_to_wait(tmp_path, device, number):
    text = (
        "import torch\n\ndef fit(self, model, loader, optimizer, cfg, args):\n    model.to(%s)\n"
        "    for x in loader:\n        loss = model(x)\n        loss.backward()\n        optimizer.step()\n"
        "        print(loss.item())\n"
    )
    (tmp_path / "run.py").write_text(text % device)
    assert len(check_paths([str(tmp_path / "run.py")], configure({}, "LS036", ""))) == number


def lines(text, code="LS036"):
    return [finding.line for finding in check_text(text, configure({}, code, ""))]


ENGINE = """
import torch
from ignite.engine import Engine, Events
{before}
def update(engine, batch):
    x, y = batch[0].cuda(), batch[1].cuda()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    {back}
    optimizer.step()
    {first}
    return {value}

def evaluate(engine, batch):
    return model(batch.cuda()).mean().item()

trainer = {made}
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, [12]),
        ({"value": "{'loss': loss.item(), 'n': len(x)}"}, [12]),
        ({"first": "print(loss)", "value": "loss.detach()"}, [11]),
        ({"value": "loss.detach()"}, []),
        ({"first": "if engine.state.iteration % 50 == 0: print(loss)", "value": "loss.detach()"}, []),
        ({"made": "Engine(evaluate)"}, []),
        ({"back": "pass"}, []),
        ({"before": "from motors import Engine"}, [12]),  # the first of two imports of a name is taken
        ({"made": "Motor(update)"}, []),
    ],
)
def test_the_function_that_an_engine_of_ignite_runs(change, told):
    usual = {"before": "", "first": "pass", "value": "loss.item()", "made": "Engine(update)", "back": "loss.backward()"}
    assert lines(ENGINE.format(**(usual | change))) == told


def told_3(text, code="LS036"):
    return bool(check_text(text, configure({}, code, "")))


NUMBERED = """
import torch

device = {device}

def train(model, loader, optimizer, criterion):
    model.to(device)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        print(loss.item())
"""


@pytest.mark.parametrize(("device", "expected"), [("0", True), ("'cpu'", False), ("torch.device('mps')", True)])
def test_a_device_that_is_a_number_or_apples_is_a_gpu(device, expected):
    assert told_3(NUMBERED.format(device=device)) is expected
