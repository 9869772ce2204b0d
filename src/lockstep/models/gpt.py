"""The built-in language model: a decoder-only transformer with the architecture of GPT-2.

    config = dataclasses.replace(PRESETS["builtin:nano"], vocab_size=corpus.vocab_size, context=256)
    logits = GPT(config)(input_ids)         # int64 [batch, time] -> [batch, time, config.padded_vocab]

Architecture and initialisation follow Radford et al., "Language Models are Unsupervised Multitask Learners" (2019):
pre-norm blocks, learned positions, a head tied to the token embedding, GELU in its tanh form. `generate` samples
tokens from this or another model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ConfigError
from lockstep.models.chunked_loss import Ending, summed_loss, summed_loss_of_part
from lockstep.parallel.activations import TensorGroup, attention_with_dropout
from lockstep.parallel.context import attention
from lockstep.parallel.layers import VocabularyEmbedding, table_logits
from lockstep.transforms.precision import eager
from lockstep.transforms.weight_copies import weight_of

__all__ = [
    "GPT",
    "PRESETS",
    "ContextReach",
    "Further",
    "GPTConfig",
    "further_logits",
    "generate",
    "plain_logits",
]

# Tensor cores are fastest if sizes are multiples of 64.
_PAD_TO = 64


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        layers: number of blocks.
        heads: attention heads of a block; divides `width`.
        width: size of the residual stream.
        vocab_size: tokens that occur. The model's table is padded to a multiple of 64, see `padded_vocab`.
        context: longest sequence, in tokens.
        dropout: probability, after the embedding, in attention and after each half of a block.

    Raises:
        ConfigError: a size below 1, a width that the heads do not divide, or a dropout outside 0 <= p < 1.
    """

    layers: int
    heads: int
    width: int
    vocab_size: int = 50257
    context: int = 1024
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "vocab_size", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"GPTConfig: {name} is {getattr(self, name)}; give at least 1")
        if self.width % self.heads:
            raise ConfigError(
                f"GPTConfig: a width of {self.width} is not a multiple of {self.heads} heads; change either"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"--model.dropout: {self.dropout} is not a probability below 1; use 0 <= p < 1")

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table and size of the logits.

        It is `vocab_size` rounded up to a multiple of 64.
        """
        return -(-self.vocab_size // _PAD_TO) * _PAD_TO


PRESETS = {
    "builtin:nano": GPTConfig(layers=4, heads=4, width=128, vocab_size=4096, context=256),
    "builtin:gpt2": GPTConfig(layers=12, heads=12, width=768),
    "builtin:gpt2-medium": GPTConfig(layers=24, heads=16, width=1024),
    "builtin:gpt2-large": GPTConfig(layers=36, heads=20, width=1280),
    "builtin:gpt2-xl": GPTConfig(layers=48, heads=25, width=1600),
}


class Past:
    """Key-value cache of a block.

    Attributes:
        time: cached tokens.
    """

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None
        self.time = 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all, each [batch, heads, time, size]."""
        if self._held is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(self._held, (key, value), strict=True))
        self._held = (key, value)
        self.time = key.shape[2]
        return key, value


class _Attention(nn.Module):
    """Causal self-attention over several heads.

    Attributes:
        heads: computed by this rank.
        tensor_group: the ranks that compute the other heads; None: this one computes all.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.tensor_group: TensorGroup | None = None
        self.dropout = config.dropout
        # One product computes queries, keys and values: one kernel instead of three.
        self.inputs = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Past | None = None) -> Tensor:
        batch, time, _ = x.shape
        query, key, value = self._heads(self.inputs(x))
        dropout = self.dropout if self.training else 0.0
        causal = mask is None
        if past is not None:
            # A single new token attends to the whole cache, so it needs no causal mask.
            causal = not past.time
            key, value = past.extend(key, value)
        if dropout and self.tensor_group is not None:
            mixed = attention_with_dropout(query, key, value, mask, dropout, self.tensor_group)
        elif mask is None and past is None:
            mixed = attention(query, key, value, dropout=dropout)
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, dropout_p=dropout
            )
        return cast(Tensor, self.output(mixed.transpose(1, 2).reshape(batch, time, -1)))

    def divide_over(self, group: TensorGroup) -> None:
        """Compute this rank's heads alone, see `parallel.tensor.cut`."""
        self.heads //= group.size
        self.tensor_group = group

    def _heads(self, products: Tensor) -> tuple[Tensor, ...]:
        """Split queries, keys and values into heads, each [batch, heads, time, width / heads]."""
        return products.view(*products.shape[:-1], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalised copy of the stream.

    The forward maps [batch, time, width] to the same shape. Its mask, bool [batch, 1, time, time], is true where a
    position may attend to another; without one, each attends to those up to itself.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.output = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Past | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x), mask, past))
        hidden = F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        return cast(Tensor, x + self.drop(self.output(hidden)))


