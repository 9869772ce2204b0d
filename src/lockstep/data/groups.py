"""Group samples of similar length into micro-batches with a bound on their tokens.

Or as a batch sampler does.

    groups = TokenGroups(lengths, bound=16384, seed=0)      # --micro-batch-tokens 16384
    epochs, numbers = groups.at(start, stop)                # a position is a micro-batch
    groups.samples(epoch, number)                           # its samples

A run with groups counts its positions in micro-batches: a step is M of them, whatever number of samples each has. The
samples are sorted by length, rounded up to 5 significant bits, and cut so that the longest times the number of samples
stays within the bound. Samples of one rounded length change places in each epoch, and the groups are shuffled: an epoch
always has the same number of groups, and each sample once. Except for one sorted list of the samples all is arithmetic.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lockstep.data.batches import Batches, MicroBatch, slots
from lockstep.data.loader import Drawing, Key, Loader, Loading, blame
from lockstep.data.sampler import (
    CACHED_EPOCHS,
    Begun,
    Indices,
    Sequential,
    Shuffled,
    check_indices,
    draw_order,
    draw_seeded,
    number_repeats,
    permute,
    sampler_length,
)
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.seeds import derive
from lockstep.task import Task, has_own

__all__ = ["FirstGroups", "GroupBatches", "GroupOrder", "SampledGroups", "TokenGroups", "grouped_order", "padding"]

# Significant bits of a rounded length: at most 1/16 longer, and half of that on average.
_BITS = 5


@runtime_checkable
class GroupOrder(Protocol):
    """An order whose positions are micro-batches."""

    @property
    def size(self) -> int:
        """Micro-batches in an epoch."""

    @property
    def description(self) -> str:
        """Description of a micro-batch, for the log."""

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and numbers of the micro-batches at these positions.

        At start .. stop - 1. Two arrays, int64 [stop - start].
        """

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
        bound: as given.
        longest: tokens of the longest sample.
        smallest: samples of the smallest micro-batch.

    Raises:
        DataError: there are no samples, or one is longer than `bound`.
    """

    def __init__(self, lengths: NDArray[Any], bound: int, seed: int) -> None:
        lengths = np.asarray(lengths, dtype=np.int64)
        if not len(lengths) or lengths.min() < 1:
            if len(lengths):
                empty = f"sample {int(lengths.argmin())} has length {lengths.min()}"
            else:
                empty = "it has no samples"
            raise DataError(f"--micro-batch-tokens: the training set cannot be grouped by length: {empty}")
        if lengths.max() > bound:
            raise DataError(
                f"--micro-batch-tokens {bound}: sample {int(lengths.argmax())} has {lengths.max()} tokens; raise it, "
                "or leave out or cut longer samples"
            )
        self.longest = int(lengths.max())
        self.description = f"at most {bound:,} tokens"
        rounded = np.minimum(round_up(lengths), bound)
        self._sorted = np.argsort(-rounded, kind="stable")
        descending = rounded[self._sorted]
        changes = np.flatnonzero(np.diff(descending)) + 1
        # The position at which each rounded length begins.
        self._classes = np.concatenate([[0], changes, [len(lengths)]])
        self._cuts = _cut(descending, bound)
        self.size = len(self._cuts) - 1
        self.smallest = int(np.diff(self._cuts).min())
        self.bound = bound
        self._seed = seed
        self._order = Shuffled(self.size, seed)

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and numbers of the micro-batches at these positions.

        As `GroupOrder.at`.
        """
        return self._order.at(start, stop)

    def samples(self, epoch: int, number: int) -> tuple[Indices, Indices]:
        """Return epochs and samples of a micro-batch, the longest first: int64 [samples] each."""
        positions = np.arange(self._cuts[number], self._cuts[number + 1])
        classes = np.searchsorted(self._classes, positions, side="right") - 1
        for length_class in np.unique(classes).tolist():
            begin = int(self._classes[length_class])
            size = int(self._classes[length_class + 1] - self._classes[length_class])
            in_class = classes == length_class
            positions[in_class] = begin + permute(
                positions[in_class] - begin, size, derive(self._seed, "group", epoch, length_class)
            )
        return np.full(len(positions), epoch), self._sorted[positions]


