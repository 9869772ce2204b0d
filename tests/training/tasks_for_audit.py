"""Tasks of test_audit.py: small models with what may differ between two ranks that compute the same, and devices that
compute wrongly."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from toys import HolesMean, Network, Ragged

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Wrong(TorchDispatchMode):
    """Within it, of every so many products one has the lowest bit of its first number flipped, in backwards too."""

    def __init__(self, every):
        super().__init__()
        self._every, self._calls = every, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket in _PRODUCTS:
            self._calls += 1
            if self._calls % self._every == 0:
                made.view(-1)[:1].view(torch.uint8)[0] ^= 1
        return made


class Sentences(Ragged):
    """Dropout, a head that is tied to the embedding; 30 samples, so that the last step is short."""

    def __init__(self, samples=30):
        super().__init__(samples, dropout=0.2, dtype=torch.float32)

    def dataset(self, split):
        return super().dataset(split) if split == "train" else None


class Means(HolesMean):
    """Means, and micro-batches without an item, in whose place another is computed with weight 0."""

    def dataset(self, split):
        rows = super().dataset(split)
        rows.kept[: len(rows) // 2] = 0
        return rows if split == "train" else None


class _Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(29)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Normed(Sentences):
    def model(self):
        return nn.Sequential(super().model(), _Norm())


class _Moving(nn.Module):
    """Two buffers that each forward moves: one in its place, one by another tensor. What comes out depends on both."""

    def __init__(self):
        super().__init__()
        self.body = spectral_norm(nn.Linear(29, 29))
        self.register_buffer("mean", torch.zeros(29))
        self.register_buffer("last", torch.ones(()))
        self.register_buffer("fixed", torch.arange(29.0))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            self.last = 0.5 * self.last + 0.5 * x.detach().square().mean()
        return self.body((x - self.mean) / (1 + self.last)) + 0.01 * self.fixed


class Moved(Sentences):
    reduction = "micro-batch"  # a forward depends on all samples of its batch

    def model(self):
        return nn.Sequential(super().model(), _Moving())


class _Frozen(nn.Module):
    """A layer that is frozen, one that every other sample uses, and complex weights."""

    def __init__(self):
        super().__init__()
        self.frozen, self.more = nn.Linear(29, 29), nn.Linear(29, 29)
        self.frozen.requires_grad_(False)
        self.turn = nn.Parameter(torch.polar(torch.ones(29), torch.linspace(0, 1, 29)))

    def forward(self, x):
        x = x + self.frozen(x)
        x = x + self.more(x) if random.random() + np.random.rand() > 1.0 else x
        return torch.view_as_real(x * self.turn).sum(-1)


class Odd(Sentences):
    def model(self):
        return nn.Sequential(super().model(), _Frozen())


class Counting(Sentences):
    """Tensors of its own, which its loss moves and depends on, and a number beside them that goes with them."""

    reduction = "micro-batch"  # the centre is that of the batch

    def __init__(self, samples=30):
        super().__init__(samples)
        self.times, self.seen = 0, {"times": torch.zeros(()), "center": torch.zeros(29)}

    def loss(self, model, batch):
        if model.training:
            self.times += 1
            self.seen["times"].fill_(self.times)
            with torch.no_grad():
                self.seen["center"].mul_(0.9).add_(model(batch["input"]).mean((0, 1)), alpha=0.1)
        return super().loss(lambda x: model(x) - self.seen["center"] / self.times, batch)

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.times = int(state["times"])


class _Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Network(dtype=torch.float32)

    def forward(self, x):
        return checkpoint(lambda tokens, _: self.body(tokens), x, torch.ones(1, requires_grad=True), use_reentrant=True)


class Reentrant(Sentences):
    def model(self):
        return _Reentrant()


_DRAWS = torch.Generator()


class _Unsteady(nn.Module):
    """Draws from a generator beside it, which nobody seeds."""

    def __init__(self):
        super().__init__()
        self.body = Network(dtype=torch.float32)
        _DRAWS.seed()

    def forward(self, x):
        return self.body(x) * (1 + torch.rand((), generator=_DRAWS))


class Unsteady(Sentences):
    def model(self):
        return _Unsteady()


class _Changing(torch.utils.data.Dataset):
    """Samples that are others each time."""

    draws_random = False

    def __init__(self, rows):
        self.rows, self.times = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.times += 1
        return self.rows[(index + self.times) % len(self.rows)]


class Changing(Sentences):
    reduction = "micro-batch"  # its samples have other items each time

    def dataset(self, split):
        return _Changing(super().dataset(split)) if split == "train" else None
