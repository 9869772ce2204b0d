"""Tasks that are hard on a proof. At module level, since they travel to other processes."""

import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from toys import Network, Ragged

import lockstep


class Images(lockstep.Task):
    """A convolution, BatchNorm and dropout; float32 images, a label each."""

    items_per_sample = 1
    reduction = "sum"

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 16, 3)
        )

    def dataset(self, split):
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        images = torch.randn(50, 1, 6, 6, generator=generator)
        return torch.utils.data.TensorDataset(images, (images.mean((1, 2, 3)) * 8).long().clamp(-1, 1) + 1)

    def collate(self, samples):
        return tuple(torch.stack(part) for part in zip(*samples, strict=True))

    def count(self, batch):
        return len(batch[1])

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class ClassWeights(Images):
    """Float32 tensors of the task's own: an attribute, one in a dict, and one in a criterion."""

    def __init__(self):
        self.weights = torch.tensor([1.0, 2.0, 0.3])
        self.more = {"bias": torch.tensor([0.1, 0.0, -0.1]), "name": "x"}
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.5]), reduction="sum")

    def loss(self, model, batch):
        logits = model(batch[0]) + self.more["bias"]
        return self.criterion(logits, batch[1]) + F.cross_entropy(logits, batch[1], self.weights, reduction="sum")


class Noise(nn.Module):
    def forward(self, x):
        return x * (1 + os.urandom(1)[0] / 1e6)


class Undecided(Ragged):
    """Multiplies by a number that no seed reaches."""

    def model(self):
        made = super().model()
        made.blocks[1].insert(1, Noise())
        return made


class Shuffling(Ragged):
    """Draws its samples from the system's generator; the loss is not proved, since that proof fails by chance."""

    reduction = "micro-batch"

    def collate(self, samples):
        batch = super().collate(samples)
        return {**batch, "input": (batch["input"] + os.urandom(1)[0]) % 29}


class Counting(Ragged):
    """Its evaluation says what the system's generator says; its training is as good as any."""

    def dataset(self, split):
        return super().dataset("train")

    def metrics(self, model, batch):
        return {"said": (float(os.urandom(1)[0] + 256 * os.urandom(1)[0]), len(batch["input"]))}


class Annealing(Ragged):
    """A weight of the loss grows with the calls, which no checkpoint has."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch) * (1 + self.calls / 10)


class Rank(Network):
    """Something that no seed, weight or batch explains: the rank shows in the loss."""

    def forward(self, x):
        return super().forward(x) * (1 + 0.01 * int(os.environ["RANK"]))


class Private(Ragged):
    def model(self):
        return Rank(dtype=torch.float32)


class Spectral(Network):
    """Multiplies its logits' spectrum by trained complex numbers."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.spectrum = nn.Parameter(torch.ones(15, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(super().forward(x)) * self.spectrum, n=29)


class Waves(Ragged):
    def model(self):
        return Spectral(dtype=torch.float32)


class Hanging(Ragged):
    """Rank 1 of a larger world never comes back from its third forward."""

    calls = 0

    def loss(self, model, batch):
        Hanging.calls += 1
        if int(os.environ["RANK"]) == 1 and Hanging.calls == 3:
            time.sleep(600)
        return super().loss(model, batch)


class Dying(Ragged):
    """Rank 1 of a larger world leaves without a word."""

    def loss(self, model, batch):
        if int(os.environ["RANK"]) == 1:
            print("the last words", flush=True)
            os._exit(9)
        return super().loss(model, batch)


class HubModel(Ragged):
    """A GPT-2 of the hub's code, with its own dropout and its tied head."""

    def model(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=29, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
        return GPT2LMHeadModel(config)

    def loss(self, model, batch):
        logits = model(input_ids=batch["input"]).logits.flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")

    def metrics(self, model, batch):
        return {}
