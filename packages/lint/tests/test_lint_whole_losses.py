"""LS012: losses that a method of the project's gives, in loops over micro-batches and in guarded steps."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

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


def told(folder, body, before=""):
    """How often the rule is told for a training function."""
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
    assert told(tmp_path, GUARDED.format(loss=loss)) == number


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
    assert told(tmp_path, MICRO.format(loss=loss, backward=backward), before) == number
