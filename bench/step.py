"""Where a step goes, in lockstep and in a bare loop: python bench/step.py [--rounds 20] [--processes 2]

The MLP of bench/loop.py, by turns in the same processes. Each loop's step is cut at the same places; what a part takes
is its median over the steps on rank 0, in microseconds. "rest" is what follows a step without a record (guards, the
body; in the bare loop the loop itself), "record" how much longer that takes in a step with one, every tenth.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from contest import machine, start
from loop import LOG_FREQ, TASKS, lockstep_stepper, rate, shuffle
from torch.nn.parallel import DistributedDataParallel

from lockstep.clock import HostClock
from lockstep.distributed.exchange import StepExchange
from lockstep.optim.groups import groups

PARTS = ("data", "exchange", "forward", "backward", "update", "rest", "record")


class Laps:
    """Seconds by part of each step."""

    def __init__(self):
        self.steps, self.present, self.last, self.begun = defaultdict(list), defaultdict(float), 0.0, 0

    def begin(self):
        """Begins a step, which ends the one before."""
        now = time.perf_counter()
        if self.last:
            self.present["record" if self.begun % LOG_FREQ == 0 else "rest"] += now - self.last
            for part, seconds in self.present.items():
                self.steps[part].append(seconds)
        self.begun += 1
        self.present, self.last = defaultdict(float), time.perf_counter()

    def lap(self, part):
        now = time.perf_counter()
        self.present[part] += now - self.last
        self.last = now

    def pause(self):
        """Forgets the last step: what follows is not its own."""
        self.present, self.last = defaultdict(float), 0.0

    def medians(self):
        """{part: microseconds}."""
        found = {part: statistics.median(self.steps.get(part) or [0.0]) * 1e6 for part in PARTS}
        return found | {"record": found["record"] - found["rest"]}


def bare(task, size, micro, rank, world, laps):
    """`hand_written` of bench/loop.py at accumulation 1, with its laps."""
    torch.manual_seed(0)
    model = task.model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if world > 1 else model
    optimizer = torch.optim.AdamW(groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), fused=True)
    parameters = list(model.parameters())
    table, items = task.table, size * task.items_per_sample
    state = {"step": 0, "logged": None}

    def batches():
        draw = shuffle(len(table))
        for epoch in itertools.count():
            order = draw(epoch)
            for first in range(rank * micro, len(order), size):
                mine = order[first : first + micro]
                yield table.x[mine], table.y[mine]

    stream = batches()

    def step(count):
        for _ in range(count):
            laps.begin()
            k = state["step"]
            batch = next(stream)
            laps.lap("data")
            loss = task.loss(wrapped, batch) * (world / items)
            laps.lap("forward")
            loss.backward()
            laps.lap("backward")
            norm = torch.nn.utils.clip_grad_norm_(parameters, task.clip)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate(k)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = k + 1
            laps.lap("update")
            if (k + 1) % LOG_FREQ == 0:
                state["logged"] = k + 1, loss.item(), norm.item()

    return step


def watched(laps):
    """Has lockstep's own clock tell `laps`, and the step exchange's calls counted apart from the data's."""

    def start(self):
        self.steps += 1
        laps.begin()

    HostClock.start = start
    HostClock.lap = lambda self, name: laps.lap(name.partition("/")[0])
    for name in ("global_items", "send", "receive"):
        inner = getattr(StepExchange, name)

        def timed(self, *given, inner=inner):
            laps.lap("data")
            found = inner(self, *given)
            laps.lap("exchange")
            return found

        setattr(StepExchange, name, timed)


def compete(rank, world, port, folder, rounds):
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    kind, size, steps = TASKS["mlp"]
    task, micro = kind(), size // world
    laps = {"bare fused": Laps(), "lockstep": Laps()}
    watched(laps["lockstep"])
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        ours = lockstep_stepper(task, size, micro, folder)
        ours(1)
        steppers = {"bare fused": bare(task, size, micro, rank, world, laps["bare fused"]), "lockstep": ours}
        wait = dist.barrier if world > 1 else (lambda: None)
        for turn in range(rounds + 1):
            for name in list(steppers)[:: 1 if turn % 2 else -1]:
                wait()
                laps[name].pause()
                steppers[name](steps)
                laps[name].pause()
            if not turn:
                for each in laps.values():
                    each.steps.clear()
    if rank == 0:
        print(f"{'part':>10}" + "".join(f"{name:>12}" for name in laps) + f"{'difference':>12}")
        one, other = (each.medians() for each in laps.values())
        for part in PARTS:
            print(f"{part:>10}{one[part]:12.0f}{other[part]:12.0f}{other[part] - one[part]:12.0f}")
        one, other = (sum(each.values()) - (1 - 1 / LOG_FREQ) * each["record"] for each in (one, other))
        print(f"{'step':>10}{one:12.0f}{other:12.0f}{other - one:12.0f}", flush=True)
    os._exit(0)  # without a teardown that a benchmark need not wait for


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    print(machine())
    start(compete, given.processes, given.rounds)


if __name__ == "__main__":
    main()
