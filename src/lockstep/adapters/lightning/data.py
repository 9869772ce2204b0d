"""Split a module's DataLoaders into their parts, and run its `test_step` and `predict_step`.

numbers = run_test(task)                    # name -> number, as an evaluation gives them; `task.test()`
outputs = run_predict(task)                 # the results of predict_step, by batch; `task.predict()`

`prepare_loaders` sets module and datamodule up and returns the parts of their loaders (dataset, sampler, collation),
from which a run builds its own. `LoaderOrder` reproduces the order of a loader's sampler. Test and prediction run in
one process on the module's current weights.
"""

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    Subset,
)

from lockstep.adapters.hf_trainer.data import EpochShuffled
from lockstep.adapters.lightning.callbacks import Served
from lockstep.adapters.lightning.package import calls, is_user_defined, kind_of
from lockstep.adapters.lightning.trainer import Standing
from lockstep.data.device import mover
from lockstep.data.groups import SampledGroups
from lockstep.data.loader import collate_draws, draws, generators_kept, seed_everything, seeded_alike
from lockstep.data.rows import rows_of
from lockstep.data.sampler import EpochOrder, Sequential, within
from lockstep.data.stream_types import refuse_divided
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.seeds import derive
from lockstep.task import Order

__all__ = [
    "LoaderParts",
    "Loaders",
    "Placed",
    "Sampled",
    "prepare_loaders",
    "run_predict",
    "run_test",
]


class Placed(NamedTuple):
    """A collated batch with the index of its evaluation set and its number of samples."""

    place: int
    samples: int
    data: Any


class Sampled(Dataset[Any]):
    """A dataset with its own length, or with samples that carry their set's index.

    Args:
        inner: the dataset; an order's indices refer to it.
        size: samples in an epoch.
    """

    def __init__(self, inner: Any, size: int) -> None:
        self.inner = inner
        self.size = size
        if hasattr(inner, "__getitems__"):
            self.__getitems__ = inner.__getitems__
        self.draws_random = draws(inner)
        self.collation_draws = collate_draws(inner)
        self.known_rows = rows_of(inner)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


