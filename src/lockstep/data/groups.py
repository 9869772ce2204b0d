"""Group samples of like length into micro-batches of at most so many tokens, or as a batch sampler does.

    groups = TokenGroups(lengths, bound=16384, seed=0)      # --micro-batch-tokens 16384
    epochs, numbers = groups.at(start, stop)                # a position is a micro-batch
    groups.samples(epoch, number)                           # its samples

A run with groups counts its positions in micro-batches: a step is M of them, whatever number of samples each has. The
samples are sorted by length, rounded up to 5 significant bits, and cut so that the longest times the number of samples
stays within the bound. Samples of one rounded length change places in each epoch, and the groups are shuffled: an epoch
always has the same number of groups, and each sample once. Apart from one sorted list of the samples all is arithmetic.
"""

from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lockstep.data.sampler import (
    CACHED_EPOCHS,
    Indices,
    Sequential,
    Shuffled,
    check_indices,
    draw_seeded,
    number_repeats,
    permute,
    sampler_length,
)
from lockstep.errors import DataError
from lockstep.seeds import derive

__all__ = ["GroupOrder", "SampledGroups", "TokenGroups", "padding"]

_BITS = 5  # significant bits of a rounded length: at most 1/16 longer, and half of that on average


@runtime_checkable
class GroupOrder(Protocol):
    """An order whose positions are micro-batches."""

    @property
    def size(self) -> int:
        """Micro-batches in an epoch."""

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and numbers of the micro-batches at the positions start .. stop - 1. int64 [stop - start]"""

    def samples(self, epoch: int, number: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of a micro-batch: int64 [samples] each."""


@final
class TokenGroups:
    """Micro-batches of at most `bound` tokens, padding included.

    Args:
        lengths: tokens of each sample, above 0.
        bound: the most tokens of a micro-batch: its longest sample times the number of its samples.
        seed: the run's.

    Attributes:
        size: micro-batches in an epoch.

    Raises:
        DataError: there are no samples, or one is longer than `bound`.
    """

    def __init__(self, lengths: NDArray[Any], bound: int, seed: int) -> None:
        lengths = np.asarray(lengths, dtype=np.int64)
        if not len(lengths) or lengths.min() < 1:
            empty = (
                f"sample {int(lengths.argmin())} has length {lengths.min()}" if len(lengths) else "it has no samples"
            )
            raise DataError(f"--micro-batch-tokens: the training set cannot be grouped by length: {empty}")
        if lengths.max() > bound:
            raise DataError(
                f"--micro-batch-tokens {bound}: sample {int(lengths.argmax())} has {lengths.max()} tokens; raise it, "
                "or leave out or cut longer samples"
            )
        rounded = np.minimum(round_up(lengths), bound)
        self._sorted = np.argsort(-rounded, kind="stable")
        descending = rounded[self._sorted]
        changes = np.flatnonzero(np.diff(descending)) + 1
        self._classes = np.concatenate([[0], changes, [len(lengths)]])  # where each rounded length begins
        self._cuts = _cut(descending, bound)
        self.size = len(self._cuts) - 1
        self._seed, self._order = seed, Shuffled(self.size, seed)

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and numbers of the micro-batches at the positions start .. stop - 1. int64 [stop - start]"""
        return self._order.at(start, stop)

    def samples(self, epoch: int, number: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of a micro-batch, the longest first: int64 [samples] each."""
        places = np.arange(self._cuts[number], self._cuts[number + 1])
        classes = np.searchsorted(self._classes, places, side="right") - 1
        for each in np.unique(classes).tolist():
            begin, size = int(self._classes[each]), int(self._classes[each + 1] - self._classes[each])
            own = classes == each
            places[own] = begin + permute(places[own] - begin, size, derive(self._seed, "group", epoch, each))
        return np.full(len(places), epoch), self._sorted[places]


@final
class SampledGroups:
    """The lists of a batch sampler as micro-batches; two epochs stay in memory.

    Args:
        sampler: yields lists of sample indices; seeded as `SamplerOrder` seeds a sampler.
        samples: of the dataset.
        seed: the run's.

    Attributes:
        size: lists in an epoch.

    Raises:
        ConfigError: it has no length.
        DataError: it draws different lists under the same seed, or invalid ones.
    """

    def __init__(self, sampler: Any, samples: int, seed: int) -> None:
        self._sampler, self._samples, self._seed = sampler, samples, seed
        self._epochs: dict[int, _Lists] = {}
        self.size = sampler_length(sampler, lists=True)
        first, again = self._draw(0), self._draw(0)
        if not (np.array_equal(first.indices, again.indices) and np.array_equal(first.starts, again.starts)):
            raise DataError(
                f"the batch sampler {type(sampler).__name__} of `order` yields other lists under the same seed; draw "
                "from torch's default generator, numpy's or random's, or from its attribute `generator` on the CPU"
            )

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and numbers of the micro-batches at the positions start .. stop - 1. int64 [stop - start]"""
        return Sequential(self.size).at(start, stop)

    def samples(self, epoch: int, number: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of a micro-batch: int64 [samples] each."""
        if epoch not in self._epochs:
            while len(self._epochs) >= CACHED_EPOCHS:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = self._draw(epoch)
        lists = self._epochs[epoch]
        span = slice(lists.starts[number], lists.starts[number + 1])
        return lists.epochs[span], lists.indices[span]

    def _draw(self, epoch: int) -> "_Lists":
        name = type(self._sampler).__name__
        lists = draw_seeded(self._sampler, self._seed, epoch, lambda sampler: [list(each) for each in sampler])
        if len(lists) != self.size or not all(lists):
            lengths = f"{len(lists)} lists" if all(lists) else "an empty list"
            raise DataError(
                f"the batch sampler {name} of `order` yields {lengths} in epoch {epoch}, but its length is "
                f"{self.size}; yield as many in every epoch as `__len__` returns, each with a sample"
            )
        indices = np.array([index for each in lists for index in each], dtype=np.int64)
        check_indices(indices, self._samples, f"epoch {epoch} of `order`")
        starts = np.cumsum([0, *map(len, lists)])
        return _Lists(starts, indices, number_repeats(np.full(len(indices), epoch), indices, self._samples))


class _Lists(NamedTuple):
    """An epoch of a batch sampler: where each list starts, and the samples and their epochs."""

    starts: Indices
    indices: Indices
    epochs: Indices


def round_up(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round up to `_BITS` significant bits."""
    shift = np.maximum(np.frexp(lengths)[1] - _BITS, 0)
    rounded: NDArray[np.int64] = -(-lengths >> shift) << shift
    return rounded


def _cut(descending: NDArray[np.int64], bound: int) -> NDArray[np.int64]:
    """Cut lengths in descending order into groups within the bound; return the start of each, and the end."""
    cuts = [0]
    while cuts[-1] < len(descending):
        most = max(1, bound // int(descending[cuts[-1]]))
        cuts.append(min(cuts[-1] + most, len(descending)))
    return np.array(cuts, dtype=np.int64)


def padding(groups: TokenGroups, lengths: NDArray[Any]) -> float:
    """Return the share of padding in an epoch's tokens."""
    lengths = np.asarray(lengths, dtype=np.int64)
    own = [lengths[groups.samples(0, number)[1]] for number in range(groups.size)]
    return 1.0 - float(lengths.sum()) / sum(int(each.max()) * len(each) for each in own)
