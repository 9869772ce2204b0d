"""A DataLoader taken apart: its dataset, order, batch size, collation and loader processes.

    parts = taken_apart(loader, "train_dataloader")
    parts.dataset, parts.batch_size, parts.collate, parts.workers
    order = parts.order(seed)                       # None: lockstep's own shuffle

What a sampler of one's own draws in an epoch is drawn under a seed of that epoch, so that every rank has the same list
and a resume has it at once.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lockstep.data.fetch import generators_kept, seed_everything
from lockstep.data.order import Sequential
from lockstep.data.sampler import EpochOrder, within
from lockstep.errors import ConfigError
from lockstep.seeds import derive
from lockstep.task import Order
from lockstep.tasks.trainer_data import EpochShuffled

__all__ = ["LoaderOrder", "Parts", "Placed", "Sampled", "named_loaders", "taken_apart"]


class Placed(NamedTuple):
    """A batch of an evaluation set: which set, how many samples, and what its collation made."""

    place: int
    samples: int
    data: Any


class Sampled(Dataset[Any]):
    """A dataset whose epoch has another number of samples than it holds, or whose samples know their set.

    Args:
        inner: any index that an order names is one of its own.
        size: samples in an epoch.
    """

    def __init__(self, inner: Any, size: int) -> None:
        self.inner, self.size = inner, size
        if hasattr(inner, "__getitems__"):
            self.__getitems__ = inner.__getitems__
        if hasattr(inner, "draws_random"):
            self.draws_random = inner.draws_random

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


@dataclass(frozen=True)
class Parts:
    """What a loader is made of.

    Attributes:
        dataset: its `len` is an epoch's samples.
        sampler: what draws indices, or lists of them where `in_batches`; None: a shuffle; "sequential": as they lie.
        batch_size: samples of a batch; 1 where `whole`.
        whole: an item of the dataset is a batch already.
        collate: a list of samples as a batch.
        drop_last: what is short of a batch is left out of each epoch.
    """

    dataset: Any
    sampler: Any
    in_batches: bool
    batch_size: int
    whole: bool
    collate: Callable[[list[Any]], Any]
    workers: int
    prefetch: int
    drop_last: bool

    def order(self, seed: int) -> Order | None:
        """Which sample stands where in the endless stream; None: another shuffle in each epoch."""
        if self.sampler is None:
            return None
        if self.sampler == "sequential":
            return Sequential(len(self.dataset))
        if isinstance(self.sampler, DistributedSampler):
            return EpochShuffled(len(self.dataset), self.sampler.seed)
        samples = len(self.dataset.inner if isinstance(self.dataset, Sampled) else self.dataset)
        return LoaderOrder(self.sampler, len(self.dataset), samples, seed, in_batches=self.in_batches)


def taken_apart(loader: Any, name: str) -> Parts:
    """The parts of a loader.

    Raises:
        ConfigError: it is no DataLoader, or it streams, or its batches are of different sizes.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"from_lightning: {name} returned {type(loader).__name__}, and its samples are not known: return a "
            "torch.utils.data.DataLoader"
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"from_lightning: the dataset of {name} is iterable ({type(dataset).__name__}), and any sample must be had "
            "by its index: write it out, or load it without streaming"
        )
    own = type(loader).__iter__ is not DataLoader.__iter__
    if own:
        raise ConfigError(
            f"from_lightning: {name} returned {type(loader).__name__}, which makes its batches in a way of its own "
            "(`__iter__`): return a torch.utils.data.DataLoader with a sampler and a collate_fn"
        )
    collate, whole, in_batches, size = loader.collate_fn, False, False, loader.batch_size
    sampler: Any = loader.sampler
    if size is None and loader.batch_sampler is None:  # no automatic batches: an item is a batch
        size, whole, collate = 1, True, _Whole(loader.collate_fn)
    elif size is None:
        sampler, size, in_batches = _of_batches(loader.batch_sampler, name)
    samples = len(dataset)
    if isinstance(sampler, DistributedSampler):
        sampler = sampler if sampler.shuffle else "sequential"
    elif type(sampler) is SequentialSampler:
        sampler = "sequential"
    elif _is_shuffle(sampler):
        sampler = None
    else:
        samples = _length(sampler, name) * (size if in_batches else 1)
    if samples != len(dataset):
        dataset = Sampled(dataset, samples)
    workers, prefetch = int(loader.num_workers), int(loader.prefetch_factor or 0)
    drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
    return Parts(dataset, sampler, in_batches, int(size), whole, collate, workers, prefetch, drop_last)


