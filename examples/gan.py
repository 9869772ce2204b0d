"""A GAN, two engines in a loop of your own: torchrun --standalone --nproc-per-node 2 examples/gan.py

The generator learns points on a ring; "off" is how far its points lie from it. Each rank takes its share of a step.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import lockstep


def network(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    steps, size = parser.parse_args().steps, 64  # of points, over all ranks
    world = lockstep.World.join()
    torch.manual_seed(0)
    generator, critic = network(2, 2).to(world.device), network(2, 1).to(world.device)
    generate = lockstep.engine("auto", generator, torch.optim.Adam(generator.parameters(), 1e-3, (0.5, 0.99)), world)
    judge = lockstep.engine("auto", critic, torch.optim.Adam(critic.parameters(), 1e-3, (0.5, 0.99)), world)

    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        noise, angle = torch.randn(size, 2, generator=draw), torch.rand(size, generator=draw) * 2 * torch.pi
        real = torch.stack([angle.cos(), angle.sin()], 1)
        noise, real = (all_of.tensor_split(world.size)[world.rank].to(world.device) for all_of in (noise, real))

        both = torch.cat([real, generator(noise).detach()])  # the critic's step
        with judge.accumulate(last=True):
            true, false = judge.model(both).split(len(real))
            judge.backward(F.softplus(-true).sum() + F.softplus(false).sum(), 0.5 / size)
        judge.step()

        critic.requires_grad_(False)  # the generator's
        with generate.accumulate(last=True):
            points = generate.model(noise)
            generate.backward(F.softplus(-critic(points)).sum(), 1 / size)
        generate.step()
        critic.requires_grad_(True)
        if world.is_main and step % 50 == 49:
            print(f"step {step + 1}: off {(points.norm(dim=1) - 1).abs().mean():.4f}")
    del generate, judge
    world.leave()
