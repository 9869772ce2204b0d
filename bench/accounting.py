"""What the account of time costs that every run keeps: python bench/accounting.py [--steps 400] [--rounds 40] [--cpu]

A run whose clock (`lockstep.clock.HostClock`, whose laps become the time/ records) counts for some steps, does nothing
for as many, and does nothing again, in turn: the last two differ by chance alone. Ratios are to the first turns that
do nothing. Two tasks: a tiny model, whose step is all overhead, and one of some 20 ms a step. --cpu counts the
thread's processor time, for a machine that has other work. Beside it what the calls of one step take by themselves.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time

import torch
from contest import machine
from torch import nn

import lockstep
from lockstep import clock as clocks
from lockstep.config.schema import Config
from lockstep.training.step import components

GOAL = 0.005  # of a step


class Work(lockstep.Task):
    items_per_sample = 1

    def __init__(self, width, layers):
        self.width, self.layers = width, layers
        self.rows = torch.randn(64, width, generator=torch.Generator().manual_seed(0))

    def model(self):
        return nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(self.layers)], nn.Linear(self.width, 8))

    def dataset(self, split):
        return range(1 << 16) if split == "train" else None

    def collate(self, samples):
        rows = torch.tensor(samples)
        return self.rows[rows % 64], rows % 8

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def nothing(*_):
    """In place of a clock's start and lap."""


def measured(name, task, slots, steps, rounds, now):
    kinds, made = ("silent", "silent again", "clock"), []
    times = {kind: [] for kind in kinds}
    plain, components.make_clock = components.make_clock, lambda *_: made.append(clocks.HostClock()) or made[0]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = Config(
            experiment_name="r", save_dir=folder, batch_size=8, micro_batch_size=8 // slots, max_steps=10**6,
            ckpt_freq=0, log_freq=10**6, device="cpu", report=False, lr=1e-7,
        )  # fmt: skip
        taken = iter(lockstep.Run(config, task))
        next(taken)  # all is made
        components.make_clock = plain
        for turn in range(rounds + 1):
            for place in range(len(kinds)):
                kind = kinds[(place + turn) % len(kinds)]
                if kind == "clock":
                    made[0].__dict__.pop("lap", None)
                    made[0].__dict__.pop("start", None)
                else:
                    made[0].start = made[0].lap = nothing
                next(taken)
                began = now()
                for _ in range(steps):
                    next(taken)
                if turn:  # once unmeasured
                    times[kind].append((now() - began) / steps)
        taken.close()
    plain = statistics.median(times["silent"])
    for kind in ("silent again", "clock"):
        ratios = [mine / first for mine, first in zip(times[kind], times["silent"], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        print(
            f"{name}, {slots} micro-batches, {1e3 * plain:.3f} ms a step: {kind:<12} "
            f"{100 * (statistics.median(ratios) - 1):+.2f} % (quarters {100 * (quarters[0] - 1):+.2f} to "
            f"{100 * (quarters[2] - 1):+.2f})"
        )
    return plain


def calls(slots, count=20000):
    """Seconds of a step's calls of the clock."""
    clock, best = clocks.HostClock(), float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(count):
            clock.start()
            clock.lap("data")
            for slot in range(slots):
                clock.lap("forward")
                clock.lap("backward" if slot + 1 == slots else "backward/alone")
            clock.lap("data")
            clock.lap("update")
            clock.lap("data")
            clock.spent()
        best = min(best, (time.thread_time() - began) / count)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of the tiny model in a turn; of the other a tenth")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    now = time.thread_time if given.cpu else time.perf_counter
    for name, task, steps in (("tiny", Work(32, 2), given.steps), ("20 ms", Work(1024, 4), max(1, given.steps // 10))):
        for slots in (1, 4):
            plain = measured(name, task, slots, steps, given.rounds, now)
            spent = calls(slots)
            print(f"    the calls alone: {1e6 * spent:.2f} us, {spent / plain:.3%} of it (goal {GOAL:.1%})")


if __name__ == "__main__":
    main()
