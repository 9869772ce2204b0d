"""Orders that are drawn an epoch at a time: torch samplers, and what a task's own `order` gives.

    order = order_of(task, len(dataset), seed=0)    # Shuffled where the task says nothing
    epochs, samples = order.at(start, stop)
    order.size                                      # samples in an epoch

A sampler's epoch e is what it yields with every generator seeded by (seed, "order", e), so that each rank has the same
list, and a resume has it without drawing those before. Two epochs are kept in memory.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Any, Protocol, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lockstep.data.loader import blamed, generators_kept, seed_everything
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.seeds import derive
from lockstep.task import Order, Task

__all__ = [
    "Begun",
    "CheckedOrder",
    "EpochOrder",
    "Indices",
    "SamplerOrder",
    "Sequential",
    "Shuffled",
    "SizedOrder",
    "order_from",
    "order_of",
    "permute",
    "within",
]


Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

_ROUNDS = 8  # four rounds already pass the tests of uniformity; twice that costs little
_SMALL = 64  # a Feistel network of so few values has visible structure
_TRIED = 256  # positions of an order that is tried
_LARGEST = 2**62  # the halves and the positions stay inside 64 bits


@final
class Shuffled:
    """A fresh permutation of the samples in every epoch.

    Args:
        size: samples in an epoch, 1 to 2**62.
        seed: the run's seed; another seed is another order.

    Raises:
        DataError: there are no samples, or more than 2**62.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = _checked(size)
        self.seed = seed

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Epochs and samples, two int64 arrays of shape [stop - start], of the positions start .. stop - 1.

        Raises:
            ValueError: start is negative, or stop comes before start.
        """
        epochs, places = _places(self.size, start, stop)
        samples = np.empty_like(places)
        done = 0
        while done < len(places):  # one turn per epoch that the range touches
            epoch, place = int(epochs[done]), int(places[done])
            end = min(done + self.size - place, len(places))
            samples[done:end] = permute(places[done:end], self.size, derive(self.seed, "order", epoch))
            done = end
        return epochs, samples


@final
class Sequential:
    """Every epoch in the order of the dataset, as an evaluation reads it. Arguments and errors as in `Shuffled`."""

    def __init__(self, size: int) -> None:
        self.size = _checked(size)

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Epochs and samples, two int64 arrays of shape [stop - start], of the positions start .. stop - 1.

        Raises:
            ValueError: start is negative, or stop comes before start.
        """
        return _places(self.size, start, stop)


@final
class Begun:
    """Of every epoch of another order the first samples alone, as one endless stream without the rest.

    Args:
        order: the whole one.
        size: its samples in an epoch.
        kept: how many of them an epoch has here, 1 to `size`.
    """

    def __init__(self, order: Order, size: int, kept: int) -> None:
        self.size = _checked(kept)
        self._order, self._whole = order, size

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Epochs and samples, two int64 arrays of shape [stop - start], of the positions start .. stop - 1.

        Raises:
            ValueError: start is negative, or stop comes before start.
        """
        _places(1, start, min(start, stop))
        epochs, samples = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        done = 0
        while done < stop - start:  # one turn per epoch that the range touches
            epoch, place = divmod(start + done, self.size)
            end = min(done + self.size - place, stop - start)
            begin = epoch * self._whole + place
            epochs[done:end], samples[done:end] = self._order.at(begin, begin + end - done)
            done = end
        return epochs, samples


def _check_order(order: Order, samples: int) -> None:
    """Try an order on its first positions: asked in another way, it must give the same.

    Args:
        samples: of an epoch.

    Raises:
        DataError: a position's sample depends on which positions were asked for, or how often.
    """
    count = min(samples, _TRIED)
    whole = order.at(0, count)
    tail = order.at(count // 2, count)
    if not all(np.array_equal(one[count // 2 :], other) for one, other in zip(whole, tail, strict=True)):
        raise DataError(
            f"the task's `order` gives the positions {count // 2} to {count - 1} other samples when they are asked for "
            "again: what stands at a position must depend on the position and the seed alone"
        )


def permute(indices: Indices, size: int, key: int) -> Indices:
    """The images (int64, same shape as `indices`) under the permutation of 0 .. size - 1 that the 64-bit `key` picks.

    Expects every index in 0 .. size - 1. Uses a few temporary arrays of the length of `indices`, whatever the size.
    """
    if size < _SMALL:
        return _table(size, key)[indices]
    half = ((size - 1).bit_length() + 1) // 2
    keys = _stream(_ROUNDS, key)
    images = _feistel(indices.astype(np.uint64), half, keys)
    outside = np.flatnonzero(images >= size)
    while outside.size:  # the domain is less than four times the size: a short walk
        walked = _feistel(images[outside], half, keys)
        images[outside] = walked
        outside = outside[walked >= size]
    return images.view(np.int64)


def _feistel(values: _Words, half: int, keys: _Words) -> _Words:
    """A bijection of the integers of 2 * half bits, one round per key."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _table(size: int, key: int) -> Indices:
    """A whole small permutation: the order of `size` random words, as if cards were sorted by a number drawn for each.

    The words are distinct, for they are the images of distinct counters under a bijection, so no order is favoured.
    """
    return np.argsort(_stream(size, key), kind="stable").astype(np.int64)


