"""Context parallelism: each rank of a replica computes some positions of every sequence.

    division = ContextDivision(group, task.sequence)
    with division.forward(batch) as part:           # this rank's positions of the batch, where `attention` sees all
        loss = watch(task.loss(model, part))
    mixed = attention(query, key, value)            # causal, over all positions

A sequence is cut into 2 C chunks, and rank r has chunks r and 2 C - 1 - r: a head and a tail, so that every rank has as
much causal attention to compute. Hidden states stay divided; attention gathers keys and values, and its backward sums
their gradients in the order of the ranks. A loss is this rank's part, so gradients are sums over the ranks too.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from lockstep.distributed import collectives
from lockstep.errors import ConfigError
from lockstep.parallel.activations import TensorGroup

__all__ = [
    "POSITIONS",
    "ContextDivision",
    "ContextDropout",
    "ContextGroup",
    "attention",
    "divide_dropout",
    "is_divided",
    "watch",
]


# The leaf of a batch that has the position of each token in its sequence.
POSITIONS = "positions"


class ContextGroup(TensorGroup):
    """The ranks of a replica that divide its sequences: see `TensorGroup`; `rank` is the context coordinate."""

    def keep(self, whole: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """Return a rank's positions of a tensor that has all, this rank's by default."""
        chunks = whole.chunk(2 * self.size, dim)
        rank = self.rank if rank is None else rank
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim)

    def join(self, part: Tensor, dim: int) -> Tensor:
        """Return all positions in order, from each rank's. Collective."""
        heads = []
        tails = []
        for other in self.gather(part):  # collective
            head, tail = other.chunk(2, dim)
            heads.append(head)
            tails.append(tail)
        return torch.cat((*heads, *reversed(tails)), dim)

    def sum_kept(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's positions of the sum of the ranks' tensors, added in the order of ranks. Collective."""
        sent = torch.stack([self.keep(whole, dim, rank) for rank in range(self.size)])
        received = torch.empty_like(sent)
        collectives.all_to_all_single(received, sent, group=self.group)  # collective
        first, *others = received.unbind()
        total = first.clone()
        for other in others:
            total.add_(other)
        return total

    def positions(self, time: int, device: torch.device) -> Tensor:
        """Return this rank's positions of a sequence of `time` tokens, int64 [time / size]."""
        return self.keep(torch.arange(time, device=device), 0)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ContextGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return group.join(part, dim)  # collective

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # torch gives the method no types, here and below.
        return _SumKept.apply(gradient, ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]


class _SumKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: ContextGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return group.sum_kept(whole, dim)  # collective

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Join.apply(gradient, ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]


@dataclass
class _Current:
    """The batch that this process computes a part of.

    Not a ContextVar: on a GPU the backward, and what it recomputes, runs in another thread.

    Attributes:
        group: the ranks that divide it; None: the batch is whole.
        time: positions of this rank.
    """

    group: ContextGroup | None = None
    time: int = 0


_CURRENT = _Current()


def is_divided() -> bool:
    """Whether the present forward computes a part of each sequence."""
    return _CURRENT.group is not None


def attention(query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0, scale: float | None = None) -> Tensor:
    """Compute causal attention, over all positions of a sequence that --parallel.context divides.

    Without that it is `scaled_dot_product_attention`. A group of query heads may share a head of keys and values.
    Collective where sequences are divided: two messages, the keys and values, and in the backward their gradients.

    Args:
        query: [batch, heads, time, size], of this rank's positions.
        key, value: [batch, heads or a divisor of them, time, size], of the same positions.
        dropout: probability of a weight to be dropped; 0 in an evaluation.
        scale: of the scores; None: 1 / sqrt(size).

    Returns:
        [batch, heads, time, size of a value].
    """
    group = _CURRENT.group
    if group is not None:
        # Together, so that they are one message.
        size = key.shape[-1]
        together: Tensor = _Join.apply(torch.cat((key, value), -1), 2, group)  # type: ignore[no-untyped-call]
        key, value = together[..., :size], together[..., size:]
    # After the gather: the copies of a shared head need not travel.
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key = key.repeat_interleave(shared, dim=1)
        value = value.repeat_interleave(shared, dim=1)
    if group is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout, scale=scale)
    if dropout:
        return _attention_with_dropout(query, key, value, dropout, scale, group)
    return _attention_by_chunks(query, key, value, scale, group)


def _attention_by_chunks(query: Tensor, key: Tensor, value: Tensor, scale: float | None, group: ContextGroup) -> Tensor:
    """Compute attention of each of the two chunks over the keys up to its end."""
    mixed = []
    size = query.shape[2] // 2
    for chunk, part in zip((group.rank, 2 * group.size - 1 - group.rank), query.chunk(2, dim=2), strict=True):
        end = (chunk + 1) * size
        mask = _last_rows(size, end, query.device)
        keys = key[:, :, :end]
        mixed.append(F.scaled_dot_product_attention(part, keys, value[:, :, :end], attn_mask=mask, scale=scale))
    return torch.cat(mixed, dim=2)


def _last_rows(size: int, end: int, device: torch.device) -> Tensor:
    """Return the last `size` rows of a causal mask over `end` positions."""
    if device.type == "cuda":
        # A bias that flash attention knows: a mask would exclude it.
        bias: Tensor = causal_lower_right(size, end)
        return bias
    return torch.ones(size, end, dtype=torch.bool, device=device).tril(end - size)


