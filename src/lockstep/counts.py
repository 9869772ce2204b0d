"""Check the item counts of batches, and add them up without rounding.

    items = check_count(task.count(batch))          # None: not a count
    own = total(items of this rank)                 # exact: an int or a Fraction
    row = parts(own)                                # three float64 numbers to send
    step = number(math.fsum(parts of all ranks))    # the same bits, whichever rank has which items

A count is any finite number, 0 or more, such as a sum of class weights. Sums of float64 depend on their grouping, which
differs between world sizes; so only the total of a step is rounded.
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
    "check_count",
    "describe_count",
    "first_length",
    "number",
    "parts",
    "samples_in",
    "total",
]

Exact = int | float | Fraction

# Number of float64 numbers per exact sum. They have 159 bits; counts of one step differ by 20 to 30 bits.
PARTS = 3
# Above it float64 cannot represent every integer.
_MAX_COUNT = 2.0**53
# Levels of a nested batch that are searched.
_MAX_DEPTH = 6


def check_count(value: Any) -> int | float | None:
    """Check what `count` returned.

    Returns:
        The number, an int if it is whole; None if it is not a finite number from 0 to 2**53.
    """
    # The fast path, since each micro-batch is counted.
    if type(value) is int:
        if 0 <= value <= _MAX_COUNT:
            return value
        return None
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if math.prod(value.shape) != 1:
            return None
        # The batch is in host memory, so no device is waited for.
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    count = float(value)
    if 0 <= count <= _MAX_COUNT:
        return number(count)
    return None


def number(value: Exact) -> int | float:
    """Round an exact sum to a float, or to an int if it is whole.

    For example 123, not 123.0.
    """
    if isinstance(value, int):
        return value
    rounded = float(value)
    if rounded.is_integer():
        return int(rounded)
    return rounded


def total(counts: Iterable[int | float]) -> int | Fraction:
    """Add counts up without rounding."""
    numbers = list(counts)
    whole = sum(numbers)
    if isinstance(whole, int):
        return whole
    return sum(map(Fraction, numbers), start=0)


def parts(exact: Exact) -> list[float]:
    """Split an exact sum into `PARTS` float64 numbers, largest first.

    Raises:
        DataError: they cannot hold it.
    """
    numbers = []
    for _ in range(PARTS):
        numbers.append(float(exact))
        if exact != numbers[-1]:
            exact = Fraction(exact) - Fraction(numbers[-1])
        else:
            exact = 0
    if exact:
        raise DataError(
            f"the counts of a step cannot be added exactly: the largest is {numbers[0]:.3g}, another 2**100 times "
            "smaller; scale what the task's `count` returns, or drop such items"
        )
    return numbers


def describe_count(value: Any) -> str:
    """Describe what `count` returned: `-1`, `nan`, `a tensor of shape [8]`."""
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) != 1:
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Tensor | np.ndarray | np.generic):
        # The batch is in host memory.
        value = value.item()
    if value is None or isinstance(value, PlainNumber):
        return repr(value)
    return f"a {type(value).__name__}"


def first_length(batch: Any) -> int | None:
    """Count the samples of a batch by its first tensor, graphs by `num_graphs`.

    None: it has no tensor.
    """
    graphs = _graphs(batch)
    if graphs is None:
        return next(_lengths(batch, frozenset()), None)
    return graphs


def samples_in(batch: Any, samples: Sequence[Any], expected: int | None = None) -> int | None:
    """Count the samples in a batch that a `collate` may have shortened.

    The first dimension of tensors is the samples. If not of all (time first, packed sequences, graphs), but of one, no
    sample was dropped.

    Args:
        batch: what `collate` returned.
        samples: its argument.
        expected: number of samples requested; None: the length of `samples`, which may be a batch already.

    Returns:
        The number; None if nothing in the batch has a length, or lengths differ and none is that of `samples`.
    """
    expected = len(samples) if expected is None else expected
    graphs = _graphs(batch)
    if graphs is not None:
        return graphs
    if first_length(batch) == expected:
        return expected
    lengths = set(_lengths(batch, frozenset(_ids_inside(samples))))
    if len(lengths) == 1:
        return lengths.pop()
    if expected in lengths:
        return expected
    return None


def _graphs(batch: Any) -> int | None:
    """Return the number of graphs in a batch of graphs; None: it is none.

    The tensors of such a batch have a row per node or edge.
    """
    graphs = getattr(batch, "num_graphs", None)
    if type(graphs) is int:
        return graphs
    return None


def _lengths(value: Any, own: frozenset[int], deep: int = 0) -> Iterator[int]:
    """Yield the first dimension of each tensor, and lengths of lists of sample parts.

    Args:
        own: ids of everything in the samples.
    """
    shape = getattr(value, "shape", None)
    if shape is not None:
        yield from (int(size) for size in tuple(shape)[:1])
        return
    if deep > _MAX_DEPTH:
        return
    if isinstance(value, list | tuple) and value and id(value[0]) in own:
        # A list of samples, or of one field of each sample.
        yield len(value)
        return
    for element in _fields(value):
        yield from _lengths(element, own, deep + 1)


def _fields(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, type):
        return ()
    return getattr(value, "__dict__", {}).values()


def _ids_inside(value: Any, deep: int = 0) -> Iterator[int]:
    """Yield the id of each tensor, string, dict, list and tuple in samples."""
    if getattr(value, "shape", None) or isinstance(value, str | Mapping | list | tuple):
        yield id(value)
    if isinstance(value, Mapping | list | tuple) and deep < _MAX_DEPTH:
        for element in _fields(value):
            yield from _ids_inside(element, deep + 1)
