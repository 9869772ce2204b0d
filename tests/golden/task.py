import torch
from torch import nn
from torch.nn import functional as F

import lockstep


class Golden(lockstep.Task):
    items_per_sample = 1
    reduction = "sum"

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))

    def dataset(self, split):
        grid = torch.arange(40.0).unsqueeze(1) * torch.arange(1.0, 7.0)
        return torch.utils.data.TensorDataset(torch.sin(grid), torch.arange(40) * 7 % 3) if split == "train" else None

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
