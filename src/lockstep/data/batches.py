"""The micro-batches of every step, and which of them this rank computes.

    batches = Batches(task, dataset, order, cut, world, seed=0)
    for step, micro in batches.from_step(500):      # starts at any step at once: the order is arithmetic

What micro-batch m of step k holds depends on (seed, k, m) alone. The world size decides only who computes it.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import threadpoolctl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.data.worker import end_with_parent
from lockstep.errors import DataError
from lockstep.seeds import derive
from lockstep.world import World

__all__ = ["Batches", "Cut", "Feed", "Loading", "MicroBatch", "Order", "draws", "seed_everything", "slots"]


class Order(Protocol):
    """Which sample stands at each position of the run's endless stream."""

    def at(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The epochs and the sample indices (int64) at the positions start .. stop - 1."""


@dataclass(slots=True)
class MicroBatch:
    """One forward's worth of samples on this rank.

    Attributes:
        data: what the task's `collate` returned, on the device.
        index: m, its place in the step; its randomness depends on (seed, step, m).
        items: what the loss sums over in it.
        weight: 1.0; 0.0 for an empty slot, which repeats a micro-batch only so that collectives line up.
    """

    data: Any
    index: int
    items: int
    weight: float


class Slot(NamedTuple):
    """A place in a rank's run of a step: the micro-batch to compute and whether it counts."""

    micro: int
    weight: float


def slots(micro_batches: int, world_size: int, rank: int, present: int | None = None) -> list[Slot]:
    """The rank's ceil(M / world) slots of a step, contiguous, in order.

    What lies past the last of the `present` micro-batches (default: all M) repeats that one with weight 0. A run's last
    step, which may be short, keeps its M slots, so that every rank still owns the same part of the exact tree.
    """
    each = -(-micro_batches // world_size)
    last = (micro_batches if present is None else present) - 1
    return [Slot(min(place, last), float(place <= last)) for place in range(rank * each, (rank + 1) * each)]


@dataclass(frozen=True, slots=True)
class Cut:
    """How the stream of positions is cut: `size` samples a step, in micro-batches of `micro_size`, up to `total`.

    Only the run's very last step can be shorter: it ends where `total` does.
    """

    size: int
    micro_size: int
    total: int

    @property
    def steps(self) -> int:
        """Steps until `total` is used up."""
        return -(-self.total // self.size)

    def samples(self, step: int) -> int:
        """Samples in `step`, over all ranks."""
        return min(self.size, self.total - step * self.size)

    @property
    def micro_batches(self) -> int:
        """M: slots in every step, over all ranks."""
        return -(-self.size // self.micro_size)

    def present(self, step: int) -> int:
        """Micro-batches of `step` that hold samples: M, but in a short last step."""
        return -(-self.samples(step) // self.micro_size)

    def positions(self, step: int, index: int) -> tuple[int, int]:
        """First and past-the-last position of micro-batch `index` of `step`."""
        start = step * self.size + index * self.micro_size
        return start, min(start + self.micro_size, self.total)


class Key(NamedTuple):
    """What a loader needs to make one micro-batch: where it stands, and the samples in it."""

    step: int
    micro: int
    weight: float
    epochs: list[int]
    samples: list[int]


@dataclass(frozen=True, slots=True)
class Loading:
    """How samples are loaded: processes a rank, micro-batches each keeps ready."""

    workers: int = 0
    prefetch: int = 4


class Batches:
    """A dataset, cut into steps and micro-batches, as one rank sees them."""

    def __init__(
        self,
        task: Any,
        dataset: Any,
        order: Order,
        cut: Cut,
        world: World,
        *,
        seed: int = 0,
        loading: Loading | None = None,
    ) -> None:
        self.cut = cut
        self.world_size = world.size
        self._order, self._rank = order, world.rank
        self._fetch = Fetch(dataset, task, seed)
        self._move = _mover(world.device)
        self._loading = loading or Loading()
        self._cuda = world.device.type == "cuda"

    def from_step(self, start: int) -> "Feed":
        """The steps from `start` on, as an iterator of (step, this rank's micro-batches)."""
        return Feed(self, start)

    def micro(self, start: int) -> Generator[tuple[int, MicroBatch], None, None]:
        """(step, micro-batch) one at a time from step `start` on: the stream that `from_step` groups by step."""
        keys = self._keys(start)
        if not self._loading.workers:
            for key in keys:
                yield key.step, self._place(key, *self._fetch[key])
            return
        for key, data, items in self._loader(keys):
            yield key.step, self._place(Key(*key), data, items)

    def samples(self, step: int, index: int) -> list[int]:
        """The samples of micro-batch `index` of `step`."""
        return [int(sample) for sample in self._order.at(*self.cut.positions(step, index))[1]]

    def _place(self, key: Key, data: Any, items: int) -> MicroBatch:
        data = self._move(data) if self._move else data
        return MicroBatch(data, key.micro, items if key.weight else 0, key.weight)

    def _keys(self, start: int) -> Iterator[Key]:
        """Keys of this rank's micro-batches, the samples looked up for many steps at once: a lone look-up is slow."""
        cut = self.cut
        block = max(1, 4096 // cut.size)
        full = slots(cut.micro_batches, self.world_size, self._rank)
        for first in range(start, cut.steps, block):
            last = min(first + block, cut.steps)
            origin = first * cut.size
            epochs, samples = self._order.at(origin, min(last * cut.size, cut.total))
            for step in range(first, last):
                present = cut.present(step)
                short = present < cut.micro_batches
                mine = slots(cut.micro_batches, self.world_size, self._rank, present) if short else full
                for micro, weight in mine:
                    a, b = cut.positions(step, micro)
                    span = slice(a - origin, b - origin)
                    yield Key(step, micro, weight, epochs[span].tolist(), samples[span].tolist())

    def _loader(self, keys: Iterator[Key]) -> Iterator[tuple[Key, Any, int]]:
        loader = DataLoader(
            _Keyed(self._fetch),
            sampler=_Once(keys),
            batch_size=None,
            collate_fn=_as_is,
            num_workers=self._loading.workers,
            prefetch_factor=self._loading.prefetch,
            pin_memory=self._cuda,
            worker_init_fn=_one_thread,
        )
        return iter(loader)


class Feed:
    """An iterator over (step, micro-batches) that can look ahead: the items of coming steps are counted early."""

    def __init__(self, batches: Batches, start: int) -> None:
        self._stream = batches.micro(start)
        self._steps = batches.cut.steps
        self._slots = -(-batches.cut.micro_batches // batches.world_size)
        self._next = start
        self._ready: deque[list[MicroBatch]] = deque()
        self._present: list[MicroBatch] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, list[MicroBatch]]:
        if not self._ready and not self._load():
            raise StopIteration
        self._next += 1
        self._present = self._ready.popleft()
        return self._next - 1, self._present

    @property
    def present(self) -> list[MicroBatch]:
        """This rank's micro-batches of the step that was taken last."""
        return self._present

    def close(self) -> None:
        """Ends the loader processes."""
        self._stream.close()

    def items(self, step: int) -> int:
        """This rank's items in the present step or one that is still to come; 0 past the last."""
        if step < self._next:
            return sum(batch.items for batch in self._present)
        while step - self._next >= len(self._ready):
            if not self._load():
                return 0
        return sum(batch.items for batch in self._ready[step - self._next])

    def _load(self) -> bool:
        if self._next + len(self._ready) >= self._steps:
            return False
        self._ready.append([batch for _, batch in islice(self._stream, self._slots)])
        return True


def draws(dataset: Any) -> bool:
    """Whether a dataset may draw random numbers: unless it says that it does not, or is known not to."""
    return bool(getattr(dataset, "draws_random", not isinstance(dataset, TensorDataset)))


class Fetch:
    """Key -> (collated batch, items). Whatever it draws at random depends on (seed, epoch, sample) alone.

    A dataset whose attribute `draws_random` is False promises that neither it nor the collate function draws
    anything; then nothing is seeded, which saves a few microseconds a sample.
    """

    def __init__(self, dataset: Any, task: Any, seed: int) -> None:
        self._dataset, self._collate, self._count, self._seed = dataset, task.collate, task.count, seed
        self._random = draws(dataset)
        self._many = getattr(dataset, "__getitems__", None)
        self._each: int | None = getattr(task, "items_per_sample", None)
        self._believed = self._each is None

    def __getitem__(self, key: Key) -> tuple[Any, int]:
        if self._random:
            samples = [self._drawn(epoch, sample) for epoch, sample in zip(key.epochs, key.samples, strict=True)]
            seed_everything(derive(self._seed, "collate", key.step, key.micro))
        elif self._many:
            samples = self._many(key.samples)
        else:
            samples = [self._dataset[sample] for sample in key.samples]
        data = self._collate(samples)
        if not self._believed:
            self._check(data, len(key.samples))
        return data, int(self._count(data)) if self._each is None else self._each * len(key.samples)

    def _check(self, data: Any, samples: int) -> None:
        """A wrong `items_per_sample` would scale every gradient: the first micro-batch is counted all the same."""
        counted, self._believed = int(self._count(data)), True
        if counted != self._each * samples:  # type: ignore[operator]
            raise DataError(
                f"the task's items_per_sample is {self._each}, but `count` finds {counted} items in {samples} samples; "
                "leave items_per_sample out where samples differ"
            )

    def _drawn(self, epoch: int, sample: int) -> Any:
        seed_everything(derive(self._seed, "sample", epoch, sample))
        return self._dataset[sample]


def seed_everything(key: int) -> None:
    """Seeds what datasets and CPU code draw from: torch's default generator, numpy's and random's."""
    torch.default_generator.manual_seed(key)  # torch.manual_seed costs a hundred times as much
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


class _Keyed(Dataset[tuple[Key, Any, int]]):
    """Fetch as torch's loader wants it; the key travels with the batch, so that the two cannot be mismatched."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, key: Key) -> tuple[Key, Any, int]:
        return key, *self._fetch[key]


class _Once:
    """An iterator as the sampler that a DataLoader asks for."""

    def __init__(self, keys: Iterator[Key]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self._keys


def _as_is(value: Any) -> Any:
    """The loader's own conversion would make batches differ from those loaded without workers."""
    return value


def _one_thread(_: int) -> None:
    """Run in each loader process: its libraries must not take the cores that other ranks compute on."""
    end_with_parent()
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)  # BLAS and OpenMP of numpy and whatever else is loaded
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def _mover(device: torch.device) -> Callable[[Any], Any] | None:
    """The function that takes a nested batch to the device; None where it is there already."""
    if device.type == "cpu":
        return None

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(move(item) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(move(item) for item in value)
        return value.to(device) if hasattr(value, "to") else value

    return move
