"""Feed a Trainer's samples to a run, and its predictions to `compute_metrics`.

    predictions = Predictions(trainer)
    predictions.add(logits, labels, inputs, loss)       # of one micro-batch
    predictions.compute()                               # name -> number, of all that were added

Here are the samples of its datasets, its collator, the count of labels and the order of samples. `Predictions` is a
metric with every prediction as its state (see `tasks.regression.RowsMetric`): it keeps the outputs in host memory and
pads batches of different lengths with -100, as the Trainer does.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.sampler import EpochOrder
from lockstep.data.stream_types import refuse_divided
from lockstep.errors import ConfigError
from lockstep.tasks.regression import RowsMetric

__all__ = [
    "Batching",
    "EpochShuffled",
    "PairBatching",
    "Predictions",
    "collator_of",
    "count_labels",
    "of_transformers",
    "samples_of",
]


# Label of a token that is not predicted, as in transformers.
IGNORED = -100


def samples_of(trainer: Any, dataset: Any, name: str) -> Any:
    """Return a dataset of the Trainer without the columns that its model does not take.

    Raises:
        ConfigError: the dataset is iterable: samples must be accessible by index.
    """
    refuse_divided(dataset, f"from_trainer: the Trainer's {name}")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"from_trainer: the Trainer's {name} is iterable ({type(dataset).__name__}), but samples must be "
            "accessible by index: write it to disk, or load it without streaming"
        )
    if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
        return trainer._remove_unused_columns(dataset, description=name)
    return dataset


def collator_of(trainer: Any) -> Callable[[list[Any]], Any]:
    """Return the Trainer's collator, which drops the columns that the model does not take."""
    collator: Callable[[list[Any]], Any] = trainer._get_collator_with_removed_columns(trainer.data_collator)
    return collator


def count_labels(batch: Mapping[str, Any], *, shifts: bool) -> Tensor | None:
    """Count the labels of a batch that are not -100.

    Args:
        shifts: the loss shifts the labels itself, so the first label of each row does not count.

    Returns:
        A 0-dim int64 tensor on the device of the labels; None if the batch has no labels that can be counted.
    """
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return None
        labels = labels[..., 1:] if shifts else labels
    if isinstance(labels, Tensor):
        return labels.ne(IGNORED).sum()
    return None


@final
class Batching:
    """Collator and item count: all that a loader process needs of the task.

    Args:
        collator: a list of samples -> a batch.
        shifts: see `count_labels`.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], shifts: bool) -> None:
        self.collate = collator
        self.shifts = shifts

    def count(self, batch: Any) -> int:
        """Count the labels of a batch in host memory."""
        labels = count_labels(batch, shifts=self.shifts)
        if labels is None:
            return 0
        return int(labels)


@final
class PairBatching:
    """Collator and item count of pairs, whose chosen rows precede the rejected.

    Args:
        collator: a list of samples -> a batch.
    """

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collate = collator

    def count(self, batch: Any) -> int:
        """Count the pairs of a batch."""
        return len(batch["input_ids"]) // 2


@final
class EpochShuffled(EpochOrder):
    """The order of accelerate's SeedableRandomSampler: epoch e is `torch.randperm` with seed `seed + e`.

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


_KINDS = ("predictions", "label_ids", "inputs", "losses")


def of_transformers(trainer: Any) -> Any:
    """Return the module that defines the Trainer class itself, not a derived class."""
    base = next(ancestor for ancestor in type(trainer).__mro__ if ancestor.__name__ == "Trainer")
    return sys.modules[base.__module__]


@final
class Predictions(RowsMetric):
    """All predictions of an evaluation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        super().__init__()
        self._form: Any = None

    def add(self, *values: Any) -> None:
        """Add a batch. Waits for the device.

        Args:
            values: predictions, labels, inputs and losses, nested as the model returns them, or None.
        """
        row: list[Tensor] = []
        self._form = tuple(_flatten(value, row) for value in values)
        self._rows.append(row)

    def compute(self) -> dict[str, float]:
        """Return the numbers of `compute_metrics`; values that are no number are dropped."""
        module = of_transformers(self._trainer)
        args = self._trainer.args
        arrays = {}
        for index, field_name in enumerate(_KINDS):
            container = module.EvalLoopContainer(args.eval_do_concat_batches, padding_index=-100)
            for row in self._rows:
                value = _unflatten(self._form[index], row)
                if value is not None:
                    container.add(value)
            arrays[field_name] = container.get_arrays()
        missing = set()
        for name in ("inputs", "losses"):
            if arrays[name] is None:
                missing.add(name)
        inputs = {name: value for name, value in arrays.items() if name not in missing}
        metrics = self._trainer.compute_metrics(module.EvalPrediction(**inputs))
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"from_trainer: compute_metrics returned {type(metrics).__name__}: return a dict, name -> number"
            )
        plain = {str(name).removeprefix("eval_"): _number(value) for name, value in metrics.items()}
        return {name: value for name, value in plain.items() if value is not None and name not in ("loss", "items")}


def _number(value: Any) -> float | None:
    try:
        # Results of `compute_metrics` are usually in host memory; a tensor on a device is waited for.
        value = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):
        # A tensor of several elements is no number.
        return None
    if isinstance(value, int | float):
        return float(value)
    return None


def _flatten(value: Any, row: list[Tensor]) -> Any:
    """Append the tensors of a nested value to `row`, and return the value's structure."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = value.detach()
        # Waits for the device, once for each tensor of a micro-batch. NumPy has no bfloat16.
        row.append((value.float() if value.dtype is torch.bfloat16 else value).cpu())
        return len(row) - 1
    if isinstance(value, Mapping):
        return {key: _flatten(item, row) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_flatten(item, row) for item in value)
    raise ConfigError(
        f"from_trainer: the model's outputs have a {type(value).__name__}, which compute_metrics cannot receive: "
        "select its inputs with preprocess_logits_for_metrics"
    )


def _unflatten(form: Any, row: list[Tensor]) -> Any:
    if isinstance(form, int):
        return row[form]
    if isinstance(form, dict):
        return {key: _unflatten(item, row) for key, item in form.items()}
    if isinstance(form, tuple):
        return tuple(_unflatten(item, row) for item in form)
    return None
