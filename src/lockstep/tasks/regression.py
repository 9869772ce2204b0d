"""Predict a number for each row of a table: `lockstep train --task regression`.

    task = make(Config(task="regression"), say=print)       # scikit-learn's diabetes, a small perceptron

An item is a row. The loss is the squared error in units of the target's standard deviation in the training split, so
predicting the mean gives 1; the metrics are in the target's unit. `RowsMetric` is the base of metrics that keep rows.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config.schema import Config
from lockstep.data.hold_out import split_samples
from lockstep.errors import ConfigError, DataError
from lockstep.files import cache_folder
from lockstep.models.vision import MLP
from lockstep.task import Task
from lockstep.tasks.columns import diabetes, find_column
from lockstep.text.hub import DataRequest, HubTable, open_table

__all__ = [
    "RowsMetric",
    "make",
    "on_columns_of",
]


class RowsMetric:
    """Base of metrics whose state is a list of rows.

    Attributes:
        several: `compute` of a subclass returns several numbers by name.
    """

    several = True

    def __init__(self) -> None:
        self._rows: list[list[Any]] = []

    @property
    def metric_state(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def merge_state(self, state: dict[str, Any]) -> None:
        """Prepend the rows of another state."""
        self._rows = state["rows"] + self._rows

    def reset(self) -> None:
        self._rows = []

    def clone(self) -> Self:
        copied = copy.copy(self)
        copied._rows = list(self._rows)
        return copied

    def cpu(self) -> Self:
        return self


DIABETES = "builtin:diabetes"
MODEL = "builtin:mlp"
# Prefixes of the dtypes of numbers.
_NUMBERS = ("int", "uint", "float", "bool")
# Leading values that decide whether a column of text has numbers.
_LOOKED_AT = 1000

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Columns:
    """A split: the features of each row, and its target, as plain numbers."""

    rows: list[list[float]]
    targets: list[float]


@final
class Regression(Task):
    """Task that predicts a number for each row of a table.

    Args:
        train, evaluation: the splits.
        features, target: the names of the columns.
        digest: hex; of the data.
        dropout: of the model.
        name: of the data.
        revision: of the data `name`: the commit on the hub, "" for files.
    """

    reduction = "sum"
    item_name = "rows"
    items_per_sample = 1

    def __init__(
        self,
        train: Columns,
        evaluation: Columns,
        *,
        features: Sequence[str],
        target: str,
        digest: str,
        dropout: float = 0.0,
        name: str = "",
        revision: str = "",
    ) -> None:
        self._parts = {"train": train, "evaluation": evaluation}
        self._dropout = dropout
        # math.fsum rounds once, so the bits are the same on every machine.
        self._features = [_mean_and_spread(column) for column in zip(*train.rows, strict=True)]
        self._target = _mean_and_spread(train.targets)
        self._r2 = _R2(self._target[0])
        self.fingerprint = f"{target} of {len(features)} columns; {digest}"
        self._unit = self._target[1]
        self.sources = {
            **({name: revision} if revision else {}),
            "features": ", ".join(features),
            "target": target,
            "target_spread": repr(self._unit),
        }

    def measure_as(self, sources: Mapping[str, str]) -> None:
        """Measure the loss in the unit of an earlier run's targets.

        Args:
            sources: of the earlier run's task.
        """
        self._unit = float(sources.get("target_spread", self._unit))

    def model(self) -> nn.Module:
        """Build the model, initialised from torch's default generator."""
        means, spreads = zip(*self._features, strict=True)
        return MLP(means, spreads, *self._target, dropout=self._dropout)

    def dataset(self, split: str) -> TensorDataset:
        """Return the samples of "train" or "evaluation": (features [features], target []), in float64.

        Raises:
            KeyError: any other split.
        """
        columns = self._parts[split]
        return TensorDataset(*(torch.tensor(values, dtype=torch.float64) for values in (columns.rows, columns.targets)))

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return the squared error in units of the target's spread, summed over the rows."""
        rows, targets = batch
        error: Tensor = model(rows) - targets
        return (error / self._unit).square().sum()

    def evaluate(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Return (loss, metrics).

        "mae" is the mean absolute error in the target's unit. "r2" is 1 - squared error / variance of the targets among
        the evaluated rows; it is reported as 0 if all targets are equal.
        """
        rows, targets = batch
        error = model(rows) - targets
        squared = error.square()
        self._r2.update(targets, squared)
        return (squared / self._unit**2).sum(), {"mae": (error.abs().sum(), len(targets)), "r2": self._r2}

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the hidden layers of an unwrapped model from `model`."""
        return list(model.get_submodule("blocks").children())


@final
class _R2(RowsMetric):
    """1 - squared error / variance of the targets, from four sums over each micro-batch.

    Args:
        near: a number near the targets, subtracted from them so that their squares keep precision.
    """

    several = False

    def __init__(self, near: float) -> None:
        super().__init__()
        self._near = near

    def update(self, targets: Tensor, squared: Tensor) -> None:
        """Add the rows of a batch: their targets, and the squares of their errors."""
        off = targets.double() - self._near
        count = torch.full((), float(len(targets)), dtype=torch.float64, device=off.device)
        self._rows.append([torch.stack([count, off.sum(), off.square().sum(), squared.double().sum()])])

    def compute(self) -> float:
        """Return R2 over all rows so far."""
        # Waits for the device if the rows are there, at the end of an evaluation.
        columns = zip(*(row[0].tolist() for row in self._rows), strict=True)
        count, off, square, error = (math.fsum(column) for column in columns)
        spread = square - off * off / count
        # A smaller spread is rounding: all targets are equal.
        if spread > 1e-12 * square:
            return 1 - error / spread
        return 0.0


def make(config: Config, say: Say) -> Regression:
    """Make the task of the flags.

    Raises:
        ConfigError: another model than the built-in one, or a package is missing.
        DataError: no such data or column, or values that are no numbers.
    """
    if config.model_name != MODEL:
        raise ConfigError(f"--model-name '{config.model_name}' is unknown; regression has only {MODEL}")
    name = config.dataset_name
    data = config.data
    flag = f"--dataset-name {config.dataset_name}"
    revision = ""
    if name == DIABETES:
        columns = diabetes(flag)
        digest = "scikit-learn"
        kinds = dict.fromkeys(columns, "float64")
        parts = split_samples(len(columns["target"]), data.evaluation)
        values = {}
        for key, column in columns.items():
            values[key] = tuple([column[row] for row in row_numbers] for row_numbers in parts)
        target, features = _choose_columns(kinds, config, flag)
        numbered: tuple[Sequence[int], Sequence[int]] = parts
    elif name.startswith("builtin:"):
        raise DataError(f"{flag}: unknown; the built-in table is {DIABETES}")
    else:
        request = DataRequest(name, data.subset, data.split, data.revision, "", data.encoding, skip=data.skip)
        table = open_table(request, data.evaluation, cache_folder(config.data.cache) / "tables", say)
        if not data.feature_columns:
            _check_others(table, flag, say)
        target, features = _choose_columns(table.kinds, config, flag)
        values = {key: table.values(key) for key in (target, *features)}
        digest = table.digest
        revision = table.revision
        numbered = table.rows
    # The values of each split as numbers; an error names the row in the user's file.
    splits = []
    for index, split in enumerate(("training", "evaluation")):
        columns_of_split = {}
        for key in (target, *features):
            columns_of_split[key] = [
                _number(key, row, value, split, flag)
                for row, value in zip(numbered[index], values[key][index], strict=True)
            ]
        rows = []
        for row in zip(*(columns_of_split[key] for key in features), strict=True):
            rows.append(list(row))
        splits.append(Columns(rows, columns_of_split[target]))
    # A resume with other columns or another split is refused by this digest.
    content = xxhash.xxh3_128_hexdigest(repr((digest, target, features, data.evaluation)).encode())
    return Regression(
        *splits,
        features=features,
        target=target,
        digest=content,
        dropout=config.model.dropout,
        name=name,
        revision=revision,
    )


def on_columns_of(sources: Mapping[str, str], run: str, config: Config, say: Callable[[str], None]) -> Regression:
    """Make the task on a run's columns, with its loss in the same unit.

    Args:
        sources: of the trained task.
        run: its folder, for a message.

    Raises:
        DataError: the data lacks these columns; else as `make`.
    """
    target = sources.get("target", "")
    features = sources.get("features", "")
    if target:
        data = dataclasses.replace(config.data, target_column=target, feature_columns=features)
        config = dataclasses.replace(config, data=data)
    try:
        task = make(config, say)
    except DataError as error:
        raise DataError(f"{run} learned '{target}' from {features}: {error}" if target else str(error)) from None
    task.measure_as(sources)
    return task


def _choose_columns(kinds: dict[str, str], config: Config, flag: str) -> tuple[str, list[str]]:
    """Choose the target's column, and the feature columns."""
    numbers = [name for name, dtype in kinds.items() if dtype.startswith(_NUMBERS)]
    names = ", ".join(kinds) or "none"
    option = config.data.target_column
    defaults = [name for name in ("target", "y") if name in kinds]
    if not option and not defaults and not numbers:
        raise DataError(f"{flag} has no column of numbers; its columns: {names}")
    target = find_column(kinds, option, "", [*defaults, *numbers[-1:]], flag, "--data.target-column")
    listed = [name.strip() for name in config.data.feature_columns.split(",") if name.strip()]
    features = listed or [name for name in numbers if name != target]
    for name in (target, *features):
        if name not in kinds:
            raise DataError(f"{flag} has no column '{name}'; its columns: {names}; see --data.feature-columns")
        if name not in numbers:
            raise DataError(f"{flag}: the column '{name}' has {kinds[name]}, not numbers; its columns: {names}")
    if target in features:
        raise DataError(f"{flag}: '{target}' is the target; remove it from --data.feature-columns")
    if not features:
        raise DataError(f"{flag}: no column except the target '{target}' has numbers; its columns: {names}")
    return target, features


def _check_others(table: HubTable, flag: str, say: Say) -> None:
    """Report the columns that are not features because they have no numbers.

    Raises:
        DataError: one of them has numbers, but for some values such as "?".
    """
    others = {}
    for name, dtype in table.kinds.items():
        if not dtype.startswith(_NUMBERS):
            others[name] = dtype
    for name in (name for name, dtype in others.items() if dtype.endswith("string")):
        begin = table.parts[0].select_columns([name])[:_LOOKED_AT][name]
        # At most half of the values are numbers: it is a column of text.
        if 2 * sum(map(_is_number, begin)) <= len(begin):
            continue
        values = zip(table.rows, table.values(name), strict=True)
        odd = ((row, value) for rows, column_values in values for row, value in zip(rows, column_values, strict=True))
        row, value = next((row, value) for row, value in odd if not _is_number(value))
        raise DataError(
            f"{flag}: row {row} has {value!r} in the column '{name}', which has numbers else; fill in such values, "
            "remove the rows, or exclude the column with --data.feature-columns"
        )
    if others:
        kinds = ", ".join(f"{name} ({dtype})" for name, dtype in others.items())
        say(f"{flag}: columns without numbers are not used: {kinds}")


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _number(column: str, row: int, value: Any, split: str, flag: str) -> float:
    if value is None or not math.isfinite(value):
        raise DataError(
            f"{flag}: row {row} ({split} split) has {value} in the column '{column}'; fill in such values, remove the "
            "rows, or exclude the column with --data.feature-columns"
        )
    return float(value)


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation; 1 for the latter if all values are equal."""
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return mean, spread or 1.0
