"""Load data, write checkpoints and compute gradients in your own training loop.

world = lockstep.World.join()
engine = lockstep.engine("auto", model, optimizer, world, clip=1.0)
loader = lockstep.loader(data, world, batch_size=64, micro_batch_size=16, epochs=3)
done = lockstep.load_state("out", world, engine=engine, scheduler=scheduler, loader=loader)
for step in loader:
    for batch in step:
        with engine.accumulate(batch.last):
            engine.backward(loss_of(engine.model, batch.data), batch.weight)
    engine.step()
    scheduler.step()
    if (step.number + 1) % 100 == 0:
        lockstep.save_state("out", world, step.number + 1, engine=engine, scheduler=scheduler, loader=loader)
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from lockstep import checkpoint
from lockstep.checkpoint.check import read_contents
from lockstep.checkpoint.format import read_manifest
from lockstep.clock import HostClock
from lockstep.config.fields import is_url
from lockstep.config.secrets import mask
from lockstep.data.batches import Batches, Loading, MicroBatch, Origin, StepPlan
from lockstep.data.loader import check_dataset
from lockstep.data.sampler import Sequential, SizedOrder, order_from
from lockstep.data.shard_order import Geometry, own_order, place_order
from lockstep.distributed import collectives
from lockstep.distributed.agreement import LONG, on_all_ranks
from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.errors import CheckpointError, ConfigError, UsageError, name_settings
from lockstep.loop import seeder
from lockstep.passes import StepControl
from lockstep.task import Task, items_of_a_sample
from lockstep.tensors import as_bytes, from_bytes
from lockstep.transforms.precision import AUTOCAST
from lockstep.whole_step import WholeStepPasses

__all__ = [
    "OwnLoopLoader",
    "autocast",
    "gather_for_metrics",
    "load_state",
    "loader",
    "save_state",
    "step_backward",
]


# PLR0913: a function for users, who name the arguments that they need.
def loader(  # noqa: PLR0913
    dataset: Any,
    world: World,
    *,
    batch_size: int,
    micro_batch_size: int,
    epochs: int = 1,
    steps: int = 0,
    shuffle: bool = True,
    order: Any = None,
    shuffle_shards: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
    count: Callable[[Any], Any] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    workers: int = 0,
) -> "OwnLoopLoader":
    """Make an iterator over the steps of a training, each with this rank's micro-batches.

    The samples of a micro-batch and its random numbers depend only on (seed, step, micro-batch), as in
    `lockstep.train`, and not on the world size or a resume. It serves an evaluation too.

    A further loader of the same world continues where the last one ended: it begins with the next epoch and step, so
    its order and its random numbers are new. Those with a shuffle (or an `order`) and those without have separate
    counts, so that evaluations in between do not change the training.

    Args:
        dataset: has `len(dataset)` and `dataset[i]`; the same on every rank.
        world: see `World.join`.
        batch_size: samples per step, over all ranks.
        micro_batch_size: samples per forward.
        epochs: passes over the data; a step may span two.
        steps: number of steps, all full, instead of `epochs`.
        shuffle: a new permutation in each epoch; False: the order of the dataset.
        order: instead of a shuffle: a torch Sampler, whose length is an epoch's, or an object with `at(start, stop)`,
            as from a task's `order`.
        shuffle_shards: for a dataset in shards: shards in a group whose samples are shuffled together; 0: shuffle all.
        seed: of the order and of all random numbers.
        drop_last: drop a last step that would be short.
        collate: a list of samples -> a batch in host memory; None: torch's `default_collate`.
        count: a batch in host memory -> its items, over which the loss is a mean or a sum, such as labelled tokens; a
            finite number, 0 or more. None: its samples.
        reduction: whether the loss is a sum or a mean over items. A mean is weighted by their number, so that each
            item of a step counts the same.
        workers: loader processes.

    Raises:
        ConfigError: a size is not positive, a step is not a whole number of micro-batches, or has fewer than there are
            ranks.
        DataError: the dataset cannot be indexed or is empty, or `order` fails or has other indices.
    """
    _check_arguments(batch_size, micro_batch_size, epochs, steps, workers, reduction)
    check_dataset(dataset, "train")
    geometry = Geometry(batch_size, micro_batch_size)
    stream = _sample_order(dataset, order, geometry, seed, shuffle=shuffle, shuffle_shards=shuffle_shards)
    planned = steps * batch_size or epochs * stream.size
    plan = StepPlan(batch_size, micro_batch_size, planned - (planned % batch_size if drop_last else 0))
    # Every rank needs at least one micro-batch, since the engines' collectives involve all ranks.
    ranks = world.data_parallel.size
    if plan.micro_batches < ranks:
        raise ConfigError(
            f"lockstep.loader: a step of {batch_size} is {plan.micro_batches} micro-batches of {micro_batch_size}, "
            f"fewer than the {ranks} ranks; use a smaller micro_batch_size"
        )
    task = _LoaderTask(collate, count, reduction)

    def load_from(origin: Origin) -> Batches:
        moved = replace(plan, total=origin.position + plan.total, origin=origin)
        return Batches(task, dataset, stream, moved, world, seed=seed, loading=Loading(workers))

    order_kind = "in order" if isinstance(stream, Sequential) else "shuffled"
    return OwnLoopLoader(load_from, plan, _Epochs(order_kind, stream.size, planned), task, world, seed)


def _check_arguments(
    batch_size: int, micro_batch_size: int, epochs: int, steps: int, workers: int, reduction: str
) -> None:
    """Raise ConfigError if an argument of `loader` is out of range, or a step no whole number of micro-batches."""
    for name, value in {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "epochs": epochs}.items():
        if value < 1:
            raise ConfigError(f"lockstep.loader: {name} is {value}: it must be at least 1")
    if steps < 0 or workers < 0:
        raise ConfigError(f"lockstep.loader: steps ({steps}) and workers ({workers}) cannot be negative")
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"lockstep.loader: reduction is '{reduction}': it must be 'mean' or 'sum'")
    if batch_size % micro_batch_size:
        raise ConfigError(
            f"lockstep.loader: batch_size {batch_size} is not a multiple of micro_batch_size {micro_batch_size}"
        )


def _sample_order(
    dataset: Any, order: Any, geometry: Geometry, seed: int, *, shuffle: bool, shuffle_shards: int
) -> SizedOrder:
    """Make the order of the samples: of shards, the caller's, the dataset's, or a permutation.

    Raises:
        ConfigError: both an order and one of shards are asked for.
        DataError: the order fails or has other indices.
    """
    order_of_shards = own_order(dataset, seed, shuffle_shards) if shuffle else None
    if order_of_shards is not None and order is not None:
        raise ConfigError("lockstep.loader: give `order`, or a mixture or `shuffle_shards`, not both")
    if order_of_shards:
        stream = order_of_shards
    elif order is None and not shuffle:
        stream = Sequential(len(dataset))
    else:
        stream = order_from(order, len(dataset), seed)
    return place_order(stream, geometry, stream.size)


@dataclass(frozen=True, slots=True)
class LoaderBatch:
    """A micro-batch: the samples of one forward.

    Attributes:
        data: the result of `collate`, on the device.
        weight: for `engine.backward(loss, weight)`: the micro-batch's share of the step's loss, the mean over all items
            of the step. 0 for an empty slot (in a short last step, or if ranks have unequal numbers), which repeats
            another micro-batch to keep collectives aligned.
        items: number of items; 0 in an empty slot.
        last: whether it is this rank's last of the step, for `engine.accumulate(last)`.
    """

    data: Any
    weight: float
    items: float
    last: bool


@dataclass(frozen=True, slots=True)
class LoaderStep:
    """An iterator over this rank's micro-batches of a step, which seeds torch before each.

    Attributes:
        number: from 0, in its loader.
        epoch: of its first sample, from 0, in its loader.
        ends_epoch: an epoch ends with it, or is incomplete at the loader's end: the time for a scheduler by epochs.
        items: over all ranks.
        world: the ranks.
        counted: for each of this rank's micro-batches, False if it is an empty slot.
        micro_batches: M, over all ranks.
        micro: this rank's micro-batches.
        seed: (step, micro-batch) -> None; seeds torch's generators.
    """

    number: int
    epoch: int
    ends_epoch: bool
    items: float
    world: World
    counted: tuple[bool, ...]
    micro_batches: int
    micro: list[MicroBatch]
    seed: Callable[[int, int], None]
    _mean: bool

    def __len__(self) -> int:
        return len(self.micro)

    def __iter__(self) -> Iterator[LoaderBatch]:
        for batch in self.micro:
            share = (batch.items if self._mean else batch.weight) / (self.items or 1)
            is_last = batch is self.micro[-1]
            items = batch.items if batch.weight else 0
            data = batch.data
            # The same seed as in `lockstep.train`, so that both loops draw the same numbers.
            self.seed(self.number, batch.index)
            yield LoaderBatch(data, share if batch.weight else 0.0, items, is_last)


class _Epochs(NamedTuple):
    """The epochs of a loader.

    Attributes:
        kind: loaders of one kind continue each other.
        size: samples in an epoch.
        planned: samples of all, before a short last step is dropped.
    """

    kind: str
    size: int
    planned: int


@final
class OwnLoopLoader:
    """The remaining steps of a training; each iteration continues where the last one ended.

    Attributes:
        micro_batches: M, in every step over all ranks, for `lockstep.engine(..., exact_micro_batches=M)`.
        steps: total number.
    """

    def __init__(
        self,
        load_from: Callable[[Origin], Batches],
        plan: StepPlan,
        epochs: _Epochs,
        task: "_LoaderTask",
        world: World,
        seed: int,
    ) -> None:
        self._load_from = load_from
        self._step_plan = plan
        self._epochs = epochs
        self._world = world
        self._each = items_of_a_sample(task)
        self._mean = task.reduction == "mean"
        self._done = 0
        self._reseed = seeder(seed, "micro", world.device)
        self.micro_batches = plan.micro_batches
        self.steps = plan.steps
        self._plan = {
            "batch_size": plan.size,
            "micro_batch_size": plan.micro_size,
            "samples": epochs.size,
            "seed": seed,
        }
        self._begin_at(world.loaded.get(epochs.kind, [0, 0]))

    def _begin_at(self, start: list[int]) -> None:
        """Set the first epoch and step; the next loader of this kind continues after them."""
        self._start = start
        epoch, step = start
        last_epoch = epoch + -(-self._epochs.planned // self._epochs.size)
        self._world.loaded[self._epochs.kind] = [last_epoch, step + self.steps]

    def __len__(self) -> int:
        """Return the number of remaining steps."""
        return self.steps - self._done

    def __iter__(self) -> Iterator[LoaderStep]:
        """Yield the remaining steps. Collective.

        At most one small exchange per step adds up the items.
        """
        epoch, first_step = self._start
        batches = self._load_from(Origin(first_step, epoch * self._epochs.size))
        plan = batches.step_plan
        steps = batches.from_step(first_step + self._done)
        items_per_sample = self._each
        constant = (lambda step: items_per_sample * plan.samples(step)) if items_per_sample else None
        exchange = StepExchange(self._world, steps.items, constant, plan.steps)  # collective
        with closing(exchange), closing(steps):
            for step_number, micro in steps:
                items = exchange.global_items(step_number)
                self._done = step_number - first_step + 1
                yield self._step(step_number - first_step, items, micro)
                # Collective: exchange the counts of the next step while the caller's update runs.
                exchange.send(step_number)
                exchange.receive()

    def _step(self, number: int, items: float, micro: list[MicroBatch]) -> LoaderStep:
        start = number * self._step_plan.size
        is_last = number + 1 == self.steps
        end = self._epochs.planned if is_last else start + self._step_plan.size
        epoch = start // self._epochs.size
        first_step = self._start[1]
        return LoaderStep(
            number,
            epoch,
            end // self._epochs.size > epoch,
            items,
            self._world,
            tuple(bool(batch.weight) for batch in micro),
            self.micro_batches,
            micro,
            lambda number, index: self._reseed(first_step + number, index),
            self._mean,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the current step."""
        return {"done": self._done, "start": list(self._start), **self._plan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. Raises ConfigError if data, sizes or seed differ."""
        differing = []
        for name, value in self._plan.items():
            differing.append(f"{name} ({state.get(name)} before, {value} now)")
        differing = [
            line for line, name in zip(differing, self._plan, strict=True) if state.get(name) != self._plan[name]
        ]
        if differing:
            raise ConfigError(
                f"lockstep.loader: different {', '.join(differing)}, so samples would repeat; use the same values"
            )
        self._done = min(int(state["done"]), self.steps)
        # States of earlier versions have no "start": they had only one loader.
        self._begin_at(list(state.get("start", [0, 0])))


class _LoaderTask(Task):
    """The parts of a task that loading needs."""

    def __init__(
        self,
        collate: Callable[[list[Any]], Any] | None,
        count: Callable[[Any], Any] | None,
        reduction: Literal["mean", "sum"],
    ) -> None:
        self.reduction = reduction
        if collate:
            # mypy rejects assigning to a method. The argument replaces Task's default for this instance alone.
            self.collate = collate  # type: ignore[method-assign, assignment]
        if count:
            # As above.
            self.count = count  # type: ignore[method-assign, assignment]

    def model(self) -> NoReturn:
        raise NotImplementedError

    def dataset(self, split: str) -> NoReturn:
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> NoReturn:
        raise NotImplementedError


def gather_for_metrics(step: LoaderStep, values: Sequence[Any]) -> Any:
    """Gather the rows of all micro-batches of a step on every rank. Collective.

    Each sample is included once, without the repetitions that fill up a step. Rows are in the order of the step's data,
    at any world size.

    Args:
        step: of a `lockstep.loader`.
        values: for each micro-batch of `step`, in order: a tensor of shape [rows, ...], or a tuple, list or dict of
            them. Only the number of rows may differ.

    Returns:
        The same structure, with tensors of shape [rows of the step, ...] on the device of the input.

    Raises:
        UsageError: not one value per micro-batch, or different structures.
    """
    if len(values) != len(step):
        raise UsageError(f"gather_for_metrics: {len(values)} values for the {len(step)} micro-batches of the step")
    leaves, forms = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
    if any(form != forms[0] for form in forms):
        raise UsageError(
            "gather_for_metrics: the values of the micro-batches differ in structure; use one structure for all"
        )
    if not all(isinstance(leaf, Tensor) and leaf.ndim for value in leaves for leaf in value):
        raise UsageError("gather_for_metrics: give tensors of shape [rows, ...]; numbers have no rows")
    peers = step.world.data_parallel
    columns = []
    for rows in zip(*leaves, strict=True):
        counted_rows = []
        for value, counts in zip(rows, step.counted, strict=True):
            # An empty slot repeats another micro-batch, so its rows would count twice.
            if counts:
                counted_rows.append(value.detach())
        columns.append(_gather_rows(torch.cat(counted_rows) if counted_rows else rows[0].detach()[:0], peers))
    return pytree.tree_unflatten(columns, forms[0])


def _gather_rows(own: Tensor, world: World) -> Tensor:
    if world.size == 1:
        return own
    # Collective over all ranks: an all-gather needs equal sizes, so the ranks agree on the longest.
    lengths = [int(length) for length in world.gather(len(own))]  # collective
    send = own.new_zeros((max(lengths), *own.shape[1:]))
    send[: len(own)] = own
    # Bytes, because gloo does not support every dtype.
    data = as_bytes(send)
    received = [torch.empty_like(data) for _ in lengths]
    collectives.all_gather(received, data, group=world.group)  # collective
    rows_by_rank = []
    for padded, length in zip(received, lengths, strict=True):
        rows_by_rank.append(from_bytes(padded, own.dtype, send.shape)[:length])
    return torch.cat(rows_by_rank)


def autocast(world: World, precision: str) -> AbstractContextManager[Any]:
    """Return an autocast context for a forward.

    With fp16, create the engine with `loss_scaling=True`.

    Args:
        world: the ranks.
        precision: "bf16" or "fp16"; "float32": no autocast.

    Raises:
        UsageError: another precision.
    """
    if precision == "float32":
        return nullcontext()
    if precision not in AUTOCAST:
        raise UsageError(
            f"lockstep.autocast: precision is '{precision}': it must be one of float32, {', '.join(AUTOCAST)}"
        )
    return torch.autocast(world.device.type, AUTOCAST[precision])


_ENGINE = "engine"  # its tensors are stored as model/..., optimizer/..., as in a run's checkpoints
_LOG = logging.getLogger("lockstep")


class Stateful(Protocol):
    """An engine, a loader, a scheduler, a module, or a metric."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, strings, and lists and dicts of these."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore the state."""


def save_state(folder: str | Path, world: World, step: int, /, *, keep: int = 2, **what: Stateful) -> Path:
    """Write a checkpoint of all named objects to `folder`/checkpoints, atomically. Collective.

    Args:
        folder: on a file system that all ranks share.
        world: the ranks.
        step: number of completed steps.
        keep: number of newest checkpoints to keep.
        what: objects by any names; tensors of `engine` get the names that `lockstep checkpoint` and `lockstep export`
            expect. Everything except engines must be the same on every rank.

    Returns:
        The checkpoint's path.

    Raises:
        UsageError: a state that is not made of tensors, numbers, strings, lists and dicts.
        CheckpointError: the file system refused; or an optimizer state, or a parameter that has one, is not finite, and
            `load_state` will skip this checkpoint. On every rank; older checkpoints are unchanged.
    """
    if step < 0 or keep < 1:
        raise UsageError(f"lockstep.save_state: step ({step}) must be at least 0 and keep ({keep}) at least 1")
    path = _path_of(folder)
    tensors = dict[str, Tensor]()
    plain = dict[str, Any]()
    for name, stateful in what.items():
        state = stateful.state_dict()
        if name == _ENGINE:
            tensors |= state
        else:
            plain[name] = _to_json(state, f"{name}/", tensors)
    saved = checkpoint.save(
        path,
        step,
        tensors,
        {"global_step": step, "own_loop": plain, "scheduled": _scheduled_values(what), "loaded": world.loaded},
        world,
        engine="own loop",
        exempt=tensors.keys() - _names_with_states(tensors),
    )  # collective
    if world.is_main:
        checkpoint.retain(path, last=keep, best=None, every=0)
    return saved


def _path_of(folder: str | Path) -> Path:
    """Return the folder's path. Raises ConfigError for a URL."""
    if is_url(str(folder)):
        raise ConfigError(
            f"'{mask(str(folder))}' is a URL: give save_state and load_state a folder, and copy it yourself"
        )
    return Path(folder)


def load_state(folder: str | Path, world: World, /, **what: Stateful) -> int:
    """Load the newest complete checkpoint into all named objects. Collective.

    Returns:
        The number of completed steps; 0 without a checkpoint, and nothing is changed.

    Raises:
        CheckpointError: none is complete, or the newest has other objects.
    """
    # Rank 0 verifies the newest checkpoint, and all ranks agree on it.
    newest = checkpoint.find_resume(
        _path_of(folder), world, lambda line: _LOG.warning(name_settings(line))
    )  # collective
    if newest is None:
        return 0
    path, state = newest
    plain = state.get("own_loop")
    if not isinstance(plain, dict):
        raise CheckpointError(f"{path} was written by lockstep.train; use another folder")
    objects = {*what} - {_ENGINE}
    stored = {*plain}
    if objects != stored:
        expected, actual = (", ".join(sorted(names)) or "nothing" for names in (objects, stored))
        raise CheckpointError(f"{path} has {actual} besides an engine, not {expected}; pass the same objects")
    # Collective.
    tensors = on_all_ranks(world, lambda: _allocate(path, tuple(f"{name}/" for name in plain)), signs=LONG)
    engine = what[_ENGINE].state_dict() if _ENGINE in what else {}
    # Every rank reads its own parts of each tensor.
    checkpoint.load(path, engine | tensors, world, verified=True)  # collective
    if _ENGINE in what:
        what[_ENGINE].load_state_dict(engine)
    for name, value in plain.items():
        what[name].load_state_dict(_from_json(value, tensors))
        _set_scheduled(what[name], _from_json(state.get("scheduled", {}).get(name), {}))
    for order_kind, start in state.get("loaded", {}).items():
        world.loaded[order_kind] = list(start)
    return int(state["global_step"])


def _names_with_states(names: Iterable[str]) -> set[str]:
    """Return the names of the engine's optimizer states, and of the parameters that have one."""
    states = set()
    for name in names:
        if name.startswith("optimizer/"):
            states.add(name)
    return states | {f"model/{name.removeprefix('optimizer/').rpartition('/')[0]}" for name in states}


_SCHEDULED = ("lr", "momentum", "betas")  # what torch's schedulers write into a group


def _scheduled_values(what: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the scheduled settings of each scheduler's optimizer, which an engine's state does not store."""
    values: dict[str, Any] = {}
    for name, stateful in what.items():
        if isinstance(stateful, LRScheduler):
            groups = []
            for group in stateful.optimizer.param_groups:
                groups.append({key: group[key] for key in _SCHEDULED if key in group})
            # Waits for the device once per tensor, at a save.
            groups = [pytree.tree_map_only(Tensor, float, group) for group in groups]
            values[name] = _to_json(groups, f"{name}/", {})
    return values


def _set_scheduled(each: Stateful, values: list[dict[str, Any]] | None) -> None:
    """Set the scheduled settings of a scheduler's optimizer.

    `values` is None in checkpoints of earlier versions: the scheduler's last rates are used.
    """
    if not isinstance(each, LRScheduler):
        return
    values = values or [{"lr": rate} for rate in each.get_last_lr()]
    for group, stored in zip(each.optimizer.param_groups, values, strict=True):
        for key, value in stored.items():
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _allocate(path: Path, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """Allocate the tensors of the checkpoint whose names have these prefixes."""
    stored = read_contents(path, read_manifest(path))
    tensors = {}
    for name, entry in stored.items():
        if name.startswith(prefixes):
            tensors[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    return tensors


def _to_json(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Convert `value` to JSON, and collect its tensors under names with this prefix."""
    if isinstance(value, Tensor):
        tensors[prefix.rstrip("/")] = value
        return {"tensor": prefix.rstrip("/")}
    if isinstance(value, dict):
        return {"dict": [[_to_json(k, prefix, {}), _to_json(v, f"{prefix}{k}/", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        type_name = "tuple" if isinstance(value, tuple) else "list"
        return {type_name: [_to_json(element, f"{prefix}{index}/", tensors) for index, element in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no inf or NaN.
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"lockstep.save_state: {prefix.rstrip('/')} is a {type(value).__name__}, which needs pickle; "
        "remove it from that state_dict()"
    )


def _from_json(stored: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(stored, dict):
        return stored
    ((type_name, content),) = stored.items()
    if type_name == "tensor":
        return tensors[content]
    if type_name == "float":
        return float(content)
    if type_name == "dict":
        return {_from_json(key, tensors): _from_json(value, tensors) for key, value in content}
    values = [_from_json(element, tensors) for element in content]
    if type_name == "tuple":
        return tuple(values)
    return values


def step_backward(
    step: LoaderStep,
    engine: Engine,
    outputs: Callable[[nn.Module, Any], Any],
    step_loss: Callable[[Any], Tensor] | None = None,
    *,
    step_loss_rows: Callable[[Any, Any, int], Tensor] | None = None,
) -> Tensor:
    """Compute the gradient of a loss over all samples of a step. Collective.

    Call `engine.step()` next. Each micro-batch takes two forwards, or one if it is this rank's only one. The gradient
    is that of one forward over the whole step, on any number of ranks.

    Args:
        step: of a `lockstep.loader`; do not iterate over it yourself.
        engine: has the gradient afterwards.
        outputs: (engine.model, a micro-batch's data) -> a tensor of shape [samples, ...], or a tuple or dict of them.
        step_loss: outputs of all samples of the step, in order -> the loss, 0-dim. It must not use parameters.
        step_loss_rows: instead of it, (own, whole, first) -> the part of the micro-batch whose outputs `own` start at
            row `first` of `whole`. The loss is the sum of the parts.

    Returns:
        The step's loss, 0-dim, the same on every rank.

    Raises:
        UsageError: neither `step_loss` nor `step_loss_rows` was given, or both.
    """
    if (step_loss is None) == (step_loss_rows is None):
        raise UsageError("lockstep.step_backward: pass step_loss or step_loss_rows, not both")
    passes = WholeStepPasses(engine, _PassTask(outputs, step_loss, step_loss_rows), _control(step))
    losses = passes.first(step.number, step.micro, 1.0)
    if losses:
        total = torch.stack(losses).sum()
    else:
        total = torch.zeros((), dtype=torch.float64, device=step.world.device)
    peers = step.world.data_parallel
    if peers.size > 1:
        # Each rank has the losses of its own micro-batches only; the step's loss is their sum.
        collectives.all_reduce(total, group=peers.group)  # collective
    return total


def _control(step: LoaderStep) -> StepControl:
    return StepControl(
        factor=lambda number: 1.0,
        seed=step.seed,
        clock=HostClock(),
        world=step.world,
        micro_batches=step.micro_batches,
    )


class _PassTask(Task):
    """The parts of a task that the passes need."""

    def __init__(self, outputs: Any, step_loss: Any, rows: Any) -> None:
        # mypy rejects assigning to a method. The arguments become the methods of this instance.
        self.outputs = outputs  # type: ignore[method-assign]
        if step_loss:
            # As above.
            self.step_loss = step_loss  # type: ignore[method-assign]
        if rows:
            # As above.
            self.step_loss_rows = rows  # type: ignore[method-assign]

    def model(self) -> NoReturn:
        raise NotImplementedError

    def dataset(self, split: str) -> NoReturn:
        raise NotImplementedError
