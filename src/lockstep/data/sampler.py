"""Orders of the training samples: shuffled by arithmetic, or drawn per epoch by a sampler.

    order = order_of(task, len(dataset), seed=0)    # Shuffled if the task has no order
    epochs, samples = order.at(start, stop)
    order.size                                      # samples in an epoch

`Shuffled` and `Sequential` compute any position at once. `SamplerOrder` lists a torch sampler's epoch e with every
generator seeded by (seed, "order", e), so that each rank has the same list, and a resume needs no earlier epochs; two
epochs stay in memory. `CheckedOrder` validates a user's own order.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Sized
from typing import Any, Protocol, TypeAlias, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lockstep.data.loader import blame, generators_kept, seed_everything, seeded_alike
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.seeds import derive
from lockstep.task import Order, Task

__all__ = [
    "CACHED_EPOCHS",
    "Begun",
    "EpochOrder",
    "Indices",
    "Sequential",
    "Shuffled",
    "SizedOrder",
    "check_indices",
    "check_size",
    "draw_order",
    "draw_seeded",
    "number_repeats",
    "order_from",
    "order_of",
    "permute",
    "permute_groups",
    "sampler_length",
    "within",
]


Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]
_T = TypeVar("_T")

# Four rounds pass the tests of uniformity; eight cost little more.
_ROUNDS = 8
# A Feistel network of fewer values has visible structure.
_SMALL = 64
# Halves of up to this many values get a table of all images, even for a few indices.
_SMALL_HALF = 64
# Number of positions of an order that are checked.
_CHECKED_POSITIONS = 256
# Halves and positions stay within 64 bits.
_MAX_SIZE = 2**62


@final
class Shuffled:
    """A new permutation of the samples in every epoch.

    Args:
        size: samples in an epoch, 1 to 2**62.
        seed: the run's seed; another seed gives another order.

    Raises:
        DataError: there are no samples, or more than 2**62.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = check_size(size)
        self.seed = seed

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of the positions start .. stop - 1.

        Returns:
            Two int64 arrays of shape [stop - start].

        Raises:
            ValueError: start is negative, or stop is before start.
        """
        epochs, samples = _places(self.size, start, stop)
        offset = 0
        # One pass per epoch that the range touches.
        while offset < stop - start:
            epoch, position = divmod(start + offset, self.size)
            end = min(offset + self.size - position, stop - start)
            samples[offset:end] = permute(samples[offset:end], self.size, derive(self.seed, "order", epoch))
            offset = end
        return epochs, samples

    def of(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return epochs and samples of any positions. int64 [positions] each"""
        epochs, positions_in_epoch = np.divmod(positions, self.size)
        samples = np.empty_like(positions_in_epoch)
        for epoch in np.unique(epochs).tolist():
            mask = epochs == epoch
            samples[mask] = permute(positions_in_epoch[mask], self.size, derive(self.seed, "order", epoch))
        return epochs, samples


@final
class Sequential:
    """The dataset's own order in every epoch, for evaluation. Arguments and errors as in `Shuffled`."""

    def __init__(self, size: int) -> None:
        self.size = check_size(size)

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of the positions start .. stop - 1.

        Returns:
            Two int64 arrays of shape [stop - start].

        Raises:
            ValueError: start is negative, or stop is before start.
        """
        return _places(self.size, start, stop)


@final
class Begun:
    """The first samples of each epoch of another order, as one endless stream.

    Args:
        order: the whole order.
        size: its samples in an epoch.
        count: samples in an epoch here, 1 to `size`.
    """

    def __init__(self, order: Order, size: int, count: int) -> None:
        self.size = check_size(count)
        self._order = order
        self._whole = size

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of the positions start .. stop - 1.

        Returns:
            Two int64 arrays of shape [stop - start].

        Raises:
            ValueError: start is negative, or stop is before start.
        """
        _places(1, start, min(start, stop))
        epochs = np.empty(stop - start, np.int64)
        samples = np.empty(stop - start, np.int64)
        offset = 0
        # One pass per epoch that the range touches.
        while offset < stop - start:
            epoch, position = divmod(start + offset, self.size)
            end = min(offset + self.size - position, stop - start)
            begin = epoch * self._whole + position
            epochs[offset:end], samples[offset:end] = self._order.at(begin, begin + end - offset)
            offset = end
        return epochs, samples


