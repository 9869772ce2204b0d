"""GPT-2 124M on one GPU, beside a tuned bare loop: PYTHONPATH=src python bench/gpu.py [--engine single]

Through an engine that needs a launcher: torchrun --standalone --nproc-per-node 1 bench/gpu.py --engine fsdp

bf16 autocast, compiled, batch of 32 sequences of 1024 in micro-batches of 16, fused AdamW, TF32 allowed. Both do the
same work on the same model; turns alternate. MFU = tokens/s * FLOPs per token / peak, with FLOPs per token = 6 N +
12 L H Q T (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B; see GPT.num_flops_per_token) and the peak given by
--peak, in FLOP/s: 989.4e12 is the dense bf16 rate of an H100 or H200 SXM in NVIDIA's datasheet.
"""

import argparse
import contextlib
import json
import os
import tempfile

import torch
from contest import contest, machine, show
from loop import STEPS, Mlp, Table, lockstep_stepper, rate
from torch.nn import functional as F

from lockstep.data.order import Shuffled
from lockstep.models.gpt import GPT, PRESETS
from lockstep.optim.groups import groups

TIME, SIZE, MICRO = 1024, 32, 16


class Gpt2(Mlp):
    """The preset builtin:gpt2 on random tokens."""

    items_per_sample = TIME

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(50257, (1024, TIME + 1), generator=generator)
        self.table = Table(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def model(self):
        return GPT(PRESETS["builtin:gpt2"])

    def count(self, batch):
        return batch[1].numel()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten(), reduction="sum")


def bare(task, device):
    """A loop by hand with everything tuned: compiled, autocast, pinned copies, fused AdamW, no wait for the device."""
    torch.manual_seed(0)
    model = task.model().to(device)
    model.compile()
    optimizer = torch.optim.AdamW(groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), fused=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    order, table, items, state = Shuffled(len(task.table), 0), task.table, SIZE * TIME, {"step": 0}

    def step(count):
        for _ in range(count):
            k = state["step"]
            samples = torch.from_numpy(order.at(k * SIZE, (k + 1) * SIZE)[1])
            for slot in range(SIZE // MICRO):
                mine = samples[slot * MICRO : (slot + 1) * MICRO]
                x, y = (part[mine].pin_memory().to(device, non_blocking=True) for part in (table.x, table.y))
                with torch.autocast("cuda", torch.bfloat16):
                    logits = model(x)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum")
                (loss / items).backward()
            torch.nn.utils.clip_grad_norm_(parameters, task.clip)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * rate(k)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            state["step"] = k + 1

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--peak", type=float, default=989.4e12)
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.set_float32_matmul_precision("high")
    task = Gpt2()
    settings = {"precision": "bf16", "compile": True, "matmul_precision": "high", "engine": given.engine}
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(nowhere):
        steppers = {"bare": bare(task, device), "lockstep": lockstep_stepper(task, SIZE, MICRO, folder, **settings)}
        steppers["bare again"] = bare(task, device)
        results = contest(steppers, rounds=given.rounds, steps=given.steps, barrier=torch.cuda.synchronize)
    print(machine() | {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda})
    flops = task.model().num_flops_per_token(TIME)
    show(f"GPT-2 124M, bf16, compiled, {given.engine}", results, model="gpt2", engine=given.engine)
    for name, found in results.items():
        tokens = SIZE * TIME / (found["microseconds"] * 1e-6)
        figures = {"contestant": name, "tokens_per_second": tokens, "mfu": tokens * flops / given.peak}
        print(json.dumps(figures | {"flops_per_token": flops, "peak": given.peak, "horizon": STEPS}))


if __name__ == "__main__":
    main()
