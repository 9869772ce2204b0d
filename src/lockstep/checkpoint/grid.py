"""Describe how a tensor is cut over a checkpoint's files.

The size of the description does not grow with the ranks.

    grid = grid_of((1000, 8), mesh, placements)     Grid: edges of the slices in each dimension, and their files
    fields = grid.to_json()                         {"cuts": [[[250, 4]], [[8, 1]]], "files": [[0, 4, 1]]}
    for file, offsets, shape in grid.within((240, 0), (20, 8)): ...     the slices that overlap a box

A grid cuts each dimension from one side to the other, as sharding does, so its slices cover the tensor exactly once.
Slices count in row-major order. Runs of equal sizes, and of files with a constant distance, are stored as one. A file
has several slices of a packed tensor: those of a rank that holds its part of each of the joined weights.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["MOST_PARTS", "Grid", "Slice", "grid_of", "runs_of"]

# Number of the file, offsets, shape.
Slice = tuple[int, tuple[int, ...], tuple[int, ...]]
# Start and number of rows that follow each other in a dimension of the full tensor.
Run = tuple[int, int]
# Slices of one tensor in one file: an index cannot make a reader reserve more.
MOST_PARTS = 256


@dataclass(frozen=True, slots=True)
class Grid:
    """The slices of a tensor: the cuts of each dimension, and each slice's file.

    Attributes:
        edges: of each dimension, ascending, from 0 to its size; both, if that is 0.
        files: number of each slice's file, in row-major order.
        parts: most slices of one file.
    """

    edges: tuple[tuple[int, ...], ...]
    files: tuple[int, ...]
    parts: int = field(init=False, compare=False, default=1)
    # Offsets of a slice -> how many of its file come before it, if there are any.
    _earlier: dict[tuple[int, ...], int] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Number the slices of each file."""
        # Nearly every tensor has one slice in a file, whose number is 0.
        if len(set(self.files)) == len(self.files):
            return
        counts = Counter[int]()
        for file, offsets, _ in self.slices():
            if counts[file]:
                self._earlier[offsets] = counts[file]
            counts[file] += 1
        object.__setattr__(self, "parts", max(counts.values()))

    @classmethod
    def whole(cls, shape: Sequence[int], file: int) -> "Grid":
        """Return the grid of one slice."""
        return cls(tuple((0, size) for size in shape), (file,))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return tuple(edges[-1] for edges in self.edges)

    def part_of(self, offsets: tuple[int, ...]) -> int:
        """Return how many slices of its file come before the one at `offsets`."""
        return self._earlier.get(offsets, 0)

    def slices(self) -> Iterator[Slice]:
        """Yield all slices."""
        return self._slices([range(len(edges) - 1) for edges in self.edges])

    def within(self, offsets: Sequence[int], shape: Sequence[int]) -> Iterator[Slice]:
        """Yield the slices that overlap a box.

        It takes a search in each dimension, whatever the number of slices.
        """
        return self._slices(
            [
                range(max(0, bisect_right(edges, begin) - 1), min(bisect_left(edges, begin + count), len(edges) - 1))
                for edges, begin, count in zip(self.edges, offsets, shape, strict=True)
            ]
        )

    def _slices(self, ranges: list[range]) -> Iterator[Slice]:
        counts = [len(edges) - 1 for edges in self.edges]
        for position in product(*ranges):
            number = 0
            for index, count in zip(position, counts, strict=True):
                number = number * count + index
            offsets = tuple(edges[index] for edges, index in zip(self.edges, position, strict=True))
            shape = tuple(edges[index + 1] - edges[index] for edges, index in zip(self.edges, position, strict=True))
            yield self.files[number], offsets, shape

    def to_json(self) -> dict[str, Any]:
        """Return it in runs: [size, count] of the cuts, [first, count, distance] of the files.

        And `parts`, only if a file has several slices.
        """
        cuts = []
        for edges in self.edges:
            cuts.append(_runs([end - begin for begin, end in pairwise(edges)]))
        fields: dict[str, Any] = {"cuts": cuts, "files": _progressions(self.files)}
        if self.parts > 1:
            fields["parts"] = self.parts
        return fields

    @classmethod
    def from_json(cls, cuts: Any, files: Any, most: int, parts: Any = 1) -> "Grid | str":
        """Parse what a file has, without trusting it.

        Args:
            most: number of files.
            parts: most slices of one file.

        Returns:
            The grid, or what is wrong.
        """
        if not _are_rows(cuts, 2, deep=True) or not _are_rows(files, 3):
            return "its cuts or files are not lists of runs"
        if type(parts) is not int or not 1 <= parts <= MOST_PARTS:
            return f"its parts are not a number from 1 to {MOST_PARTS}"
        counts = []
        for dimension in cuts:
            counts.append(sum(count for _, count in dimension))
        slices = math.prod(counts)
        if min([1, *counts]) < 1 or max(slices, sum(count for _, count, _ in files)) > most * parts:
            return "it has no slice, or more than there are files"
        numbers = tuple(start + distance * k for start, count, distance in files for k in range(count))
        if len(numbers) != slices or max(Counter(numbers).values()) > parts:
            return "it does not have one file for each slice"
        # Where the slices of each dimension begin and end.
        edges = []
        for dimension in cuts:
            lengths = [size for size, count in dimension for _ in range(count)]
            edges.append(tuple(accumulate(lengths, initial=0)))
        if any(begin == end and len(dimension) > 2 for dimension in edges for begin, end in pairwise(dimension)):
            return "it has an empty slice"
        return cls(tuple(edges), numbers)