@final
class SampledGroups:
    """The lists of a batch sampler as micro-batches; two epochs stay in memory.

    Args:
        sampler: yields lists of sample indices; seeded as `SamplerOrder` seeds a sampler.
        samples: of the dataset.
        seed: the run's.
        draws: epoch -> the lists of another way to draw them; None: as above.

    Attributes:
        size: lists in an epoch.

    Raises:
        ConfigError: it has no length.
        DataError: it draws different lists under the same seed, or invalid ones.
    """

    def __init__(self, sampler: Any, samples: int, seed: int, draws: Callable[[int], list[Any]] | None = None) -> None:
        self._sampler = sampler
        self._samples = samples
        # Copies, since a sampler may fill one list again and again.
        self._draws = draws or partial(
            draw_seeded, sampler, seed, read=lambda sampler: [list(each) for each in sampler]
        )
        self._epochs: dict[int, _Lists] = {}
        self.description = f"the samples that {type(sampler).__name__} lists"
        self.size = sampler_length(sampler, lists=True)
        # Drawn twice: the lists must depend on the seed alone.
        first_draw = self._draw(0)
        second_draw = self._draw(0)
        if not (
            np.array_equal(first_draw.indices, second_draw.indices)
            and np.array_equal(first_draw.starts, second_draw.starts)
        ):
            raise DataError(
                f"the batch sampler {type(sampler).__name__} of `order` yields other lists under the same seed; draw "
                "from torch's default generator, numpy's or random's, or from its attribute `generator` on the CPU"
            )

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and numbers of the micro-batches at these positions.

        As `GroupOrder.at`.
        """
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
        lists = self._draws(epoch)
        if len(lists) != self.size or not all(lists):
            lengths = f"{len(lists)} lists" if all(lists) else "an empty list"
            raise DataError(
                f"the batch sampler {name} of `order` yields {lengths} in epoch {epoch}, but its length is "
                f"{self.size}; yield as many in every epoch as `__len__` returns, each with a sample"
            )
        indices = np.array([index for indices_of_list in lists for index in indices_of_list], dtype=np.int64)
        check_indices(indices, self._samples, f"epoch {epoch} of `order`")
        starts = np.cumsum([0, *map(len, lists)])
        return _Lists(starts, indices, number_repeats(np.full(len(indices), epoch), indices, self._samples))


class _Lists(NamedTuple):
    """An epoch of a batch sampler.

    The start of each list, and all samples with their epochs.
    """

    starts: Indices
    indices: Indices
    epochs: Indices


def round_up(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round up to `_BITS` significant bits."""
    shift = np.maximum(np.frexp(lengths)[1] - _BITS, 0)
    rounded: NDArray[np.int64] = -(-lengths >> shift) << shift
    return rounded


