"""Tasks of test_shares.py: 30 samples in micro-batches of one, so that the last of four steps is short."""

import torch
from torch import nn
from toys import Network, Ragged


class Sentences(Ragged):
    def __init__(self):
        super().__init__(samples=30, dropout=0.2, dtype=torch.float32)


class Normed(Sentences):
    """BatchNorm, whose statistics are of as many positions as there are tokens in a sample."""

    def model(self):
        return nn.Sequential(Network(0.1, dtype=torch.float32), _Norm())


class _Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(29)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class _Branching(nn.Module):
    """Every other sample goes through a layer of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.more = Network(dtype=torch.float64), nn.Linear(29, 29).double()

    def forward(self, x):
        found = self.body(x)
        return found + self.more(found) if int(x.sum()) % 2 else found


class Holed(Ragged):
    def __init__(self):
        super().__init__(samples=30, dtype=torch.float64)

    def model(self):
        return _Branching()

    def dataset(self, split):
        rows = super().dataset(split)
        rows.kept[::3] = 0
        return rows
