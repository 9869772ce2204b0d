"""LS009: accumulation without no_sync."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEAD = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""


BESIDE = """
def main(build, loader, rank, every):
    dist.init_process_group("nccl")
    {made}
    groups = [{{"params": [p for n, p in {trained}.named_parameters()]}}]
    optimizer = torch.optim.AdamW(groups)
    for i, x in enumerate(loader):
        with torch.no_grad():
            target = teacher(x)
        loss = nn.functional.mse_loss(student(x), target) / every
        loss.backward()
        if (i + 1) % every == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
"""


TEACHER = "student = nn.Linear(4, 2)\n    teacher = DDP(nn.Linear(4, 2).to(rank))"


NAMED = "student, size = nn.Linear(4, 2), 3\n    teacher = nn.Linear(4, 2)\n    teacher = DDP(teacher)"


STUDENT = "teacher = nn.Linear(4, 2)\n    student = DDP(nn.Linear(4, 2).to(rank))"


def told(text, rule):
    """How often a rule is told."""
    return len(check_text(HEAD + text, configure({}, rule, "")))


@pytest.mark.parametrize(
    ("made", "trained", "exchanging", "apart"),
    [
        (STUDENT, "student", 1, 0),
        (TEACHER, "teacher", 1, 0),
        (NAMED, "student", 1, 0),
        ("student = nn.Linear(4, 2)\n    teacher = DDP(student)", "student", 1, 0),
        ("student = build()\n    teacher = DDP(student.teacher)", "student", 1, 0),
        (f"{TEACHER}\n    student = DDP(student)", "student", 1, 0),
        (
            "teacher = DDP(nn.Linear(4, 2))\n    net = torch.compile(teacher)\n    student = net.to(rank)",
            "student",
            1,
            0,
        ),
        (f"{TEACHER}\n    teacher.student = student", "student", 1, 0),
        (f"{TEACHER}\n    teacher.module.student = nn.Sequential(student)", "student", 1, 0),
        ("student = nn.Linear(4, 2)\n    both = nn.Sequential(student)\n    teacher = DDP(both)", "student", 1, 0),
    ],
)
def test_a_model_that_trains_beside_the_wrapped_one(made, trained, exchanging, apart):
    text = BESIDE.format(made=made, trained=trained)
    assert told(text, "LS009") == exchanging
    assert told(text, "LS031") == apart


HEAD_2 = """
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
        ("'a b'.split()", "self.optimizer.step()", "pass", False),
        ("batch.tasks", "self.optimizer.step()", "pass", False),
        ("batch.chunk(4)", "pass", "pass", False),
    ],
)
def test_the_parts_of_a_batch_in_a_function_and_the_step_after(loop, parts, here, after, expected):
    text = APART.format(parts=parts, here=here, after=after, loop=loop, loss="(self.model(part).mean() / 4)")
    assert bool(check_text(text, configure({}, "LS009", ""))) == (expected and loop.startswith("for"))


@pytest.mark.parametrize(("steps", "number"), [("1", 0), ("2", 1)])
def test_micro_batches_of_which_there_is_one(steps, number):
    text = HEAD_2 + "def train(model, optimizer, batches):\n    model = wrap(model, 0)\n"
    text += f"    accum = {steps}\n    for x in batches:\n        for micro in range(accum):\n"
    text += "            (model(x) / accum).backward()\n        optimizer.step()\n        optimizer.zero_grad()\n"
    assert len(check_text(text, configure({}, "LS009", ""))) == number
