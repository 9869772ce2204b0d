"""LS036 and LS016: what a step hands on as a number already, and what is a tensor of the device still."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths, check_text

CONFIG = configure({}, "LS036", "")
SCRIPT = """
import torch
import torch.nn.functional as F
from torch import autograd

def step(model, x, y, optimizer, n):
    optimizer.zero_grad()
    losses = {{"loss": F.cross_entropy(model(x), y)}}
    losses["loss"].backward()
    optimizer.step()
    reduced = {reduced}
    return {given}

def penalty(image, mean):
    grad, = autograd.grad(outputs=image.sum(), inputs=image)
    mean = mean + 0.1 * (grad.norm() - mean)
    return grad.sum(), {mean}

def check(values):
    whole = torch.stack(values)
    if {asked}:
        raise ValueError("broken")
    return whole

def train(model, generator, loader, optimizer, writer, args, config, wandb):
    model.cuda()
    norm, mean = 0, 0
    for i, batch in enumerate(loader):
        x, y = batch["x"].cuda(), batch["y"].cuda()
        {line}
"""
USUAL = {
    "reduced": "{k: v.item() for k, v in losses.items()}",
    "given": "losses",
    "mean": "mean.detach()",
    "asked": "whole is None",
}
STEPPED = "loss = step(model, x, y, optimizer, 4){part}\n        writer.add_scalar('loss', loss, i)"
LEARNS = (
    "out = model(x)\n        loss = F.mse_loss(out, y)\n        loss.backward()\n        optimizer.step()\n        "
)


def lines(text):
    return [text.splitlines()[finding.line - 1].strip() for finding in check_text(text, CONFIG)]


def found(line, **change):
    """What is told in the loop and in the functions that it calls."""
    return lines(SCRIPT.format(line=line, **(USUAL | change)))


LOGGED = "writer.add_scalar('loss', loss, i)"


@pytest.mark.parametrize(
    ("given", "part", "told"),
    [
        ("losses['loss']", "", True),
        ("losses['loss'].item()", "", False),
        ("losses['loss'].data[0] / n", "", False),
        ("(losses['loss'], n)", "[0]", True),
        ("reduced", ".pop('loss')", False),
        ("reduced", "['loss']", False),
        ("{'loss': losses['loss'].item()}", "['loss']", False),
        ("{'loss': losses['loss'].item(), 'raw': losses['loss']}", "['loss']", False),
        ("{'loss': losses['loss'].item(), 'raw': losses['loss']}", ".pop('loss')", False),
        ("{'loss': losses['loss'].item(), 'raw': losses['loss']}", "['raw']", True),
        ("{**losses, 'loss': losses['loss'].item()}", "['raw']", True),
    ],
)
def test_what_a_step_gives_back(given, part, told):
    assert (LOGGED in found(STEPPED.format(part=part), given=given)) is told


@pytest.mark.parametrize(("part", "told"), [("['loss']", False), ("['raw']", True)])
def test_what_a_step_gives_back_under_a_name(part, told):
    kept = "{'loss': losses['loss'].item(), 'raw': losses['loss']}"
    assert (LOGGED in found(STEPPED.format(part=part), reduced=kept, given="reduced")) is told


PUT = LEARNS + (
    "key = 'loss'\n        logs[{key}] = loss.item()\n        {more}\n        last_loss = logs[{asked}]\n        {read}"
)


@pytest.mark.parametrize(
    ("key", "more", "asked", "told"),
    [
        ("'loss'", "pass", "'loss'", False),
        ("key", "pass", "key", False),
    ],
)
def test_what_is_put_under_a_key_and_taken_from_there(key, more, asked, told):
    read = "print(last_loss)"
    assert (read in found(PUT.format(key=key, more=more, asked=asked, read=read))) is told


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("'cpu'", False),
        ("device='cpu'", False),
    ],
)
def test_a_test_of_what_was_brought_to_the_cpu_does_not_wait(place, told):
    test = "if kept > 3: pass"
    assert (test in found(f"{LEARNS}kept = loss.detach().to({place})\n        {test}")) is told


@pytest.mark.parametrize(
    ("lines_of_sum", "told"),
    [
        ("count = 0\n        count += out.sum()\n        print(count)", True),
        ("norm += out.sum()\n        print(norm)", True),
        ("print(norm)\n        norm += out.sum()", True),
        ("for k in range(9):\n            print(norm)\n        norm += out.sum()", True),
        ("count = 0\n        count += out.sum()\n        count = 3\n        print(count)", False),
        ("count = 0\n        print(count)\n        count += out.sum()", False),
    ],
)
def test_a_sum_that_is_begun_anew_before_it_is_shown(lines_of_sum, told):
    assert any("print" in line for line in found(LEARNS + lines_of_sum)) is told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("losses['loss'], reduced", True),
        ("losses['loss'].item(), losses", False),
        ("losses['loss'], losses['loss'].item()", True),
    ],
)
def test_one_of_several_values(given, told):
    line = f"loss, rest = step(model, x, y, optimizer, 4)\n        {LOGGED}"
    assert (LOGGED in found(line, given=given)) is told


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n        writer.add_scalar('n', norm, i)", True),
        ("norm = i * 0.5\n        writer.add_scalar('n', norm, i)", False),
        ("writer.add_scalar('n', norm, i)", False),
        ("shown = out.mean()\n        wandb.log({'out': shown, 'i': i})", True),
        ("shown = out.mean().item()", True),
        ("a, mean = penalty(generator(x), mean)\n        wandb.log({'mean': mean})", True),
        ("loss_sum = 0.0\n        wandb.log({'sum': loss_sum})", False),
        ("norm += out.abs().sum()\n        writer.add_scalar('n', norm, i)", True),
        ("norm += 1\n        writer.add_scalar('n', norm, i)", False),
        # attributes of what is no tensor, and flags
        ("if i >= config.train.max_steps: break", False),
        ("assert model.uncertainty_loss == True", False),
        ("if out == None: break", False),
        # moved in a chain
        ("mask = batch['mask'].bool().to(device=args.device)\n        if mask.any(): pass", True),
        ("mask = batch['mask'].bool().to(dtype=torch.int)\n        if mask.any(): pass", False),
        # an arm beside one that ends the turn
        ("if len(x) == 7: pass\n        else: print(loss.item())", False),
        # what is not run
        ("log = False\n        if log: print(loss.item())", False),
        ("log = i % 50 == 0\n        if log and args.verbosely: print(loss.item())", False),
        # at the first turn alone
        ("if args.kept is None: args.kept = loss.item()", False),
    ],
)
def test_what_is_read_beside_a_step(last, told):
    assert bool(found(LEARNS + last)) is told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("torch.isnan(torch.sum(whole))", True),
        ("whole.sum().isnan()", True),
        ("whole.cpu().isnan().any()", True),  # for its .cpu()
        ("whole.shape[0] == 2", False),
    ],
)
def test_a_helper_that_tests_what_it_is_given(asked, told):
    assert bool(found(LEARNS + "check([loss, loss])", asked=asked)) is told


def test_a_model_that_is_looked_up_is_no_model_that_is_run():
    text = SCRIPT.format(
        line=LEARNS + "limits = Config.model_validate(args)\n        if i > limits.most: break", **USUAL
    )
    assert not lines(text)


ONCE_MORE = """
import torch

