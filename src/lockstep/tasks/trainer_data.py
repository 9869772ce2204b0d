"""The data of a Hugging Face Trainer: its samples, its batches, their labels, and its order.

dataset = samples_of(trainer, trainer.train_dataset, "train_dataset")
batching = Batching(collator_of(trainer), shifts=trainer._loss_shifts_labels)
order = EpochShuffled(len(dataset), seed=42)
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.sampler import EpochOrder
from lockstep.errors import ConfigError

__all__ = ["Batching", "EpochShuffled", "collator_of", "labelled", "samples_of"]

IGNORED = -100


def samples_of(trainer: Any, dataset: Any, name: str) -> Any:
    """A set of the Trainer without the columns that its model does not take, where it has such.

    Raises:
        ConfigError: it is iterable: a sample must be had by its index.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"from_trainer: the {name} of the Trainer is iterable ({type(dataset).__name__}), and any sample must be "
            "had by its index: write it out, or load it without streaming"
        )
    if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
        return trainer._remove_unused_columns(dataset, description=name)
    return dataset


def collator_of(trainer: Any) -> Callable[[list[Any]], Any]:
    """What makes batches; it leaves out, of samples that still have them, the columns that the model does not take."""
    collator: Callable[[list[Any]], Any] = trainer._get_collator_with_removed_columns(trainer.data_collator)
    return collator


def labelled(batch: Mapping[str, Any], *, shifts: bool) -> Tensor | None:
    """How many labels of a batch count, 0-dim int64 where they lie; None where it has no labels that can be counted.

    Args:
        shifts: the loss shifts the labels itself, so that the first of each row is none.
    """
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return None
        labels = labels[..., 1:] if shifts else labels
    return labels.ne(IGNORED).sum() if isinstance(labels, Tensor) else None


@final
class Batching:
    """What a loader process needs of the task: batches, and their items.

    Args:
        collator: a list of samples as one batch.
        shifts: see `labelled`.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], shifts: bool) -> None:
        self.collate, self.shifts = collator, shifts

    def count(self, batch: Any) -> int:
        """The labels of a batch in host memory that count."""
        found = labelled(batch, shifts=self.shifts)
        return 0 if found is None else int(found)


@final
class EpochShuffled(EpochOrder):
    """The order of accelerate's SeedableRandomSampler: epoch e is `torch.randperm` under the seed `seed + e`.

    Args:
        size: samples in an epoch.
        seed: of the first epoch.
    """

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, size)
        self.seed = seed

    def draw(self, epoch: int) -> NDArray[np.int64]:
        """Draw the permutation of an epoch."""
        generator = torch.Generator(device="cpu").manual_seed(self.seed + epoch)
        return torch.randperm(self.size, generator=generator, device="cpu").numpy()
