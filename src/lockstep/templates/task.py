"""What is trained: a model, its samples, and the loss as a SUM over a batch. Put your own in place of each.

lockstep train --config config.toml                                     the same on two processes:
lockstep launch --nproc-per-node 2 -- train --config config.toml
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


class MyTask(lockstep.Task):
    """Points on a plane: which of two spirals is each on?"""

    def model(self):
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def dataset(self, split):
        """The samples of "train" or "evaluation": anything with len(d) and d[i]."""
        draw = torch.Generator().manual_seed(1 if split == "train" else 2)
        labels = torch.arange(1000) % 2
        turn = torch.rand(1000, generator=draw) * 6
        angle = turn + torch.pi * labels
        return TensorDataset(torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 3, labels)

    def loss(self, model, batch):
        points, labels = batch
        return F.cross_entropy(model(points), labels)

    def metrics(self, model, batch):
        """name -> (sum, count); exact over any number of processes."""
        points, labels = batch
        return {"accuracy": ((model(points).argmax(1) == labels).sum(), len(labels))}
