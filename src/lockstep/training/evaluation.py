"""Evaluate a model: cut the sets into micro-batches, merge losses and metrics.

    found = named_sets(task.dataset("evaluation"))
    sets = batches_of(config, task, found, world)       # {} where there is none, {"": batches} for one alone

Each set is one step, whose micro-batches are divided among the ranks; for a loss over all samples of a step it is cut
into steps as in training. Its samples, their order and its micro-batches depend on neither the world nor the loader
processes, so the result is the same in any world.
"""

import base64
import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.config.fields import in_batches
from lockstep.config.schema import Config
from lockstep.counts import number
from lockstep.data.batches import Batches, Loading, MicroBatch, StepPlan
from lockstep.data.loader import check_dataset
from lockstep.data.sampler import Sequential
from lockstep.distributed.world import World
from lockstep.engines.base import at_rest
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.guards.samples import RetryingDataset
from lockstep.loop import seeder
from lockstep.passes import split_loss
from lockstep.records import EvaluationRecord, exact_sums, mean_numbers, sum_and_count
from lockstep.task import Task, has_mean_loss, has_own, has_step_loss, needs_graph
from lockstep.tasks.metric_states import merge, obstacle
from lockstep.transforms.precision import eager
from lockstep.whole_step import WHOLE_LOSS, make_whole_step

__all__ = [
    "ANY",
    "batches_of",
    "check_mergeable",
    "evaluate",
    "evaluate_all",
    "is_metric",
    "named_sets",
    "numbered",
    "one_step",
    "taken",
]


# --- metrics

ANY = "*"  # among metric names: further names are known only after the whole set

_NEEDED = ("metric_state", "merge_state", "reset", "compute", "clone")


def is_metric(value: Any) -> bool:
    """Whether `value` is a metric with its own state, as torchmetrics' are."""
    return all(hasattr(value, name) for name in _NEEDED)


def taken(metric: Any) -> dict[str, Any]:
    """Return the metric's state as JSON values, and reset it. Waits for the device."""
    state = {name: _plain(value) for name, value in metric.metric_state.items()}
    metric.reset()
    return state


def merged(name: str, metric: Any, states: list[dict[str, Any]]) -> dict[str, float]:
    """Merge the states of all micro-batches and compute the metric.

    No collective: every rank has all states.

    Returns:
        The metric's numbers by name.

    Raises:
        ConfigError: it cannot be merged, or computes no number.
    """
    with _one_number(name, metric):
        return _named(name, metric, _whole(metric, states).compute() if states else math.nan)


def check_mergeable(name: str, metric: Any, state: dict[str, Any]) -> list[str]:
    """Check that a metric can be merged, and return the names of its numbers.

    A single micro-batch may be too little for the metric to compute (R2 needs two samples, a correlation more than one
    value). That is accepted; the names of several numbers are then unknown.

    Args:
        state: of a single micro-batch.

    Raises:
        ConfigError: it cannot be merged, or computes no number.
    """
    if reason := obstacle(metric, {key: _tensors(value) for key, value in state.items()}):
        raise ConfigError(
            f"the task's metric '{name}' ({type(metric).__name__}) cannot be merged over batches: {reason}; or return "
            "(sum, count)"
        )
    with _one_number(name, metric):
        whole = _whole(metric, [state])
    try:
        with _quiet():
            value = whole.compute()
    except LockstepError:
        raise
    except Exception:
        return [ANY] if _is_several(metric) else [name]
    with _one_number(name, metric):
        if not _is_several(metric):
            _named(name, metric, _whole(metric, [state] * 3).compute())  # some fail from the third state on
        return list(_named(name, metric, value))


def _named(name: str, metric: Any, value: Any) -> dict[str, float]:
    if not _is_several(metric):
        return {name: float(value)}
    return {key: float(each) for key, each in value.items()} if isinstance(value, dict) else {}


def _is_several(metric: Any) -> bool:
    return bool(getattr(metric, "several", False))


def _whole(metric: Any, states: list[dict[str, Any]]) -> Any:
    whole = metric.clone().cpu()
    whole.distributed_available_fn = _never  # every rank has all states: torchmetrics must not gather them again
    merge(whole, [{key: _tensors(value) for key, value in state.items()} for state in states])
    return whole


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "compute before update": its state was merged instead
        yield


@contextlib.contextmanager
def _one_number(name: str, metric: Any) -> Iterator[None]:
    try:
        with _quiet():
            yield
    except (LockstepError, MemoryError):
        raise
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the task's metric '{name}' ({type(metric).__name__}) does not give one number over merged batches: "
            f"{line}; choose an average, or return (sum, count)"
        ) from error


