"""LS009: accumulation without no_sync."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEAD = """
import torch
from apex import amp
from ignite.engine import Engine
from torch.nn.parallel import DistributedDataParallel as DDP

def wrap(model, rank):
    return DDP(model.to(rank), device_ids=[rank])
"""


APART = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self, model):
        self.model = DDP(model)

    def step(self, batch):
        self.compute(batch)
        {after}

    def compute(self, batch):
        self.optimizer.zero_grad()
        for part in {parts}:
            {loss}.backward()
        {here}

    def run(self, loader):
        {loop}:
            self.step(batch)
"""


@pytest.mark.parametrize("loop", ["for batch in loader", "with loader as batch"])
@pytest.mark.parametrize(
    ("parts", "here", "after", "expected"),
    [
        ("batch.chunk(4)", "self.optimizer.step()", "pass", True),
        ("torch.split(batch, 4)", "pass", "self.optimizer.step()", True),
        ("zip(batch.split(2), batch.split(2))", "pass", "self.optimizer.step()", True),
        ("batch.tasks", "self.optimizer.step()", "pass", False),
        ("batch.chunk(4)", "pass", "pass", False),
    ],
)
def test_the_parts_of_a_batch_in_a_function_and_the_step_after(loop, parts, here, after, expected):
    text = APART.format(parts=parts, here=here, after=after, loop=loop, loss="(self.model(part).mean() / 4)")
    assert bool(check_text(text, configure({}, "LS009", ""))) == (expected and loop.startswith("for"))


@pytest.mark.parametrize(("steps", "number"), [("1", 0), ("2", 1)])
def test_micro_batches_of_which_there_is_one(steps, number):
    text = HEAD + "def train(model, optimizer, batches):\n    model = wrap(model, 0)\n"
    text += f"    accum = {steps}\n    for x in batches:\n        for micro in range(accum):\n"
    text += "            (model(x) / accum).backward()\n        optimizer.step()\n        optimizer.zero_grad()\n"
    assert len(check_text(text, configure({}, "LS009", ""))) == number
