"""LS036: what runs beside every step of the optimizer, and which values a number leaves on the device."""

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
def test_what_a_loss_is_the_sum_of(shown, expected):
    assert bool(told(SUMMED.format(shown=shown))) is expected


AGENT = """
import torch

class Agent:
    def __init__(self, net, optimizer):
        self.net, self.optimizer = net.cuda(), optimizer

    def learn(self, memory):
        loss = self.net(memory.sample())
        loss.backward()
        {step}
        return loss.item()

def run(env, net, optimizer, memory):
    agent = Agent(net, optimizer)
    for step in range(10**6):
        memory.append(env.step(agent))
        if step % 4 == 0:
            agent.learn(memory)
"""


@pytest.mark.parametrize(("step", "lines"), [("self.optimizer.step()", [12]), ("pass", [])])
def test_a_method_that_steps_is_run_once_a_step(step, lines):
    assert told(AGENT.format(step=step)) == lines


@pytest.mark.parametrize(
    ("path", "start", "step", "lines"),
    [
        ("agent.py", "import torch", "self.optimizer.step()", [12]),
        ("agent.py", "import torch", "pass", []),
        ("test_agent.py", "import torch, pytest", "self.optimizer.step()", []),
    ],
)
def test_a_method_that_makes_a_step_for_a_loop_out_of_sight(path, start, step, lines):
    text = AGENT.partition("\ndef run")[0].replace("import torch", start).format(step=step)
    assert [f.line for f in check_text(text, configure({}, "LS036", ""), path)] == lines


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("part = loss.sum() / (y.cuda() != 255).sum().item(); losses.append(part.item())", 2),
        ("part = best_loss / (y.cuda() != 255).sum().item(); losses.append(part.item())", 1),
        ("mean_loss = loss.item() / 2\n        best_loss = mean_loss\n        writer.add_scalar('x', best_loss)", 1),
        ("print('a' if i not in loss else 'b')", 0),
    ],
)
def test_a_number_beside_a_tensor_and_what_is_made_of_numbers(last, expected):
    text = LOOP.format(steps=STEP, last=last.replace("; ", "\n        "))
    assert len(told(text)) == expected


DEVICE = """
import torch
from torch.utils.data import DataLoader

def train(model, data, optimizer, criterion, cfg, given):
    {device}
    loader = DataLoader(data, num_workers=2, pin_memory=True)
    model.load_state_dict(torch.load("x.pt"))
    for x, y in loader:
        x = x.to(device)
        loss = criterion(model(x), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""


@pytest.mark.parametrize(
    ("device", "waits", "copies"),
    [
        ('device = "mps" if torch.backends.mps.is_available() else "cpu"', [15], 0),
        ('device = "mps" if torch.backends.mps.is_available() else "cuda"', [15], 2),
        ('device, timestamps = "cpu", 0', [], 0),
        ('device = cfg["device"]', [15], 2),
        ('device = given["name"]', [], 2),
        ("device = y.device", [], 2),
    ],
)
def test_what_a_gpu_is(device, waits, copies):
    text = DEVICE.format(device=device)
    assert told(text) == waits
    assert told(text, "LS015") == ([] if device.startswith("device, timestamps") else [8])  # whoever saved it had a GPU
    assert len(told(text, "LS022")) == copies
