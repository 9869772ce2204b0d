"""What `--shares auto` gains where ranks or samples are unequal: python bench/shares.py [--rounds 10] [--only slow]

slow: one of two ranks at half speed, twelve micro-batches a step, without and with --exact. Aim: a step at most 1.1 of
the ideal, which is 2/3 of that with equal shares. lengths: a sample a micro-batch, lengths log-normal with sigma 1,
eight micro-batches a rank, each step cut by `Task.work`. Aim: 1.3 times the throughput of equal counts. equal and mlp:
ranks and samples alike, a GPT and a tiny MLP that compute. Aim: at most 1.01 of equal shares.

In `slow` and `lengths` the work is sleep, a third of it in the forward and the rest in the backward, in proportion to
what a micro-batch costs its rank: so neither more ranks than cores nor a busy machine count as slowness. By turns in
one group of processes: equal shares, auto (once it has decided), equal shares again (A/A).
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from contest import contest, machine, show, start
from loop import Mlp, SmallGpt

import lockstep
from lockstep.config.schema import Config

WARM = 40  # steps in which auto decides


class Slept(torch.autograd.Function):
    """The loss as it is, after a pause here and a longer one in the backward."""

    @staticmethod
    def forward(ctx, loss, seconds):
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds * 2 / 3)
        return gradient, None


class Slow(Mlp):
    """A micro-batch takes so many seconds, on the last rank twice as long."""

    def __init__(self, seconds):
        super().__init__()
        self.cost = self.seconds = seconds

    def bound(self, world):
        self.cost = self.seconds * (2.0 if world.rank == world.size - 1 else 1.0)
        return self

    def loss(self, model, batch):
        return Slept.apply(super().loss(model, batch), self.cost)


class Lengths(Mlp):
    """A sample takes as long as it is: log-normal with sigma 1 and mean 1, times so many seconds."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        drawn = torch.empty(4096).log_normal_(-0.5, 1.0, generator=torch.Generator().manual_seed(1))
        self.table.x[:, 0] = drawn  # each sample knows its length

    def bound(self, world):
        return self

    def work(self, dataset, samples):
        return float(dataset.x[samples, 0].sum())

    def loss(self, model, batch):
        return Slept.apply(super().loss(model, batch), float(batch[0][:, 0].sum()) * self.seconds)


def stepper(task, micro_batches, size, folder, name, world, **settings):
    config = Config(
        experiment_name=name,
        save_dir=folder,
        batch_size=size,
        micro_batch_size=size // micro_batches,
        max_steps=10**6,
        ckpt_freq=0,
        log_freq=100,
        engine="ddp",
        **settings,
    )
    run = lockstep.Run(config, task, world)
    records = iter(run)
    return run, lambda count: [next(records) for _ in range(count)]


KINDS = {"slow": Slow, "lengths": Lengths, "equal": SmallGpt, "mlp": Mlp}


def compete(rank, world, port, folder, name, ranks, micro_batches, size, exact, rounds, steps, seconds):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        world = lockstep.World.join()
        task = KINDS[name](seconds).bound(world) if name in ("slow", "lengths") else KINDS[name]()
        runs = {
            contestant: stepper(
                task, micro_batches, size, folder, contestant.replace(" ", "-"), world, exact=exact, shares=shares
            )
            for contestant, shares in (("equal", "equal"), ("auto", "auto"), ("equal again", "equal"))
        }
        for _, step in runs.values():  # all, so that each turn has the same steps
            step(WARM)
        results = contest(
            {contestant: step for contestant, (_, step) in runs.items()},
            rounds=rounds,
            steps=steps,
            barrier=dist.barrier,
        )
    if rank == 0:
        title = f"{name}{' exact' * exact}, {ranks} processes, {micro_batches} micro-batches a step"
        show(title, results, kind=name, processes=ranks, micro_batches=micro_batches, exact=exact)
        found = results["auto"]["ratio"]
        if name == "slow":
            print(f"  a step is {found / (2 / 3):.3f} of the ideal (aim 1.1)")
        elif name == "lengths":
            print(f"  {1 / found:.3f} times the throughput (aim 1.3)")
    os._exit(0)


#        kind: (processes, micro-batches a step, samples a step, exact, steps a turn)
CASES = (
    ("slow", 2, 12, 12, False, 5),
    ("slow", 2, 12, 12, True, 5),
    ("lengths", 2, 16, 16, False, 5),
    ("lengths", 4, 32, 32, False, 5),
    ("lengths", 8, 64, 64, False, 5),
    ("equal", 2, 8, 8, False, 3),
    ("mlp", 2, 8, 64, False, 100),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="that work of 1 takes; more on a busy machine")
    parser.add_argument("--only", choices=KINDS, action="append")
    given = parser.parse_args()
    print(machine())
    for name, ranks, micro_batches, size, exact, steps in CASES:
        if name in (given.only or KINDS):
            start(
                compete, ranks, name, ranks, micro_batches, size, exact, given.rounds, steps, given.milliseconds / 1e3
            )


if __name__ == "__main__":
    main()
