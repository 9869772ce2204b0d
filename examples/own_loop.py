"""An engine in a loop of your own: torchrun --standalone --nproc-per-node 2 examples/own_loop.py

The five lines that matter are marked: right accumulation, a loss per item over all ranks, clipping, any engine by name.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import lockstep

SIZE, MICRO = 32, 4  # samples in a step over all ranks, and in one forward


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    world = lockstep.World.join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = lockstep.engine(given.engine, model, optimizer, world, clip=1.0)  # 1

    x = torch.randn(1024, 8, device=world.device)
    y = x.square().sum(1, keepdim=True)
    for step in range(given.steps):
        rows = torch.arange(step * SIZE, (step + 1) * SIZE, device=world.device) % len(x)
        mine = rows.tensor_split(world.size)[world.rank].split(MICRO)
        total = torch.zeros(())
        for batch in mine:
            with engine.accumulate(last=batch is mine[-1]):  # 2
                loss = F.mse_loss(engine.model(x[batch]), y[batch], reduction="sum")  # 3
                engine.backward(loss, 1 / SIZE)  # 4
            total += loss.detach().cpu()
        result = engine.step(factor=min(1.0, (step + 1) / 20))  # 5
        if world.is_main and step % 50 == 49:
            print(f"step {step + 1}: loss of this rank {total / len(rows) * world.size:.3f}, norm {result.norm:.3f}")
    del engine
    world.leave()
