"""LS031: no gradient exchange."""

import pytest
from rule_findings import count

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

HEAD = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""


STEP = """
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
"""


AROUND = """
def main(net, loader, optimizer, rank):
    dist.init_process_group("nccl")
    model = DDP(net.to(rank), device_ids=[rank])
    for x in loader:
        {line}
"""


def count_findings(text, rule):
    """Count a rule's findings."""
    return len(check_text(HEAD + text, configure({}, rule, "")))


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("loss = model(x).sum()", 0),
        ("loss = model.module.criterion(model(x))", 0),
        ("loss = model.forward(x).sum()", 0),
        ("loss = step(model, x) + model.module.penalty()", 0),
        ("loss = step([model], x) + model.module.penalty()", 0),
        ("loss = step(x, nets={'one': model}) + model.module.penalty()", 0),
        ("loss = [model][0](x) + model.module.penalty()", 0),
        ("loss = net(x).sum()\n        model.module.eval()", 0),
        ("loss = net(x).sum()\n        model.module.update(x)", 0),
        ("held = Diffusion(model)\n        loss = held(x) + model.module.penalty()", 0),
    ],
)
def test_steps_that_go_around_the_wrapper(line, number):
    assert count_findings(AROUND.format(line=line) + STEP, "LS031") == number


@pytest.mark.parametrize(
    ("wrapper", "number"),
    [
        ("FullyShardedDataParallel", 0),
    ],
)
def test_a_program_that_wraps_in_two_ways(wrapper, number):
    text = f"from torch.distributed.fsdp import {wrapper} as Wrap\n" + AROUND.format(line="loss = model.module.loss(x)")
    assert (
        count_findings(text.replace("    for x", "    other = Wrap(nn.Linear(2, 2))\n    for x") + STEP, "LS031")
        == number
    )


THAWED = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(rank, model, optimizer, loader):
    dist.init_process_group("nccl")
    for name, weight in model.named_parameters():
        if "head" not in name:
            weight.requires_grad = {frozen}
    ddp = DDP(model.to(rank), device_ids=[rank])
    for step, (x, y) in enumerate(loader):
        if step == 1000:
            for weight in {model}.parameters():
                weight.requires_grad = True
            {again}
        optimizer.zero_grad()
        ddp(x, y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("frozen", "model", "again", "number"),
    [
        ("True", "model", "pass", 0),
        ("False", "teacher", "pass", 0),
        ("False", "model", "ddp = DDP(model, device_ids=[rank])", 0),
    ],
)
def test_parameters_that_are_unfrozen_under_the_wrapper(frozen, model, again, number):
    assert count(THAWED.format(frozen=frozen, model=model, again=again), "LS031") == number
