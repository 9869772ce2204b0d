"""The cost of a loss over the whole step: python bench/step_loss.py [--rounds 15] [--size 256]

Two towers of plain layers, InfoNCE over all pairs of a step, 8 micro-batches a step on one process, and one
micro-batch a rank on two. Contestants, in turns on the same data and model:

    one pass            lockstep, a loss that is a sum over its items (what a step of one pass costs)
    step_loss           lockstep, `outputs` and `step_loss`
    step_loss_rows      lockstep, `outputs` and `step_loss_rows`
    by hand             the two passes in plain PyTorch, as a person writes them (GradCache, without a graph in pass 1)
    one graph           plain PyTorch, one forward over the whole step: as much memory as the step has samples

Each contestant's gradient is that of "one graph" but for "one pass", whose loss is another. Ratios are to "one pass".
"""

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from contest import contest, machine, show, start
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.clock import make_clock
from lockstep.data.batches import Batches, StepPlan
from lockstep.data.sampler import Shuffled
from lockstep.distributed.exchange import StepExchange
from lockstep.engines.registry import engine
from lockstep.loop import StepControl, seeder, steps

STEPS = 1_000_000  # a horizon that no contest reaches


class Table:
    draws_random = False

    def __init__(self, samples=4096, width=512):
        self.x = torch.randn(samples, width, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]

    def __getitems__(self, indices):
        return self.x[torch.tensor(indices)]


def tower(width, depth):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 128))


class Towers(nn.Module):
    def __init__(self, width=512, depth=8):
        super().__init__()
        self.a, self.b = tower(width, depth), tower(width, depth)

    def forward(self, x):
        return F.normalize(self.a(x), dim=-1), F.normalize(self.b(x.flip(1)), dim=-1)


def info_nce(outputs):
    a, b = outputs
    return F.cross_entropy(10 * a @ b.T, torch.arange(len(a)))


class OnePass(lockstep.Task):
    """The same towers, and a loss of each pair by itself."""

    reduction, items_per_sample = "sum", 1

    def model(self):
        return Towers()

    def dataset(self, split):
        return Table() if split == "train" else None

    def collate(self, samples):
        return samples

    def loss(self, model, batch):
        a, b = model(batch)
        return F.softplus(-(a * b).sum(1)).sum()


class WholeStep(OnePass):
    loss = lockstep.Task.loss

    def outputs(self, model, batch):
        return model(batch)

    def step_loss(self, outputs):
        return info_nce(outputs)


class Rows(WholeStep):
    step_loss = lockstep.Task.step_loss

    def step_loss_rows(self, own, whole, first):
        logits = 10 * own[0] @ whole[1].T
        return F.cross_entropy(logits, torch.arange(first, first + len(own[0])), reduction="sum") / len(whole[0])


def ours(task, size, micro, world):
    """The loop of `lockstep.train` with its seeds and clock; records, guards and saves are the same for each."""
    torch.manual_seed(0)
    made = engine("auto", task.model(), lambda held: torch.optim.SGD(held.parameters(), 1e-2, foreach=True), world)
    dataset = task.dataset("train")
    order, plan = Shuffled(len(dataset), 0), StepPlan(size, micro, STEPS * size)
    loader = Batches(task, dataset, order, plan, world).from_step(0)
    exchange = StepExchange(world, loader.items, lambda step: size)
    control = StepControl(
        lambda step: 1.0,
        seeder(0, "micro", world.device),
        make_clock(world.device),
        world=world,
        micro_batches=plan.micro_batches,
    )
    records = steps(made, task, loader, exchange, control)
    return lambda count: [next(records) for _ in range(count)]


def by_hand(size, micro, rank, world, *, whole=False):
    """Plain PyTorch: two passes, or one graph over this process's samples where it is alone."""
    torch.manual_seed(0)
    model, table, done = Towers(), Table(), [0]
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, foreach=True)

    def step(count):
        for _ in range(count):
            start = done[0] * size % len(table)
            done[0] += 1
            optimizer.zero_grad(set_to_none=True)
            own = table.x[start : start + size].chunk(size // micro)[rank::world]
            if whole:
                info_nce(model(table.x[start : start + size])).backward()
            elif len(own) == 1:
                one_each(wrapped, own[0], rank, world)
            else:
                two_passes(model, own)
            optimizer.step()

    return step


def two_passes(model, parts):
    with torch.no_grad():
        outputs = [torch.cat(column) for column in zip(*(model(part) for part in parts), strict=True)]
    leaves = [output.requires_grad_() for output in outputs]
    gradients = torch.autograd.grad(info_nce(leaves), leaves)
    begin = 0
    for part in parts:
        rows = slice(begin, begin + len(part))
        torch.autograd.backward(model(part), [gradient[rows] for gradient in gradients])
        begin += len(part)


def one_each(model, part, rank, world):
    """A micro-batch a rank, as open_clip does it: gather, and the loss of all on each rank. DDP averages."""
    outputs = model(part)
    columns = []
    for output in outputs:
        parts = [torch.empty_like(output) for _ in range(world)]
        dist.all_gather(parts, output.detach())
        parts[rank] = output
        columns.append(torch.cat(parts))
    (info_nce(columns) * world).backward()


def compete(rank, world, port, folder, rounds, turn, size):
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(world)}
    here = lockstep.World.join("cpu")
    micro = size // 8 if world == 1 else size // world
    made = {
        "one pass": ours(OnePass(), size, micro, here),
        "step_loss": ours(WholeStep(), size, micro, here),
        "step_loss_rows": ours(Rows(), size, micro, here),
        "by hand": by_hand(size, micro, rank, world),
    }
    if world == 1:
        made["one graph"] = by_hand(size, micro, rank, world, whole=True)
    found = contest(made, rounds=rounds, steps=turn, barrier=here.barrier)
    if rank == 0:
        show(f"{world} x {size // micro // world} micro-batches of {micro}", found, world=world, **machine())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--size", type=int, default=256, help="samples of a step")
    given = parser.parse_args()
    for world in (1, 2):
        start(partial(compete), world, given.rounds, given.steps, given.size)


if __name__ == "__main__":
    main()
