"""A small regression for tests/slurm whose micro-batches take `STEP_SECONDS`; rank 1 fails in call `FAIL_AT`."""

import os
import time

import torch
from torch import nn

import lockstep


class Slow(lockstep.Task):
    items_per_sample = 1
    reduction = "sum"
    calls = 0

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split):
        inputs = torch.sin(torch.arange(1024.0).reshape(256, 4))
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)) if split == "train" else None

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 1:  # as a library in C writes, of which the log knows nothing
            os.write(2, f"raw words of {os.environ['RANK']}\n".encode())
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        if os.environ.get("RANK") == "1" and self.calls >= int(os.environ.get("FAIL_AT", "1000000")):
            raise ValueError("planted")
        return ((model(batch[0]) - batch[1]) ** 2).sum()
