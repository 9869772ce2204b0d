"""Check the item counts of batches, and add them up without rounding.

    items = checked(task.count(batch))              # None: it is no count
    own = total(items of this rank)                 # exact: an int or a Fraction
    row = parts(own)                                # three float64 numbers that travel
    step = number(math.fsum(parts of all ranks))    # the same bits however the ranks share the items out

A count may be any finite number of 0 or more, such as a sum of class weights. Sums of float64 depend on their grouping,
which differs between world sizes; so only the step's total is rounded, once.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from numbers import Number as PlainNumber
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.errors import DataError

__all__ = [
    "Exact",
    "checked",
    "first_length",
    "number",
    "parts",
    "samples_in",
    "shown",
    "total",
]

Exact = int | float | Fraction

PARTS = 3  # float64 numbers per exact sum that is sent: 159 bits; counts of one step differ by 20 to 30
_MOST = 2.0**53  # above it float64 skips whole numbers
_DEEP = 6  # levels of nesting of a batch that are searched


def checked(value: Any) -> int | float | None:
    """Check what `count` returned.

    Returns:
        The number, an int if it is whole; None if it is not a finite number from 0 to 2**53.
    """
    if type(value) is int:  # the fast path: each micro-batch is counted
        return value if 0 <= value <= _MOST else None
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if math.prod(value.shape) != 1:
            return None
        value = value.item()  # in host memory, as the batch is
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    found = float(value)
    return number(found) if 0 <= found <= _MOST else None


def number(value: Exact) -> int | float:
    """Round an exact sum once.

    The result is an int if it is whole, so that records show 123 and not 123.0.
    """
    if isinstance(value, int):
        return value
    rounded = float(value)
    return int(rounded) if rounded.is_integer() else rounded


def total(counts: Iterable[int | float]) -> int | Fraction:
    """Add counts up without rounding."""
    return sum((each if isinstance(each, int) else Fraction(each) for each in counts), start=0)


def parts(exact: Exact) -> list[float]:
    """Split an exact sum into `PARTS` float64 numbers, largest first.

    Raises:
        DataError: they cannot hold it.
    """
    found = []
    for _ in range(PARTS):
        found.append(float(exact))
        exact = Fraction(exact) - Fraction(found[-1]) if exact != found[-1] else 0
    if exact:
        raise DataError(
            f"the counts of a step cannot be added up exactly: beside {found[0]:.3g} there is one that is 2**100 times "
            "smaller; scale what the task's `count` returns, or leave such items out"
        )
    return found


def shown(value: Any) -> str:
    """Describe what `count` returned: `-1`, `nan`, `a tensor of shape [8]`."""
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) != 1:
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item()
    return repr(value) if value is None or isinstance(value, PlainNumber) else f"a {type(value).__name__}"


def first_length(batch: Any) -> int | None:
    """Count the samples of a batch by its first tensor; None: it has none."""
    return next(_lengths(batch, frozenset()), None)


def samples_in(batch: Any, samples: Sequence[Any], given: int | None = None) -> int | None:
    """Count the samples in a batch that a `collate` may have shortened.

    Tensors have samples first. If not all of them do (time first, packed sequences, graphs), but one has as many rows
    as there are samples, no sample was dropped.

    Args:
        samples: what the batch was made from.
        given: number of samples requested; None: the length of `samples`, which may be a batch already.

    Returns:
        The number; None if nothing in the batch has a length, or lengths differ and none is that of `samples`.
    """
    given = len(samples) if given is None else given
    if first_length(batch) == given:
        return given
    found = set(_lengths(batch, frozenset(_inside(samples))))
    if len(found) == 1:
        return found.pop()
    return given if given in found else None


def _lengths(value: Any, own: frozenset[int], deep: int = 0) -> Iterator[int]:
    """Yield the first dimension of each tensor, and lengths of lists of sample parts.

    Args:
        own: ids of everything in the samples.
    """
    shape = getattr(value, "shape", None)
    if shape is not None:
        yield from (int(size) for size in tuple(shape)[:1])
        return
    if deep > _DEEP:
        return
    if isinstance(value, list | tuple) and value and id(value[0]) in own:
        yield len(value)  # a list of samples, or of one part of each
        return
    for each in _fields(value):
        yield from _lengths(each, own, deep + 1)


def _fields(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return () if isinstance(value, type) else getattr(value, "__dict__", {}).values()


def _inside(value: Any, deep: int = 0) -> Iterator[int]:
    """Yield the ids of everything in samples: each tensor, string, dict, list and tuple."""
    if getattr(value, "shape", None) or isinstance(value, str | Mapping | list | tuple):
        yield id(value)
    if isinstance(value, Mapping | list | tuple) and deep < _DEEP:
        for each in _fields(value):
            yield from _inside(each, deep + 1)