def train(model, critic, loader, g_optim, d_optim, args):
    model.cuda()
    for i, x in enumerate(loader):
        if i > args.most:
            break
        loss = critic(model(x.cuda())).mean()
        loss.backward()
        {usual}
        regularize = i % {every} == 0
        if regularize:
            extra = model(x.cuda()).abs().mean()
            extra.backward()
            {more}
            print(extra.item())
"""


@pytest.mark.parametrize(
    ("usual", "every", "more", "told"),
    [
        ("g_optim.step()", "args.every", "g_optim.step()", False),
        ("pass", "args.accumulation", "g_optim.step()", True),
        ("g_optim.step()", "5", "d_optim.step()", False),
        ("g_optim.step()", "50", "d_optim.step()", False),
        ("if i % args.accumulation == 0: g_optim.step()", "50", "d_optim.step()", False),
    ],
)
def test_an_optimizer_that_steps_once_more_now_and_then(usual, every, more, told):
    assert bool(lines(ONCE_MORE.format(usual=usual, every=every, more=more))) is told


BATCHES = """
import torch
from torch.utils.data import DataLoader

class Prefetch:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield {yielded}

def train(model, data, optimizer, device):
    model.cuda()
    loader = DataLoader(data, 4)
    loader = {loader}
    for batch in loader:
        {moved}
        y = batch.y
        seen = {read}
        loss = model(batch.x.to(device)).sum()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("loader", "yielded", "moved", "read", "told"),
    [
        ("loader", "batch", "pass", "batch.y.tolist()", False),
        ("loader", "batch", "batch.to(device)", "batch.tolist()", False),  # a tensor stays where it is
        ("loader", "batch", "batch['n'] = batch['n'].cuda()", "batch['m'].item()", False),
        ("Prefetch(loader)", "batch", "pass", "batch['m'].item()", False),
    ],
)
def test_a_batch_that_is_moved_in_place(loader, yielded, moved, read, told):
    text = BATCHES.format(loader=loader, yielded=yielded, moved=moved, read=read)
    assert (f"seen = {read}" in lines(text)) is told