def _never() -> bool:
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()  # waits for the device
        text = base64.b64encode(
            held.reshape(-1).view(torch.uint8).numpy().tobytes()
        ).decode()  # base64 takes a third more
        return {"dtype": str(held.dtype).removeprefix("torch."), "shape": list(held.shape), "v": text}
    return [_plain(each) for each in value]


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        held = bytearray(base64.b64decode(value["v"]))
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(held, dtype=dtype) if held else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    return [_tensors(each) for each in value]


# --- evaluation

Progress = Callable[[int, int], None]


def one_step(samples: int, micro_size: int) -> StepPlan:
    """Return the whole set as one step, whose micro-batches are divided among the ranks."""
    return StepPlan(-(-samples // micro_size) * micro_size, micro_size, samples)


class ModelHolder(Protocol):
    """An object with a model: an engine, or a run loaded for inference (training/inference.py)."""

    model: nn.Module


def evaluate_all(
    engine: ModelHolder,
    task: Task,
    sets: Mapping[str, Batches],
    world: World,
    *,
    step: int,
    seed: int,
    progress: Progress | None = None,
) -> EvaluationRecord:
    """Evaluate each set in order, and merge the results into one record. Collective.

    Args:
        sets: name -> set; "" is the name of a single set.
        step: the step to record.
        progress: as for `evaluate`, over all sets.

    Returns:
        The record. Of several sets its loss and items are the first set's, and each number is a metric `SET/NAME`.
    """
    whole, before, found = sum(batches.slots_in_all for batches in sets.values()), 0, dict[str, EvaluationRecord]()
    for name, batches in sets.items():
        told = _after(progress, before, whole) if progress else None
        found[name] = evaluate(engine, task, batches, world, step=step, seed=seed, progress=told)
        before += batches.slots_in_all
    first = next(iter(found.values()))
    if list(found) == [""]:
        return first
    metrics = {f"{name}/{key}": value for name, each in found.items() for key, value in numbered(each).items()}
    return EvaluationRecord(step, first.loss, first.items, metrics)


def numbered(record: EvaluationRecord) -> dict[str, float]:
    """Return every number of the record by name: loss, items, and the metrics."""
    return {"loss": record.loss, "items": record.items, **record.metrics}


def evaluate(
    engine: ModelHolder,
    task: Task,
    batches: Batches,
    world: World,
    *,
    step: int,
    seed: int,
    progress: Progress | None = None,
) -> EvaluationRecord:
    """Compute mean loss and metrics of a set, in eval mode. Collective.

    Each module's mode is restored. Every micro-batch is computed the same way at every world size, repeated ones weigh
    0, and the sums are exactly rounded in float64, so the result does not depend on the number of ranks or their order.
    A few numbers of each micro-batch are kept: on a CPU they are read at once, on a device once at the end. Nothing is
    compiled: compiling takes longer than most evaluations.

    Args:
        step: the step to record.
        progress: called after each micro-batch of this rank with (done, total).
    """
    modes = [(module, module.training) for module in engine.model.modules()]
    engine.model.eval()
    try:
        with torch.set_grad_enabled(needs_graph(task)), eager():
            reseed = seeder(seed, "evaluation", world.device)
            whole = WholeLosses(task, batches, world, reseed) if has_step_loss(task) else None
            own = _own_rows(engine.model, task, batches, reseed, progress, whole)
    finally:
        for module, mode in modes:
            module.training = mode
        at_rest(engine.model)
    parts = world.gather([own.rows, own.states, whole.beside() if whole else {}])  # collective
    gathered = [row for rows, _, _ in parts for row in rows]
    loss, items = math.fsum(row[0] for row in gathered), number(math.fsum(row[1] for row in gathered))
    ratios = {name: _ratio(name, [row[2 + 2 * k : 4 + 2 * k] for row in gathered]) for k, name in enumerate(own.pairs)}
    in_order = sorted((found for _, states, _ in parts for found in states), key=lambda found: found[0])
    computed = {name: merged(name, metric, [states[name] for _, states in in_order]) for name, metric in own.metrics}
    parts_of = (computed[name] if name in computed else {name: ratios[name]} for name in own.names)
    metrics = _averages([beside for _, _, beside in parts])
    metrics |= {name: value for part in parts_of for name, value in part.items()}
    over = whole.samples if whole else items
    return EvaluationRecord(step, loss / over if over else math.nan, items, metrics)


def _ratio(name: str, pairs: list[list[float]]) -> float:
    """Divide the sum by the count, both exactly rounded; NaN if nothing was counted.

    Raises:
        DataError: a count is negative or not finite. The same on every rank.
    """
    for _, count in pairs:
        if not 0.0 <= count < math.inf:
            raise DataError(
                f"the task's metric '{name}' has a count of {count:g}: (sum, count) needs a finite count, 0 or more"
            )
    whole = math.fsum(count for _, count in pairs)
    return math.fsum(value for value, _ in pairs) / whole if whole else math.nan


def _measures(task: Task) -> Callable[[nn.Module, MicroBatch], tuple[Any, Mapping[str, Any]]]:
    """Return (model, micro-batch) -> (loss summed over items, name -> (sum, count)).

    The numbers that `loss` returns are metrics too; if the task's metrics have the same name, theirs wins. A mean over
    no items would be 0 / 0, and counts as 0.
    """
    mean = has_mean_loss(task)

    def measured(model: nn.Module, batch: MicroBatch) -> tuple[Any, Mapping[str, Any]]:
        loss, found = task.evaluate(model, batch.data)
        with torch.no_grad():  # even if the task's own gradients need a graph
            loss, numbers = split_loss(loss)
        if numbers:
            pairs = {name: sum_and_count(value, batch.items, mean=mean) for name, value in numbers.items()}
            found = {**pairs, **found}
        if not mean:
            return loss, found
        return loss * batch.items if batch.items else 0.0, found

    return measured


class WholeLosses:
    """Evaluation losses that cover all samples of a step, cut as in training.

    Attributes:
        samples: number in the steps so far, over all ranks.
    """

    def __init__(self, task: Task, batches: Batches, world: World, reseed: Callable[[int, int], None]) -> None:
        self._task, self._batches, self._reseed = task, batches, reseed
        self._whole = make_whole_step(task, world, batches.step_plan.micro_batches, batches.sharing)
        self._outputs: list[tuple[int, float, Any]] = []
        self._numbers: dict[str, list[list[Any]]] = {}
        self.samples = 0

    def measure(self, model: nn.Module, batch: MicroBatch) -> tuple[Any, Mapping[str, Any]]:
        """Keep a micro-batch's outputs, and return 0.0 for its loss, and its metrics.

        The loss is filled in at the end of the step.
        """
        data = batch.data
        self._outputs.append((batch.index, batch.weight, self._task.outputs(model, data)))
        return 0.0, self._task.metrics(model, data) if has_own(self._task, "metrics") else {}

    def after(self, step: int, rows: list[list[Any]]) -> None:
        """Fill in the step's losses after the rank's last micro-batch of it. Collective."""
        if len(self._outputs) < self._batches.slots_of(step):
            return
        found, self._outputs = self._outputs, []
        self._reseed(step, WHOLE_LOSS)
        self._batches.sharing.step = step
        losses = self._whole(found, gradient=False)
        counted = sum(bool(weight) for _, weight, _ in found)
        for row, loss in zip(rows[len(rows) - counted :], losses, strict=False):
            row[0] = _kept([loss.double() * self._whole.samples])[0]
        self.samples += self._whole.samples
        for _, beside, counts in self._whole.numbers:
            for name, part in beside.items() if counts else ():
                self._numbers.setdefault(name, []).append(_kept([part.value * part.factor, part.count]))

    def beside(self) -> dict[str, list[list[float]]]:
        """Return the numbers that came with this rank's losses, as (sum, count) by name. Waits for the device."""
        return {name: _read(rows) for name, rows in self._numbers.items()}


def _averages(parts: list[dict[str, list[list[float]]]]) -> dict[str, float]:
    """Average each number over the parts of all ranks: its sum over its count."""
    names = dict.fromkeys(name for part in parts for name in part)
    rows = {name: [row for part in parts for row in part.get(name, ())] for name in names}
    return mean_numbers({name: exact_sums([(row[0], row[1]) for row in found]) for name, found in rows.items()})


@dataclass
class _Own:
    """Results of this rank's share of the set.

    Attributes:
        names: of the metrics, in the task's order.
        pairs: names of those that are a sum over a count.
        metrics: (name, metric) of those that have a state.
        rows: one per micro-batch that counts: loss, items, then sum and count of each pair.
        states: ((step, micro-batch), name -> state) of each.
    """

    names: list[str]
    pairs: list[str]
    metrics: list[tuple[str, Any]]
    rows: list[list[float]]
    states: list[tuple[tuple[int, int], dict[str, Any]]]


def _after(progress: Progress, before: int, whole: int) -> Progress:
    return lambda done, _: progress(before + done, whole)


def _own_rows(
    model: nn.Module,
    task: Task,
    batches: Batches,
    reseed: Any,
    progress: Progress | None,
    whole: "WholeLosses | None",
) -> _Own:
    told = (lambda done: progress(done, batches.slots_in_all)) if progress else None
    with closing(batches.micro(0)) as found:  # so that an error ends the loader processes too
        return _found(model, task, found, reseed, told, whole)


def _found(
    model: nn.Module,
    task: Task,
    micro: Iterable[tuple[int, MicroBatch]],
    reseed: Any,
    progress: Callable[[int], None] | None,
    whole: "WholeLosses | None",
) -> _Own:
    measure, own = whole.measure if whole else _measures(task), _Own([], [], [], [], [])
    rows: list[list[Any]] = []
    for done, (step, batch) in enumerate(micro, 1):
        reseed(step, batch.index)
        loss, found = measure(model, batch)
        if done == 1:
            own.names = list(found)
            own.pairs = [name for name, value in found.items() if not is_metric(value)]
            own.metrics = [(name, value) for name, value in found.items() if is_metric(value)]
        elif list(found) != own.names:
            raise LockstepError(
                f"the task's metrics are named {', '.join(found) or 'nothing'} in one micro-batch and "
                f"{', '.join(own.names) or 'nothing'} in another: return the same names each time, with count 0 if "
                "need be"
            )
        states = {name: taken(metric) for name, metric in own.metrics}  # waits for the device, if there are any
        if batch.weight:
            numbers = (number for name in own.pairs for number in found[name])
            rows.append(_kept([loss, float(batch.items), *numbers]))
            own.states += [((step, batch.index), states)] if states else []
        if whole:
            whole.after(step, rows)  # collective, at the end of a step
        if progress:
            progress(done)
    own.rows = _read(rows)
    return own


def _kept(row: list[Any]) -> list[Any]:
    """Convert host tensors of a row to floats.

    Small tensors that outlive a forward fragment the heap.
    """
    return [_detached(v) if isinstance(v, Tensor) and v.device.type != "cpu" else float(_detached(v)) for v in row]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _read(rows: list[list[Any]]) -> list[list[float]]:
    """Convert tensors to numbers, all of them in one transfer."""
    tensors = [value.detach().double().reshape(()) for row in rows for value in row if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])  # waits for the device
    return [[next(numbers) if isinstance(v, Tensor) else float(v) for v in row] for row in rows]


# --- evaluation sets

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def named_sets(found: Any) -> dict[str, Any]:
    """Return the evaluation sets by name: {"": set} for a single one, {} for none.

    A mapping whose keys are all strings is several sets; with other keys it is a dataset.

    Args:
        found: what `task.dataset("evaluation")` returned.

    Raises:
        DataError: a set is no dataset; or one of several is empty or has a name that cannot be shown.
    """
    if not (isinstance(found, Mapping) and found and all(isinstance(name, str) for name in found)):
        if found is not None:
            check_dataset(found, "evaluation")
        return {} if found is None or not len(found) else {"": found}
    for name, dataset in found.items():
        if not _NAME.fullmatch(name):
            raise DataError(
                f"the task's dataset('evaluation') has a set named {name!r}: use letters, digits, '-', '_' and '.'"
            )
        check_dataset(dataset, "evaluation", name)
        if not len(dataset):
            raise DataError(f"the task's dataset('evaluation')['{name}'] is empty: leave it out of the dict")
    return dict(found)


def batches_of(config: Config, task: Task, sets: Mapping[str, Any], world: World) -> dict[str, Batches]:
    """Cut the sets into steps, in their order. Collective.

    Raises:
        LockstepError: the ranks have different sets, or sets of different sizes.
    """
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    world.check_same("evaluation set", {"names": list(sizes), "samples": list(sizes.values())})  # collective
    return {name: _one(config, task, dataset, world) for name, dataset in sets.items()}


def _one(config: Config, task: Task, dataset: Any, world: World) -> Batches:
    micro_size = config.eval_micro_batch_size or config.micro_size
    workers = config.data.workers if config.eval_workers < 0 else config.eval_workers
    whole = one_step(len(dataset), micro_size).micro_batches
    samples = min(len(dataset), in_batches(config.limit_eval_batches, whole) * micro_size)
    loading = Loading(workers, config.data.prefetch, config.guards.retries)
    step_plan, order = _cut(config, task, samples, micro_size), Sequential(len(dataset))
    guards = config.guards
    dataset = RetryingDataset(dataset, retries=guards.retries, skips=guards.bad_samples, rank=world.rank)
    return Batches(task, dataset, order, step_plan, world, seed=config.seed, loading=loading)


def _cut(config: Config, task: Task, samples: int, micro_size: int) -> StepPlan:
    """Return the steps of a set.

    It is one step; or steps as in training, if the loss covers all samples of a step.
    """
    if not has_step_loss(task):
        return one_step(samples, micro_size)
    if config.batch_size % micro_size:
        raise ConfigError(
            f"--eval-micro-batch-size {micro_size} does not divide --batch-size {config.batch_size}: the loss looks at "
            "all samples of a step, in an evaluation too; leave it out, or give a divisor"
        )
    return StepPlan(config.batch_size, micro_size, samples)
