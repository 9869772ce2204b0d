"""Index the commonest data sets once for all samples of a micro-batch.

    rows = rows_of(dataset)                 # None: an unknown kind, which is indexed sample by sample
    batch = rows.batch([3, 1, 4])           # as default_collate([dataset[3], dataset[1], dataset[4]]), to the bit
    samples = rows.samples([3, 1, 4])       # [dataset[3], dataset[1], dataset[4]]

Supported are `TensorDataset`, Hugging Face's `Dataset` in its torch format, and `Subset` of either. A subclass may
read in another way, so only these exact types are used.
"""

import sys
from collections.abc import Sequence
from operator import index as whole
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

__all__ = ["Rows", "is_hub_dataset", "never_draws", "rows_of"]


class Rows(Protocol):
    """Samples of a known type of dataset.

    Both methods raise where indexing each sample would; the caller then indexes each to name it.
    """

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the samples as torch's `default_collate` combines them; None: combine `samples`."""

    def samples(self, indices: Sequence[int]) -> list[Any] | None:
        """Return the samples; None: index each."""


def rows_of(dataset: Any) -> Rows | None:
    """Return a dataset's rows; None: its type is not known.

    A wrapper of lockstep's has them as `known_rows`.
    """
    known: Rows | None = getattr(dataset, "known_rows", None)
    if known is not None:
        return known
    maps = list[Subset[Any]]()
    while type(dataset) is Subset:
        maps.append(dataset)
        dataset = dataset.dataset
    rows: Rows | None = None
    if type(dataset) is TensorDataset:
        rows = _TensorRows(dataset)
    elif is_hub_dataset(dataset):
        rows = _DatasetRows(dataset)
    if rows and maps:
        return _SubsetRows(rows, maps)
    return rows


def never_draws(dataset: Any) -> bool:
    """Whether the samples of a dataset are known to draw no random numbers."""
    if type(dataset) in (TensorDataset, list, tuple):
        return True
    # The format "custom" calls a function of the user's.
    return is_hub_dataset(dataset) and dataset.format["type"] != "custom"


def is_hub_dataset(dataset: Any) -> bool:
    """Whether it is exactly a `datasets.Dataset`."""
    # An object of the class exists only if its module was imported.
    module = sys.modules.get("datasets.arrow_dataset")
    return module is not None and type(dataset) is module.Dataset


@final
class _TensorRows:
    """Rows of a TensorDataset."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset
        # The tensors that the two flags describe.
        self._tensors: tuple[Tensor, ...] = ()
        self._plain = self._on_host = False

    def batch(self, indices: Sequence[int]) -> list[Tensor] | None:
        tensors = self._dataset.tensors
        # The caller may replace the dataset's tensors between two steps.
        if tensors is not self._tensors:
            self._tensors = tensors
            self._plain = all(map(_is_plain, tensors))
            self._on_host = all(tensor.is_cpu for tensor in tensors)
        if not self._plain:
            return None
        # Takes a fifth of the time of torch.tensor(indices).
        rows = torch.from_numpy(np.array(indices, np.int64))
        if self._on_host:
            return [tensor.index_select(0, rows) for tensor in tensors]
        _check_range(indices, len(tensors[0]))
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in tensors]

    def samples(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]] | None:
        batch = self.batch(indices)
        if batch is None:
            return None
        return list(zip(*(column.unbind() for column in batch), strict=True))


def _is_plain(tensor: Tensor) -> bool:
    """Whether selected rows are bitwise the stack of the single samples.

    With the same strides and type.
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _check_range(indices: Sequence[int], size: int) -> None:
    """Raise IndexError for an index outside the tensor.

    A device would answer such an index by ending the process's CUDA context.
    """
    if indices and not (min(indices) >= 0 and max(indices) < size):
        raise IndexError(f"an index is not in 0 .. {size - 1}")


@final
class _DatasetRows:
    """Rows of a Hugging Face `Dataset`, read in one look-up of its table."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._even = True

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor] | None:
        if not self._even or self._dataset.format["type"] != "torch":
            return None
        columns = self._dataset[list(indices)]
        # Strings, and rows of unequal length, are a list there. torch's collation decides about these.
        self._even = all(type(column) is Tensor and column.is_contiguous() for column in columns.values())
        if self._even:
            return dict(columns)
        return None

    def samples(self, indices: Sequence[int]) -> list[Any]:
        samples: list[Any] = self._dataset.__getitems__(list(indices))
        return samples


@final
class _SubsetRows:
    """Rows of a Subset, or of a Subset of one.

    Args:
        rows: of the innermost dataset.
        maps: the outermost first.
    """

    def __init__(self, rows: Rows, maps: list["Subset[Any]"]) -> None:
        self._rows = rows
        self._maps = maps

    def batch(self, indices: Sequence[int]) -> Any:
        return self._rows.batch(self._inner(indices))

    def samples(self, indices: Sequence[int]) -> list[Any] | None:
        return self._rows.samples(self._inner(indices))

    def _inner(self, indices: Sequence[int]) -> Sequence[int]:
        for subset in self._maps:
            positions = subset.indices
            indices = [whole(positions[index]) for index in indices]
        return indices