WHOLE_STEP = """
import torch

def train_step(model, x, optimizer, steps):
    for {name} in range(steps):
        loss = model(x).sum() / steps
        loss.backward()
    optimizer.step()
    return loss.item()

def train(model, loader, optimizer):
    model.cuda()
    {loop}
"""


@pytest.mark.parametrize(
    ("name", "loop", "told"),
    [
        ("micro_step", "for x in loader: train_step(model, x.cuda(), optimizer, 4)", True),
        ("micro_step", "train_step(model, loader, optimizer, 4)", False),
        ("i", "for x in loader: train_step(model, x.cuda(), optimizer, 4)", True),
    ],
)
def test_a_function_that_makes_a_step_of_micro_batches(name, loop, told):
    assert bool(lines(WHOLE_STEP.format(name=name, loop=loop))) is told


OWN = """
import torch
from optimizers import Both

def closed_loss():
    return 1.0

def train(model, loader):
    model.cuda()
    optimizer = Both(model.parameters())
    for x in loader:
        loss = model(x.cuda()).sum()
        optimizer.step({given})
        print(loss.item())
"""


@pytest.mark.parametrize(("given", "told"), [("loss", True), ("closed_loss", False), ("", False)])
def test_an_optimizer_that_computes_the_gradients_of_a_loss(given, told):
    assert bool(lines(OWN.format(given=given))) is told


FILES = {
    "losses.py": """
import torch
from torch import nn

class OhemLoss(nn.Module):
    def forward(self, logits, labels):
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        if {test}:
            loss = loss[:9]
        return loss.mean()

class Meter:
    def update(self, output, y):
        self.total = (output - y).abs().sum().item()

def show(writer, values):
    for name, value in values.items():
        writer.add_scalar(name, {value})
""",
    "train.py": """
import torch
from losses import Meter, OhemLoss, show

def train(model, loader, optimizer, writer):
    model.cuda()
    criteria_p = OhemLoss()
    total, meter = 0.0, Meter()
    for x, y in loader:
        output = model(x.cuda())
        loss = criteria_p(output, y.cuda())
        loss.backward()
        optimizer.step()
        {line}
""",
}


@pytest.mark.parametrize(
    ("test", "value", "line", "number"),
    [
        ("loss.shape[0] > 9", "value", "pass", 0),
        ("self.step % 100 == 0 and loss[9] > 0.7", "value", "pass", 0),
        ("self.step % 100:\n            pass\n        elif loss[9] > 0.7", "value", "pass", 0),
        ("loss is None", "value", "meter.update(3, 4)", 0),
        ("loss is None", "name", "show(writer, {'loss': loss})", 0),
    ],
)
def test_what_another_file_reads_of_what_it_is_handed(tmp_path, test, value, line, number):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("{test}", test).replace("{value}", value).replace("{line}", line))
    assert len(check_paths([str(tmp_path / "train.py")], CONFIG)) == number


COLLECTED = """
import torch

class Net(torch.nn.Module):
    def __call__(self, data, train=True):
        score = self.forward(data)
        if train:
            return score.sum()
        label = data[-1].{cut}
        picked = list(map(int, label))
        return label, picked

    def forward(self, data):
        return self.layer(data)

def train(model, data, optimizer):
    for each in data:
        model(each).backward()
        optimizer.step()

def test(data):
    labels, scores = [], []
    for each in data:
        label, score = {call}
        labels.append(label)
        scores.append(score)
    return labels

model = Net()
train(model, [], None)
test([])
"""


@pytest.mark.parametrize(
    ("cut", "call", "number"),
    [
        ("cpu().data.numpy()", "model(each, train=False)", 0),
        ("cpu()", "model(each, train=False)", 1),  # integers keep no graph
        ("cpu()", "model.eval_model(each)", 0),
    ],
)
def test_a_model_that_gives_numbers(cut, call, number):
    assert len(check_text(COLLECTED.format(cut=cut, call=call), configure({}, "LS016", ""))) == number