def _cut(descending: NDArray[np.int64], bound: int) -> NDArray[np.int64]:
    """Cut descending lengths into groups within the bound.

    Returns the start of each group, and the end.
    """
    cuts = [0]
    while cuts[-1] < len(descending):
        most = max(1, bound // int(descending[cuts[-1]]))
        cuts.append(min(cuts[-1] + most, len(descending)))
    return np.array(cuts, dtype=np.int64)


def padding(groups: TokenGroups, lengths: NDArray[Any]) -> float:
    """Return the share of padding in an epoch's tokens."""
    lengths = np.asarray(lengths, dtype=np.int64)
    lengths_by_group = []
    for number in range(groups.size):
        lengths_by_group.append(lengths[groups.samples(0, number)[1]])
    return 1.0 - float(lengths.sum()) / sum(
        int(group_lengths.max()) * len(group_lengths) for group_lengths in lengths_by_group
    )


def grouped_order(
    task: Task, dataset: Any, seed: int, bound: int, shuffle_shards: int = 0
) -> TokenGroups | SampledGroups | None:
    """Create the order of a training set in groups.

    None: its samples have another order.

    Args:
        bound: tokens of a micro-batch, of --micro-batch-tokens; 0: the task's `order` decides.
        shuffle_shards: of --data.shuffle-shards.

    Raises:
        ConfigError: the lengths are unknown, or something else orders the samples too.
        DataError: `order` or `work` fails, or its result is invalid.
    """
    if bound:
        if has_own(task, "order") or shuffle_shards or hasattr(dataset, "order"):
            if shuffle_shards:
                other = f"--data.shuffle-shards {shuffle_shards}"
            else:
                other = "the `order` of task or training set"
            raise ConfigError(f"--batch-tokens orders the samples itself; drop it, or {other}")
        return TokenGroups(lengths_of(task, dataset), bound, seed)
    if has_own(task, "order"):
        order = draw_order(task, len(dataset), seed)
    else:
        order = None
    if order is None or not (isinstance(order, SampledGroups) or _lists(order, seed)):
        return None
    if shuffle_shards:
        raise ConfigError(f"--data.shuffle-shards {shuffle_shards}: the task's `order` is a batch sampler; drop one")
    if isinstance(order, SampledGroups):
        return order
    return SampledGroups(order, len(dataset), seed)


def _lists(order: Any, seed: int) -> bool:
    """Whether this is a batch sampler: it yields lists."""
    if isinstance(order, type | DataLoader) or not hasattr(order, "__iter__") or hasattr(order, "at"):
        return False
    return isinstance(draw_seeded(order, seed, 0, lambda sampler: next(iter(sampler), None)), list | tuple)


def lengths_of(task: Task, dataset: Any) -> NDArray[np.int64]:
    """Return the tokens of each sample.

    The dataset's `lengths`, else the result of the task's `work` for each.

    Raises:
        ConfigError: neither is known.
        DataError: `work` fails.
    """
    known = getattr(dataset, "lengths", None)
    if known is None and len(dataset) and task.work(dataset, [0]) is None:
        raise ConfigError(
            "--batch-tokens: the lengths of the samples are not known; define work(dataset, samples) in the task, the "
            "tokens of a batch with padding, or give the dataset an attribute `lengths`"
        )
    if known is not None:
        return np.asarray(known, dtype=np.int64)
    try:
        works = (task.work(dataset, [sample]) or 0 for sample in range(len(dataset)))
        return np.ceil(np.fromiter(works, np.float64, len(dataset))).astype(np.int64)
    except LockstepError:
        raise
    except Exception as error:
        raise blame("work", error, "a sample alone") from error


@final
class FirstGroups:
    """The first groups of each epoch of another order.

    Args:
        groups: the whole order.
        count: groups in an epoch here.
    """

    def __init__(self, groups: GroupOrder, count: int) -> None:
        self.size = count
        self._begun = Begun(groups, groups.size, count)
        self.description = groups.description
        self.samples = groups.samples

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """Return epochs and numbers of the micro-batches at these positions.

        As `GroupOrder.at`.
        """
        return self._begun.at(start, stop)


@final
class GroupBatches(Batches):
    """A dataset in groups of samples: a position of the plan is a micro-batch.

    Args:
        groups: the samples of each micro-batch.
        others: as of `Batches`.
    """

    def __init__(self, task: Task, dataset: Any, groups: GroupOrder, *others: Any, **options: Any) -> None:
        super().__init__(task, dataset, groups, *others, **options)
        self._groups = groups

    def known_items(self, each: int | None) -> Callable[[int], int] | None:
        """Return None: only the ranks together know the items of a step."""
        return None

    def describe(self) -> list[str]:
        """Return lines for the log about the groups."""
        return [f"micro-batches of {self._groups.description}, {self._groups.size:,} in an epoch"]

    def parts(self, step: int, cuts: list[tuple[int, int]]) -> list[tuple[MicroBatch, bool]]:
        """Load slices of samples; see `Batches.parts`. They end with the plan."""
        first_key = self._first_key(step)
        keys = [first_key]
        ends = len(first_key.samples)
        micro_batch = step * self.step_plan.micro_batches + first_key.micro
        # A cut may go past the micro-batch, so collect as many as the cuts need.
        while ends < max(b for _, b in cuts) and micro_batch + 1 < self.step_plan.steps * self.step_plan.micro_batches:
            micro_batch += 1
            keys.append(self._key(*divmod(micro_batch, self.step_plan.micro_batches)))
            ends += len(keys[-1].samples)
        epochs = []
        for key in keys:
            epochs.extend(key.epochs)
        samples = []
        for key in keys:
            samples.extend(key.samples)
        cut_keys = []
        for a, b in cuts:
            cut_keys.append(first_key._replace(weight=1.0, epochs=epochs[a:b], samples=samples[a:b]))
        loader = Loader(Drawing(self._fetch), Loading(min(self._loading.workers, 1)), self.rank, False)
        micro_batches = []
        for key, (data, drew), items in loader.stream(iter(cut_keys)):
            micro_batches.append((self._micro_batch(key, data, items), drew))
        return micro_batches

    def _key(self, step: int, micro: int) -> Key:
        start, stop = self.step_plan.positions(step, micro)
        (epoch,), (number,) = self._groups.at(start, stop)
        epochs, samples = self._groups.samples(int(epoch), int(number))
        return Key(step, micro, 1.0, epochs.tolist(), samples.tolist())

    def _keys(self, start: int) -> Iterator[Key]:
        for step in range(start, self.step_plan.steps):
            for micro, weight in slots(self.sharing.at(step), self.dp_rank, self.step_plan.present(step)):
                yield self._key(step, micro)._replace(weight=weight)
