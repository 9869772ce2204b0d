"""Small tasks for tests, and `fit`: a few steps of the real loop with nothing but its parts."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep import checkpoint
from lockstep.clock import make_clock
from lockstep.data.batches import Batches, StepPlan
from lockstep.data.sampler import Shuffled
from lockstep.distributed.exchange import StepExchange
from lockstep.engines.registry import engine
from lockstep.loop import StepControl, seeder, steps
from lockstep.optim.optimizers import adamw
from lockstep.optim.schedule import factor
from lockstep.task import Task
from lockstep.transforms.determinism import pin


class Sentences(torch.utils.data.Dataset):
    """Token rows of one length whose labels are masked (-100) from a sample-dependent place on: items are ragged."""

    draws_random = False

    def __init__(self, count, length=12, vocabulary=29):
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randint(vocabulary, (count, length + 1), generator=generator)
        self.kept = torch.randint(1, length + 1, (count,), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        labels = row[1:].clone()
        labels[self.kept[index] :] = -100
        return {"input": row[:-1], "labels": labels}


class Network(nn.Module):
    """Embedding, two blocks with dropout, and a head tied to the embedding."""

    def __init__(self, dropout=0.0, width=16, vocabulary=29, dtype=torch.float64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return self.head(x)


class Partial(Task):
    """What is enough where no model is trained."""

    def model(self):
        raise NotImplementedError

    def dataset(self, split):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError


@dataclass
class Ragged(Task):
    """The task: summed cross entropy over the labelled tokens of `Sentences`, divided by their number."""

    reduction = "sum"
    samples: int = 40
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64

    def model(self):
        return Network(self.dropout, dtype=self.dtype)

    def dataset(self, split):
        return Sentences(self.samples if split == "train" else self.samples // 3 + 1)

    def collate(self, samples):
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def count(self, batch):
        return int((batch["labels"] != -100).sum())

    def loss(self, model, batch):
        logits = model(batch["input"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")

    def metrics(self, model, batch):
        kept = batch["labels"] != -100
        right = (model(batch["input"]).argmax(-1) == batch["labels"]) & kept
        return {"accuracy": (right.sum(), kept.sum())}


class Holes(Ragged):
    """Every third sample has no label at all."""

    def dataset(self, split):
        rows = super().dataset(split)
        rows.kept[::3] = 0
        return rows


class HolesMean(Holes):
    """The same as a mean written by hand: 0 / 0 in a micro-batch without labels, and NaN in its gradients."""

    reduction = "mean"

    def loss(self, model, batch):
        kept = batch["labels"] != -100
        each = F.cross_entropy(model(batch["input"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (each.view_as(kept) * kept).sum() / kept.sum()


def parts(world, task, *, size=8, micro=1, count=6, exact=False, lr=0.01, clip=1.0, name="auto", total=None):
    """(engine, batches) of a run of `count` steps."""
    pin(exact=exact, matmul="highest", device=world.device)
    torch.manual_seed(0)
    model = task.model().to(world.device)
    made = engine(
        name,
        model,
        lambda held: adamw(held, lr=lr, fused=False if exact else None),
        world,
        clip=clip,
        exact_micro_batches=size // micro if exact else 0,
    )
    dataset = task.dataset("train")
    step_plan = StepPlan(size, micro, total or count * size)
    return made, Batches(task, dataset, Shuffled(len(dataset), 0), step_plan, world, seed=0)


def train(world, made, batches, task, *, start=0, stop=None):
    """The mean loss of each step, and the gradient's norms, as every rank would record them."""
    step_loader = batches.from_step(start)
    exchange = StepExchange(world, step_loader.items, None)
    horizon = batches.step_plan.steps
    plan = StepControl(
        lambda step: factor(step, horizon, 2, 0.1), seeder(0, "micro", world.device), make_clock(world.device)
    )
    losses, norms = [], []
    for record in steps(made, task, step_loader, exchange, plan):
        total = exchange.totals([sum(float(loss) for loss in record.losses)])[0]
        losses.append(total / (record.items or 1))
        norms.append(float(record.norm))
        if record.step + 1 == stop:
            break
    return losses, norms


def taken(config, task=None, world=None, leave_at=None):
    """The steps of a run (0-based; one may come twice after a rollback), and its exit code, None where it was left."""
    run, steps = lockstep.Run(config, task, world), []
    try:
        for step in run:
            steps.append(step.global_step - 1)
            if step.global_step == leave_at:
                return steps, None
    except KeyboardInterrupt:
        pass
    return steps, run.result.exit_code


def fit(world, task, **settings):
    """(losses, norms, fingerprint of the weights) of a short run."""
    made, batches = parts(world, task, **settings)
    losses, norms = train(world, made, batches, task)
    weights = {name.removeprefix("model/"): t for name, t in made.state_dict().items() if name.startswith("model/")}
    return losses, norms, checkpoint.fingerprint_of(weights)