def _attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None, group: ContextGroup
) -> Tensor:
    """Compute attention by plain operations: fused kernels draw their masks inside, for the positions they see."""
    time = key.shape[2]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    keys = torch.arange(time, device=query.device)
    later = group.positions(time, query.device)[:, None] < keys
    weights = (query @ key.transpose(-2, -1) * scale).masked_fill(later, -math.inf).softmax(dim=-1)  # noqa: LS035
    return _drop_part(weights, dropout, 2, group) @ value


def _drop_part(part: Tensor, probability: float, dim: int, group: ContextGroup) -> Tensor:
    """Drop elements of this rank's positions as a single process would: draw all, and keep the own ones."""
    shape = list(part.shape)
    shape[dim] *= group.size
    # Through torch's own dropout, so that the draws are those of a whole tensor on the same device.
    mask = F.dropout(torch.ones(shape, dtype=part.dtype, device=part.device), probability)
    return part * group.keep(mask, dim)


@final
class ContextDropout(nn.Dropout):
    """Dropout on [batch, time, ...] that draws for all positions where a rank has some of them."""

    def forward(self, input: Tensor) -> Tensor:
        group = _CURRENT.group
        if group is None or not (self.training and self.p):
            return super().forward(input)
        if input.ndim < 2 or input.shape[1] != _CURRENT.time:
            raise ConfigError(
                f"--parallel.context {group.size}: a Dropout gets a tensor of shape {tuple(input.shape)}, where "
                f"[batch, {_CURRENT.time} positions, ...] is supported; set its p to 0"
            )
        return _drop_part(input, self.p, 1, group)


def divide_dropout(model: nn.Module) -> None:
    """Let each `nn.Dropout` of a model draw for all positions. Changes the model's layers in place."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            # Change the class and not the instance's forward, which other techniques wrap.
            module.__class__ = ContextDropout


class _Watch(torch.autograd.Function):
    """Identity on the end of a forward, whose backward begins with the state of the forward."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, current: _Current) -> Tensor:
        ctx.current = current
        return end.view_as(end)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _set(ctx.current)
        # Private to torch, which has no other call for the end of a backward; DDP and FSDP use it too.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _set(_Current()))
        return gradient, None


def watch(end: Tensor) -> Tensor:
    """Return the end of a forward, whose backward may compute parts of it again.

    Call in the context of `ContextDivision.forward`; without one the tensor is unchanged.

    Args:
        end: a loss, or what a pipeline's stage sends on.
    """
    if _CURRENT.group is None:
        return end
    watched: Tensor = _Watch.apply(end, dataclasses.replace(_CURRENT))  # type: ignore[no-untyped-call]
    return watched


def _set(current: _Current) -> None:
    _CURRENT.group = current.group
    _CURRENT.time = current.time


@final
class ContextDivision:
    """Divide batches over the ranks of a context group.

    Args:
        group: the ranks.
        sequence: batch -> the dimension of the sequence in each leaf that has one; see `Task.sequence`.
    """

    def __init__(self, group: ContextGroup, sequence: Callable[[Any], Mapping[str, int] | None]) -> None:
        self.group = group
        self._sequence = sequence

    @contextmanager
    def forward(self, batch: Any) -> Iterator[dict[str, Any]]:
        """Yield this rank's part of a batch, which a forward in this context computes."""
        part, time = self._divide(batch)
        _set(_Current(self.group, time))
        try:
            yield part
        finally:
            _set(_Current())

    def shorten(self, batch: Any, most: int) -> dict[str, Any]:
        """Return a batch without the positions from `most` on, rounded up to what the ranks can divide."""
        end = -(-most // (2 * self.group.size)) * 2 * self.group.size
        shortened = dict(batch)
        for name, dim in dict(self._sequence(batch) or {}).items():
            if name in shortened:
                leaf = shortened[name]
                shortened[name] = leaf.narrow(dim, 0, min(end, leaf.shape[dim]))
        return shortened

    def _divide(self, batch: Any) -> tuple[dict[str, Any], int]:
        """Return this rank's part of a batch, with the positions, and their number."""
        flag = f"--parallel.context {self.group.size}"
        dims = dict(self._sequence(batch) or {})
        if not dims:
            raise ConfigError(
                f"{flag}: the task's `sequence` returns no dimensions, so its batches cannot be divided; leave it out"
            )
        added = dims.pop(POSITIONS, None) if isinstance(batch, Mapping) and POSITIONS not in batch else None
        part = dict(batch) if isinstance(batch, Mapping) else {}
        lengths = {}
        for name, dim in dims.items():
            leaf = part.get(name)
            if not isinstance(leaf, Tensor) or not -leaf.ndim <= dim < leaf.ndim:
                raise ConfigError(
                    f"{flag}: the task's `sequence` names '{name}' with dimension {dim}, which its batches do not "
                    "have; name tensors of a batch that is a dict"
                )
            lengths[name] = leaf.shape[dim]
            part[name] = self.group.keep(leaf, dim)
        time = next(iter(lengths.values()), 0)
        if not time or any(length != time or length % (2 * self.group.size) for length in lengths.values()):
            raise ConfigError(
                f"{flag}: the sequences of a batch have {lengths} positions, which must be equal and a multiple of "
                f"{2 * self.group.size}; pad them in `collate`"
            )
        if added is not None:
            name = next(iter(dims))
            positions = self.group.positions(time, part[name].device)
            part[POSITIONS] = positions.expand(part[name].shape[0], -1)
        return part, time // self.group.size
