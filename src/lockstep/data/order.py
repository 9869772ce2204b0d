"""Which sample stands at which position of a run: arithmetic, so any position is known at once, in O(1) memory.

    order = Shuffled(size=len(dataset), seed=0)
    epochs, samples = order.at(start, stop)         # positions start .. stop - 1 of an endless stream
    order = Begun(order, len(dataset), 1000)        # an epoch is the first 1000 samples of its permutation

Position p lies in epoch p // size, and its sample is a permutation, keyed by (seed, epoch), of p % size. Nothing is
stored and nothing is drawn in sequence, so a run resumes at any position and the world size has no say in the order.

The permutation is a balanced Feistel network (Luby & Rackoff, SIAM J. Comput. 17(2), 1988) on the smallest power of
four that holds `size`, with cycle walking (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002): what
lands outside is permuted again until it is inside. Its round function is the finaliser of splitmix64.
"""

from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError
from lockstep.seeds import derive
from lockstep.task import Order

__all__ = ["Begun", "Sequential", "Shuffled", "check_samples", "permute"]

Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

_ROUNDS = 8  # four rounds already pass the tests of uniformity; twice that costs little
_SMALL = 64  # a Feistel network of so few values has visible structure
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


def check_samples(samples: list[int], size: int) -> None:
    """Raises DataError where an order gives a sample that a dataset of `size` samples has not."""
    odd = next((sample for sample in samples if not 0 <= sample < size), None)
    if odd is not None:
        raise DataError(f"the task's `order` gives sample {odd}, and the dataset has {size}: 0 to {size - 1}")


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
