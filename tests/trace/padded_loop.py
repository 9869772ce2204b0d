"""A loop over texts of several lengths, padded to the longest of a batch. Run by plain_loop.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

PAD, WORDS, LONGEST = 3, 30, 9


class Texts(Dataset):
    """Rows of 2 to 9 tokens, each with a label."""

    def __init__(self, samples):
        make = torch.Generator().manual_seed(5)
        lengths = torch.randint(2, LONGEST + 1, (samples,), generator=make).tolist()
        self.rows = [torch.randint(4, WORDS, (length,), generator=make) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.rows[index] % 4


class Stream(IterableDataset):
    """The rows of a sampler, without their indices."""

    def __init__(self, rows, sampler):
        self.rows, self.sampler = rows, sampler

    def __iter__(self):
        return (self.rows[index] for index in self.sampler)


class Reader(nn.Module):
    """Tokens [n, length] -> logits [n, length, 4]; absolute positions begin with the padding."""

    def __init__(self, absolute):
        super().__init__()
        self.absolute = absolute
        self.word, self.place = nn.Embedding(WORDS, 16), nn.Embedding(LONGEST, 16)
        self.head = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, tokens):
        places = (tokens != PAD).cumsum(1).sub(1).clamp(min=0)
        if self.absolute:
            places = torch.arange(tokens.shape[1]).expand_as(tokens)
        return self.head(torch.tanh(self.word(tokens) + self.place(places)))


def collator(left, mask, ignored, shift=0):
    def padded(rows, value):
        if left:
            rows = [row.flip(0) for row in rows]
        whole = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
        return whole.flip(1) if left else whole

    def collate(samples):
        tokens, labels = zip(*samples, strict=True)
        tokens = [4 + (row - 4 + shift) % (WORDS - 4) for row in tokens]
        batch = {"tokens": padded(tokens, PAD), "labels": padded(labels, ignored)}
        return {**batch, "attention_mask": batch["tokens"] != PAD} if mask else batch

    return collate


def train(mistake="", left=False, absolute=False, mask=False, stream=False, dtype="", steps=6, ignored=-100):
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    torch.manual_seed(1)
    bare = Reader(absolute)
    model = DistributedDataParallel(bare) if distributed else bare
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    last = distributed and rank == world - 1
    texts, collate = Texts(48), collator(left, mask, ignored, shift=int(last and mistake == "augmented"))
    sampler = DistributedSampler(texts, world, rank, seed=2)
    if stream:
        loader = DataLoader(Stream(texts, sampler), 8 // world, collate_fn=collate)
    else:
        loader = DataLoader(texts, 8 // world, sampler=sampler, collate_fn=collate)
    for step, batch in zip(range(steps), loader, strict=False):
        model.train()
        tokens, labels = batch["tokens"], batch["labels"]
        if mistake == "half-dropped" and last and step == steps - 1:
            tokens, labels = tokens[::2], labels[::2]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            out = model(tokens).float()
        loss = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction="sum")
        items = (labels != ignored).sum()
        if distributed and mistake != "rank-average":
            dist.all_reduce(items)
            items = items / world
        (loss / items).backward()
        if mistake == "own-buffer":
            bare.seen += bare.word(tokens).detach().mean((0, 1))
        optimizer.step()
        optimizer.zero_grad()
    evaluate(bare, mistake, Subset(Texts(21), range(rank, 21, world)), collate, distributed)


def evaluate(model, mistake, texts, collate, distributed):
    model.train(mistake in ("train-mode", "train-and-graph"))
    total = torch.zeros(1, dtype=torch.float64)
    for batch in DataLoader(texts, 4, collate_fn=collate):
        with torch.set_grad_enabled(mistake == "train-and-graph"):
            total += (model(batch["tokens"]).argmax(-1) == batch["labels"]).sum()
    if distributed:
        dist.all_reduce(total)
