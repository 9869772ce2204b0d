"""One micro-batch from its samples: loaded, seeded, collated, counted. In whatever process it runs, with the same bits.

fetch = Fetch(dataset, task, seed=0)
data, items = fetch[Key(step=3, micro=1, weight=1.0, epochs=[0, 0], samples=[17, 4])]
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.counts import checked, samples_in, shown
from lockstep.distributed.rank_label import rank_label
from lockstep.errors import DataError, LockstepError, error_line
from lockstep.seeds import derive
from lockstep.task import Task, has_own, items_of_a_sample

__all__ = [
    "Drawing",
    "Fetch",
    "Key",
    "Reseeding",
    "blamed",
    "check_dataset",
    "draws",
    "failure",
    "generator_states",
    "generators_kept",
    "seed_everything",
]


class Key(NamedTuple):
    """What a loader needs to make one micro-batch: where it stands, and the samples in it."""

    step: int
    micro: int
    weight: float
    epochs: list[int]
    samples: list[int]


@runtime_checkable
class Reseeding(Protocol):
    """A dataset that may try a sample several times, or take another: it has the seeding come before each try."""

    def load_seeded(self, index: int, seed: Callable[[int], None]) -> Any:
        """The sample; `seed(index)` is called before each try, with the index of the sample that is then loaded."""


def draws(dataset: Any) -> bool:
    """Whether a dataset may draw random numbers: unless it says that it does not, or is known not to."""
    return bool(getattr(dataset, "draws_random", not isinstance(dataset, TensorDataset)))


def check_dataset(dataset: Any, split: str, name: str = "") -> None:
    """Raises DataError, in one line, for what is no map-style dataset: the order is arithmetic on indices.

    Args:
        name: of the set, where the split has several.
    """
    where, kind = f"the task's dataset('{split}')" + (f"['{name}']" if name else ""), type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{where} returned a DataLoader: give its dataset alone, loader.dataset; batches are "
            "made by --batch-size and --micro-batch-size, a collate_fn is the task's `collate`, a sampler its `order`"
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if isinstance(dataset, IterableDataset):
        missing = ["__len__", "__getitem__"]
    if missing:
        raise DataError(
            f"{where} returned {kind}, which has no {' and no '.join(missing)}: any "
            "sample must be had by its index, dataset[i] for i below len(dataset); write an iterable one out, or "
            "index its files"
        )


class Fetch:
    """Key -> (collated batch, items). Whatever it draws at random depends on (seed, epoch, sample) alone.

    A dataset whose attribute `draws_random` is False promises that neither it nor the collate function draws
    anything; then nothing is seeded, which saves a few microseconds a sample.
    """

    def __init__(self, dataset: Any, task: Task, seed: int, rank: int = 0) -> None:
        self._dataset, self._collate, self._seed, self._rank = dataset, task.collate, seed, rank
        self._count = task.count
        self.draws = draws(dataset)
        self._load_seeded = dataset.load_seeded if isinstance(dataset, Reseeding) else self._plainly
        self._many = getattr(dataset, "__getitems__", None)
        self._each = items_of_a_sample(task)
        self._counts, self._collates = has_own(task, "count"), has_own(task, "collate")

    def __getitem__(self, key: Key) -> tuple[Any, float]:
        if self.draws:
            samples = [self._drawn(epoch, sample) for epoch, sample in zip(key.epochs, key.samples, strict=True)]
            self.seed_collate(key)
        elif self._many:
            samples = self._many(key.samples)
        else:
            samples = [self._dataset[sample] for sample in key.samples]
        if not self._collates and len(samples) != len(key.samples):  # an own `collate` may take a batch at once
            raise DataError(
                f"the dataset's `__getitems__` returned {len(samples)} samples for {len(key.samples)} indices, at "
                f"{self._where(key)}; leave samples out in the task's `collate`"
            )
        try:
            data = self._collate(samples)
        except LockstepError:
            raise
        except Exception as error:
            raise blamed("collate", error, self._where(key)) from error
        return data, self._items(data, samples, key)

    def seed_collate(self, key: Key) -> None:
        """Seeds what a collate function draws from."""
        seed_everything(derive(self._seed, "collate", key.step, key.micro))

    def _items(self, data: Any, samples: list[Any], key: Key) -> float:
        """Count the items of this micro-batch, which the loss is divided by."""
        each, given = self._each, len(key.samples)
        if self._counts:
            items = self._counted(data, key)
            if each is not None and items != each * given:
                raise self._differing(f"`count` finds {items} items in {given} samples", key)
            return items
        if not self._collates:  # torch's own keeps every sample
            return (each or 1) * given
        found = samples_in(data, samples, given)
        if found == 0 or data is None:
            raise DataError(
                f"the task's `collate` made {'None' if data is None else 'an empty batch'} of {given} samples, at "
                f"{self._where(key)}; leave out fewer, or give a larger --micro-batch-size"
            )
        if each is None and found is None:
            raise DataError(
                f"how many samples a batch has cannot be told from what the task's `collate` returned "
                f"({type(data).__name__}), at {self._where(key)}; write `count(batch)`, or give the task "
                "items_per_sample = 1 where it leaves none out"
            )
        if each is not None and found not in (None, given):
            raise self._differing(f"`collate` made a batch of {found} of {given} samples", key)
        return given * each if found is None and each else found * (each or 1)  # type: ignore[operator]

    def _differing(self, found: str, key: Key) -> DataError:
        return DataError(
            f"the task's items_per_sample is {self._each}, but {found}, at {self._where(key)}; leave items_per_sample "
            "out where samples differ"
        )

    def _counted(self, data: Any, key: Key) -> float:
        try:
            value = self._count(data)
            found = checked(value)
        except LockstepError:
            raise
        except Exception as error:
            raise blamed("count", error, self._where(key)) from error
        if found is None:
            raise DataError(
                f"the task's `count` returned {shown(value)} at {self._where(key)}; return one finite number, 0 or more"
            )
        return found

    def _where(self, key: Key) -> str:
        shown = ", ".join(str(sample) for sample in key.samples[:8]) + (", ..." if len(key.samples) > 8 else "")
        return f"{rank_label(self._rank)}, step {key.step}, samples {shown}"

    def _drawn(self, epoch: int, sample: int) -> Any:
        return self._load_seeded(sample, lambda tried: seed_everything(derive(self._seed, "sample", epoch, tried)))

    def _plainly(self, sample: int, seed: Callable[[int], None]) -> Any:
        seed(sample)
        return self._dataset[sample]


class Drawing:
    """A Fetch whose batch is (batch, whether collating it drew random numbers)."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, key: Key) -> tuple[Any, float]:
        data, items = self._fetch[key]
        if not self._fetch.draws:
            return (data, False), items
        after = generator_states()
        self._fetch.seed_collate(key)
        return (data, after != generator_states()), items


def blamed(method: str, error: Exception, where: str) -> DataError:
    """One line for an error inside a method that the user wrote: the method, where, what, and the line."""
    return DataError(f"the task's `{method}` failed at {where}: {failure(error)}; mend it there")


def failure(error: Exception) -> str:
    """`TYPE: first line of the message (FILE:LINE)`, the last line that is neither torch's nor ours."""
    return error_line(error)


def seed_everything(key: int) -> None:
    """Seeds what datasets and CPU code draw from: torch's default generator, numpy's and random's."""
    torch.default_generator.manual_seed(key)  # torch.manual_seed costs a hundred times as much
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def generator_states() -> tuple[Any, ...]:
    """What the generators that `seed_everything` seeds will draw next, as one value to compare."""
    numpy: Any = np.random.get_state(legacy=True)
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        tuple(np.asarray(part).tobytes() for part in numpy[1:]),
        random.getstate(),
    )


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators that `seed_everything` seeds back to where they were, afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
