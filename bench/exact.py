"""What --exact costs on two, three and four processes: python bench/exact.py [--rounds 20]

A GPT of five million parameters, ddp and fsdp, at one and at four micro-batches a rank on two processes, and at eight a
step on three and on four. By turns in one group of processes: the engine with fused AdamW (what lockstep uses
otherwise), the same again (A/A), and --exact. One thread a process for all. Aims: ddp 1.17 at one micro-batch a rank,
1.07 at four, and 1.3 on three processes and more; fsdp 1.25.
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
from lockstep.config.schema import Config


def stepper(task, micro_batches, folder, name, world, **settings):
    config = Config(
        experiment_name=name,
        save_dir=folder,
        batch_size=8,
        micro_batch_size=8 // micro_batches,
        max_steps=10**6,
        ckpt_freq=0,
        log_freq=100,
        **settings,
    )
    records = iter(lockstep.Run(config, task, world))
    return lambda count: [next(records) for _ in range(count)]


def compete(rank, world, port, folder, engine, size, micro_batches, rounds):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        world, task = lockstep.World.join(), SmallGpt()
        steppers = {
            name: stepper(
                task, micro_batches, folder, name.replace(" ", "-"), world, engine=engine, exact=name.endswith("exact")
            )
            for name in (engine, f"{engine} exact", f"{engine} again")
        }
        results = contest(steppers, rounds=rounds, steps=3, barrier=dist.barrier)
    if rank == 0:
        title = f"{engine}, {size} processes, {micro_batches} micro-batches a step"
        show(title, results, engine=engine, processes=size, micro_batches=micro_batches)
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engines", nargs="*", default=["ddp", "fsdp"])
    given = parser.parse_args()
    print(machine())
    for engine, (size, micro_batches) in itertools.product(given.engines, ((2, 2), (2, 8), (3, 8), (4, 8))):
        start(compete, size, engine, size, micro_batches, given.rounds)


if __name__ == "__main__":
    main()
