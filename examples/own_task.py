"""A task of your own: python examples/own_task.py, or lockstep launch --nproc-per-node 2 -- examples/own_task.py

Points on two spirals; the same bits on one process and on two. Flags are those of `lockstep train`: --max-steps 100.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


class Spirals(lockstep.Task):
    """A model, its data, and the loss as a SUM over the samples."""

    def model(self):
        layers = nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        return nn.Sequential(*layers)

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        label = torch.arange(600) % 2
        turn = torch.rand(600, generator=generator) * 2 * torch.pi
        angle = turn + torch.pi * label
        return TensorDataset(torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 6, label)

    def loss(self, model, batch):
        points, labels = batch
        return F.cross_entropy(model(points), labels)

    def metrics(self, model, batch):
        points, labels = batch
        return {"accuracy": ((model(points).argmax(1) == labels).sum(), len(labels))}


if __name__ == "__main__":
    defaults = {"experiment_name": "spirals", "max_steps": 400, "batch_size": 64, "log_freq": 100, "eval_freq": 200}
    config = lockstep.Config.from_args(lr=0.01, exact=True, **defaults)
    with lockstep.Run(config, Spirals()) as run:
        for step in run:
            if step.evaluation and run.is_main:  # whatever you want to do after a step, as plain ifs
                print(f"step {step.global_step}: accuracy {step.evaluation.metrics['accuracy']:.3f}")
    raise SystemExit(run.result.exit_code)  # 75 after a signal
