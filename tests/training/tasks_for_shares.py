"""Tasks of test_shares.py and test_shares_auto.py: 30 samples in micro-batches of one, so that a last step is short."""

import time

import torch
from torch import nn
from toys import Network, Ragged

from lockstep.data.sampler import Sequential


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
        found, odd = self.body(x), x.sum(1) % 2 == 1
        return found.index_put((odd,), found[odd] + self.more(found[odd])) if odd.any() else found


class Holed(Ragged):
    def __init__(self):
        super().__init__(samples=30, dtype=torch.float64)

    def model(self):
        return _Branching()

    def dataset(self, split):
        rows = super().dataset(split)
        rows.kept[::3] = 0
        return rows


class Lengthy(Sentences):
    """As long as what is learned of it, which its data set can tell."""

    def work(self, dataset, samples):
        return float(sum(int(dataset.kept[sample]) ** 2 for sample in samples))


class Broken(Sentences):
    """In every epoch the loss of one sample is no number."""

    def dataset(self, split):
        rows = super().dataset(split)
        rows.rows[17 % len(rows.rows), :-1] = 7
        return rows

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return found * float("nan") if model.training and bool((batch["input"] == 7).all()) else found


class Weightless(Sentences):
    def work(self, dataset, samples):
        return 0

    def order(self, samples, seed):
        return Sequential(samples)


class Unknown(Weightless):
    def work(self, dataset, samples):
        return {}["length"]


class Own(Sentences):
    """Each rank says something else of the same samples."""

    def __init__(self, rank):
        super().__init__()
        self.own = rank

    def work(self, dataset, samples):
        return float(1 + (samples[0] * (1 + self.own)) % 7)


class Slow(Sentences):
    """On rank 1 each forward takes 25 ms longer."""

    def __init__(self, rank):
        super().__init__()
        self.pause = 0.025 * rank

    def loss(self, model, batch):
        time.sleep(self.pause)
        return super().loss(model, batch)