def _are_rows(value: Any, width: int, *, deep: bool = False) -> bool:
    """Whether `value` is a list of rows of `width` whole numbers from 0 on.

    With `deep` it must be a list of such lists.
    """
    if type(value) is not list:
        return False
    if deep:
        return all(_are_rows(rows, width) for rows in value)
    return all(
        type(row) is list and len(row) == width and all(type(n) is int and 0 <= n < 1 << 62 for n in row)
        for row in value
    )


def _runs(sizes: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return runs


def _progressions(numbers: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        start, count, distance = runs[-1] if runs else (0, 0, 0)
        if count == 1 and number > start:
            runs[-1][1:] = [2, number - start]
        elif count > 1 and number == start + count * distance:
            runs[-1][1] += 1
        else:
            runs.append([number, 1, 0])
    return runs


def grid_of(
    shape: Sequence[int], mesh: Tensor, shards: Mapping[int, int], packed: Mapping[int, int] | None = None
) -> Grid:
    """Return the grid of a tensor that is sharded over a mesh.

    Of several copies of a part the first one is in a file.

    Args:
        shape: of the full tensor, which has elements.
        mesh: the ranks, whose numbers are those of the files.
        shards: dimension of the mesh -> dimension of the tensor that it cuts, in the order of cutting; it holds copies
            along the others.
        packed: dimension of the mesh -> number of joined weights, if it cuts each of them.
    """
    # The mesh's dimensions that cut each dimension of the tensor, in the order of cutting.
    axes: list[list[int]] = []
    for dim in range(len(shape)):
        axes.append([axis for axis, cut in shards.items() if cut == dim])
    edges = []
    holders = []
    for size, own in zip(shape, axes, strict=True):
        cuts = [(int(mesh.shape[axis]), (packed or {}).get(axis, 1)) for axis in own]
        starts = []
        for number, at in enumerate(product(*(range(ranks) for ranks, _ in cuts))):
            # A rank without a row writes no slice.
            starts += [(start, number) for start, count in runs_of(size, cuts, at) if count]
        starts.sort()
        holders.append([number for _, number in starts])
        edges.append((*(start for start, _ in starts), size))
    ranks = mesh.numpy()
    # Along the other dimensions are copies: keep the first one.
    ranks = ranks[tuple(slice(None) if axis in shards else 0 for axis in range(ranks.ndim))]
    order = sorted(shards)
    # Bring the ranks into the order of the slices, which is row-major.
    ranks = ranks.transpose([order.index(axis) for own in axes for axis in own])
    ranks = ranks.reshape([math.prod(mesh.shape[axis] for axis in own) for own in axes])
    return Grid(tuple(edges), tuple(ranks[np.ix_(*holders)].reshape(-1).tolist()))


def runs_of(size: int, cuts: Sequence[tuple[int, int]], at: Sequence[int]) -> list[Run]:
    """Return the rows of a dimension that a rank holds, in ascending order.

    Args:
        size: of the dimension.
        cuts: (ranks, joined weights) of each cut, in the order of cutting: every weight is cut into as many pieces as
            there are ranks; 1 for a dimension that is one weight.
        at: the rank's number in each cut.

    Returns:
        The fewest runs; one without rows if the rank has none.
    """
    runs = [(0, size)]
    for (ranks, weights), index in zip(cuts, at, strict=True):
        pieces: list[Run] = []
        for weight in range(weights):
            pieces += _chunk(_chunk(runs, weights, weight), ranks, index)
        runs = _join(pieces)
    return runs


def _join(runs: list[Run]) -> list[Run]:
    """Join the runs that touch, and leave out those without rows; one of these if there is no other."""
    joined: list[Run] = []
    for start, count in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        elif count:
            joined.append((start, count))
    return joined or runs[:1]


def _chunk(runs: list[Run], pieces: int, index: int) -> list[Run]:
    """Return a piece of the rows as torch.chunk cuts: ceil(n / pieces) rows each, the last with fewer or none."""
    rows = sum(count for _, count in runs)
    step = math.ceil(rows / pieces)
    low = min(index * step, rows)
    high = min(low + step, rows)
    chunk: list[Run] = []
    before = 0
    for start, count in runs:
        first = max(low - before, 0)
        last = min(high - before, count)
        if first < last:
            chunk.append((start + first, last - first))
        before += count
    # Where its rows would begin.
    return chunk or [(sum(runs[-1]), 0)]
