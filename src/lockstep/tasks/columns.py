"""Which column of a table is what, and its classes.

label = find_column(table.kinds, "", "", ("label",), "--dataset-name a.csv", "--data.label-column")
classes, (train, evaluation) = class_labels(table, label, flag)
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from lockstep.config.secrets import printable
from lockstep.data.sampler import Shuffled
from lockstep.errors import ConfigError, DataError
from lockstep.task import Task
from lockstep.text.hub import HubTable

__all__ = [
    "check_classes",
    "class_labels",
    "diabetes",
    "digits",
    "find_column",
    "fingerprint_of",
    "names_of",
    "parted",
]


_SPLIT_SEED = 0  # not the run's: runs with other seeds are evaluated on the same samples


def digits(flag: str) -> tuple[Tensor, Tensor]:
    """Handwritten digits: uint8 [1797, 1, 8, 8], in 17 steps of grey from 0 to 255, and their classes, int64 [1797].

    The test set of "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (1998).

    Raises:
        ConfigError: scikit-learn is not installed; `flag` is what needs it.
    """
    found = _datasets(flag).load_digits()
    pixels = torch.from_numpy(found.images).reshape(-1, 1, 8, 8) * 255 / 16
    return pixels.round().to(torch.uint8), torch.from_numpy(found.target).long()


def diabetes(flag: str) -> dict[str, list[float]]:
    """442 patients: ten columns of measurements, and "target", how far the disease had gone a year later.

    Efron et al., "Least Angle Regression", The Annals of Statistics 32 (2004), in the units in which they were taken.

    Raises:
        ConfigError: scikit-learn is not installed; `flag` is what needs it.
    """
    found = _datasets(flag).load_diabetes(scaled=False)
    columns = {name: found.data[:, place].tolist() for place, name in enumerate(found.feature_names)}
    return {**columns, "target": found.target.tolist()}


def parted(samples: int, fraction: float) -> tuple[list[int], list[int]]:
    """The samples for training and those for evaluation, each in their own order, drawn alike for every seed.

    At least one each; `samples` is two or more.
    """
    count = min(max(round(samples * fraction), 1), samples - 1)
    evaluated = sorted(Shuffled(samples, _SPLIT_SEED).at(0, count)[1].tolist())
    apart = set(evaluated)
    return [sample for sample in range(samples) if sample not in apart], evaluated


def _datasets(flag: str) -> Any:
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package scikit-learn: pip install 'torch-lockstep[images]'") from error
    return datasets


_SHOWN = 8


def find_column(kinds: Mapping[str, str], wanted: str, kind: str, usual: Sequence[str], flag: str, option: str) -> str:
    """The column that was asked for; else the first of the `usual` names that is there, else the only one of `kind`.

    Args:
        kinds: column -> what it holds: "Image", "ClassLabel", or a dtype such as "string".
        kind: what it must hold; "": anything.
        flag, option: what a message names: the data, and the way to name another column.

    Raises:
        DataError: there is none, or it holds something else; the message lists those that there are.
    """
    shown = ", ".join(kinds) or "none"
    if wanted:
        if wanted not in kinds:
            raise DataError(f"{flag} has no column '{wanted}'; its columns: {shown}; name one with {option}")
        if kind and kinds[wanted] != kind:
            raise DataError(f"{flag}: the column '{wanted}' holds {kinds[wanted]}, no {kind}; its columns: {shown}")
        return wanted
    fitting = [name for name in kinds if not kind or kinds[name] == kind]
    found = next((name for name in usual if name in fitting), "")
    if not found and kind and len(fitting) == 1:
        found = fitting[0]
    if not found:
        what = " or ".join(f"'{name}'" for name in usual)
        raise DataError(f"{flag} has no column {what}; its columns: {shown}; name the one with {option}")
    return found


def class_labels(table: HubTable, column: str, flag: str) -> tuple[tuple[str, ...], tuple[Tensor, Tensor]]:
    """The names of the classes, and the class of each row of both splits, int64 [rows].

    Classes are those that the dataset names, else the values of the training split in their order.

    Raises:
        DataError: a missing value, a number that is no whole one, a single class, or one that training has not.
    """
    parts = table.values(column)
    for split, values in zip(("training", "evaluation"), parts, strict=True):
        bad = next((row for row, value in enumerate(values) if _missing(value)), None)
        if bad is not None:
            raise DataError(
                f"{flag}: row {bad} of the {split} split has {values[bad]!r} in the column '{column}', which is no "
                "class; give each row one, or name another column with --data.label-column"
            )
    named = table.classes.get(column)
    values = list(range(len(named))) if named else sorted(set(parts[0]))
    names = tuple(named or map(str, values))
    if len(names) < 2:
        raise DataError(
            f"{flag}: the column '{column}' has one class, '{names[0]}', and there is nothing to tell apart"
        )
    place = {value: label for label, value in enumerate(values)}
    strange = next((value for part in parts for value in part if value not in place), None)
    if strange is not None:
        known = _told_classes(names)
        raise DataError(f"{flag}: the column '{column}' has {strange!r}, which is none of its classes ({known})")
    train, evaluation = (torch.tensor([place[value] for value in part], dtype=torch.int64) for part in parts)
    return names, (train, evaluation)


def _told_classes(names: Sequence[str]) -> str:
    """The names of the classes, in a line's room: `cat, dog`."""
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fingerprint_of(classes: Sequence[str], digest: str) -> str:
    """Of data with classes, "CLASSES; HASH": a resume with others is refused in a line that names them."""
    return f"{_classes_of(classes)}; {digest}"


def _classes_of(names: Sequence[str]) -> str:
    """What tells these classes from others: their names, of many the first ones and a hash."""
    more = f" {xxhash.xxh3_64_hexdigest(repr(tuple(names)).encode())}" if len(names) > _SHOWN else ""
    return (_told_classes(names) + more).replace(";", ",")


def names_of(classes: Sequence[str]) -> str:
    """The names as JSON, for a task's `sources`: the run's environment.json keeps them."""
    return json.dumps(list(classes), ensure_ascii=False)


def check_classes(before: str, task: Task, run: str) -> None:
    """Raises DataError where the data of `task` has other classes than those that a run was trained on.

    Args:
        before: the fingerprint of the data that it was trained on.
    """
    names = getattr(task, "classes", None)
    known = before.partition("; ")[0]
    if names and known != (now := _classes_of(names)):
        raise DataError(
            f"{printable(run)} was trained on the classes {printable(known)}, and its data now has {printable(now)}"
        )


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not value.is_integer())