class GPT(nn.Module):
    """A GPT; draws its initial parameters from torch's default generator.

    The order of the draws depends on its shape alone: with the same seed, every rank of any world builds the same
    model.

    Attributes:
        config: its shape.
        blocks: the layers, the units that engines shard, compile and recompute.
        ending: computes the loss from the blocks' output; see `models.chunked_loss`.
        multiplies_by: modules whose weight the head uses, see `transforms.weight_copies`.
        residual: dtype of the residual stream; None: the embedding's, which autocast leaves alone.
    """

    ending: Ending
    multiplies_by: ClassVar[tuple[str, ...]] = ("tokens",)
    residual: torch.dtype | None = None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.ending = _sum_loss
        device = torch.get_default_device()
        # On the meta device layers draw nothing; reset_parameters draws each weight once.
        with torch.device("meta"):
            self.tokens = nn.Embedding(config.padded_vocab, config.width)
            self.positions = nn.Embedding(config.context, config.width)
            self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
        # Not `Module.to_empty`: it swaps tensors, which FakeTensorMode does not allow.
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise all parameters in a fixed order: N(0, 0.02) weights, zero biases, norms of one.

        The two projections of each block that end in the residual stream get 0.02 / sqrt(2 * layers), so that the
        stream's variance does not grow with depth.
        """
        narrow = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                scale = narrow if name.endswith("output.weight") else 0.02
                parameter.normal_(0.0, scale, generator=generator)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        chunk: int = 0,
        past: Sequence[Past] = (),
    ) -> Tensor:
        """Return the logits [batch, time, padded_vocab] of the token after each input token.

        Logits from `vocab_size` on are padding: no label has them.

        Args:
            input_ids: int64 [batch, time]; `time` is at most `config.context`.
            positions: int64 [batch, time]; None: 0, 1, 2, ...
            documents: int64 [batch, time]; a token attends to those before it with the same number. None: to all before
                it.
            labels: int64 [batch, time]; with them the result is the loss, see `models.chunked_loss.summed_loss`.
            chunk: tokens whose logits are computed together then; 0: all.
            past: a cache for each block, of the previous tokens; they are filled. If they are not empty, `input_ids`
                are one token.
        """
        if positions is None:
            begin = past[0].time if past else 0
            positions = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)
        mask = None if documents is None else _apart(documents)
        x = self.drop(self.tokens(input_ids) + self.positions(positions))
        x = x if self.residual is None else x.to(self.residual)
        for number, block in enumerate(self.blocks):
            x = block(x, mask, past[number]) if past else block(x, mask)
        if labels is None:
            return self._head(self.norm(x))
        return self.ending(self, x, labels, chunk)

    def _head(self, x: Tensor) -> Tensor:
        if isinstance(self.tokens, VocabularyEmbedding):
            return table_logits(self.tokens, x)
        return F.linear(x, weight_of(self.tokens, x))

    def tensor_plan(self, degree: int, *, vocabulary: bool = True) -> dict[str, str]:
        """Return how the layers are cut over `degree` ranks, see `parallel.tensor.cut`.

        Args:
            vocabulary: cut the token table too.

        Raises:
            ConfigError: `degree` does not divide the heads or the padded vocabulary.
        """
        if self.config.heads % degree:
            raise ConfigError(
                f"--parallel.tensor {degree}: the model has {self.config.heads} attention heads; use a degree that "
                "divides them"
            )
        if vocabulary and self.config.padded_vocab % degree:
            raise ConfigError(
                f"--parallel.tensor {degree}: the vocabulary is padded to {self.config.padded_vocab} tokens; use a "
                "degree that divides them, or --parallel.vocabulary false"
            )
        plan = {"blocks.*.attention.inputs": "packed:3", "blocks.*.expand": "columns", "blocks.*.output": "rows"}
        return plan | {"tokens": "vocabulary"} if vocabulary else plan

    def num_flops_per_token(self, seq_len: int) -> int:
        """Return a token's operations for forward and backward.

        They are 6 N + 12 layers * width * seq_len.

        Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B, where width is heads * head size. N is all parameters
        but the position table, which is looked up and not multiplied; the tied token table counts once, as the head.
        Causal masking is not subtracted, and recomputation not added.
        """
        multiplied = sum(p.numel() for p in self.parameters()) - self.positions.weight.numel()
        return 6 * multiplied + 12 * self.config.layers * self.config.width * seq_len


def _sum_loss(model: GPT, x: Tensor, labels: Tensor, chunk: int) -> Tensor:
    table = model.tokens
    hidden = model.norm(x)
    if isinstance(table, VocabularyEmbedding):
        return summed_loss_of_part(table.own_logits, table.tensor_group, hidden, labels, chunk)
    return summed_loss(model._head, hidden, labels, chunk)


def _apart(documents: Tensor) -> Tensor:
    """Return the mask of packed documents, bool [batch, 1, time, time].

    A position attends to those up to itself in its own document.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


