"""Loaders in a cycle, keys without values, steps and rates of some ranks, clips of scaled gradients."""

import pytest

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text


def levels(text, code):
    """The levels of what a rule tells about a script."""
    return [finding.severity for finding in check_text(text, configure({}, code, ""))]


READ = """
import torch

def main(model, optimizer, path, skip):
    state = {state}
    {line}

main(*parts())
"""


@pytest.mark.parametrize(
    ("state", "line", "number"),
    [
        ("model.state_dict()", "return {k: v for k, v in state if k not in skip}", 1),
        ("0", "return {k: v for k, v in model.state_dict() if k not in model.head.state_dict()}", 1),
        ("0", "return [k for k, v in model.state_dict().items()]", 0),
        ("model.state_dict().items()", "return [k for k, v in state]", 0),
        ("0", "for name, value in optimizer.state_dict(): print(name)", 1),
        ("0", "for name in model.state_dict(): print(name)", 0),
        ("0", "for i, name in enumerate(model.state_dict()): print(name)", 0),
        ("torch.load(path)", "for name, value in state['state_dict']: print(name)", 1),
        ("torch.load(path)", "for x, y in state['data']: print(x)", 0),
        ("torch.load(path)", "for x, y in state: print(x)", 0),
        ("0", "for name, p in model.parameters(): print(name)", 1),
        ("0", "for name, p in model.named_parameters(): print(name)", 0),
        ("0", "for p in model.named_parameters(): p.requires_grad = False", 1),
        ("0", "for p in model.named_parameters(): p[1].requires_grad = False", 0),
        ("0", "for p in model.parameters(): p.requires_grad = False", 0),
    ],
)
def test_keys_without_values(state, line, number):
    assert len(levels(READ.format(state=state, line=line), "LS059")) == number


def test_a_state_of_the_project():
    text = READ.format(state="0", line="return [k for k, v in model.state_dict()]")
    assert levels(text, "LS059")
    assert not levels(f"{text}\nclass Pairs:\n    def state_dict(self):\n        return [(1, 2)]\n", "LS059")


CYCLE = """
import itertools
from torch.utils.data import DataLoader

def main(model, data, optimizer, steps):
    {name} = DataLoader(data, batch_size=8, {order})
    for step, batch in zip(range(steps), {cycle}({name})):
        model(batch).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("name", "order", "cycle", "told"),
    [
        ("loader", "shuffle=True", "itertools.cycle", ["error"]),
        ("loader", "sampler=order(data)", "itertools.cycle", ["error"]),
        ("loader", "shuffle=False", "itertools.cycle", ["hint"]),
        ("val_loader", "shuffle=True", "itertools.cycle", []),
        ("loader", "shuffle=True", "cycle", []),
    ],
)
def test_a_loader_in_a_cycle(name, order, cycle, told):
    text = CYCLE.format(name=name, order=order, cycle=cycle)
    if cycle == "cycle":
        text += "\ndef cycle(loader):\n    while True:\n        yield from loader\n"
    assert [level.value for level in levels(text, "LS069")] == told


def test_a_cycle_that_each_epoch_makes():
    text = CYCLE.format(name="loader", order="shuffle=True", cycle="itertools.cycle")
    text += "\nfor epoch in range(9):\n    main(model, data, optimizer, 9)\n"
    assert [level.value for level in levels(text, "LS069")] == ["hint"]


PARTED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, rank, evaluate, epochs):
    dist.init_process_group("nccl")
    model = DDP(model.to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.{kind}
    for epoch in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            {step}
        {last}
    dist.destroy_process_group()
"""
PLATEAU = "ReduceLROnPlateau(optimizer)"
SETS = "for group in optimizer.param_groups: group['lr'] = 0.1 / epoch"


@pytest.mark.parametrize(
    ("kind", "last", "number"),
    [
        ("StepLR(optimizer, 9)", "if rank == 0: scheduler.step()", 1),
        ("StepLR(optimizer, 9)", "if dist.get_rank() == 0: scheduler.step()", 1),
        ("StepLR(optimizer, 9)", "scheduler.step()", 0),
        ("StepLR(optimizer, 9)", "if epoch > 5: scheduler.step()", 0),
        (PLATEAU, "if rank == 0: scheduler.step(evaluate(model))", 1),
        (PLATEAU, "scheduler.step(evaluate(model))", 0),
        (PLATEAU, f"if rank == 0:\n            {SETS}", 1),
        (PLATEAU, SETS, 0),
        (PLATEAU, f"if rank == 0:\n            {SETS}\n        dist.broadcast_object_list([epoch])", 0),
        (PLATEAU, f"if rank == 0:\n            {SETS}\n        else:\n            {SETS}", 0),
    ],
)
def test_rates_of_some_ranks(kind, last, number):
    assert len(levels(PARTED.format(kind=kind, step="optimizer.step()", last=last), "LS013")) == number


def test_a_pair_of_steps():
    last = "if rank == 0:\n            scheduler.step(evaluate(model))\n        else:\n            scheduler.step(1.0)"
    assert not levels(PARTED.format(kind=PLATEAU, step="optimizer.step()", last=last), "LS013")


@pytest.mark.parametrize(
    ("step", "number"),
    [
        ("if rank == 0: optimizer.step()", 1),
        ("optimizer.step()", 0),
        ("if rank == 0: optimizer.step()\n            dist.broadcast(next(model.parameters()), 0)", 0),
        ("if rank == 0: optimizer.step()\n            else: optimizer.step()", 0),
    ],
)
def test_steps_of_some_ranks(step, number):
    step = step.replace("if rank == 0: optimizer", "if rank == 0:\n                optimizer")
    step = step.replace("else: optimizer", "else:\n                optimizer")
    assert len(levels(PARTED.format(kind=PLATEAU, step=step, last="pass"), "LS041")) == number


MANAGED = """
import torch
from {package} import {name}

def main(model, loader, optimizer, args):
    table = {{"precision": "16-mixed"}}
    engine = {name}({option})
    for batch in loader:
        engine.backward(model(batch).sum())
        {clip}
        optimizer.step()
        optimizer.zero_grad()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("package", "name", "option", "clip", "number"),
    [
        ("accelerate", "Accelerator", "mixed_precision='fp16'", CLIP, 1),
        ("accelerate", "Accelerator", "mixed_precision='bf16'", CLIP, 0),
        ("accelerate", "Accelerator", "mixed_precision=args.precision", CLIP, 0),
        ("accelerate", "Accelerator", "", CLIP, 0),
        ("accelerate", "Accelerator", "mixed_precision='fp16'", "engine.clip_grad_norm_(model.parameters(), 1.0)", 0),
        ("accelerate", "Accelerator", "mixed_precision='fp16'", f"engine.unscale_gradients()\n        {CLIP}", 0),
        ("lightning", "Fabric", "precision=table['precision']", CLIP, 1),
        ("lightning.fabric", "Fabric", "precision='16-mixed'", CLIP, 1),
        ("lightning.fabric", "Fabric", "precision='bf16-mixed'", CLIP, 0),
    ],
)
def test_clips_where_a_framework_scales(package, name, option, clip, number):
    text = MANAGED.format(package=package, name=name, option=option, clip=clip)
    assert len(levels(text, "LS011")) == number
