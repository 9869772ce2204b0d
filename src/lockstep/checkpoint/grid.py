"""Describe how a tensor is cut over a checkpoint's files.

The size of the description does not grow with the ranks.

    grid = grid_of((1000, 8), mesh, placements)     Grid: edges of the slices in each dimension, and their files
    fields = grid.to_json()                         {"cuts": [[[250, 4]], [[8, 1]]], "files": [[0, 4, 1]]}
    for file, offsets, shape in grid.within((240, 0), (20, 8)): ...     the slices that overlap a box

A grid cuts each dimension once, as sharding does, so its slices cover the tensor exactly once. Slices count in
row-major order. Runs of equal sizes, and of files with a constant distance, are stored as one.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["Grid", "Slice", "grid_of"]

# Number of the file, offsets, shape.
Slice = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Grid:
    """The slices of a tensor: the cuts of each dimension, and each slice's file.

    Attributes:
        edges: of each dimension, ascending, from 0 to its size; both, if that is 0.
        files: number of each slice's file, in row-major order.
    """

    edges: tuple[tuple[int, ...], ...]
    files: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], file: int) -> "Grid":
        """Return the grid of one slice."""
        return cls(tuple((0, size) for size in shape), (file,))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return tuple(edges[-1] for edges in self.edges)

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
        """Return it in runs: [size, count] of the cuts, [first, count, distance] of the files."""
        cuts = []
        for edges in self.edges:
            cuts.append(_runs([end - begin for begin, end in pairwise(edges)]))
        return {"cuts": cuts, "files": _progressions(self.files)}

    @classmethod
    def from_json(cls, cuts: Any, files: Any, most: int) -> "Grid | str":
        """Parse what a file has, without trusting it.

        Args:
            most: number of files, so of slices too.

        Returns:
            The grid, or what is wrong.
        """
        if not _are_rows(cuts, 2, deep=True) or not _are_rows(files, 3):
            return "its cuts or files are not lists of runs"
        counts = []
        for dimension in cuts:
            counts.append(sum(count for _, count in dimension))
        if min([1, *counts]) < 1 or math.prod(counts) > most or sum(count for _, count, _ in files) > most:
            return "it has no slice, or more than there are files"
        numbers = tuple(start + distance * k for start, count, distance in files for k in range(count))
        if len(numbers) != math.prod(counts) or len(set(numbers)) != len(numbers):
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


def grid_of(shape: Sequence[int], mesh: Tensor, shards: Mapping[int, int]) -> Grid:
    """Return the grid of a tensor that is sharded over a mesh.

    Of several copies of a part the first one is in a file.

    Args:
        shape: of the full tensor, which has elements.
        mesh: the ranks, whose numbers are those of the files.
        shards: dimension of the mesh -> dimension of the tensor that it cuts, in the order of cutting; it holds copies
            along the others.
    """
    # The mesh's dimensions that cut each dimension of the tensor, in the order of cutting.
    axes: list[list[int]] = []
    for dim in range(len(shape)):
        axes.append([axis for axis, cut in shards.items() if cut == dim])
    edges = []
    kept = []
    for size, mine in zip(shape, axes, strict=True):
        sizes = [size]
        for axis in mine:
            sizes = [chunk for extent in sizes for chunk in _chunks(extent, mesh.shape[axis])]
        # A rank without a row writes no slice.
        kept.append([index for index, chunk in enumerate(sizes) if chunk])
        edges.append(tuple(accumulate((chunk for chunk in sizes if chunk), initial=0)))
    ranks = mesh.numpy()
    # Along the other dimensions are copies: keep the first one.
    ranks = ranks[tuple(slice(None) if axis in shards else 0 for axis in range(ranks.ndim))]
    order = sorted(shards)
    # Bring the ranks into the order of the slices, which is row-major.
    ranks = ranks.transpose([order.index(axis) for mine in axes for axis in mine])
    ranks = ranks.reshape([math.prod(mesh.shape[axis] for axis in mine) for mine in axes])
    return Grid(tuple(edges), tuple(ranks[np.ix_(*kept)].reshape(-1).tolist()))


def _chunks(size: int, ranks: int) -> list[int]:
    """Return the rows of each rank by torch.chunk: the last ranks have fewer."""
    rows = math.ceil(size / ranks)
    return [max(0, min(rows, size - rank * rows)) for rank in range(ranks)]
