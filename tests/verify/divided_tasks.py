"""Tasks whose models are divided over ranks, rightly and wrongly. At module level, since they travel to processes."""

from types import MappingProxyType

from torch import nn
from torch.nn import functional as F
from toys import Ragged

from lockstep.models.gpt import GPT, GPTConfig


class TinyGPT(Ragged):
    """The built-in GPT, which lockstep divides by itself."""

    def model(self):
        return GPT(GPTConfig(layers=2, heads=4, width=16, vocab_size=29, context=16, dropout=self.dropout))


class Sequences(TinyGPT):
    """The same, on sequences that are divided."""

    def loss(self, model, batch):
        return super().loss(lambda ids: model(ids, positions=batch.get("positions")), batch)

    def metrics(self, model, batch):
        return super().metrics(lambda ids: model(ids, positions=batch.get("positions")), batch)

    def sequence(self, batch):
        return {"input": 1, "labels": 1, "positions": 1}


class Attention(nn.Module):
    """Attention with joined queries, keys and values, as people write it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, time, width = x.shape
        # The size of a head is fixed, so that fewer columns are fewer heads.
        parts = self.qkv(x).chunk(3, dim=-1)
        query, key, value = (self.split(part, width // self.heads) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))

    def split(self, part, size):
        return part.unflatten(-1, (-1, size)).transpose(1, 2)


class AllHeads(Attention):
    """Takes the number of heads for granted: with half of the columns each head is half as large."""

    def split(self, part, size):
        return part.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Decoder(nn.Module):
    def __init__(self, dropout, attention=Attention, width=16, vocabulary=29):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.attention = attention(width, 4)
        self.up = nn.Linear(width, 2 * width)
        self.gate = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.double()

    def forward(self, x):
        x = self.embedding(x)
        x = x + self.dropout(self.attention(self.norm(x)))
        x = x * (1 + self.gate(x).mean(-1, keepdim=True))
        return self.head(x + self.dropout(self.down(self.mix(x))))

    def mix(self, x):
        return F.gelu(self.up(x))


class WholeGate(Decoder):
    """Multiplies cut columns by a number that is whole, whose gradient nobody sums."""

    def mix(self, x):
        return F.gelu(self.up(x)) * x.mean(-1, keepdim=True)


class Planned(Ragged):
    """An own model with an own plan."""

    plan = MappingProxyType({"attention.qkv": "packed:3", "attention.out": "rows", "up": "columns", "down": "rows"})
    attention = Attention
    decoder = Decoder

    def model(self):
        return self.decoder(self.dropout, self.attention)

    def parallelize(self, model):
        return self.plan


class UndividedHeads(Planned):
    attention = AllHeads


class PlainShard(Planned):
    """Divides joined weights as one layer: a rank has queries and half of the keys."""

    plan = MappingProxyType({**Planned.plan, "attention.qkv": "columns"})


class WithoutRows(Planned):
    """A mean over half of the columns, which no layer of rows sums."""

    plan = MappingProxyType({**Planned.plan, "gate": "columns"})


class Unsummed(Planned):
    decoder = WholeGate


class WrongShapes(Planned):
    plan = MappingProxyType({"up": "columns"})
