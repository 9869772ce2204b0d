"""A Trainer's `compute_metrics` as a metric whose state is every prediction: see `lockstep.run.stateful_metrics`.

    predictions = Predictions(trainer)
    predictions.add(logits, labels, inputs, loss)       # of one micro-batch
    predictions.compute()                               # name -> number, of all that were added

What a batch gave is kept in host memory; batches of other lengths are padded with -100, as the Trainer does it.
"""

import sys
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.tasks.rows_metric import RowsMetric

__all__ = ["Predictions", "of_transformers"]

_KINDS = ("predictions", "label_ids", "inputs", "losses")


def of_transformers(trainer: Any) -> Any:
    """The module of the Trainer class itself, whatever derives from it."""
    base = next(kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
    return sys.modules[base.__module__]


@final
class Predictions(RowsMetric):
    """All predictions of an evaluation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        super().__init__()
        self._form: Any = None

    def add(self, *values: Any) -> None:
        """Adds a batch: predictions, labels, inputs and losses, nested as they come, or None. Waits for the device."""
        row: list[Tensor] = []
        self._form = tuple(_taken_apart(value, row) for value in values)
        self._rows.append(row)

    def compute(self) -> dict[str, float]:
        """The numbers that `compute_metrics` gives; what is no number is left out."""
        theirs, args = of_transformers(self._trainer), self._trainer.args
        found = {}
        for place, kind in enumerate(_KINDS):
            held = theirs.EvalLoopContainer(args.eval_do_concat_batches, padding_index=-100)
            for row in self._rows:
                value = _together(self._form[place], row)
                if value is not None:
                    held.add(value)
            found[kind] = held.get_arrays()
        wanted = {name for name in ("inputs", "losses") if found[name] is None}
        given = {name: value for name, value in found.items() if name not in wanted}
        said = self._trainer.compute_metrics(theirs.EvalPrediction(**given))
        if not isinstance(said, Mapping):
            raise ConfigError(
                f"from_trainer: compute_metrics returned {type(said).__name__}: it must return a dict, name -> number"
            )
        plain = {str(name).removeprefix("eval_"): _number(value) for name, value in said.items()}
        return {name: value for name, value in plain.items() if value is not None and name not in ("loss", "items")}


def _number(value: Any) -> float | None:
    try:
        value = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # of more than one element
        return None
    return float(value) if isinstance(value, int | float) else None


def _taken_apart(value: Any, row: list[Tensor]) -> Any:
    """The form of a nested value, whose tensors are put into `row`."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = value.detach()
        row.append((value.float() if value.dtype is torch.bfloat16 else value).cpu())  # waits for the device
        return len(row) - 1
    if isinstance(value, Mapping):
        return {key: _taken_apart(each, row) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_taken_apart(each, row) for each in value)
    raise ConfigError(
        f"from_trainer: the model's outputs have a {type(value).__name__}, which cannot be kept for compute_metrics: "
        "choose what it needs with preprocess_logits_for_metrics"
    )


def _together(form: Any, row: list[Tensor]) -> Any:
    if isinstance(form, int):
        return row[form]
    if isinstance(form, dict):
        return {key: _together(each, row) for key, each in form.items()}
    return tuple(_together(each, row) for each in form) if isinstance(form, tuple) else None
