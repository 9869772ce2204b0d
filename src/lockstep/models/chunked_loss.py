"""Compute the summed loss of a language model, for a chunk of tokens at a time.

    summed_loss(head, hidden, labels, chunk_of(-1, tokens, vocab_size))

The logits of a chunk exist only while its loss or its gradient is computed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.activations import TensorGroup, enter
from lockstep.parallel.layers import vocabulary_cross_entropy

__all__ = ["IGNORED", "Ending", "chunk_of", "summed_cross_entropy", "summed_loss", "summed_loss_of_part"]


# Label of a token that is not predicted; the default of F.cross_entropy.
IGNORED = -100

# (model, output of its blocks or its head, labels int64 [batch, time], chunk) -> the loss, summed
Ending = Callable[[Any, Tensor, Tensor, int], Tensor]

# Bytes of a micro-batch's float32 logits; larger ones are computed in chunks.
_LARGE = 512 << 20
# Bytes of the float32 logits of a chunk, at most.
_CHUNK = 128 << 20


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy in nats, summed over the labels that are not -100.

    The result is a scalar in float32, or float64 for such logits.

    Args:
        logits: [..., vocab].
        labels: int64 [...].
    """
    logits = logits.flatten(0, -2)
    if logits.dtype is not torch.float64:
        # A sum over a large vocabulary is too coarse in half precision.
        logits = logits.float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def summed_loss(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    chunk: int,
    loss: Callable[[Tensor, Tensor], Tensor] = summed_cross_entropy,
) -> Tensor:
    """Return `loss(head(hidden), labels)`, for `chunk` tokens at a time; 0: all.

    The losses are added in the order of the chunks, so the bits depend only on `chunk`.

    Args:
        head: hidden states -> logits; it may use any parameters of the running model.
        hidden: [batch, time, width].
        labels: int64 [batch, time].
        loss: (logits, labels) -> the sum; another one where a rank has only some columns of the logits.
    """

    if not chunk:
        return loss(head(hidden), labels)

    def part(rows: Tensor, targets: Tensor) -> Tensor:
        return loss(head(rows), targets)

    # Checkpointing frees a chunk's logits after its forward, and computes them again in the backward.
    parts = zip(torch.split(hidden.flatten(0, 1), chunk), torch.split(labels.flatten(), chunk), strict=True)
    losses = []
    for operands in parts:
        losses.append(checkpoint(part, *operands, use_reentrant=False, preserve_rng_state=False))
    total: Tensor = losses[0]
    for further in losses[1:]:
        total = total + further
    return total


def summed_loss_of_part(
    own_logits: Callable[[Tensor], Tensor], group: TensorGroup, hidden: Tensor, labels: Tensor, chunk: int
) -> Tensor:
    """Return `summed_loss` where each rank has some columns of the logits. Collective.

    Args:
        own_logits: hidden states -> the logits of this rank's tokens.
        group: the ranks that have the others.
        hidden, labels, chunk: as in `summed_loss`.
    """
    # Entered once for all chunks: their gradients are added before the one exchange.
    entered = enter(hidden, group)
    loss = partial(vocabulary_cross_entropy, group=group, ignored=IGNORED)
    return summed_loss(own_logits, entered, labels, chunk, loss)


def chunk_of(setting: int, tokens: int, vocab_size: int) -> int:
    """Return the chunk for a micro-batch of `tokens` tokens; 0: all at once.

    Args:
        setting: a number of tokens, 0 for none, -1 to choose by size: if float32 logits would take more than 512 MiB,
            the power of two whose logits take up to 128 MiB.
    """
    if setting >= 0:
        return setting
    if 4 * tokens * vocab_size <= _LARGE:
        return 0
    # 4 bytes a logit, and at least 16 tokens.
    return 1 << max(_CHUNK // (4 * vocab_size), 16).bit_length() - 1
