"""Each engine against the same engine written by hand: python bench/engines.py [--rounds 20] [--steps 10]

A GPT of 5.8 million parameters on two processes, one thread each, at one and at four micro-batches a rank. The loops
by hand do the same work: torch's wrapper, clipping, fused AdamW, one exchange a step. By turns in one pair of
processes. `speed` is the time of the loop by hand over lockstep's; the aim is at least 0.99. Collectives are counted
from a trace of torch.profiler: those of ddp and zero must be as many at four micro-batches as at one, since gradients
are exchanged once a step (in as many calls as there are buffers).
"""

import argparse
import contextlib
import json
import warnings

import torch
import torch.distributed as dist
from contest import contest, machine, show
from group import together
from loop import SmallGpt
from torch.nn.parallel import DistributedDataParallel

from lockstep.engines.registry import engine
from lockstep.optim.groups import groups
from lockstep.optim.optimizers import adamw

NAMES = ("ddp", "zero", "fsdp")


def by_lockstep(task, name, world, slots):
    torch.manual_seed(0)
    made = engine(
        name, task.model(), lambda held: adamw(held, lr=1e-3), world, clip=1.0, blocks=(), say=lambda line: None
    )

    def step(count):
        for _ in range(count):
            for slot, batch in enumerate(_batches(task, world, slots)):
                with made.accumulate(slot == slots - 1):
                    made.backward(task.loss(made.model, batch), 1 / _items(world))
            made.step(1.0)

    return step


def by_hand(task, name, world, slots):
    """The same, as torch's documentation writes it, with its fastest settings."""
    torch.manual_seed(0)
    model = task.model()
    held, optimizer = _wrapped(name, model, world)
    parameters = list(model.parameters())

    def step(count):
        for _ in range(count):
            for slot, batch in enumerate(_batches(task, world, slots)):
                last = slot == slots - 1
                if name == "fsdp":
                    held.set_requires_gradient_sync(last)
                    held.set_is_last_backward(last)
                with contextlib.nullcontext() if last or name == "fsdp" else held.no_sync():
                    (task.loss(held, batch) * (world.size / _items(world))).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def _wrapped(name, model, world):
    betas = {"lr": 1e-3, "betas": (0.9, 0.95)}
    if name == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.AdamW(groups(model, 0.1), fused=True, **betas)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    members = [{key: value for key, value in group.items() if key != "names"} for group in groups(model, 0.1)]
    if name == "ddp":
        return ddp, torch.optim.AdamW(members, fused=True, **betas)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ddp, ZeroRedundancyOptimizer(members, torch.optim.AdamW, fused=True, **betas)


def _items(world):
    return 4 * world.size * 128


def _batches(task, world, slots):
    """Four samples a rank and step, cut into `slots`."""
    each, first = 4 // slots, world.rank * 4
    return [task.table.__getitems__(list(range(first + k * each, first + (k + 1) * each))) for k in range(slots)]


def exchanges(step):
    """{collective: calls a step} of one step, from the profiler's trace, once DDP has arranged its buffers."""
    step(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(1)
    names = [event.key for event in profile.key_averages() for _ in range(event.count)]
    kinds = [name.partition(":")[2] for name in names if name.startswith(("gloo:", "nccl:"))]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def compete(world, names, slots, rounds, steps):
    task, counted, results = SmallGpt(), {}, {}
    for name in names:
        mine, hand = by_lockstep(task, name, world, slots), by_hand(task, name, world, slots)
        counted[name] = exchanges(mine), exchanges(hand)
        pair = {f"{name} by hand": hand, name: mine}
        results |= contest(pair, rounds=rounds, steps=steps, barrier=dist.barrier)
        del mine, hand, pair
    return results, counted


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--engines", nargs="*", default=NAMES, choices=NAMES)
    given = parser.parse_args()
    print(machine())
    earlier = {}
    for slots in (1, 4):
        results, counted = together(2, compete, given.engines, slots, given.rounds, given.steps)
        show(f"two processes, {slots} micro-batches a rank", results, slots=slots)
        for name, (mine, hand) in counted.items():
            speed = 1 / results[name]["ratio"]
            once = earlier.setdefault(name, mine) == mine or name == "fsdp"
            verdict = "" if once else " MISSED: more at more micro-batches"
            print(f"  {name:<6} speed {speed:.3f}; collectives a step {mine} (by hand {hand}){verdict}")
            print(json.dumps({"bench": "engines", "engine": name, "slots": slots, "speed": speed, "exchanges": mine}))


if __name__ == "__main__":
    main()
