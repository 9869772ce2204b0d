"""What --exact costs on two processes: python bench/exact.py [--rounds 20]

A GPT of five million parameters, ddp and fsdp, at one and at four micro-batches a rank. By turns in one pair of
processes: the engine with fused AdamW (what lockstep uses otherwise), the same again (A/A), and --exact. One thread a
process for all. Aims: ddp 1.17 at one micro-batch and 1.07 at four, fsdp 1.25.
"""

import argparse
import contextlib
import itertools
import os

import torch
import torch.distributed as dist
from contest import contest, machine, show, start
from loop import SmallGpt

import lockstep
from lockstep.config.config import Config


def stepper(task, slots, folder, name, world, **settings):
    config = Config(
        experiment_name=name,
        save_dir=folder,
        batch_size=8,
        micro_batch_size=4 // slots,
        max_steps=10**6,
        ckpt_freq=0,
        log_freq=100,
        **settings,
    )
    records = iter(lockstep.Run(config, task, world))
    return lambda count: [next(records) for _ in range(count)]


def compete(rank, world, port, folder, engine, slots, rounds):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        world, task = lockstep.World.join(), SmallGpt()
        steppers = {
            name: stepper(
                task, slots, folder, name.replace(" ", "-"), world, engine=engine, exact=name.endswith("exact")
            )
            for name in (engine, f"{engine} exact", f"{engine} again")
        }
        results = contest(steppers, rounds=rounds, steps=3, barrier=dist.barrier)
    if rank == 0:
        show(f"{engine}, 2 processes, {slots} slot{'s' * (slots > 1)} a rank", results, engine=engine, slots=slots)
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engines", nargs="*", default=["ddp", "fsdp"])
    given = parser.parse_args()
    print(machine())
    for engine, slots in itertools.product(given.engines, (1, 4)):
        start(compete, 2, engine, slots, given.rounds)


if __name__ == "__main__":
    main()
