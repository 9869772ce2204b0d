"""Layers that hold this rank's part of a whole layer.

`tensor.py: cut` changes the class of a layer of torch to one of these, so that its names, hooks and settings stay.
Their cut parameters are DTensors; forwards use the local part.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ConfigError
from lockstep.parallel.activations import TensorGroup, dropout_of_part, enter, gather_columns, largest, leave

__all__ = [
    "ColumnDropout",
    "ColumnLinear",
    "ReplicatedParameters",
    "RowLinear",
    "VocabularyEmbedding",
    "VocabularyLinear",
    "local_part",
    "table_logits",
    "vocabulary_cross_entropy",
]


def local_part(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter, with gradient; a plain parameter unchanged."""
    if not hasattr(parameter, "placements"):
        whole: Tensor = parameter
        return whole
    local: Tensor = parameter.to_local()
    return local


class ColumnLinear(nn.Linear):
    """A linear layer that computes this rank's columns of the output."""

    tensor_group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else local_part(self.bias)
        return F.linear(enter(input, self.tensor_group), local_part(self.weight), bias)


class RowLinear(nn.Linear):
    """A linear layer that multiplies this rank's columns of the input, and sums over the ranks."""

    tensor_group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        weight = local_part(self.weight)
        if input.shape[-1] != weight.shape[1]:
            raise ConfigError(
                f"--parallel.tensor {self.tensor_group.size}: a layer planned as 'rows' got {input.shape[-1]} columns, "
                f"but this rank has {weight.shape[1]} of {self.in_features}; plan the layer before it as 'columns'"
            )
        product = leave(F.linear(input, weight), self.tensor_group)
        if self.bias is None:
            return product
        # After the sum, so that it is added once; in the product's dtype, as in a product under autocast.
        return product + self.bias.to(product.dtype)


class VocabularyLinear(nn.Linear):
    """An output head that holds the rows of this rank's tokens; its forward returns all logits."""

    tensor_group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        return gather_columns(self.own_logits(enter(input, self.tensor_group)), self.tensor_group)

    def own_logits(self, entered: Tensor) -> Tensor:
        """Return the logits of this rank's tokens, from hidden states that `enter` returned."""
        bias = None if self.bias is None else local_part(self.bias)
        return F.linear(entered, local_part(self.weight), bias)


class VocabularyEmbedding(nn.Embedding):
    """A token table that holds the rows of this rank's tokens."""

    tensor_group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        weight = local_part(self.weight)
        own = self.tensor_group.own(self.num_embeddings)
        index, is_own = local_ids(input, own, self.num_embeddings)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - own.start if own.start <= padding < own.stop else None
        found = F.embedding(index, weight, padding)
        # Another rank has the row, so this one adds zeros.
        return leave(found.masked_fill(~is_own[..., None], 0.0), self.tensor_group)

    def own_logits(self, entered: Tensor) -> Tensor:
        """Return the logits of this rank's tokens, where the table is the output head too."""
        return F.linear(entered, local_part(self.weight))


class ColumnDropout(nn.Dropout):
    """Dropout between columns and rows, with the mask of all columns."""

    tensor_group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.p):
            return input
        return dropout_of_part(input, self.p, -1, self.tensor_group)


class ReplicatedParameters(nn.Module):
    """A mixin for a module with whole parameters whose input is cut, such as the norm of a head's queries."""

    tensor_group: TensorGroup

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._enter_parameters():
            return super().forward(*inputs, **kwargs)

    @contextmanager
    def _enter_parameters(self) -> Iterator[None]:
        """Replace the parameters, so that the gradients of the ranks' parts are summed before `.grad`."""
        parameters: Any = self._parameters
        entered: Any = {}
        for name, parameter in parameters.items():
            entered[name] = None if parameter is None else enter(parameter, self.tensor_group)
        self._parameters = entered
        try:
            yield
        finally:
            self._parameters = parameters


def local_ids(ids: Tensor, own: slice, count: int, ignored: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the places of ids in this rank's rows, and which ids are its own.

    Ids of other ranks get the place 0. Those outside the vocabulary get a place outside of every rank's rows, so that
    torch refuses them as it does for a whole table.

    Args:
        ids: int64, of any shape.
        own: this rank's rows.
        count: rows of the whole.
        ignored: an id that is nobody's.
    """
    is_own = (ids >= own.start) & (ids < own.stop)
    others = (ids >= 0) & (ids < count) & ~is_own
    if ignored is not None:
        others = others | (ids == ignored)
    # Below 0 an id stays: `ids - own.start` could not be inside the rows either.
    return (ids - own.start).masked_fill(others, 0), is_own


def table_logits(table: VocabularyEmbedding, hidden: Tensor) -> Tensor:
    """Return all logits of a head that is tied to a cut token table. Collective."""
    entered = enter(hidden, table.tensor_group)
    return gather_columns(table.own_logits(entered), table.tensor_group)


def vocabulary_cross_entropy(own_logits: Tensor, labels: Tensor, group: TensorGroup, ignored: int = -100) -> Tensor:
    """Return the cross entropy in nats, summed over the labels that are not ignored. Collective.

    The result is a scalar in float32, or float64 for such logits, the same on every rank. Three small exchanges of a
    number per token take the place of an exchange of the logits, as in Megatron-LM: the maximum, the sum of the
    exponentials, and the label's logit.

    Args:
        own_logits: [..., vocab / degree], this rank's columns.
        labels: int64 [...].
        group: the ranks that have the other columns.
        ignored: the label of a token that is not predicted.
    """
    logits = own_logits.flatten(0, -2)
    if logits.dtype is not torch.float64:
        # A sum over a large vocabulary is too coarse in half precision.
        logits = logits.float()
    labels = labels.flatten()
    rows = logits.shape[-1] * group.size
    index, is_own = local_ids(labels, group.own(rows), rows, ignored)
    # The maximum of the ranks' own sums, not of the logits: nothing of the logits' size is made here.
    part = logits.logsumexp(dim=-1)
    top = largest(part, group)  # collective
    total = top + leave((part - top).exp(), group).log()  # collective
    label_logit = logits.gather(-1, index[:, None])[:, 0].masked_fill(~is_own, 0.0)
    losses = total - leave(label_logit, group)  # collective
    return losses.masked_fill(labels == ignored, 0.0).sum()
