"""A task of your own in the built-in loop: torchrun --standalone --nproc-per-node 2 examples/own_task.py

Classifies points on two spirals. Leave out torchrun for one process: the weights at the end are the same bits.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


class Spirals:
    """What lockstep asks for: a model, data, how to collate and count it, and the loss as a SUM over the items."""

    items_per_sample = 1  # known beforehand, so that ranks need not ask each other

    def model(self):
        return nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        label = torch.arange(600) % 2
        turn = torch.rand(600, generator=generator) * 2 * math.pi
        angle = turn + math.pi * label
        return TensorDataset(torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 6, label)

    def collate(self, samples):
        points, labels = zip(*samples, strict=True)
        return torch.stack(points), torch.stack(labels)

    def count(self, batch):
        return len(batch[1])

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def metrics(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save-dir", default="outputs")
    parser.add_argument("--max-steps", type=int, default=400)
    given = parser.parse_args()
    config = lockstep.Config(
        experiment_name="spirals",
        save_dir=given.save_dir,
        max_steps=given.max_steps,
        batch_size=64,
        lr=0.01,
        exact=True,
        log_freq=100,
        eval_freq=200,
    )
    for record in lockstep.train(config, Spirals()):
        if record.step == 0:  # whatever you want to do after a step, as plain ifs
            print(f"the first step had {record.items} items")


if __name__ == "__main__":
    main()
