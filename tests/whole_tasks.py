"""Tasks whose loss looks at all samples of a step, and the same training in plain PyTorch: one graph over the step."""

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.data.sampler import Sequential

BATCH = 28


class Towers(nn.Module):
    """Two small towers and a learned temperature, which fsdp keeps whole. `norm` puts a BatchNorm in."""

    def __init__(self, dropout=0.0, norm=False, width=16):
        super().__init__()
        middle = nn.BatchNorm1d(24) if norm else nn.Identity()
        self.left = nn.Sequential(nn.Linear(8, 24), middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, width))
        self.right = nn.Linear(8, width)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, y):
        return F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1), self.scale.repeat(len(x))


class Pairs(torch.utils.data.Dataset):
    draws_random = False

    def __init__(self, count):
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].roll(1) + 0.1


class Contrastive(lockstep.Task):
    """InfoNCE over all pairs of a step."""

    def __init__(self, dropout=0.0, norm=False, samples=3 * BATCH, dtype=torch.float64):
        self.dropout, self.norm, self.samples, self.dtype = dropout, norm, samples, dtype

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Towers(self.dropout, self.norm).to(self.dtype)

    def dataset(self, split):
        return Pairs(self.samples) if split == "train" else Pairs(BATCH + 9)

    def order(self, samples, seed):
        return Sequential(samples)

    def outputs(self, model, batch):
        return model(*(part.to(self.dtype) for part in batch))

    def metrics(self, model, batch):
        a, b, _ = self.outputs(model, batch)
        return {"near": ((a * b).sum(), len(a))}

    def step_loss(self, outputs):
        a, b, scale = outputs
        logits = scale.mean().exp() * a @ b.T
        target = torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


class ContrastiveRows(Contrastive):
    """The same, each micro-batch's rows by themselves."""

    step_loss = lockstep.Task.step_loss

    def step_loss_rows(self, own, whole, first):
        (a, b, _), (every_a, every_b, scale) = own, whole
        target = torch.arange(first, first + len(a))
        by = scale.mean().exp()
        there = F.cross_entropy(by * a @ every_b.T, target, reduction="sum")
        back = F.cross_entropy(by * b @ every_a.T, target, reduction="sum")
        return (there + back) / (2 * len(every_a))


class Dice(Contrastive):
    """Dice's loss: a ratio of sums over the step. Its outputs are a dict with labels and an empty column."""

    def model(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4)).double()

    def metrics(self, model, batch):
        return {}

    def outputs(self, model, batch):
        p, label = model(batch[0]).softmax(1), batch[0][:, :4].argmax(1)
        return {"p": p, "certain": p[:, 0] > 0.9, "boxes": p.new_empty(len(p), 0), "label": label}

    def step_loss(self, outputs):
        p, t = outputs["p"], F.one_hot(outputs["label"], 4).to(outputs["p"].dtype)
        return 1 - (2 * (p * t).sum(0) / (p.sum(0) + t.sum(0))).mean()


def oracle(task, steps, rate, left_out=-1):
    """(losses, parameters) of the task in plain PyTorch: one graph over each step's samples, but for one step."""
    model, data = task.model(), task.dataset("train")
    optimizer, losses = torch.optim.SGD(model.parameters(), rate), []
    for step in range(steps):
        places = [place % len(data) for place in range(step * BATCH, min((step + 1) * BATCH, len(data) * 4))]
        loss = task.step_loss(task.outputs(model, task.collate([data[place] for place in places])))
        optimizer.zero_grad()
        loss.backward()
        if step != left_out:
            optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}