def _check_order(order: Order, samples: int) -> None:
    """Check that an order gives its first positions the same samples in another request.

    Args:
        samples: in an epoch.

    Raises:
        DataError: a position's sample depends on which positions are requested, or how often.
    """
    count = min(samples, _CHECKED_POSITIONS)
    full = order.at(0, count)
    tail = order.at(count // 2, count)
    if not all(np.array_equal(before[count // 2 :], after) for before, after in zip(full, tail, strict=True)):
        raise DataError(
            f"the task's `order` returned other samples for the positions {count // 2} to {count - 1} on a second "
            "call; the sample at a position must depend on the position and the seed alone"
        )


def permute(indices: Indices, size: int, key: int) -> Indices:
    """Map indices by the permutation of 0 .. size - 1 that `key` selects.

    Uses a few temporary arrays of the length of `indices`, for any size.

    Args:
        indices: int64, each in 0 .. size - 1.
        size: of the permutation.
        key: 64 bits.

    Returns:
        int64, the shape of `indices`.
    """
    if size < _SMALL:
        return _table(size, key)[indices]
    half = ((size - 1).bit_length() + 1) // 2
    keys = _stream(_ROUNDS, key)
    images = _feistel(indices.astype(np.uint64), half, keys)
    outside = np.flatnonzero(images >= size)
    # The network's domain is less than four times the size: repeating it leads back inside after a few steps (cycle
    # walking).
    while outside.size:
        walked = _feistel(images[outside], half, keys)
        images[outside] = walked
        outside = outside[walked >= size]
    return images.view(np.int64)


def permute_groups(indices: Indices, groups: Indices, sizes: Sequence[int], keys: Sequence[int]) -> Indices:
    """Map indices by a permutation for each group, all groups at once.

    Each group is permuted as by `permute`.

    Args:
        indices: int64, each below the size of its group.
        groups: the group of each index, 0 or more; int64, the shape of `indices`.
        sizes: of each group.
        keys: of each group.

    Returns:
        int64, the shape of `indices`.
    """
    images = np.empty_like(indices)
    small = []
    for group, size in enumerate(sizes):
        if size < _SMALL:
            small.append(group)
    for group in small:
        mask = groups == group
        images[mask] = _table(sizes[group], keys[group])[indices[mask]]
    if small:
        remaining = np.flatnonzero(~np.isin(groups, small))
    else:
        remaining = np.arange(len(indices))
    values = indices[remaining].astype(np.uint64)
    groups = groups[remaining]
    halves = np.array([((size - 1).bit_length() + 1) // 2 for size in sizes], dtype=np.uint64)[groups]
    words = np.array([_stream(_ROUNDS, key) for key in keys]).reshape(len(keys), _ROUNDS).T[:, groups]
    limits = np.array(sizes, dtype=np.uint64)[groups]
    walking = np.arange(len(remaining))
    while walking.size:
        values[walking] = _feistel(values[walking], halves[walking], words[:, walking])
        walking = walking[values[walking] >= limits[walking]]
    images[remaining] = values.view(np.int64)
    return images


def _feistel(values: _Words, half: int | _Words, keys: _Words) -> _Words:
    """Apply a bijection of the integers of 2 * half bits, one round per key."""
    shift = np.uint64(half) if isinstance(half, int) else half
    mask = (np.uint64(1) << shift) - np.uint64(1)
    upper = values >> shift
    lower = values & mask
    # There are fewer halves than values, so look their images up.
    if isinstance(half, int) and 1 << half <= max(_SMALL_HALF, len(values)):
        for images in _mix(np.arange(1 << half, dtype=np.uint64) ^ keys[:, None]) & mask:
            upper, lower = lower, upper ^ images[lower]
        return (upper << shift) | lower
    for key in keys:
        upper, lower = lower, upper ^ (_mix(lower ^ key) & mask)
    return (upper << shift) | lower


def _table(size: int, key: int) -> Indices:
    """Return a whole small permutation: the argsort of `size` random words.

    The words are distinct, being images of distinct counters under a bijection, so no order is favoured.
    """
    return np.argsort(_stream(size, key), kind="stable").astype(np.int64)


def _stream(count: int, key: int) -> _Words:
    """Return the first `count` words of splitmix64 started at `key`."""
    # The constants below are those of splitmix64 (Steele, Lea and Flood, 2014).
    counters = np.arange(1, count + 1, dtype=np.uint64)
    return _mix(counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & (2**64 - 1)))


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _places(size: int, start: int, stop: int) -> tuple[Indices, Indices]:
    if not 0 <= start <= stop:
        raise ValueError(f"positions {start} to {stop}: a range starts at 0 or later and does not end before its start")
    epochs, positions = np.divmod(np.arange(start, stop, dtype=np.int64), size)
    return epochs, positions


def check_size(size: int) -> int:
    """Return the number of samples of a dataset.

    Raises DataError if it is 0 or above 2**62.
    """
    if not 0 < size <= _MAX_SIZE:
        raise DataError(f"--dataset-name: the dataset has {size} samples; it must have 1 to 2**62")
    return size


# A step may span two epochs.
CACHED_EPOCHS = 2
# Bits of an epoch's number; the higher bits count the repeats of a sample.
_REPEAT = 32


class SizedOrder(Order, Protocol):
    """An order with a known number of samples in an epoch."""

    @property
    def size(self) -> int:
        """Samples in an epoch."""


class EpochOrder(ABC):
    """An order whose epochs are lists, drawn when one of their positions is requested.

    Args:
        size: samples in an epoch.
        samples: of the dataset; indices are below it.
    """

    def __init__(self, size: int, samples: int) -> None:
        self._size = size
        self._samples = samples
        self._cache: dict[int, tuple[Indices, Indices]] = {}

    @property
    def size(self) -> int:
        """Samples in an epoch."""
        return self._size

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of the positions start .. stop - 1.

        If an epoch has a sample several times, each further time has its own epoch number: an augmentation's random
        numbers are drawn by (epoch, sample), and so differ each time.

        Returns:
            Two int64 arrays of shape [stop - start].

        Raises:
            DataError: an epoch cannot be drawn, or is invalid.
        """
        epochs, positions = np.divmod(np.arange(start, stop, dtype=np.int64), self._size)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            mask = epochs == epoch
            indices, repeats = self._cached_epoch(epoch)
            samples[mask] = indices[positions[mask]]
            if repeats.size:
                epochs[mask] = epoch + (repeats[positions[mask]] << _REPEAT)
        return epochs, samples

    def _cached_epoch(self, epoch: int) -> tuple[Indices, Indices]:
        if epoch not in self._cache:
            while len(self._cache) >= CACHED_EPOCHS:
                self._cache.pop(next(iter(self._cache)))
            indices = self.draw(epoch)
            check_indices(indices, self._samples, f"epoch {epoch} of `order`")
            self._cache[epoch] = indices, _repeats(indices, self._samples)
        return self._cache[epoch]

    @abstractmethod
    def draw(self, epoch: int) -> Indices:
        """Draw an epoch: int64 of shape [size]."""


@final
class SamplerOrder(EpochOrder):
    """The order of a torch sampler, or of any sized iterable of indices.

    Args:
        sampler: its `generator`, and that of a sampler inside it, is seeded; its `set_epoch` is called.
        samples: of the dataset.
        seed: the run's.

    Raises:
        ConfigError: it is not a sampler of single indices for one process.
        DataError: it draws different indices under the same seed.
    """

    def __init__(self, sampler: Any, samples: int, seed: int) -> None:
        super().__init__(sampler_length(sampler), samples)
        self._sampler = sampler
        self._seed = seed
        if not np.array_equal(self.draw(0), self._cached_epoch(0)[0]):
            raise DataError(
                f"the sampler {_type_name(sampler)} of `order` yields other indices under the same seed; draw "
                "from torch's default generator, numpy's or random's, or from its attribute `generator` on the CPU"
            )

    def draw(self, epoch: int) -> Indices:
        """Draw an epoch under its seed; restore all generators."""
        return draw_seeded(self._sampler, self._seed, epoch, lambda sampler: self._list_epoch(epoch))

    def _list_epoch(self, epoch: int) -> Indices:
        name = _type_name(self._sampler)
        indices = np.fromiter(map(_index, self._sampler), np.int64)
        if len(indices) != self.size:
            raise DataError(
                f"the sampler {name} of `order` yields {len(indices)} indices in epoch {epoch}, but its length is "
                f"{self.size}; yield as many in every epoch as `__len__` returns"
            )
        return indices


def draw_seeded(sampler: Any, seed: int, epoch: int, read: Callable[[Any], _T]) -> _T:
    """Draw an epoch of a sampler under the epoch's seed; restore all generators.

    Args:
        sampler: its `generator`, and that of a sampler inside it, is seeded; its `set_epoch` is called.
        seed: the run's.
        read: reads it, once.

    Raises:
        DataError: reading it fails.
    """
    generators = []
    for wrapped in map(_generator, within(sampler)):
        if wrapped is not None:
            generators.append(wrapped)
    states = [wrapped.get_state() for wrapped in generators]
    key = derive(seed, "order", epoch)
    try:
        with generators_kept():
            seed_everything(key)
            for generator in generators:
                generator.manual_seed(key)
            for wrapped in within(sampler):
                if callable(getattr(wrapped, "set_epoch", None)):
                    wrapped.set_epoch(epoch)
            return read(sampler)
    except LockstepError:
        raise
    except Exception as error:
        raise blame("order", error, f"epoch {epoch}") from error
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@final
class CheckedOrder:
    """A user's own order, with every result checked.

    Args:
        inner: has `at(start, stop)`; its length, if any, is that of an epoch.
        samples: of the dataset.

    Raises:
        ConfigError: its epochs have no samples.
    """

    def __init__(self, inner: Order, samples: int) -> None:
        self._inner = inner
        self._samples = samples
        self.size = len(inner) if isinstance(inner, Sized) else samples
        if self.size < 1:
            raise ConfigError("`order` has length 0; an epoch needs at least one sample")

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of the positions start .. stop - 1.

        Returns:
            Two int64 arrays of shape [stop - start].

        Raises:
            DataError: the user's `at` fails, or returns something else.
        """
        span = f"the positions {start} to {stop - 1}"
        try:
            result = self._inner.at(start, stop)
        except LockstepError:
            raise
        except Exception as error:
            raise blame("order", error, span) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise DataError(
                f"`at` of `order` returned {_type_name(result)} for {span}; return two arrays, the epochs and samples"
            )
        epochs, samples = (_integers(array, stop - start, span) for array in result)
        check_indices(samples, self._samples, f"`at` of `order` for {span}")
        return epochs, samples


def draw_order(task: Task, samples: int, seed: int) -> Any:
    """Return what the task's `order` returns.

    Args:
        task: its `order` is called.
        samples: of the training set.
        seed: the run's; seeds random draws within `order`, which may make the dataset again, as for the dataset itself.

    Raises:
        DataError: it fails.
    """
    with seeded_alike(seed):
        try:
            return task.order(samples, seed)
        except LockstepError:
            raise
        except Exception as error:
            raise blame("order", error, f"order({samples}, {seed})") from error


def order_of(task: Task, samples: int, seed: int) -> SizedOrder:
    """Create the order of a task's training set.

    Raises the errors of `draw_order` and `order_from`.
    """
    return order_from(draw_order(task, samples, seed), samples, seed)


def order_from(order: Any, samples: int, seed: int) -> SizedOrder:
    """Convert a user's order: None, a sampler, or an object with `at(start, stop)`.

    Raises:
        ConfigError: it is something else.
        DataError: it is invalid.
    """
    if order is None:
        return Shuffled(samples, seed)
    if isinstance(order, EpochOrder):
        return order
    if hasattr(order, "at") and not isinstance(order, type):
        checked = CheckedOrder(order, samples)
        _check_order(checked, samples)
        return checked
    return SamplerOrder(order, samples, seed)


def within(sampler: Any) -> list[Any]:
    """Return the sampler, and the one inside it if it wraps another."""
    inner = getattr(sampler, "sampler", None)
    if inner is None:
        return [sampler]
    return [sampler, inner]


def check_indices(indices: Indices, samples: int, source: str) -> None:
    """Raise DataError, in one line, for an index outside the dataset."""
    if indices.size and not (indices.min() >= 0 and indices.max() < samples):
        bad = int(indices[(indices < 0) | (indices >= samples)][0])
        raise DataError(
            f"{source}: the index {bad} is not in the dataset, which has {samples} samples, 0 to {samples - 1}"
        )


def sampler_length(sampler: Any, *, lists: bool = False) -> int:
    """Return the length of an epoch.

    Args:
        lists: it is a batch sampler.

    Raises:
        ConfigError: it is not a sampler for one process, or one of lists though `lists` is False.
    """
    name = _type_name(sampler)
    start = f"`order` returned {name}"
    if isinstance(sampler, type) or not hasattr(sampler, "__iter__"):
        raise ConfigError(
            f"{start}: return a torch Sampler, an object with at(start, stop), or None for a shuffle in each epoch"
        )
    if isinstance(sampler, DataLoader):
        raise ConfigError(f"{start}: return its sampler alone, loader.sampler")
    if any(isinstance(wrapped, DistributedSampler) or hasattr(wrapped, "num_replicas") for wrapped in within(sampler)):
        raise ConfigError(
            f"{start}, which draws one rank's share, but lockstep itself splits the samples among ranks; return the "
            "sampler of one process, or None for a shuffle in each epoch"
        )
    if isinstance(sampler, BatchSampler) and not lists:
        raise ConfigError(
            f"{start}, which yields lists; return the sampler inside it: --batch-size and --micro-batch-size cut a step"
        )
    try:
        size = len(sampler)
    except TypeError as error:
        raise ConfigError(f"{start}, which has no length; define `__len__`, the indices in an epoch") from error
    if size < 1:
        raise ConfigError(f"{start} of length 0; an epoch needs at least one sample")
    return size


def _index(value: Any) -> int:
    if isinstance(value, list | tuple):
        raise ConfigError(
            "the sampler of `order` yields lists; yield single indices: --batch-size and --micro-batch-size cut a step"
        )
    return operator.index(value)


def _integers(value: Any, count: int, span: str) -> Indices:
    """Convert to an array of `count` integers. Raises DataError for anything else."""
    array = np.asarray(value)
    if array.shape != (count,) or (count and array.dtype.kind not in "iu"):
        raise DataError(
            f"`at` of `order` returned an array of shape {list(array.shape)} and type {array.dtype} for "
            f"{span}: return two integer arrays of shape [{count}], the epochs and the samples"
        )
    return array.astype(np.int64, copy=False)


def _repeats(indices: Indices, samples: int) -> Indices:
    """Count each place's earlier occurrences of its sample; empty if there are no repeats."""
    if len(indices) <= samples and np.bincount(indices, minlength=1).max(initial=0) <= 1:
        return np.empty(0, np.int64)
    by_sample = np.argsort(indices, kind="stable")
    ordered = indices[by_sample]
    # The position at which each sample's run begins.
    run_starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    repeats = np.empty_like(indices)
    repeats[by_sample] = np.arange(len(indices)) - np.repeat(run_starts, np.diff(np.r_[run_starts, len(indices)]))
    return repeats


def number_repeats(epochs: Indices, indices: Indices, samples: int) -> Indices:
    """Give each further occurrence of a sample in an epoch its own epoch number.

    See `EpochOrder.at`.
    """
    repeats = _repeats(indices, samples)
    if repeats.size:
        return epochs + (repeats << _REPEAT)
    return epochs


def _generator(sampler: Any) -> torch.Generator | None:
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        return generator
    return None


def _type_name(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__ + " itself"
    return type(value).__name__