def named_loaders(found: Any, name: str) -> dict[str, Any]:
    """The loaders of an evaluation by name: "" for one alone, `dataloader_idx_N` or their own names for several."""
    if found is None:
        return {}
    inner = getattr(found, "iterables", None) if type(found).__name__ == "CombinedLoader" else None
    found = found if inner is None else inner
    if isinstance(found, Mapping):
        return {str(key): loader for key, loader in found.items()}
    if isinstance(found, list | tuple):
        if len(found) == 1:
            return {"": found[0]}
        return {f"dataloader_idx_{place}": loader for place, loader in enumerate(found)}
    return {"": found}


@final
class LoaderOrder(EpochOrder):
    """The order of a loader's sampler, as Lightning draws it: its generator goes on from epoch to epoch.

    Args:
        sampler: yields indices, or lists of them; `set_epoch` is called before each epoch.
        size: samples in an epoch; what is drawn beyond them is left out.
        samples: of the dataset.
        seed: the run's; what is drawn from the default generators is drawn under a seed of the epoch.
        in_batches: it yields lists.
    """

    def __init__(self, sampler: Any, size: int, samples: int, seed: int, *, in_batches: bool) -> None:
        super().__init__(size, samples)
        self._sampler, self._seed, self._in_batches = sampler, seed, in_batches
        self._generators = [(each, each.get_state()) for each in _generators(sampler)]

    def draw(self, epoch: int) -> NDArray[np.int64]:
        """Draw an epoch. Raises ConfigError where it has too few samples."""
        with generators_kept():
            for generator, state in self._generators:  # which go on from epoch to epoch
                generator.set_state(state)
            for now in range(epoch + 1) if self._generators else (epoch,):
                seed_everything(derive(self._seed, "sampler", now))
                for each in within(self._sampler):
                    if callable(getattr(each, "set_epoch", None)):
                        each.set_epoch(now)
                found = list(self._flat())
        if len(found) < self.size:
            raise ConfigError(
                f"from_lightning: the sampler {type(self._sampler).__name__} gave {len(found)} samples in epoch "
                f"{epoch}, and {self.size} by its length: every epoch must have as many"
            )
        return np.asarray(found[: self.size], dtype=np.int64)

    def _flat(self) -> Iterator[int]:
        for each in self._sampler:
            yield from map(int, each) if self._in_batches else (int(each),)


@final
class _Whole:
    """A dataset's item, which is a batch already, as the loader hands it on."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        return self._convert(samples[0])


def _is_shuffle(sampler: Any) -> bool:
    """Whether this is the sampler of `shuffle=True`: each sample once, in an order that nobody has fixed."""
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    return plain and sampler.num_samples == len(sampler.data_source)


def _of_batches(batch_sampler: Any, name: str) -> tuple[Any, int, bool]:
    """(sampler, size, whether it yields lists) of a batch sampler. Raises ConfigError where sizes differ."""
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler, int(batch_sampler.batch_size), False
    _length(batch_sampler, name)
    drawn = [(each, each.get_state()) for each in _generators(batch_sampler)]
    with generators_kept():
        sizes = [len(batch) for batch in copy.copy(batch_sampler)]
    for generator, state in drawn:
        generator.set_state(state)
    if not sizes or len(set(sizes)) > 1:
        raise ConfigError(
            f"from_lightning: the batch sampler of {name}, {type(batch_sampler).__name__}, makes batches of "
            f"{min(sizes, default=0)} to {max(sizes, default=0)} samples, and all must be of one size: leave out the "
            "short ones, or give the loader a sampler and a batch_size"
        )
    return batch_sampler, sizes[0], True


def _length(sampler: Any, name: str) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise ConfigError(
            f"from_lightning: the sampler of {name}, {type(sampler).__name__}, has no length: write `__len__`, the "
            "samples of an epoch"
        ) from error


def _generators(sampler: Any) -> list[torch.Generator]:
    found = [getattr(each, "generator", None) for each in within(sampler)]
    return [each for each in found if isinstance(each, torch.Generator)]
