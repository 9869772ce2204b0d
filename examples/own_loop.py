"""A loop of your own on any number of processes: torchrun --standalone --nproc-per-node 2 examples/own_loop.py

The loop has a loss per item over all ranks, accumulation with one exchange a step, clipping, a scheduler, checkpoints
and a resume on any number of processes: run it again with more --epochs.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--folder", default="outputs/own-loop")
given = parser.parse_args()
x = torch.randn(1280, 8, generator=torch.Generator().manual_seed(0))
y = x.square().sum(1, keepdim=True)
train, held_out = TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))

world = lockstep.World.join()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
engine = lockstep.engine("auto", model.to(world.device), optimizer, world, clip=1.0)
loader = lockstep.loader(train, world, batch_size=32, micro_batch_size=4, epochs=given.epochs)
parts = {"engine": engine, "scheduler": scheduler, "loader": loader}
lockstep.load_state(given.folder, world, **parts)
for step in loader:
    for batch in step:
        with engine.accumulate(batch.last):
            engine.backward(nn.functional.mse_loss(engine.model(batch.data[0]), batch.data[1]), batch.weight)
    engine.step()
    scheduler.step()
    if (step.number + 1) % 64 == 0:
        lockstep.save_state(given.folder, world, step.number + 1, **parts)
for step in lockstep.loader(held_out, world, batch_size=256, micro_batch_size=32, shuffle=False):
    with torch.no_grad():
        off, target = lockstep.gather_for_metrics(step, [(engine.model(b.data[0]), b.data[1]) for b in step])
    world.print(f"after {loader.steps} steps: error {nn.functional.mse_loss(off, target):.4f} on {len(off)} samples")
del engine, parts
world.leave()
