"""Other kinds of training in plain torch, with mistakes that can be switched on: `--kind gan --mistake NAME`.

    python train_kinds.py --kind gan
    torchrun --nproc-per-node 2 train_kinds.py --kind fsdp2 --mistake stale-optimizer

gan         two models and two optimizers; the discriminator is frozen while the generator trains
ema         an average of the weights, with which each epoch is evaluated
uneven      global batches of 9 samples, so that ranks have 5 and 4
fsdp2       fully_shard on several processes
sam         the gradient is taken at weights that are moved along it first, and moved back
buffer      a buffer counts the labels of all ranks
left        rows are padded on the left to the longest of their batch, and have positions
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from toy import (
    BATCH,
    CLASSES,
    EPOCHS,
    IGNORED,
    LENGTH,
    PADDING,
    TRAIN,
    VALID,
    WIDTH,
    Journal,
    arguments,
    collator,
    cross_entropy,
    datasets,
    model,
    pretrained,
)

MISTAKES = (
    *("gan-no-zero-grad", "unrestored", "uneven-average", "stale-optimizer", "frozen", "no-restore"),
    *("own-buffer", "left-average", "absolute-positions"),
)
KINDS = ("gan", "ema", "uneven", "fsdp2", "sam", "buffer", "left")
RHO = 0.3


class Whole(Journal):
    """Of sharded tensors the whole ones."""

    def _flat(self, plain: nn.Module) -> list[float]:
        whole = [getattr(t, "full_tensor", lambda t=t: t)() for t in plain.state_dict().values()]  # collective
        return torch.cat([tensor.detach().flatten() for tensor in whole]).tolist()


class Parts:
    """Global batches in the order of an epoch, of which each rank reads its part."""

    def __init__(self, size: int, world: int, rank: int) -> None:
        self.size, self.world, self.rank, self.epoch = size, world, rank, 0

    def __iter__(self):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(11 + self.epoch)).tolist()
        for begin in range(0, TRAIN, self.size):
            yield order[begin : begin + self.size][self.rank :: self.world]


def main() -> None:
    args = arguments(MISTAKES, choices={"kind": KINDS})
    wrong = args.mistake
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    train, valid = datasets(args)
    parts = Parts(9 if args.kind == "uneven" else BATCH, world, rank)
    collate = padded_left if args.kind == "left" else collator(args)
    loader = DataLoader(train, batch_sampler=parts, collate_fn=collate)
    valid_loader = DataLoader(Subset(valid, range(rank, VALID, world)), batch_size=5, collate_fn=collate)
    trainer = Gan(args, world) if args.kind == "gan" else Classifier(args, world)
    journal = Whole(trainer.whole, args.out)
    for epoch in range(EPOCHS):
        parts.epoch = epoch
        for batch in loader:
            trainer.update(batch)
        journal.report(trainer.evaluate(valid_loader))
        if wrong != "unrestored":
            trainer.restore()
    journal.close()
    if world > 1:
        # DDP's reducer joins gloo's threads with the interpreter's lock, for which they may wait: it goes first.
        del trainer, journal
        gc.collect()
        dist.destroy_process_group()


def coarse(args):
    """A block that computes in the dtype of --dtype."""
    return torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16")


def padded_left(samples) -> dict[str, torch.Tensor]:
    """A batch of the vectors with labels, as long as the longest row."""

    def padded(rows, value):
        flipped = [row.flip(0) for row in rows]
        return nn.utils.rnn.pad_sequence(flipped, batch_first=True, padding_value=value).flip(1)

    kept = [sample["labels"] != IGNORED for sample in samples]
    rows = {name: [each[name][k] for each, k in zip(samples, kept, strict=True)] for name in ("x", "labels")}
    return {"x": padded(rows["x"], PADDING), "labels": padded(rows["labels"], IGNORED)}


class Placed(nn.Module):
    """The toy with an embedding of the positions; absolute ones begin with the padding."""

    def __init__(self, args) -> None:
        super().__init__()
        self.toy, self.place = model(args), nn.Embedding(LENGTH + 1, WIDTH)
        self.absolute = args.mistake == "absolute-positions"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (x != PADDING).any(-1).cumsum(1).sub(1).clamp(min=0)
        if self.absolute:
            places = torch.arange(x.shape[1]).expand_as(places)
        return self.toy(x + self.place(places))


class Classifier:
    """The toy, trained in each way but by a rival."""

    def __init__(self, args, world: int) -> None:
        self.args, self.world, self.kept = args, world, None
        self.whole = plain = Placed(args) if args.kind == "left" else model(args)
        if args.kind == "buffer":
            plain.register_buffer("seen", torch.zeros(CLASSES))
        plain.load_state_dict(pretrained(plain))
        if args.mistake == "frozen":
            plain.block.requires_grad_(False)
        early = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
        if world == 1:
            self.model = plain
        else:
            self.model = fully_shard(plain) if args.kind == "fsdp2" else DistributedDataParallel(plain)
        late = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
        self.optimizer = early if args.mistake == "stale-optimizer" else late
        self.average = [p.detach().clone() for p in plain.parameters()] if args.kind == "ema" else []

    def update(self, batch) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        self.backward(batch)
        if self.args.kind == "sam":
            parameters = list(self.whole.parameters())
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            away = [p.grad * (RHO / norm) for p in parameters]
            with torch.no_grad():
                torch._foreach_add_(parameters, away)
            self.optimizer.zero_grad()
            self.backward(batch)
            if self.args.mistake != "no-restore":
                with torch.no_grad():
                    torch._foreach_sub_(parameters, away)
        self.optimizer.step()
        if self.average:
            torch._foreach_lerp_(self.average, [p.detach() for p in self.whole.parameters()], 0.1)

    def backward(self, batch) -> None:
        items, share = (batch["labels"] != IGNORED).sum(), 1
        if self.world > 1 and self.args.mistake not in ("uneven-average", "left-average"):
            dist.all_reduce(items)
            share = self.world  # by which DDP divides
        with coarse(self.args):
            logits = self.model(batch["x"])
        (cross_entropy(logits, batch["labels"], "sum") * share / items).backward()
        if self.args.kind == "buffer":
            labels = batch["labels"][batch["labels"] != IGNORED]
            seen = torch.bincount(labels, minlength=CLASSES).float()
            if self.world > 1 and self.args.mistake != "own-buffer":
                dist.all_reduce(seen)
            self.whole.seen += seen

    @torch.no_grad()
    def evaluate(self, loader) -> float:
        """The mean loss of a label, of the average of the weights where there is one."""
        if self.average:
            self.kept = [p.clone() for p in self.whole.parameters()]
            torch._foreach_copy_(list(self.whole.parameters()), self.average)
        evaluated = self.model if self.args.kind == "fsdp2" else self.whole
        evaluated.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for batch in loader:
            loss = cross_entropy(evaluated(batch["x"]), batch["labels"], "sum")
            total += torch.tensor([float(loss), float((batch["labels"] != IGNORED).sum())])
        if self.world > 1:
            dist.all_reduce(total)
        return float(total[0] / total[1])

    @torch.no_grad()
    def restore(self) -> None:
        if self.kept:
            torch._foreach_copy_(list(self.whole.parameters()), self.kept)


class Gan:
    """A generator of sentences' vectors from their labels, and who tells them from those of the data."""

    def __init__(self, args, world: int) -> None:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(LENGTH * CLASSES, 16), nn.Tanh(), nn.Linear(16, LENGTH * WIDTH))
        critic = nn.Sequential(nn.Linear(LENGTH * WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
        self.args, self.world = args, world
        self.whole = nn.ModuleDict({"generator": generator, "critic": critic})
        wrapped = [DistributedDataParallel(each) if world > 1 else each for each in (generator, critic)]
        self.generator, self.critic = wrapped
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
        self.generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)

    def update(self, batch) -> None:
        real, given = self._vectors(batch)
        critic = self.whole["critic"]
        if self.args.mistake != "gan-no-zero-grad":
            self.critic_optimizer.zero_grad()
        with coarse(self.args):
            fake = self.generator(given).float()
            both = self.critic(torch.cat([real, fake.detach()])).float()
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        nn.functional.binary_cross_entropy_with_logits(both, truth).backward()
        self.critic_optimizer.step()
        self.generator_optimizer.zero_grad()
        critic.requires_grad_(False)
        with coarse(self.args):
            judged = critic(fake).float()
        nn.functional.binary_cross_entropy_with_logits(judged, torch.ones(len(real), 1)).backward()
        critic.requires_grad_(True)
        self.generator_optimizer.step()

    @staticmethod
    def _vectors(batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors and one-hot labels [batch, 36] and [batch, 18], padded alike in any batch: all of them count here."""
        more = LENGTH - batch["labels"].shape[1]
        labels = nn.functional.pad(batch["labels"], (0, more), value=IGNORED)
        x = nn.functional.pad(batch["x"], (0, 0, 0, more))
        x = torch.where((labels != IGNORED)[..., None], x, PADDING)
        return x.flatten(1), nn.functional.one_hot(labels.clamp(min=0), CLASSES).float().flatten(1)

    @torch.no_grad()
    def evaluate(self, loader) -> float:
        """How sure the critic is of the generator's sentences."""
        self.whole.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for batch in loader:
            _, given = self._vectors(batch)
            sure = self.whole["critic"](self.whole["generator"](given)).sigmoid()
            total += torch.tensor([float(sure.sum()), float(len(sure))])
        if self.world > 1:
            dist.all_reduce(total)
        self.whole.train()
        return float(total[0] / total[1])

    def restore(self) -> None:
        """Nothing was changed."""


if __name__ == "__main__":
    main()
