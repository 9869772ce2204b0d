"""What lockstep's loop costs beside a bare PyTorch loop: python bench/loop.py [--rounds 30] [--only mlp]

Two models: a tiny MLP, whose step is all overhead, and a GPT of a few million parameters. 1 and 2 processes,
accumulation 1 and 4. lockstep is the whole product: `lockstep.train` with records, heartbeat, seeds, guards and timers,
and a record every 10 steps. The bare loops train alike (model, sizes, clipping, warm-up and cosine, parameter groups
with and without decay) as one would write them by hand: "fused" draws a `randperm` an epoch and indexes its tensors by
slices of it, sets the rate by hand, frees gradients, uses fused AdamW, and reads loss and norm only in steps that it
logs; "one group" is the same with all parameters in one group; "plain" is the usual tutorial's: DataLoader, LambdaLR,
clip_grad_norm_, AdamW as torch chooses. Ratios are to "bare fused"; below 1 is faster. One process is timed by its
processor time, two by the clock.
"""

import argparse
import contextlib
import importlib
import itertools
import math
import os
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from contest import contest, machine, show, start
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.models.gpt import GPT, GPTConfig
from lockstep.optim.groups import groups

STEPS = 1_000_000  # a horizon that no contest reaches
LOG_FREQ = 10


class Table:
    """Samples in memory, taken a micro-batch at a time."""

    draws_random = False

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __getitems__(self, indices):
        rows = torch.from_numpy(np.array(indices))  # a fifth of the time of torch.tensor(indices)
        return self.x[rows], self.y[rows]


class Mlp(lockstep.Task):
    """64 -> 128 -> 128 -> 10; a step is a few hundred microseconds, nearly all of it overhead."""

    items_per_sample = 1
    clip = 1.0

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4096, 64, generator=generator)
        self.table = Table(x, torch.randint(10, (4096,), generator=generator))

    def model(self):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def dataset(self, split):
        return self.table if split == "train" else None

    def collate(self, samples):
        return samples

    def count(self, batch):
        return batch[0].shape[0]

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class SmallGpt(Mlp):
    """6 layers of 256: 5.8 million parameters, sequences of 128."""

    items_per_sample = 128

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(4096, (512, 129), generator=generator)
        self.table = Table(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def model(self):
        return GPT(GPTConfig(layers=6, heads=4, width=256, vocab_size=4096, context=128))

    def count(self, batch):
        return batch[1].numel()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten(), reduction="sum")


def lockstep_stepper(task, size, micro, folder, **settings):
    config = Config(
        experiment_name="bench",
        save_dir=folder,
        batch_size=size,
        micro_batch_size=micro,
        max_steps=STEPS,
        ckpt_freq=0,
        log_freq=LOG_FREQ,
        lr=1e-3,
        optim=Optim(clip=task.clip, warmup_steps=20),
        **settings,
    )
    records = iter(lockstep.Run(config, task))

    def step(count):
        for _ in range(count):
            next(records)

    return step


def bare_stepper(task, size, micro, *, fused, rank, world, one_group=False):
    """The same training by hand. Each rank owns a contiguous part of the step's samples, as lockstep's do."""
    torch.manual_seed(0)
    model = task.model()
    each = size // micro // world
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
    members = model.parameters() if one_group else groups(model, 0.1)
    optimizer = torch.optim.AdamW(members, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=fused or None)
    make = hand_written if fused else tutorial
    return make(task, wrapped, optimizer, size, micro, each, rank, world)


def rate(step):
    return (step + 1) / 21 if step < 20 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 20) / (STEPS - 20)))


def shuffle(samples):
    """epoch -> a new order, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return lambda epoch: torch.randperm(samples, generator=generator)


def hand_written(task, model, optimizer, size, micro, each, rank, world, order_of=None):
    parameters = list(model.parameters())
    table, items = task.table, size * task.items_per_sample
    state = {"step": 0, "logged": None}

    def batches():
        draw = order_of or shuffle(len(table))
        for epoch in itertools.count():
            order = draw(epoch)
            for first in range(0, len(order), size):
                for slot in range(rank * each, (rank + 1) * each):
                    mine = order[first + slot * micro : first + (slot + 1) * micro]
                    yield table.x[mine], table.y[mine]

    stream = batches()

    def step(count):
        for _ in range(count):
            k, total = state["step"], 0.0
            for slot in range(each):
                with contextlib.nullcontext() if slot == each - 1 or world == 1 else model.no_sync():
                    loss = task.loss(model, next(stream)) * (world / items)
                    loss.backward()
                total = loss.detach() + total
            norm = torch.nn.utils.clip_grad_norm_(parameters, task.clip)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate(k)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = k + 1
            if (k + 1) % LOG_FREQ == 0:
                state["logged"] = k + 1, total.item(), norm.item()

    return step


def tutorial(task, model, optimizer, size, micro, each, rank, world):
    table = task.table
    data = torch.utils.data.TensorDataset(table.x, table.y)
    sampler = torch.utils.data.DistributedSampler(data, world, rank) if world > 1 else None
    loader = torch.utils.data.DataLoader(data, batch_size=micro, sampler=sampler, shuffle=sampler is None)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def endless():
        while True:
            yield from loader

    stream, items = endless(), size * task.items_per_sample

    def step(count):
        for _ in range(count):
            for slot in range(each):
                batch = next(stream)
                with contextlib.nullcontext() if slot == each - 1 or world == 1 else model.no_sync():
                    (task.loss(model, batch) * (world / items)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return step


TASKS = {"mlp": (Mlp, 64, 50), "gpt": (SmallGpt, 8, 3)}


def compete(rank, world, port, folder, name, accumulation, rounds):
    """One setting, on one rank."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        kind, size, steps = TASKS[name]
        task, micro = kind(), size // accumulation // world
        ours = lockstep_stepper(task, size, micro, folder)
        ours(1)  # joins the world, which the bare loops then share
        make = partial(bare_stepper, task, size, micro, rank=rank, world=world)
        steppers = {"bare fused": make(fused=True), "bare plain": make(fused=False), "lockstep": ours}
        steppers["bare one group"] = make(fused=True, one_group=True)
        steppers["bare fused again"] = make(fused=True)  # A/A: what the method itself makes of no difference
        wait = dist.barrier if world > 1 else (lambda: None)
        clock = time.perf_counter if world > 1 else time.process_time
        results = contest(steppers, rounds=rounds, steps=steps, barrier=wait, clock=clock)
        if world == 1:
            del ours, steppers  # the run ends here, where nothing is shown
    if rank == 0:
        title = f"{name}, {world} process{'es' * (world > 1)}, accumulation {accumulation}"
        show(title, results, model=name, processes=world, accumulation=accumulation)
    os._exit(0) if world > 1 else None  # without a teardown that a benchmark need not wait for


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", choices=TASKS, action="append")
    parser.add_argument("--processes", type=int, action="append")
    parser.add_argument("--accumulation", type=int, action="append")
    parser.add_argument("--others", action="store_true", help="beside the other frameworks; needs the extra `bench`")
    parser.add_argument("--contestant", action="append", help="with --others: only these")
    given = parser.parse_args()
    if given.others:
        others = importlib.import_module("others")
        others.run(given.only, given.processes, given.accumulation, given.rounds, given.contestant)
        return
    print(machine())
    for name in given.only or TASKS:
        for world in given.processes or (1, 2):
            for accumulation in given.accumulation or (1, 4):
                start(compete, world, name, accumulation, given.rounds)


if __name__ == "__main__":
    main()
