"""Permute shards, then samples within groups of shards.

So a rank reads few shards at a time.

    order = ShardOrder(dataset.shard_sizes, seed=0, group=4).placed(Geometry(batch_size, micro_batch_size), 0)
    epochs, samples = order.at(start, stop)

An epoch lays its permuted shards end to end (the tape), and permutes the samples within each group of `group` shards.
The tape is cut into lanes, one for each micro-batch of a step: micro-batch m of every step reads on in lane m. A rank
computes a run of micro-batches, so it reads a stretch of the tape. Everything is arithmetic on positions: a sample is
found at once, and no list is as long as the data.
"""

from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import numpy as np

from lockstep.data.sampler import Begun, Indices, Shuffled, SizedOrder, check_size, order_of, permute, permute_groups
from lockstep.errors import ConfigError
from lockstep.seeds import derive
from lockstep.task import Task

__all__ = [
    "ONE_LANE",
    "Geometry",
    "PlacedOrder",
    "ShardOrder",
    "lanes_of",
    "own_order",
    "place_order",
    "training_order",
]


class Geometry(NamedTuple):
    """Samples of a step, and of a micro-batch, in the run's first start.

    A resume with another batch size keeps them, since they decide which sample is at which position.
    """

    size: int
    micro_size: int


ONE_LANE = Geometry(1, 1)


@runtime_checkable
class PlacedOrder(SizedOrder, Protocol):
    """An order that depends on how steps are cut."""

    def placed(self, geometry: Geometry, size: int) -> SizedOrder:
        """Return the order for steps of this geometry, with epochs of `size` samples.

        0: of all samples.
        """


class LanePositions(NamedTuple):
    """The positions of samples in the lanes of their micro-batches.

    int64 arrays, all of one shape.

    Attributes:
        steps: numbers of steps, if all have the geometry's size.
        first: first place of the lane in a step.
        within: place in the micro-batch.
        width: samples of the lane in a step.
    """

    steps: Indices
    first: Indices
    within: Indices
    width: Indices


def lanes_of(positions: Indices, geometry: Geometry) -> LanePositions:
    """Return the lanes of positions: one for each micro-batch of a step."""
    steps, offsets = np.divmod(positions, geometry.size)
    first = offsets // geometry.micro_size * geometry.micro_size
    return LanePositions(steps, first, offsets - first, np.minimum(geometry.micro_size, geometry.size - first))


class _Tape(NamedTuple):
    """The shards of an epoch, laid end to end in their permuted order.

    Attributes:
        shards: numbers of the shards. int64 [shards]
        ends: where each of them ends. int64 [shards]
        group_ends: where each group of them ends. int64 [groups]
    """

    shards: Indices
    ends: Indices
    group_ends: Indices


# A step may span two epochs.
_CACHED_EPOCHS = 2


