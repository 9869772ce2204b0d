"""What each engine holds per rank, counted on live tensors: python bench/memory.py [--sizes 1,2,4]

A GPT of 5.8 million parameters with AdamW at accumulation 1. Gradients are counted between the backward and the
update, parameters and optimizer states after it. The aims: fsdp (full) within 5% of 1/N in all three; zero's states
within 5% of max(1/N, the largest parameter's share).

--evaluation: how the resident memory of a process grows over the micro-batches of an evaluation on a CPU, in a process
of its own. The aim: by no more than a tenth of one micro-batch's logits each.

--peaks: bytes a parameter over all storages on a CPU, with 16 equal layers in float32, AdamW and one row a micro-batch:
after model, engine and states are made, and at the peaks of that, of forward and backward, and of the update. The aim:
16 at the start, which ddp's buffers of gradients take by themselves.
"""

import argparse
import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from group import together
from held import Held
from loop import SmallGpt
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.config.engine_options import EngineOptions
from lockstep.data.batches import Batches
from lockstep.data.sampler import Sequential
from lockstep.engines.memory import footprint
from lockstep.engines.registry import engine
from lockstep.files import bytes_text
from lockstep.optim.optimizers import adamw
from lockstep.training.evaluation import evaluate, one_step_plan

CASES = {
    "ddp": ("ddp", {}),
    "zero": ("zero", {}),
    "fsdp full": ("fsdp", {}),
    "fsdp grad-op": ("fsdp", {"sharding": "grad-op"}),
    "fsdp none": ("fsdp", {"sharding": "none"}),
}


def measure(world):
    """{case: [bytes of parameters, gradients, states] a rank}, and the largest parameter's share."""
    task, found = SmallGpt(), {}
    for case, (name, options) in CASES.items():
        torch.manual_seed(0)
        model = task.model().to(world.device)
        share = max(p.numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
        made = engine(name, model, lambda held: adamw(held, lr=1e-3), world, clip=1.0, options=EngineOptions(**options))
        for _ in range(2):  # the first step finds out about unused parameters
            batch = tuple(part.to(world.device) for part in task.table.__getitems__(list(range(4))))
            with made.accumulate(last=True):
                made.backward(task.loss(made.model, batch) / 512)
            gradients = _gradients(made.model)
            made.step(1.0)
        held = footprint(made)
        found[case] = world.gather([held.parameters, gradients, held.states])
        del made, model
    return found, share


def _gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return sum((g.to_local() if hasattr(g, "to_local") else g).nbytes for g in grads)


class Wide(lockstep.Task):
    """A model whose logits are large (2.4 MiB a micro-batch), its loss and a metric."""

    def model(self):
        return nn.Linear(8, 40_000)

    def dataset(self, split):
        return torch.ones(2400, 8)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.int64), reduction="sum")

    def metrics(self, model, batch):
        return {"top": (model(batch).argmax(1).sum(), len(batch))}


def evaluation(world, count=150, micro=16):
    """MiB by which this process grew over the micro-batches of an evaluation, and the MiB of one's logits."""
    task, data, seen = Wide(), torch.ones(count * micro, 8), []
    made = engine("single", task.model(), lambda held: adamw(held, lr=1e-3), world)
    batches = Batches(task, data, Sequential(len(data)), one_step_plan(len(data), micro), world)
    evaluate(made, task, batches, world, step=0, seed=0, progress=lambda done, of: seen.append(resident()))
    return seen[-1] - seen[9], micro * 40_000 * 4 / 2**20


def resident():
    """MiB of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def report_evaluation():
    count = 150
    grown, logits = together(1, evaluation, count)
    met = grown <= 0.1 * logits * count
    print(f"evaluation on a CPU: {grown:.0f} MiB more after {count} micro-batches with {logits:.1f} MiB of logits each")
    print(json.dumps({"bench": "evaluation memory", "grown_mib": grown, "logits_mib": logits, "met": met}))


def peaks(world, name, exact=0):
    """Bytes a parameter: after the start, and the peaks of the start, of forward and backward, and of the update."""
    torch.manual_seed(0)
    found = {}
    with Held() as held:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
        count = sum(p.numel() for p in model.parameters())
        blocks = list(model) if name == "fsdp" else ()
        options = {"blocks": blocks, "exact_micro_batches": exact}
        made = engine(name, model, lambda each: adamw(each, lr=1e-3, fused=not exact), world, **options)
        state = made.state_dict()
        gc.collect()
        found["after"], found["start"] = held.now, held.peak
        del state
        for _ in range(3):  # the first exchanges by hand
            gc.collect()
            held.peak = held.now
            for _ in range(exact or 1):
                with made.accumulate(last=True):
                    made.backward(made.model(torch.ones(1, 64)).sum())
            found["backward"], held.peak = held.peak, held.now
            made.step(1.0)
            found["update"] = held.peak
    return {where: size / count for where, size in found.items()}


def report_peaks():
    rows = {"single": together(1, peaks, "single"), "single --exact, 4 micro-batches": together(1, peaks, "single", 4)}
    rows |= {f"{name} on 2 ranks": together(2, peaks, name) for name in ("ddp", "zero", "fsdp")}
    print(f"{'engine':<34} {'after':>7} {'start':>7} {'forward and backward':>21} {'update':>7}")
    for name, found in rows.items():
        after, start, backward, update = found.values()
        print(f"{name:<34} {after:>7.1f} {start:>7.1f} {backward:>21.1f} {update:>7.1f}")
        print(json.dumps({"bench": "peaks", "engine": name, **found}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1,2,4")
    parser.add_argument("--evaluation", action="store_true")
    parser.add_argument("--peaks", action="store_true")
    given = parser.parse_args()
    if given.peaks:
        report_peaks()
        return
    if given.evaluation:
        report_evaluation()
        return
    sizes = [int(size) for size in given.sizes.split(",")]
    whole = None
    print(f"{'ranks':>5} {'engine':<14} {'parameters':>12} {'gradients':>12} {'states':>12}   parts of the whole")
    for size in sizes:
        found, share = together(size, measure)
        for case, ranks in found.items():
            most = [max(column) for column in zip(*ranks, strict=True)]
            whole = whole or [max(column) for column in zip(*found["ddp"], strict=True)]
            parts = [mine / all_ for mine, all_ in zip(most, whole, strict=True)]
            aim = {"fsdp full": [1 / size] * 3, "zero": [None, None, max(1 / size, share)]}.get(case, [None] * 3)
            met = all(wanted is None or part <= 1.05 * wanted for part, wanted in zip(parts, aim, strict=True))
            cells = " ".join(f"{bytes_text(count):>12}" for count in most)
            shares = " ".join(f"{part:.3f}" for part in parts)
            print(f"{size:>5} {case:<14} {cells}   {shares} {'' if met else 'MISSED'}")
            record = {"bench": "memory", "ranks": size, "engine": case, "bytes": most, "parts": parts, "met": met}
            print(json.dumps(record))


if __name__ == "__main__":
    main()
