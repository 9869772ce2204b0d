"""A CNN of your own on scikit-learn's digits, with OneCycle and F1: python examples/images.py

Needs the extras `images` and `metrics`. Flags are those of `lockstep train`: --num-epochs 5, --exact, --help.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassF1Score

import lockstep


class Digits(lockstep.Task):
    def __init__(self):
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels)
        self.f1 = MulticlassF1Score(10, average="macro")

    def model(self):
        layers = []
        for n_in, n_out in ((1, 32), (32, 64)):
            layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))

    def dataset(self, split):
        held_out = torch.arange(len(self.labels)) % 5 == 0
        rows = ~held_out if split == "train" else held_out
        return TensorDataset(self.images[rows], self.labels[rows])

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        logits = model(batch[0])
        self.f1.update(logits.cpu(), batch[1].cpu())
        return F.cross_entropy(logits, batch[1]), {"f1": self.f1}


if __name__ == "__main__":
    defaults = {"experiment_name": "digits", "num_epochs": 10, "batch_size": 64, "lr": 0.01, "best_metric": "f1:max"}
    config = lockstep.Config.from_args(eval_freq="1epoch", optim={"schedule": "one-cycle"}, **defaults)
    result = lockstep.train(config, Digits())
    if result.best:
        print(f"best F1 {result.best.value:.4f}, after step {result.best.step}")