@final
class ShardOrder:
    """A new permutation of shards, and of samples within groups of them, in every epoch.

    Args:
        sizes: samples of each shard. int64 [shards]
        seed: the run's seed.
        group: shards whose samples are permuted together, at least 1.
        geometry: of the steps; by default the tape is read by one lane.
        size: samples in an epoch, the first ones of the tape; 0: all.

    Attributes:
        size: samples in an epoch.

    Raises:
        DataError: there are no samples, or more than 2**62.
        ConfigError: `group` is below 1.
    """

    def __init__(self, sizes: Any, seed: int, group: int, geometry: Geometry = ONE_LANE, size: int = 0) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        check_size(sum(self._sizes.tolist()))
        self.size = size or int(self._sizes.sum())
        if group < 1:
            raise ConfigError(f"--data.shuffle-shards {group}: give at least 1")
        self._seed = seed
        self._group = group
        self._geometry = geometry
        self._tapes: dict[int, _Tape] = {}

    def placed(self, geometry: Geometry, size: int) -> "ShardOrder":
        """Return the order for steps of this geometry, with epochs of `size` samples.

        0: of all samples.
        """
        return ShardOrder(self._sizes, self._seed, self._group, geometry, size)

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of the positions start .. stop - 1.

        Two arrays, int64 [stop - start].
        """
        return self.of(np.arange(start, stop, dtype=np.int64))

    def of(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return epochs and samples of any positions. int64 [positions] each"""
        epochs = positions // self.size
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            mask = epochs == epoch
            samples[mask] = self._samples(epoch, self._tape_places(epoch, positions[mask]))
        return epochs, samples

    def _tape_places(self, epoch: int, positions: Indices) -> Indices:
        """Return where on the epoch's tape these of its positions read.

        That is all that the lanes before its own read in this epoch, and what its own lane has read of it so far. The
        epoch may start and end within a step; its ends are Python integers, which do not overflow.
        """
        (first_step, begin), (last_step, end) = (
            divmod(epoch_number * self.size, self._geometry.size) for epoch_number in (epoch, epoch + 1)
        )
        lanes = lanes_of(positions, self._geometry)
        before = (last_step - first_step) * lanes.first + np.minimum(end, lanes.first) - np.minimum(begin, lanes.first)
        read_by_lane = (
            (lanes.steps - first_step) * lanes.width + lanes.within - np.clip(begin - lanes.first, 0, lanes.width)
        )
        return before + read_by_lane

    def _samples(self, epoch: int, places: Indices) -> Indices:
        """Return the samples at these places of an epoch's tape."""
        tape = self._tape(epoch)
        numbers, groups = np.unique(np.searchsorted(tape.group_ends, places, side="right"), return_inverse=True)
        ends = tape.group_ends[numbers]
        begins = np.where(numbers > 0, tape.group_ends[numbers - 1], 0)
        keys = []
        for number in numbers.tolist():
            keys.append(derive(self._seed, "shard", epoch, number))
        # All groups in one call: a Python loop over groups would take longer than the arithmetic.
        permuted = permute_groups(places - begins[groups], groups, (ends - begins).tolist(), keys)
        places = permuted + begins[groups]
        which = np.searchsorted(tape.ends, places, side="right")
        shards = tape.shards[which]
        return self._starts[shards] + places - (tape.ends[which] - self._sizes[shards])

    def _tape(self, epoch: int) -> _Tape:
        if epoch not in self._tapes:
            while len(self._tapes) >= _CACHED_EPOCHS:
                self._tapes.pop(next(iter(self._tapes)))
            count = len(self._sizes)
            shards = permute(np.arange(count), count, derive(self._seed, "shards", epoch))
            ends = np.cumsum(self._sizes[shards])
            self._tapes[epoch] = _Tape(shards, ends, np.append(ends[self._group - 1 : -1 : self._group], ends[-1]))
        return self._tapes[epoch]


# --- the order of a training set


@runtime_checkable
class Ordered(Protocol):
    """A dataset with an order of its own, such as a mixture."""

    def make_order(self, seed: int, shuffle_shards: int) -> SizedOrder:
        """Make the order, under the run's seed; `shuffle_shards` is that of --data.shuffle-shards."""


def own_order(dataset: Any, seed: int, shuffle_shards: int) -> SizedOrder | None:
    """Return the order that a dataset or --data.shuffle-shards asks for; None: neither.

    Raises:
        ConfigError: the dataset has no shards.
    """
    if isinstance(dataset, Ordered):
        return dataset.make_order(seed, shuffle_shards)
    if not shuffle_shards:
        return None
    sizes = getattr(dataset, "shard_sizes", None)
    if sizes is None:
        raise ConfigError(
            f"--data.shuffle-shards {shuffle_shards}: the training set {type(dataset).__name__} has no shards; open it "
            "with lockstep.shards, give it an attribute `shard_sizes` (samples of each), or leave the flag out"
        )
    if sum(map(int, sizes)) != len(dataset):
        raise ConfigError(
            f"--data.shuffle-shards {shuffle_shards}: the `shard_sizes` of {type(dataset).__name__} add up to "
            f"{sum(map(int, sizes))}, and it has {len(dataset)} samples; give the samples of each shard"
        )
    return ShardOrder(sizes, seed, shuffle_shards)


def training_order(task: Task, dataset: Any, samples: int, seed: int, shuffle_shards: int) -> SizedOrder:
    """Make the order of a task's training set.

    The task's own, the dataset's, or a shuffle.

    Args:
        samples: of the training set.
        shuffle_shards: of --data.shuffle-shards.

    Raises:
        ConfigError: both have one, or the dataset has no shards; and as `order_of`.
        DataError: as `order_of`.
    """
    order_of_dataset = own_order(dataset, seed, shuffle_shards)
    default = order_of(task, samples, seed)
    if order_of_dataset is None or isinstance(default, Shuffled):
        return order_of_dataset or default
    if shuffle_shards:
        asks = f"--data.shuffle-shards {shuffle_shards}"
    else:
        asks = "its training set, a mixture,"
    raise ConfigError(f"the task has an `order`, and {asks} asks for another; remove one of them")


def place_order(order: SizedOrder, geometry: Geometry, size: int) -> SizedOrder:
    """Return an order for steps of this geometry.

    Its epochs have only the first `size` samples of each.
    """
    if isinstance(order, PlacedOrder):
        return order.placed(geometry, size)
    if size < order.size:
        return Begun(order, order.size, size)
    return order
