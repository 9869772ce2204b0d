"""LS012: accumulation."""

import pytest

from lockstep_lint.config import Config, configure
from lockstep_lint.runner import check_paths, check_text

COUNTED = """
import torch

def train(model, loader, optimizer, n):
    {whole}
    for epoch in range(3):
        {epoch}
        for x in loader:
            {before}
            loss = model(x).mean() / n
            loss.backward()
            if {test}:
                optimizer.step()
                optimizer.zero_grad()
            {after}
        {end}
"""


@pytest.mark.parametrize(
    ("whole", "epoch", "before", "test", "after", "end", "expected"),
    [
        ("k = 0", "pass", "k += 1", "k % n == 0", "pass", "pass", []),
        ("pass", "k = 0", "k += 1", "k % n == 0", "pass", "optimizer.step()", []),
        ("pass", "k = 0", "k += 1", "k == n", "k = 0 if k == n else k", "pass", []),
        ("pass", "k = 0", "k += len(x)", "k % n == 0", "pass", "pass", []),
        ("pass", "k = 0", "k += 1", "k % n == 0 or k == len(loader)", "pass", "pass", []),
    ],
)
def test_micro_batches_that_are_counted_by_hand(tmp_path, whole, epoch, before, test, after, end, expected):
    text = COUNTED.format(whole=whole, epoch=epoch, before=before, test=test, after=after, end=end)
    (tmp_path / "run.py").write_text(text)
    found = check_paths([str(tmp_path / "run.py")], configure({}, "LS012", ""))
    assert [next(word for word in ("never", "first") if word in one.message) for one in found] == expected


RATED = """
import torch

def train(model, loader, optimizer, criterion, n):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y){divided}
        loss.backward()
        if (i + 1) % n == 0 or i + 1 == len(loader):
            optimizer.{step}()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("divided", "step", "expected"),
    [("", "step_and_update_lr", True), (" / n", "step_and_update_lr", False), ("", "update_lr", False)],
)
def test_an_optimizer_that_sets_its_own_rate(divided, step, expected):
    text = RATED.format(divided=divided, step=step)
    assert bool(check_text(text, configure({}, "LS012", ""))) is expected


def lines(code, text):
    codes = frozenset({code})
    return [finding.line for finding in check_text(text, Config(codes, codes))]


ACCELERATE = """import torch
from accelerate import Accelerator

def train(model, loader, optimizer, n):
    accelerator = Accelerator({options})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(model):
            loss = model(x).mean()
            shown = loss / n
            {divided}
            accelerator.backward({loss})
            optimizer.step()
            optimizer.zero_grad()
"""


TOLD = "gradient_accumulation_steps=n"


@pytest.mark.parametrize(
    ("options", "divided", "loss", "expected"),
    [
        (TOLD, "pass", "loss", []),
        (TOLD, "loss = loss / 2", "loss", []),
        ("", "loss = loss / n", "loss", []),
        ("gradient_accumulation_steps=1", "loss = loss / n", "loss", []),
    ],
)
def test_a_loss_that_accelerate_divides(options, divided, loss, expected):
    assert lines("LS012", ACCELERATE.format(options=options, divided=divided, loss=loss)) == expected


ACCELERATED = """
from accelerate import Accelerator

def train(model, optimizer, loader):
    accelerator = Accelerator({given})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, batch in enumerate(loader):
        {with_}
            loss = model(batch)
            accelerator.backward(loss)
            {test}
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("given", "with_", "test", "number"),
    [
        ("gradient_accumulation_steps=2", "if True:", "if True:", 0),
        ("gradient_accumulation_steps=2", "with accelerator.accumulate(model):", "if True:", 0),
        ("gradient_accumulation_steps=1", "with accelerator.autocast():", "with clock():", 0),
        ("", "with accelerator.autocast():", "with clock():", 0),
    ],
)
def test_an_accelerator_that_divides_what_nothing_accumulates(given, with_, test, number):
    text = ACCELERATED.format(given=given, with_=with_, test=test)
    assert sum("accelerator.accumulate()" in f.message for f in check_text(text, configure({}, "LS012", ""))) == number