class ContextReach(Protocol):
    """A language model's context in tokens (0: unlimited), and its vocabulary for generation."""

    @property
    def context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def plain_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of a model that returns nothing else."""
    return cast(Tensor, model(ids))


def further_logits(layers: int) -> "Further":
    """Return the `further` of `generate` for a GPT of `layers` blocks."""

    def further(model: nn.Module, ids: Tensor, past: Any) -> tuple[Tensor, Any]:
        past = past or [Past() for _ in range(layers)]
        return cast(Tensor, model(ids, past=past)), past

    return further


# (model, new tokens, cache of the previous ones or None) -> (their logits, the new cache)
Further = Callable[[nn.Module, Tensor, Any], tuple[Tensor, Any]]


@torch.no_grad()
# Each option is a keyword with a default.
def generate(  # noqa: PLR0913
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    *,
    config: ContextReach,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    logits_of: Callable[[nn.Module, Tensor], Tensor] = plain_logits,
    further: Further | None = None,
    stop: Sequence[int] = (),
) -> Tensor:
    """Append `max_new_tokens` sampled tokens to `ids` (int64 [batch, time], time >= 1).

    The model's train or eval mode is restored. Tokens beyond the context are cut off at the left. Nothing is compiled:
    each text length would need its own compilation.

    Args:
        model: a GPT, or an engine's wrapper of one; or another model, with `logits_of`.
        config: the GPT's, or another model's context and vocabulary.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: samples among the k likeliest tokens only.
        generator: on the device of `ids`: one for all rows, or one for each, so that no row's draw depends on the
            others; None: torch's default one.
        logits_of: (model, ids) -> logits [batch, time, at least the vocabulary].
        further: computes each token once while all fit the context; the logits are the same but for rounding.
        stop: tokens that end generation once every row has one; a row that has one earlier continues meanwhile.

    Returns:
        int64 [batch, time + at most `max_new_tokens`].
    """
    training = model.training
    past = None
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    ends = torch.tensor(stop, dtype=ids.dtype, device=ids.device)
    model.eval()
    try:
        with eager():
            for _ in range(max_new_tokens):
                if further is not None and (ids.shape[1] <= config.context or not config.context):
                    logits, past = further(model, ids if past is None else ids[:, -1:], past)
                else:
                    # The window moves, and each token's position with it, so the cache is invalid.
                    logits = logits_of(model, ids[:, -config.context :])
                logits = logits[:, -1, : config.vocab_size].float()
                ids = torch.cat((ids, _sample(logits, temperature, top_k, generator)), dim=1)
                ended |= torch.isin(ids[:, -1], ends)
                # Waits for the device, once a token, only if `stop` is given.
                if len(ends) and bool(ended.all()):
                    break
    finally:
        model.train(training)
    return ids


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | Sequence[torch.Generator] | None
) -> Tensor:
    """Sample a token for each row, int64 [batch, 1], from logits [batch, vocab]."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    shares = (logits / temperature).softmax(dim=-1)
    if not isinstance(generator, Sequence):
        return torch.multinomial(shares, 1, generator=generator)
    rows = enumerate(generator)
    return torch.cat(
        [torch.multinomial(shares[row : row + 1], 1, generator=row_generator) for row, row_generator in rows]
    )