def _stream(count: int, key: int) -> _Words:
    """The first `count` words of splitmix64 started at `key`."""
    counters = np.arange(1, count + 1, dtype=np.uint64)
    return _mix(counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & (2**64 - 1)))


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _places(size: int, start: int, stop: int) -> tuple[Indices, Indices]:
    if not 0 <= start <= stop:
        raise ValueError(f"positions {start} to {stop}: a range starts at 0 or later and does not end before its start")
    epochs, places = np.divmod(np.arange(start, stop, dtype=np.int64), size)
    return epochs, places


def _checked(size: int) -> int:
    if not 0 < size <= _LARGEST:
        raise DataError(f"--dataset-name: the data has {size} samples; 1 to 2**62 can be put in order")
    return size


_KEPT = 2  # epochs: a step may lie across two
_REPEAT = 32  # bits of an epoch's number; above them stands which draw of its sample a position is


class SizedOrder(Order, Protocol):
    """An order that knows how many samples an epoch has."""

    @property
    def size(self) -> int:
        """Samples in an epoch."""


class EpochOrder(ABC):
    """An order whose epochs are lists, drawn when a position in them is asked for.

    Args:
        size: samples in an epoch.
        samples: of the dataset: an index is below it.
    """

    def __init__(self, size: int, samples: int) -> None:
        self._size, self._samples = size, samples
        self._known: dict[int, tuple[Indices, Indices]] = {}

    @property
    def size(self) -> int:
        """Samples in an epoch."""
        return self._size

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and samples, two int64 arrays of shape [stop - start], of the positions start .. stop - 1.

        Where an epoch has a sample several times, each further one has an epoch number of its own: the random numbers
        of an augmentation are drawn by (epoch, sample), and are others each time.

        Raises:
            DataError: an epoch cannot be drawn, or is not what it must be.
        """
        epochs, places = np.divmod(np.arange(start, stop, dtype=np.int64), self._size)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            drawn, repeats = self._drawn(epoch)
            samples[here] = drawn[places[here]]
            if repeats.size:
                epochs[here] = epoch + (repeats[places[here]] << _REPEAT)
        return epochs, samples

    def _drawn(self, epoch: int) -> tuple[Indices, Indices]:
        if epoch not in self._known:
            while len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            drawn = self.draw(epoch)
            check_indices(drawn, self._samples, f"epoch {epoch} of `order`")
            self._known[epoch] = drawn, _repeats(drawn, self._samples)
        return self._known[epoch]

    @abstractmethod
    def draw(self, epoch: int) -> Indices:
        """Draw an epoch: int64 of shape [size]."""


@final
class SamplerOrder(EpochOrder):
    """The order of a torch sampler, or of any object that yields indices and has a length.

    Args:
        sampler: its `generator` and that of a sampler within it are seeded, its `set_epoch` is called.
        samples: of the dataset.
        seed: the run's.

    Raises:
        ConfigError: it is no sampler of single indices for one process.
        DataError: it draws other indices under the same seed.
    """

    def __init__(self, sampler: Any, samples: int, seed: int) -> None:
        super().__init__(_length(sampler), samples)
        self._sampler, self._seed = sampler, seed
        if not np.array_equal(self.draw(0), self._drawn(0)[0]):
            raise DataError(
                f"the sampler {_named(sampler)} of `order` yields other indices under the same seed: draw "
                "from torch's default generator, numpy's or random's, or from its attribute `generator` on the CPU"
            )

    def draw(self, epoch: int) -> Indices:
        """Draw an epoch under its seed, and leave all generators as they were."""
        generators = [each for each in map(_generator, within(self._sampler)) if each is not None]
        states = [each.get_state() for each in generators]
        key = derive(self._seed, "order", epoch)
        try:
            with generators_kept():
                seed_everything(key)
                for generator in generators:
                    generator.manual_seed(key)
                for each in within(self._sampler):
                    if callable(getattr(each, "set_epoch", None)):
                        each.set_epoch(epoch)
                return self._listed(epoch)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _listed(self, epoch: int) -> Indices:
        name = _named(self._sampler)
        try:
            drawn = np.fromiter(map(_index, self._sampler), np.int64)
        except LockstepError:
            raise
        except Exception as error:
            raise blamed("order", error, f"epoch {epoch}") from error
        if len(drawn) != self.size:
            raise DataError(
                f"the sampler {name} of `order` yields {len(drawn)} indices in epoch {epoch}, and its "
                f"length is {self.size}: every epoch must have as many as `__len__` says"
            )
        return drawn


@final
class CheckedOrder:
    """An order of the user's own, whose every answer is checked.

    Args:
        inner: has `at(start, stop)`; its length, where it has one, is that of an epoch.
        samples: of the dataset.

    Raises:
        ConfigError: its epochs have no samples.
    """

    def __init__(self, inner: Order, samples: int) -> None:
        self._inner, self._samples = inner, samples
        self.size = len(inner) if isinstance(inner, Sized) else samples
        if self.size < 1:
            raise ConfigError("`order` has the length 0: an epoch has at least one sample")

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and samples, two int64 arrays of shape [stop - start], of the positions start .. stop - 1.

        Raises:
            DataError: `at` fails, or gives something else.
        """
        where = f"the positions {start} to {stop - 1}"
        try:
            given = self._inner.at(start, stop)
        except LockstepError:
            raise
        except Exception as error:
            raise blamed("order", error, where) from error
        if not isinstance(given, tuple) or len(given) != 2:
            raise DataError(
                f"`at` of `order` returned {_named(given)} for {where}: return two arrays, the epochs and the samples"
            )
        epochs, samples = (_integers(each, stop - start, where) for each in given)
        check_indices(samples, self._samples, f"`at` of `order` for {where}")
        return epochs, samples


