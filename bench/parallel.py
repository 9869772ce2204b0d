"""A model over two processes against one and two replicas: python bench/parallel.py [--rounds 10] [--steps 3]

A GPT of 5.8 million parameters, one thread a process, a step of 16 sequences in 4 micro-batches, by turns in one pair
of processes. `one` is rank 0 alone, `two replicas` are ddp without division; `tensor 2` divides each layer,
`pipeline 2` the blocks. Ratios are to `one`, below 1 is faster. On a CPU a message costs little compared with a
product, so the ratios are those of the division, not of a link between GPUs.
"""

import argparse
import dataclasses
import tempfile

import torch
from contest import contest, machine, show
from group import together
from loop import STEPS, SmallGpt

import lockstep
from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config
from lockstep.config.sections import Optim
from lockstep.distributed.world import World

DEGREES = ("tensor", "pipeline")


def config_of(folder, name, **degrees):
    return Config(
        experiment_name=name.replace(" ", "-"),
        save_dir=folder,
        batch_size=16,
        micro_batch_size=4,
        precision="float32",
        max_steps=STEPS,
        ckpt_freq=0,
        log_freq=10,
        lr=1e-3,
        report=False,
        compile=False,
        optim=Optim(clip=1.0, warmup_steps=20),
        parallel=Parallel(**degrees),
    )


def stepper(config, world):
    records = iter(lockstep.Run(config, SmallGpt(), world))

    def step(count):
        for _ in range(count):
            next(records)

    return step


def compete(world, folder, rounds, steps):
    torch.set_num_threads(1)
    steppers = {"one": lambda count: None}
    if world.rank == 0:
        steppers["one"] = stepper(config_of(folder, "one"), World())
    steppers["two replicas"] = stepper(config_of(folder, "two replicas"), dataclasses.replace(world))
    for name in DEGREES:
        # Each run forms the replicas of its own world.
        steppers[f"{name} 2"] = stepper(config_of(folder, f"{name} 2", **{name: 2}), dataclasses.replace(world))
    return contest(steppers, rounds=rounds, steps=steps, barrier=world.barrier)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = together(2, compete, folder, given.rounds, given.steps)
    show("a step on two processes", results, **machine())


if __name__ == "__main__":
    main()