@dataclass(frozen=True)
class LoaderParts:
    """The parts of a DataLoader.

    Attributes:
        dataset: its `len` is the number of samples of an epoch.
        sampler: yields indices, or lists of them if `in_batches`; None: a shuffle; "sequential": the order of the data.
        batch_size: samples of a batch, of the largest if they differ; 1 if `whole`.
        whole: an item of the dataset is a batch already.
        collate: a list of samples -> a batch.
        drop_last: each epoch drops its incomplete last batch.
        grouped: the lists of its sampler differ in size: each is a micro-batch.
        sizes: of an evaluation's batches, if they differ.
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
    grouped: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        """Positions of an epoch, which batch sizes count: samples, or lists if `grouped`."""
        if self.grouped:
            return len(self.sampler)
        return len(self.dataset)

    @property
    def micro_batch_size(self) -> int:
        """Positions of a micro-batch."""
        if self.grouped:
            return 1
        return self.batch_size

    def order(self, seed: int) -> Order | None:
        """Return the order of the samples or their groups; None: a shuffle per epoch."""
        if self.sampler is None:
            return None
        if self.sampler == "sequential":
            return Sequential(len(self.dataset))
        if isinstance(self.sampler, DistributedSampler):
            return EpochShuffled(len(self.dataset), self.sampler.seed)
        samples = len(self.dataset.inner if isinstance(self.dataset, Sampled) else self.dataset)
        draws = LoaderDraws(self.sampler, seed)
        if self.grouped:
            return SampledGroups(self.sampler, samples, seed, draws)
        return LoaderOrder(draws, len(self.dataset), samples, in_batches=self.in_batches)

    def held_out(self) -> "LoaderParts":
        """Return the parts for an evaluation: the sampler's first epoch, in its order."""
        if self.sampler is None or self.sampler == "sequential" or isinstance(self.sampler, DistributedSampler):
            return self
        if isinstance(self.dataset, Sampled):
            inner = self.dataset.inner
        else:
            inner = self.dataset
        drawn = LoaderDraws(self.sampler, 0)(0)
        lists = drawn if self.in_batches else [drawn]
        return replace(
            self,
            dataset=Subset(inner, [int(index) for indices in lists for index in indices]),
            sampler="sequential",
            in_batches=False,
            grouped=False,
            sizes=tuple(map(len, lists)) if self.grouped else (),
        )

    def batches(self) -> Iterator[range]:
        """Yield the samples of each batch in the order of the data."""
        samples = len(self.dataset)
        start = 0
        for size in self.sizes or itertools.repeat(self.batch_size, -(-samples // self.batch_size)):
            yield range(start, min(start + size, samples))
            start += size


def taken_apart(loader: Any, name: str) -> LoaderParts:
    """Split a loader into its parts.

    Raises:
        ConfigError: it is no DataLoader, or its dataset is iterable.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"from_lightning: {name} returned {type(loader).__name__}: return a torch.utils.data.DataLoader"
        )
    dataset = loader.dataset
    refuse_divided(dataset, f"from_lightning: the dataset of {name}")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"from_lightning: the dataset of {name} is iterable ({type(dataset).__name__}), but samples must be "
            "accessible by index: write it to disk, or load it without streaming"
        )
    overrides_iter = type(loader).__iter__ is not DataLoader.__iter__
    if overrides_iter:
        raise ConfigError(
            f"from_lightning: {name} returned {type(loader).__name__}, which overrides `__iter__`: return a "
            "torch.utils.data.DataLoader with a sampler and a collate_fn"
        )
    collate = loader.collate_fn
    whole = False
    size = loader.batch_size
    in_batches = grouped = False
    sampler: Any = loader.sampler
    # Without automatic batching an item of the dataset is a batch.
    if size is None and loader.batch_sampler is None:
        size = 1
        whole = True
        collate = _ReadyBatch(loader.collate_fn)
    elif size is None:
        sampler, sizes = _unpack_batch_sampler(loader.batch_sampler, name)
        size = max(sizes)
        in_batches = sampler is loader.batch_sampler
        grouped = len(sizes) > 1
    samples = len(dataset)
    if isinstance(sampler, DistributedSampler):
        sampler = sampler if sampler.shuffle else "sequential"
    elif type(sampler) is SequentialSampler:
        sampler = "sequential"
    elif _is_shuffle(sampler):
        sampler = None
    elif not grouped:
        samples = _length(sampler, name) * (size if in_batches else 1)
    if samples != len(dataset):
        dataset = Sampled(dataset, samples)
    workers = int(loader.num_workers)
    prefetch = int(loader.prefetch_factor or 0)
    # Lists of several sizes already reflect the sampler's drop_last.
    drop_last = bool(getattr(loader.batch_sampler, "drop_last", False)) and not grouped
    return LoaderParts(dataset, sampler, in_batches, int(size), whole, collate, workers, prefetch, drop_last, grouped)


def named_loaders(loaders: Any, name: str) -> dict[str, Any]:
    """Return the loaders of an evaluation by name.

    The name is "" for a single loader, `dataloader_idx_N` or the mapping's own key for several.
    """
    if loaders is None:
        return {}
    if type(loaders).__name__ == "CombinedLoader":
        inner = getattr(loaders, "iterables", None)
    else:
        inner = None
    loaders = loaders if inner is None else inner
    if isinstance(loaders, Mapping):
        return {str(key): loader for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        if len(loaders) == 1:
            return {"": loaders[0]}
        return {f"dataloader_idx_{index}": loader for index, loader in enumerate(loaders)}
    return {"": loaders}


@final
class LoaderDraws:
    """Draws of a loader's sampler, epoch by epoch, as Lightning draws them.

    Its generator continues from epoch to epoch.

    Args:
        sampler: yields indices, or lists of them; `set_epoch` is called before each epoch.
        seed: of the run; draws from the default generators use a seed derived from it for each epoch.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.name = type(sampler).__name__
        self._sampler = sampler
        self._seed = seed
        self._generators = [(generator, generator.get_state()) for generator in _generators(sampler)]

    def __call__(self, epoch: int) -> list[Any]:
        """Return what the sampler yields in an epoch."""
        with generators_kept():
            # Generators continue from epoch to epoch, so the earlier epochs are drawn again.
            for generator, state in self._generators:
                generator.set_state(state)
            for drawn_epoch in range(epoch + 1) if self._generators else (epoch,):
                seed_everything(derive(self._seed, "sampler", drawn_epoch))
                for item in within(self._sampler):
                    if callable(getattr(item, "set_epoch", None)):
                        item.set_epoch(drawn_epoch)
                drawn = []
                for item in self._sampler:
                    drawn.append(list(item) if isinstance(item, list) else item)
        return drawn


@final
class LoaderOrder(EpochOrder):
    """The order of a loader's sampler.

    Args:
        draws: what the sampler yields in an epoch.
        size: samples in an epoch; further indices are dropped.
        samples: of the dataset.
        in_batches: the sampler yields lists, of one size.
    """

    def __init__(self, draws: LoaderDraws, size: int, samples: int, *, in_batches: bool) -> None:
        super().__init__(size, samples)
        self._draws = draws
        self._in_batches = in_batches

    def draw(self, epoch: int) -> NDArray[np.int64]:
        """Draw the indices of an epoch.

        Raises:
            ConfigError: the sampler yields too few, or lists of unlike sizes, unlike in its first epoch.
        """
        drawn = self._draws(epoch)
        sizes = {len(entry) for entry in drawn} if self._in_batches else {1}
        if len(sizes) > 1:
            raise ConfigError(
                f"from_lightning: the batch sampler {self._draws.name} makes batches of {min(sizes)} to {max(sizes)} "
                f"samples in epoch {epoch}, but of one size in its first: let them differ in every epoch, or in none"
            )
        if self._in_batches:
            indices = []
            for batch in drawn:
                for entry in batch:
                    indices.append(int(entry))
        else:
            indices = list(map(int, drawn))
        if len(indices) < self.size:
            raise ConfigError(
                f"from_lightning: the sampler {self._draws.name} gave {len(indices)} samples in epoch {epoch}, but its "
                f"length is {self.size}: every epoch must have that many"
            )
        return np.asarray(indices[: self.size], dtype=np.int64)


@final
class _ReadyBatch:
    """Collation for a dataset of ready batches: convert the single item."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, samples: list[Any]) -> Any:
        return self._convert(samples[0])


def _is_shuffle(sampler: Any) -> bool:
    """Whether this is the sampler of `shuffle=True`.

    It yields each sample once, without a generator of its own.
    """
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    return plain and sampler.num_samples == len(sampler.data_source)


def _unpack_batch_sampler(batch_sampler: Any, name: str) -> tuple[Any, set[int]]:
    """Return a batch sampler and the sizes of its batches.

    For torch's own batch sampler the sampler inside it is returned.

    Raises:
        ConfigError: it has no length, or makes no batches.
    """
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler, {int(batch_sampler.batch_size)}
    _length(batch_sampler, name)
    # Reading the sizes must not advance the sampler or its generators.
    generator_states = [(rng, rng.get_state()) for rng in _generators(batch_sampler)]
    with generators_kept():
        sizes = {len(batch) for batch in copy.copy(batch_sampler)}
    for generator, state in generator_states:
        generator.set_state(state)
    if not sizes - {0}:
        raise ConfigError(
            f"from_lightning: the batch sampler of {name}, {type(batch_sampler).__name__}, makes no batches: let it "
            "yield lists of indices"
        )
    return batch_sampler, sizes


def _length(sampler: Any, name: str) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise ConfigError(
            f"from_lightning: the sampler of {name}, {type(sampler).__name__}, has no length: define `__len__` as "
            "the samples of an epoch"
        ) from error


def _generators(sampler: Any) -> list[torch.Generator]:
    generators = []
    for candidate in within(sampler):
        generators.append(getattr(candidate, "generator", None))
    candidates = []
    for candidate in generators:
        if isinstance(candidate, torch.Generator):
            candidates.append(candidate)
    return candidates


@dataclass
class Loaders:
    """The parts of the training and validation loaders.

    Attributes:
        datamodule: None: there is none.
        seed: under which every set of data is made.
    """

    train: LoaderParts
    validation: dict[str, LoaderParts] = field(default_factory=dict)
    datamodule: Any = None
    seed: int = 0


def prepare_loaders(module: Any, data: Any, trainer: Standing, seed: int) -> Loaders:
    """Set up module and datamodule, and split their training and validation loaders.

    Args:
        seed: of torch, numpy and random before each method that makes data.

    Raises:
        ConfigError: there is no training loader, or one that cannot be split.
    """
    datamodule = data if kind_of(data, "LightningDataModule") else None
    if datamodule is not None:
        datamodule.trainer = trainer
    _prepare(module, datamodule, seed)
    _call_setup(module, datamodule, "fit", seed)
    if data is not None and datamodule is None:
        passed = _split_loaders(data)
    else:
        passed = None
    if passed:
        train = passed[0]
    else:
        train = _call_loader("train_dataloader", module, datamodule, seed)
    if train is None:
        raise ConfigError(
            f"from_lightning: {type(module).__name__} has no train_dataloader: pass a datamodule (--datamodule "
            "FILE.py:DataModule) or a loader"
        )
    if isinstance(train, Mapping | list | tuple) or type(train).__name__ == "CombinedLoader":
        loaders = named_loaders(train, "train_dataloader")
        if len(loaders) != 1:
            raise ConfigError(
                "from_lightning: train_dataloader returned several loaders: return one, of a dataset whose samples "
                "have a part of each"
            )
        (train,) = loaders.values()
    trainer.train_dataloader = train
    parts = taken_apart(train, "train_dataloader")
    if passed:
        val_loaders = passed[1]
    else:
        val_loaders = _call_loader("val_dataloader", module, datamodule, seed)
    trainer.val_dataloaders = val_loaders
    if is_user_defined(module, "validation_step"):
        sets = named_loaders(val_loaders, "val_dataloader")
    else:
        sets = {}
    validation = {}
    for name, loader in sets.items():
        validation[name] = taken_apart(loader, "val_dataloader").held_out()
    # An evaluation without samples is left out.
    return Loaders(
        parts, {name: loader for name, loader in validation.items() if len(loader.dataset)}, datamodule, seed
    )


def _setup_loaders(module: Any, made: Loaders, name: str) -> dict[str, LoaderParts]:
    """Set up for `test_dataloader` or `predict_dataloader`, and return the parts of its loaders."""
    _call_setup(module, made.datamodule, name.removesuffix("_dataloader"), made.seed)
    loaders = _call_loader(name, module, made.datamodule, made.seed)
    if loaders is None:
        raise ConfigError(f"{type(module).__name__} has no {name}: define it, or pass a datamodule that has it")
    parts = {}
    for key, loader in named_loaders(loaders, name).items():
        parts[key] = taken_apart(loader, name).held_out()
    return parts


def _call_setup(module: Any, datamodule: Any, stage: str, seed: int) -> None:
    """Call `setup` of datamodule, callbacks and module, in Lightning's order."""
    with module.trainer.setting_up(), seeded_alike(seed):
        if is_user_defined(datamodule, "setup"):
            datamodule.setup(stage)
        Served(module.trainer.callbacks).call("setup", module.trainer, module, stage=stage)
        if is_user_defined(module, "setup"):
            module.setup(stage)


def _call_loader(name: str, module: Any, datamodule: Any, seed: int) -> Any:
    for owner in (datamodule, module):
        if is_user_defined(owner, name):
            with module.trainer.setting_up(), seeded_alike(seed):
                return getattr(owner, name)()
    return None


def _split_loaders(loaders: Any) -> tuple[Any, Any]:
    """Return (training, evaluation) loaders that were passed in place of a datamodule."""
    if isinstance(loaders, DataLoader):
        return loaders, None
    if isinstance(loaders, list | tuple) and len(loaders) == 2:
        return loaders[0], loaders[1]
    raise ConfigError(
        f"from_lightning: datamodule is {type(loaders).__name__}: pass a LightningDataModule, a DataLoader, or "
        "(train loader, validation loader)"
    )


def _prepare(module: Any, datamodule: Any, seed: int) -> None:
    """Call `prepare_data` of datamodule and module on rank 0, or on each node's first rank.

    The other ranks wait.
    """
    owners = []
    for candidate in (datamodule, module):
        if is_user_defined(candidate, "prepare_data"):
            owners.append(candidate)
    if not owners:
        return

    def here() -> None:
        for owner in owners:
            per_node = bool(getattr(owner, "prepare_data_per_node", True))
            if int(os.environ.get("LOCAL_RANK" if per_node else "RANK", "0")) == 0:
                with module.trainer.setting_up(), seeded_alike(seed):
                    owner.prepare_data()

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        here()
        return
    # An hour: prepare_data may download.
    world = World.join(device="cpu", timeout=3600.0)
    try:
        # Collective over all ranks: the others wait, and an error is raised on every rank.
        on_all_ranks(world, here)
    finally:
        world.leave()


def run_test(task: Any) -> dict[str, float]:
    """Run `test_step` over the test loaders with the current weights, and return what it logs.

    Every sample counts once.

    Raises:
        ConfigError: the module has no test_step, or there is no test_dataloader.
    """
    _check(task, "test_step")
    sets = _setup_loaders(task.module, task.loaders, "test_dataloader")
    test_task = task.testing(sets)
    results: dict[str, float] = {}
    with _evaluation_mode(task):
        for name, index, epoch in test_task.epochs():
            for batch in _batches(list(sets.values())[index], index, task.trainer.limit_test_batches):
                test_task.evaluate(task.module, _to_device(task, batch))
            numbers = epoch.compute()
            for key, value in numbers.items():
                results[task.metric_name(name, key) if name else key] = value
    task.life.teardown("test")
    return results


def run_predict(task: Any) -> list[Any]:
    """Run `predict_step` over the predict loaders, and return its results batch by batch.

    With several loaders there is a list for each.

    Raises:
        ConfigError: there is no predict_dataloader.
    """
    sets = _setup_loaders(task.module, task.loaders, "predict_dataloader")
    life = task.life
    outputs = list[list[Any]]()
    task.trainer.stage = "predict"
    with _evaluation_mode(task):
        for name in ("start", "epoch_start"):
            life.hook(f"on_predict_{name}")
        for index, parts in enumerate(sets.values()):
            outputs.append([])
            for number, batch in enumerate(_batches(parts, index, task.trainer.limit_predict_batches)):
                data = task.transfer(_to_device(task, batch).data, index)
                args = (data, number, index) if len(sets) > 1 else (data, number)
                life.hook("on_predict_batch_start", *args)
                output = life.call("predict_step", *calls(task.module.predict_step, *args))
                life.hook("on_predict_batch_end", output, *args)
                outputs[-1].append(output)
        for name in ("epoch_end", "end"):
            life.hook(f"on_predict_{name}")
    life.teardown("predict")
    if len(outputs) == 1:
        return outputs[0]
    return outputs


@contextlib.contextmanager
def _evaluation_mode(task: Any) -> Iterator[None]:
    """Put the module into eval mode without gradients, in a context."""
    modes = [(submodule, submodule.training) for submodule in task.module.modules()]
    task.module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        task.trainer.stage = "train"
        for submodule, mode in modes:
            submodule.training = mode


def _check(task: Any, step: str) -> None:
    if not is_user_defined(task.module, step):
        raise ConfigError(f"{type(task.module).__name__} has no `{step}`: define it")


def _to_device(task: Any, batch: Placed) -> Placed:
    device = next((p.device for p in task.module.parameters()), torch.device("cpu"))
    move = mover(device)
    if move:
        return batch._replace(data=move(batch.data))
    return batch


def _batches(parts: LoaderParts, place: int, limit: int | float) -> Iterator[Placed]:
    """Yield the batches of a set in the order of the data."""
    ranges = list(parts.batches())
    # An integer limits the number of batches, a float the share of them.
    if isinstance(limit, int) and not isinstance(limit, bool):
        most = limit
    else:
        most = int(len(ranges) * limit)
    for indices in ranges[:most]:
        yield Placed(place, len(indices), parts.collate([parts.dataset[at] for at in indices]))