DIFFUSION = """
import torch
import torch.nn.functional as F

class Diffusion:
    def __init__(self, betas):
        self.scale = 1.0 / betas

    def losses(self, model, x):
        return F.mse_loss(model(x), x)

    def shares(self, model, x, n):
        return F.mse_loss(model(x), x) / n
"""


GUARDED = """
    diffusion = Diffusion(torch.ones(8))
    for step, x in enumerate(loader):
        loss = {loss}
        loss.backward()
        if (step + 1) % n == 0 or step + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
"""


MICRO = """
    for step in range(1000):
        for _ in range(ACCUMULATE):
            loss = {loss}
            {backward}
        optimizer.step()
        optimizer.zero_grad()
"""


def count_findings(folder, body, before=""):
    """Count the rule's findings in a training function."""
    path = folder / "run.py"
    path.write_text(f"{before}{DIFFUSION}\nACCUMULATE = 4\n\ndef train(model, loader, optimizer, n):{body}")
    return len(check_paths([str(path)], configure({}, "LS012", "")))


@pytest.mark.parametrize(
    ("loss", "number"),
    [
        ("diffusion.losses(model, x)", 1),
        ("diffusion.losses(model, x).mean()", 1),
        ("model(x).mean()", 1),
        ("diffusion.shares(model, x, n)", 0),
        ("diffusion.losses(model, x) / n", 0),
        ("(diffusion.losses(model, x) / n).mean()", 0),
    ],
)
def test_the_object_that_gives_a_loss_divides_nothing(tmp_path, loss, number):
    assert count_findings(tmp_path, GUARDED.format(loss=loss)) == number


ACCELERATOR = "from accelerate import Accelerator\naccelerator = Accelerator({})\n"


@pytest.mark.parametrize(
    ("before", "loss", "backward", "number"),
    [
        ("USE_ACCELERATED_SCAN = True\n", "model(next(loader))", "loss.backward()", 1),
        ("# needs: accelerate, torch\n", "model(next(loader), scan='accelerated')", "loss.backward()", 1),
        ("", "model(next(loader))", "loss.backward()", 1),
        ("", "model(next(loader))", "(loss / ACCUMULATE).backward()", 0),
        ("from accelerate import Accelerator\n", "model(next(loader))", "accelerator.backward(loss)", 0),
        ("", "model(next(loader))", "accelerator.backward(loss)", 0),
        (ACCELERATOR.format(""), "model(next(loader))", "accelerator.backward(loss)", 1),
        (ACCELERATOR.format("mixed_precision='no'"), "model(next(loader))", "accelerator.backward(loss)", 1),
        (ACCELERATOR.format("mixed_precision='no'"), "model(next(loader))", "accelerator.backward(loss / n)", 0),
        (ACCELERATOR.format("gradient_accumulation_steps=4"), "model(next(loader))", "accelerator.backward(loss)", 0),
        (ACCELERATOR.format("**settings"), "model(next(loader))", "accelerator.backward(loss)", 0),
        ("", "model(next(loader))", "self.accelerator.backward(loss)", 0),
    ],
)
def test_only_an_accelerator_divides_by_itself(tmp_path, before, loss, backward, number):
    assert count_findings(tmp_path, MICRO.format(loss=loss, backward=backward), before) == number


SOUND = """
import torch

def train(model, loader, optimizer, criterion, n):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(n), y.chunk(n)):
            loss = criterion(model(xs), ys)
            loss.mul_(len(xs) / len(x))
            loss.backward()
        optimizer.step()
"""


def test_a_loss_that_is_scaled_in_place():
    assert check_text(SOUND, configure({}, "LS012", "")) == []
