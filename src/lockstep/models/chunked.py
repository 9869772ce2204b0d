"""Cross entropy over a large vocabulary, inside the forward of a model; without the logits of all tokens at once.

    loss = summed_loss(head, hidden, labels, chunk=512)     # head: [tokens, width] -> [tokens, vocab]

A model that computes its loss so has an attribute `ending`, an `Ending`: what follows its blocks up to the loss, as a
function of the model, so that a compiler may be given it by itself (see `transforms.precision.compiled`).

Logits of `chunk` tokens are made, used and dropped; the backward makes them again, chunk by chunk. What is held is a
chunk's logits and their gradient, in place of [tokens, vocab] in the products' dtype, in float32 and as a gradient. The
price is one more product with the head. It belongs into the model's own forward: only there are the head's parameters
whole, whatever engine holds the model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["IGNORED", "Ending", "chunk_of", "summed_cross_entropy", "summed_loss"]

IGNORED = -100  # the label of a token that is not predicted

# (model, what its blocks or its head gave, labels int64 [batch, time], chunk) -> the loss, summed
Ending = Callable[[Any, Tensor, Tensor, int], Tensor]

_LARGE = 512 << 20  # bytes of a micro-batch's float32 logits from which they are made in chunks
_CHUNK = 128 << 20  # bytes of a chunk's


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats of logits [..., vocab], summed over the labels (int64 [...]) that are not -100.

    A scalar in float32, or float64 for such logits.
    """
    logits = logits.flatten(0, -2)
    if logits.dtype is not torch.float64:
        logits = logits.float()  # a sum over a large vocabulary is too coarse in half precision
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def summed_loss(head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """`summed_cross_entropy(head(hidden), labels)`, the logits of at most `chunk` tokens at a time; 0: of all.

    The sum is formed in the order of the chunks, so its bits depend on `chunk` and on nothing else.

    Args:
        head: what makes logits of hidden states; it may use any parameters of the model that is being run.
        hidden: [batch, time, width].
        labels: int64 [batch, time].
    """

    if not chunk:
        return summed_cross_entropy(head(hidden), labels)

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return summed_cross_entropy(head(rows), wanted)

    parts = zip(torch.split(hidden.flatten(0, 1), chunk), torch.split(labels.flatten(), chunk), strict=True)
    losses = [checkpoint(part, *each, use_reentrant=False, preserve_rng_state=False) for each in parts]
    total: Tensor = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def chunk_of(asked: int, tokens: int, vocab_size: int) -> int:
    """The chunk for a micro-batch of so many tokens; 0: all at once.

    Args:
        asked: a number of tokens, 0 for none, -1 for what its size suggests: where float32 logits would take more than
            512 MiB, the power of two whose logits take up to 128 MiB.
    """
    if asked >= 0:
        return asked
    if 4 * tokens * vocab_size <= _LARGE:
        return 0
    return 1 << max(_CHUNK // (4 * vocab_size), 16).bit_length() - 1
