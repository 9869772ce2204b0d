"""Choose the columns of a table and read its classes; load scikit-learn's built-in tables.

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
from lockstep.errors import ConfigError, DataError
from lockstep.extras import install_extra
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
]


def digits(flag: str) -> tuple[Tensor, Tensor]:
    """Load the handwritten digits: uint8 [1797, 1, 8, 8] and their classes, int64 [1797].

    The pixels have 17 levels of grey from 0 to 255. It is the test set of "Optical Recognition of Handwritten Digits",
    UCI Machine Learning Repository (1998).

    Raises:
        ConfigError: scikit-learn is not installed; `flag` is the flag that needs it.
    """
    bunch = _datasets(flag).load_digits()
    # scikit-learn's pixels have values from 0 to 16.
    pixels = torch.from_numpy(bunch.images).reshape(-1, 1, 8, 8) * 255 / 16
    return pixels.round().to(torch.uint8), torch.from_numpy(bunch.target).long()


def diabetes(flag: str) -> dict[str, list[float]]:
    """Load 442 patients: ten columns of measurements, and "target", the progression after a year.

    Efron et al., "Least Angle Regression", The Annals of Statistics 32 (2004), in the original units.

    Raises:
        ConfigError: scikit-learn is not installed; `flag` is the flag that needs it.
    """
    bunch = _datasets(flag).load_diabetes(scaled=False)
    columns = {}
    for index, name in enumerate(bunch.feature_names):
        columns[name] = bunch.data[:, index].tolist()
    return {**columns, "target": bunch.target.tolist()}


def _datasets(flag: str) -> Any:
    try:
        # scikit-learn is optional, and has no type annotations.
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package scikit-learn: {install_extra('images')}") from error
    return datasets


# Names of classes that a message lists, at most.
_SHOWN = 8


def find_column(
    kinds: Mapping[str, str], option_value: str, kind: str, usual: Sequence[str], flag: str, option: str
) -> str:
    """Find the requested column, or else a column by its usual name or its kind.

    Without a request it is the first of the `usual` names that exists, else the only column of `kind`.

    Args:
        kinds: column -> its content: "Image", "ClassLabel", or a dtype such as "string".
        option_value: the requested column; "": none.
        kind: the required content; "": any.
        usual: names to look for.
        flag, option: for messages: the data, and the option that names another column.

    Raises:
        DataError: there is none, or it has other content; the message lists the columns.
    """
    names = ", ".join(kinds) or "none"
    if option_value:
        if option_value not in kinds:
            raise DataError(f"{flag} has no column '{option_value}'; its columns: {names}; name one with {option}")
        if kind and kinds[option_value] != kind:
            raise DataError(
                f"{flag}: the column '{option_value}' has {kinds[option_value]}, not {kind}; its columns: {names}"
            )
        return option_value
    fitting = []
    for name in kinds:
        if not kind or kinds[name] == kind:
            fitting.append(name)
    column = next((name for name in usual if name in fitting), "")
    if not column and kind and len(fitting) == 1:
        column = fitting[0]
    if not column:
        choices = " or ".join(f"'{name}'" for name in usual)
        raise DataError(f"{flag} has no column {choices}; its columns: {names}; name the one with {option}")
    return column


def class_labels(table: HubTable, column: str, flag: str) -> tuple[tuple[str, ...], tuple[Tensor, Tensor]]:
    """Return the names of the classes, and each row's class in both splits, int64 [rows].

    The classes are those that the dataset names, else the sorted values of the training split.

    Raises:
        DataError: a missing value, a number that is no integer, a single class, or a class that training lacks.
    """
    parts = table.values(column)
    for split, rows, values in zip(("training", "evaluation"), table.rows, parts, strict=True):
        bad = next((index for index, value in enumerate(values) if _missing(value)), None)
        if bad is not None:
            raise DataError(
                f"{flag}: row {rows[bad]} ({split} split) has {values[bad]!r} in the column '{column}', which is not "
                "a class; fix the row, or name another column with --data.label-column"
            )
    class_names = table.classes.get(column)
    if class_names:
        values = list(range(len(class_names)))
    else:
        values = sorted(set(parts[0]))
    names = tuple(class_names or map(str, values))
    if len(names) < 2:
        raise DataError(f"{flag}: the column '{column}' has one class, '{names[0]}'; classification needs at least two")
    index = {value: label for label, value in enumerate(values)}
    unknown = next((value for split_values in parts for value in split_values if value not in index), None)
    if unknown is not None:
        listing = _class_list(names)
        raise DataError(
            f"{flag}: the column '{column}' has {unknown!r}, which is not one of its classes ({listing}); fix the row, "
            "or name another column with --data.label-column"
        )
    labels = []
    for split_values in parts:
        labels.append(torch.tensor([index[value] for value in split_values], dtype=torch.int64))
    train, evaluation = labels
    return names, (train, evaluation)


def _class_list(names: Sequence[str]) -> str:
    """Format the names of the classes, shortened: `cat, dog`."""
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fingerprint_of(classes: Sequence[str], digest: str) -> str:
    """Return the fingerprint of data with classes, "CLASSES; HASH".

    A resume with other classes is refused with a message that names them.
    """
    return f"{_classes_of(classes)}; {digest}"


def _classes_of(names: Sequence[str]) -> str:
    """Identify classes by their names, or the first ones and a hash."""
    if len(names) > _SHOWN:
        more = f" {xxhash.xxh3_64_hexdigest(repr(tuple(names)).encode())}"
    else:
        more = ""
    return (_class_list(names) + more).replace(";", ",")


def names_of(classes: Sequence[str]) -> str:
    """Return the names as JSON, for a task's `sources` in the run's environment.json."""
    return json.dumps(list(classes), ensure_ascii=False)


def check_classes(before: str, task: Task, run: str) -> None:
    """Check that the data of `task` has the classes that a run was trained on.

    Args:
        before: the fingerprint of the run's training data.

    Raises:
        DataError: it has others.
    """
    names = getattr(task, "classes", None)
    trained = before.partition("; ")[0]
    if names and trained != (current := _classes_of(names)):
        raise DataError(
            f"{printable(run)} was trained on the classes {printable(trained)}, but the data now has "
            f"{printable(current)}; give data with the same classes"
        )


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not value.is_integer())
