"""What a step costs the host besides the model's own work: python bench/host.py [--rounds 20] [--steps 100]

Three figures, each beside its aim, and one line of JSON:

- host time: lockstep's step less a bare loop's with the same tiny model, samples and update, by turns in one process,
  in milliseconds; read at once as on a CPU, and a step late as on a device. On a CPU the two loops do the same
  arithmetic, so what is left is what a host with a device would do while that computes. And of a record.
- operations an update: what is dispatched from the last backward to the end of the update, in the branch of a CUDA
  device (fused AdamW; see tests/fake_cuda.py), of a GPT with 6 blocks; each is a kernel's launch or a view.
- synchronisations a step: what the host would wait for on such a device, over ten steps with guards on, recorded each
  step; and waits for the event of the step before, which keep it from running ahead.
"""

import argparse
import collections
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from contest import contest, machine
from loop import Mlp, SmallGpt, bare_stepper

import lockstep
from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.distributed.world import World
from lockstep.engines.registry import engine
from lockstep.guards.nonfinite import DeferredReader
from lockstep.optim.optimizers import adamw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fake_cuda import DEVICE, FakeCuda

AIMS = {"host_ms": 0.3, "record_ms": 0.2, "operations": 16, "synchronisations": 0}


def run_of(folder, name, task, world, **changes):
    given = {"batch_size": 32, "micro_batch_size": 32, "max_steps": 1_000_000, "ckpt_freq": 0, "log_freq": 100}
    optim = Optim(clip=task.clip, warmup_steps=20)
    config = Config(
        experiment_name=name,
        save_dir=folder,
        lr=1e-3,
        optim=optim,
        compile=False,
        precision="float32",
        **given | changes,
    )
    return lockstep.Run(config, task, world)


def stepper(folder, lag, log_freq=100):
    DeferredReader.lag = lag
    steps = iter(run_of(folder, f"late-{lag}-{log_freq}", Mlp(), World(), log_freq=log_freq))
    next(steps)  # all is made by now, the reader too
    DeferredReader.lag = None

    def step(count):
        for _ in range(count):
            next(steps)

    return step


def host_times(folder, rounds, steps):
    """{how the numbers are read: milliseconds a step beyond the bare loop's}, and those of a record."""
    bare = bare_stepper(Mlp(), 32, 32, fused=True, rank=0, world=1)
    steppers = {"bare": bare, "at once": stepper(folder, 0), "late": stepper(folder, 1)}
    steppers["recorded"] = stepper(folder, 1, log_freq=1)
    found = contest(steppers, rounds=rounds, steps=steps, barrier=lambda: None)
    taken = {name: each["microseconds"] / 1e3 for name, each in found.items()}
    times = {"at once": taken["at once"] - taken["bare"], "late": taken["late"] - taken["bare"]}
    return times, taken["recorded"] - taken["late"]


def operations():
    """{name: how often it is dispatched in an update}."""
    with FakeCuda() as cuda:
        task = SmallGpt()
        model = task.model().to(DEVICE)
        made = engine("single", model, lambda held: adamw(held, lr=1e-3, fused=True), World(device=DEVICE), clip=1.0)
        x = torch.zeros(2, 8, dtype=torch.int64).pin_memory().to(DEVICE, non_blocking=True)
        for turn in range(3):
            made.backward(task.loss(made.model, (x, x)))
            cuda.counting = turn == 2
            made.step(1.0)
            cuda.counting = False
    return dict(collections.Counter(cuda.operations).most_common())


def synchronisations(folder):
    """(waits a step by their line, waits a step for an event of the step before)."""
    count = 10
    with FakeCuda(fast=False) as cuda:
        for step in run_of(folder, "waits", Mlp(), World(device=DEVICE), log_freq=1, max_steps=4 + count):
            if step.global_step == 3:
                cuda.waits.clear()
                cuda.log.clear()
            elif step.global_step == 3 + count:
                waits, log = list(cuda.waits), list(cuda.log)
    lines = collections.Counter(f"{wait.file}: {wait.line}" for wait in waits)
    events = sum(line.startswith("wait for event") for line in log)
    return {line: times / count for line, times in lines.items()}, events / count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        (times, record), dispatched = host_times(folder, given.rounds, given.steps), operations()
        waits, events = synchronisations(folder)
    found = {
        "machine": machine(),
        "host_ms": times,
        "record_ms": record,
        "operations": sum(dispatched.values()),
        "by_name": dispatched,
        "synchronisations": sum(waits.values()),
        "waits": waits,
        "events": events,
        "aims": AIMS,
    }
    for name, value in times.items():
        print(f"host time of a step, read {name}: {value:.3f} ms (at most {AIMS['host_ms']})")
    print(f"a record: {record:.3f} ms (at most {AIMS['record_ms']} on a device; half of it is a CPU's /proc)")
    print(f"operations an update: {found['operations']} (at most {AIMS['operations']}): {dispatched}")
    print(f"synchronisations a step: {found['synchronisations']:g} (none); waits for the step before: {events:g}")
    print(json.dumps(found), flush=True)
    os._exit(0)  # without the ends of runs that nobody needs


if __name__ == "__main__":
    main()
