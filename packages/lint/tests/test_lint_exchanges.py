"""LS031 and LS009: whether DDP takes part in what a loop trains. LS001: DataParallel by other names, Lightning's."""

import pytest

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
    ("line", "number"),
    [
        ("loss = model.module.loss(x)", 1),
        ("loss = -model.module.log_prob(x).mean()", 1),
        ("loss = model.module(x).sum()", 1),
        ("loss = model(x).sum()", 0),
        ("loss = model.module.criterion(model(x))", 0),
        ("loss = model.forward(x).sum()", 0),
        ("loss = step(model, x) + model.module.penalty()", 0),  # what is not in sight may run the wrapper
        ("loss = step([model], x) + model.module.penalty()", 0),
        ("loss = step(x, nets={'one': model}) + model.module.penalty()", 0),
        ("loss = step(model.module, x) + model.module.penalty()", 1),
        ("loss = step(model.parameters()) + model.module.penalty()", 1),
        ("loss = [model][0](x) + model.module.penalty()", 0),
        ("loss = net(x).sum()\n        model.module.eval()", 0),
        ("out = model.module.encode(x)\n        loss = nn.functional.mse_loss(out, x)", 1),
        ("loss = net(x).sum()\n        model.module.update(x)", 0),
        ("held = Diffusion(model)\n        loss = held(x) + model.module.penalty()", 0),
    ],
)
def test_steps_that_go_around_the_wrapper(line, number):
    assert told(AROUND.format(line=line) + STEP, "LS031") == number


@pytest.mark.parametrize(("wrapper", "number"), [("FullyShardedDataParallel", 0), ("CPUOffload", 1)])
def test_a_program_that_wraps_in_two_ways(wrapper, number):
    text = f"from torch.distributed.fsdp import {wrapper} as Wrap\n" + AROUND.format(line="loss = model.module.loss(x)")
    assert told(text.replace("    for x", "    other = Wrap(nn.Linear(2, 2))\n    for x") + STEP, "LS031") == number


def test_steps_that_go_around_the_wrapper_in_a_file_that_starts_no_group():
    text = AROUND.format(line="loss = model.module.loss(x)") + STEP
    assert told(text.replace("optimizer.step()", "print(x)"), "LS031") == 0  # only tries out what it differentiates
    assert told(text.replace('dist.init_process_group("nccl")', "rank = dist.get_rank()"), "LS031") == 1


def test_gradients_that_are_averaged_by_hand():
    text = AROUND.format(line="loss = model.module.loss(x)") + STEP
    assert told(text, "LS031") == 1
    by_hand = "        loss.backward()\n        for p in net.parameters():\n            dist.all_reduce(p.grad)\n"
    assert told(text.replace("        loss.backward()\n", by_hand), "LS031") == 0
    clipped = "        loss.backward()\n        print(net.weight.grad.norm())\n"
    assert told(text.replace("        loss.backward()\n", clipped), "LS031") == 1


@pytest.mark.parametrize(
    ("made", "trained", "exchanging", "apart"),
    [
        (TEACHER, "student", 0, 1),
        ("student = nn.Linear(4, 2)\n    teacher = nn.Linear(4, 2)\n    teacher = DDP(teacher)", "student", 0, 1),
        (STUDENT, "student", 1, 0),
        (TEACHER, "teacher", 1, 0),
        (NAMED, "student", 1, 0),  # a pair is not followed
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


@pytest.mark.parametrize(("helper", "number"), [("wrap_model", 0), ("show", 1)])
def test_a_helper_out_of_sight_may_wrap_the_model_that_is_trained(helper, number):
    beside = BESIDE.format(made=f"{TEACHER}\n    {helper}(rank)", trained="student")
    assert told(f"from mine import {helper}\n{beside}", "LS031") == number
    around = AROUND.format(line="loss = model.module.loss(x)") + STEP  # the steps go around the wrapper in any case
    assert told(f"from mine import {helper}\n{helper}(1)\n{around}", "LS031") == 1


@pytest.mark.parametrize(
    ("call", "apart"), [("share(student)", 0), ("both = share([teacher, student])", 0), ("share(teacher)", 1)]
)
def test_a_model_that_is_handed_to_what_is_not_in_sight(call, apart):
    text = "from tools.nets import share\n" + BESIDE.format(made=f"{TEACHER}\n    {call}", trained="student")
    assert told(text, "LS009") == 0
    assert told(text, "LS031") == apart


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("from torch.nn import DataParallel as DP\nDP(model)", 1),
        ("import torch.nn.parallel.data_parallel as parallel\nparallel(model, (x,))", 1),
        ("from torch.nn.parallel import data_parallel as run\nrun(model, x)", 1),
        ("wrap = nn.DataParallel\nwrap(model)", 1),
        ("from torch.nn.parallel import DistributedDataParallel as DataParallel\nDataParallel(model)", 0),
        ("from mine import DataParallel as DP\nDP(model)", 0),
        ("import pytorch_lightning as pl\npl.Trainer(gpus=2, accelerator='dp')", 1),
        ("import pytorch_lightning as pl\npl.Trainer.from_argparse_args(args, accelerator='dp')", 1),
        ("from lightning.pytorch import Trainer\nTrainer(strategy='dp' if gpus > 1 else None)", 1),
        ("import pytorch_lightning as pl\nhow = 'dp'\npl.Trainer(strategy=how)", 1),
        ("import pytorch_lightning as pl\npl.Trainer(strategy=pl.strategies.DataParallelStrategy())", 1),
        ("import pytorch_lightning as pl\npl.Trainer(gpus=2, accelerator='ddp')", 0),
        ("from mine import Trainer\nTrainer(strategy='dp')", 0),
    ],
)
def test_data_parallel_by_other_names(line, number):
    assert told(line + "\n", "LS001") == number