def order_of(task: Task, samples: int, seed: int) -> SizedOrder:
    """Make the order of a task's training set.

    Args:
        samples: of the training set.
        seed: the run's. What `order` itself draws at random is seeded by it, so that all ranks draw the same.

    Raises:
        ConfigError: `order` returned something else.
        DataError: it fails, or what it gives is not what it must be.
    """
    with generators_kept():
        seed_everything(derive(seed, "order"))
        try:
            found = task.order(samples, seed)
        except LockstepError:
            raise
        except Exception as error:
            raise blamed("order", error, f"order({samples}, {seed})") from error
    return order_from(found, samples, seed)


def order_from(given: Any, samples: int, seed: int) -> SizedOrder:
    """Make an order of what a user gave: None, a sampler, or an object with `at(start, stop)`. Raises as `order_of`."""
    if given is None:
        return Shuffled(samples, seed)
    if isinstance(given, EpochOrder):
        return given
    if hasattr(given, "at") and not isinstance(given, type):
        made = CheckedOrder(given, samples)
        _check_order(made, samples)
        return made
    return SamplerOrder(given, samples, seed)


def within(sampler: Any) -> list[Any]:
    """Return the sampler, and the one inside it where it wraps another."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def check_indices(indices: Indices, samples: int, where: str) -> None:
    """Raise DataError, in one line, for an index that is not in the dataset."""
    if indices.size and not (indices.min() >= 0 and indices.max() < samples):
        bad = int(indices[(indices < 0) | (indices >= samples)][0])
        raise DataError(
            f"{where}: the index {bad} is not in the dataset, which has {samples} samples, 0 to {samples - 1}"
        )


def _length(sampler: Any) -> int:
    """The indices of an epoch. Raises ConfigError for what is no sampler of single indices for one process."""
    name = _named(sampler)
    start = f"`order` returned {name}"
    if isinstance(sampler, type) or not hasattr(sampler, "__iter__"):
        raise ConfigError(
            f"{start}: return a torch Sampler, an object with at(start, stop), or None for a shuffle in each epoch"
        )
    if isinstance(sampler, DataLoader):
        raise ConfigError(f"{start}: return its sampler alone, loader.sampler")
    if any(isinstance(each, DistributedSampler) or hasattr(each, "num_replicas") for each in within(sampler)):
        raise ConfigError(
            f"{start}, which draws one rank's share: lockstep shares out what is drawn for all; return the sampler of "
            "one process, or None for a shuffle in each epoch"
        )
    if isinstance(sampler, BatchSampler):
        raise ConfigError(
            f"{start}, which yields lists: return the sampler within it; a step is cut by --batch-size and "
            "--micro-batch-size"
        )
    try:
        size = len(sampler)
    except TypeError as error:
        raise ConfigError(f"{start}, which has no length: write `__len__`, the indices of an epoch") from error
    if size < 1:
        raise ConfigError(f"{start} of length 0: an epoch has at least one sample")
    return size


def _index(given: Any) -> int:
    if isinstance(given, list | tuple):
        raise ConfigError(
            "the sampler of `order` yields lists: it must yield single indices; a step is cut by "
            "--batch-size and --micro-batch-size"
        )
    return operator.index(given)


def _integers(given: Any, count: int, where: str) -> Indices:
    """An array of `count` integers. Raises DataError for anything else."""
    found = np.asarray(given)
    if found.shape != (count,) or (count and found.dtype.kind not in "iu"):
        raise DataError(
            f"`at` of `order` returned an array of shape {list(found.shape)} and type {found.dtype} for "
            f"{where}: return two integer arrays of shape [{count}], the epochs and the samples"
        )
    return found.astype(np.int64, copy=False)


def _repeats(drawn: Indices, samples: int) -> Indices:
    """Count how often each place's sample came before in the epoch; empty where each comes once."""
    if len(drawn) <= samples and np.bincount(drawn, minlength=1).max(initial=0) <= 1:
        return np.empty(0, np.int64)
    by_sample = np.argsort(drawn, kind="stable")
    ordered = drawn[by_sample]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])  # where the run of a sample begins
    repeats = np.empty_like(drawn)
    repeats[by_sample] = np.arange(len(drawn)) - np.repeat(first, np.diff(np.r_[first, len(drawn)]))
    return repeats


def _generator(sampler: Any) -> torch.Generator | None:
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _named(given: Any) -> str:
    return given.__name__ + " itself" if isinstance(given, type) else type(given).__name__
