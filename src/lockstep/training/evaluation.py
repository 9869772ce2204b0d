"""Evaluate a model: cut the sets into micro-batches, merge losses and metrics.

    datasets = sets_by_name(task.dataset("evaluation"))             # {"": dataset} for a single set
    sets = build_evaluation_batches(config, task, datasets, world)
    record = evaluate_all(engine, task, sets, world, step=step, seed=config.seed)

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

from lockstep.config.schema import Config
from lockstep.counts import number
from lockstep.data.batches import Batches, Loading, MicroBatch, StepPlan
from lockstep.data.loader import check_dataset
from lockstep.data.sampler import Sequential
from lockstep.distributed.world import World
from lockstep.engines.base import at_rest
from lockstep.engines.fsdp.forwards import equal_forwards
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.guards.samples import RetryingDataset
from lockstep.loop import seeder
from lockstep.passes import split_loss
from lockstep.records import (
    EvaluationRecord,
    describe_value,
    exact_sums,
    float_of,
    is_number,
    mean_numbers,
    sum_and_count,
)
from lockstep.task import Task, has_own, has_step_loss, needs_graph
from lockstep.tasks.metric_states import merge, obstacle
from lockstep.tensors import host_bytes
from lockstep.training.staged_task import without_sharing
from lockstep.training.state.plan import samples_in_evaluation
from lockstep.transforms.precision import eager
from lockstep.whole_step import WHOLE_LOSS, make_whole_step

__all__ = [
    "MORE_NAMES",
    "all_numbers",
    "build_evaluation_batches",
    "check_mergeable",
    "evaluate",
    "evaluate_all",
    "is_metric",
    "one_step_plan",
    "pop_state",
    "sets_by_name",
]


# --- metrics

# Among metric names: the metric names its numbers only after the whole set.
MORE_NAMES = "*"

_METRIC_METHODS = ("metric_state", "merge_state", "reset", "compute", "clone")


def is_metric(value: Any) -> bool:
    """Whether `value` is a metric with a state, such as one of torchmetrics."""
    return all(hasattr(value, name) for name in _METRIC_METHODS)


def pop_state(metric: Any) -> dict[str, Any]:
    """Return the metric's state as JSON values, and reset the metric. Waits for the device."""
    state = {name: _to_json(value) for name, value in metric.metric_state.items()}
    metric.reset()
    return state


def merge_states(name: str, metric: Any, states: list[dict[str, Any]]) -> dict[str, float]:
    """Merge the states of all micro-batches of all ranks, and compute the metric.

    Returns:
        The metric's numbers by name.

    Raises:
        ConfigError: the states cannot be merged, or the result is no number.
    """
    with _metric_errors(name, metric):
        return _numbers(name, metric, _merge(metric, states).compute() if states else math.nan)


def check_mergeable(name: str, metric: Any, state: dict[str, Any]) -> list[str]:
    """Check that a metric's states can be merged, and return the names of its numbers.

    A single micro-batch may be too little to compute (R2 needs two samples); the names of several numbers are then
    unknown.

    Args:
        state: of a single micro-batch.

    Raises:
        ConfigError: the states cannot be merged, or the result is no number.
    """
    if reason := obstacle(metric, {key: _from_json(value) for key, value in state.items()}):
        raise ConfigError(
            f"the task's metric '{name}' ({type(metric).__name__}) cannot be merged over batches: {reason}; or return "
            "(sum, count)"
        )
    with _metric_errors(name, metric):
        merged = _merge(metric, [state])
    try:
        with _ignore_warnings():
            value = merged.compute()
    except LockstepError:
        raise
    except Exception:
        if _has_several_numbers(metric):
            return [MORE_NAMES]
        return [name]
    with _metric_errors(name, metric):
        if not _has_several_numbers(metric):
            # Some metrics fail only from the third state on.
            _numbers(name, metric, _merge(metric, [state] * 3).compute())
        return list(_numbers(name, metric, value))


def _numbers(name: str, metric: Any, value: Any) -> dict[str, float]:
    if not _has_several_numbers(metric):
        return {name: float(value)}
    if isinstance(value, dict):
        return {key: float(entry) for key, entry in value.items()}
    return {}


def _has_several_numbers(metric: Any) -> bool:
    return bool(getattr(metric, "several", False))


def _merge(metric: Any, states: list[dict[str, Any]]) -> Any:
    # States of all ranks are merged on the host. Waits for the device.
    merged = metric.clone().cpu()
    # torchmetrics must not gather: every rank has all states.
    merged.distributed_available_fn = _never
    merge(merged, [{key: _from_json(value) for key, value in state.items()} for state in states])
    return merged


@contextlib.contextmanager
def _ignore_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # torchmetrics warns of `compute` before `update`, but the state was merged.
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _metric_errors(name: str, metric: Any) -> Iterator[None]:
    try:
        with _ignore_warnings():
            yield
    except (LockstepError, MemoryError):
        raise
    except Exception as error:
        if str(error).strip():
            line = str(error).strip().splitlines()[0]
        else:
            line = type(error).__name__
        raise ConfigError(
            f"the task's metric '{name}' ({type(metric).__name__}) does not give one number over merged batches: "
            f"{line}; choose an average, or return (sum, count)"
        ) from error


def _never() -> bool:
    return False


def _to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Waits for the device, once for each state of a metric.
        host = value.detach().cpu()
        text = base64.b64encode(host_bytes(host)).decode()
        return {"dtype": str(host.dtype).removeprefix("torch."), "shape": list(host.shape), "v": text}
    return [_to_json(entry) for entry in value]


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        data = bytearray(base64.b64decode(value["v"]))
        dtype = getattr(torch, value["dtype"])
        if data:
            flat = torch.frombuffer(data, dtype=dtype)
        else:
            flat = torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    return [_from_json(entry) for entry in value]


# --- evaluation

Progress = Callable[[int, int], None]


def one_step_plan(samples: int, micro_size: int) -> StepPlan:
    """Return the plan of a whole set as one step, whose micro-batches the ranks divide."""
    return StepPlan(-(-samples // micro_size) * micro_size, micro_size, samples)


class ModelHolder(Protocol):
    """An object with a model: an engine, or a run that is loaded for inference."""

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
        sets: name -> batches; "" is the name of a single set.
        step: the step to record.
        progress: called after each micro-batch of this rank with (done, total), over all sets.

    Returns:
        For several sets, the first set's loss and items, and every number as a metric by the task's `metric_name`.
    """
    total = sum(batches.slots_in_all for batches in sets.values())
    offset = 0
    records = dict[str, EvaluationRecord]()
    for name, batches in sets.items():
        report = _offset_progress(progress, offset, total) if progress else None
        records[name] = evaluate(engine, task, batches, world, step=step, seed=seed, progress=report)
        offset += batches.slots_in_all
    first_record = next(iter(records.values()))
    if list(records) == [""]:
        return first_record
    metrics = {
        task.metric_name(name, key): value
        for name, record in records.items()
        for key, value in all_numbers(record).items()
    }
    return EvaluationRecord(step, first_record.loss, first_record.items, metrics)


def all_numbers(record: EvaluationRecord) -> dict[str, float]:
    """Return all numbers of a record by name: loss, items and metrics."""
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

    Each module's mode is restored. Micro-batches are the same at every world size, repeated ones have weight 0, and
    sums are exactly rounded in float64, so the result does not depend on the ranks. A device's numbers are read once,
    at the end. Nothing is compiled: compiling takes longer than most evaluations.

    Args:
        step: the step to record.
        progress: called after each micro-batch of this rank with (done, total).

    Raises:
        ConfigError, DataError, LockstepError: the task's metrics cannot be merged, or differ between micro-batches.
    """
    modes = [(module, module.training) for module in engine.model.modules()]
    engine.model.eval()
    try:
        with torch.set_grad_enabled(needs_graph(task)), eager(), without_sharing(task):
            reseed = seeder(seed, "evaluation", world.device)
            if has_step_loss(task):
                whole_step = WholeStepLosses(task, batches, world, reseed)
            else:
                whole_step = None
            results = _evaluate_rank(engine.model, task, batches, world, reseed, progress, whole_step)
    finally:
        for module, mode in modes:
            module.training = mode
        at_rest(engine.model)
    # The ranks evaluate different micro-batches; all of them compute the record from all rows.
    numbers = whole_step.numbers() if whole_step else {}
    parts = world.gather_counted([results.rows, results.states, numbers, results.names, results.pairs])
    # Before the last stage of a pipeline a rank has none of its own.
    names, pairs = parts[0][3:]
    gathered = []
    for part in parts:
        gathered.extend(part[0])
    loss = math.fsum(row[0] for row in gathered)
    items = number(math.fsum(row[1] for row in gathered))
    ratios = {}
    for k, name in enumerate(pairs):
        ratios[name] = _divide(name, [row[2 + 2 * k : 4 + 2 * k] for row in gathered])
    # In the order of the samples, so that metrics are the same on any number of ranks.
    in_order = sorted((entry for part in parts for entry in part[1]), key=lambda entry: entry[0])
    computed = {}
    for name, metric in results.metrics:
        computed[name] = merge_states(name, metric, [states[name] for _, states in in_order])
    # The names keep the order in which the task returned them.
    chosen = (computed[name] if name in computed else {name: ratios[name]} for name in names)
    metrics = _average_numbers([part[2] for part in parts])
    metrics |= {name: value for values in chosen for name, value in values.items()}
    divisor = whole_step.samples if whole_step else items
    return EvaluationRecord(step, loss / divisor if divisor else math.nan, items, metrics)


def _divide(name: str, pairs: list[list[float]]) -> float:
    """Divide the sum by the count, both exactly rounded; NaN for a count of 0.

    Raises:
        DataError: a count is negative or not finite. The same on every rank.
    """
    for _, count in pairs:
        if not 0.0 <= count < math.inf:
            raise DataError(
                f"the task's metric '{name}' has a count of {count:g}: return (sum, count) with a finite count >= 0"
            )
    total = math.fsum(count for _, count in pairs)
    if total:
        return math.fsum(value for value, _ in pairs) / total
    return math.nan


def _make_measure(task: Task) -> Callable[[nn.Module, MicroBatch], tuple[Any, Mapping[str, Any]]]:
    """Return (model, micro-batch) -> (loss summed over items, name -> (sum, count)).

    The numbers that `loss` returns are metrics too, unless one of the task's metrics has the same name. A mean over no
    items counts as 0.
    """
    # A loss without a declared reduction is averaged over batches, as in a plain loop.
    mean = task.reduction != "sum"

    def measure(model: nn.Module, batch: MicroBatch) -> tuple[Any, Mapping[str, Any]]:
        loss, metrics = task.evaluate(model, batch.data)
        # Gradients may be enabled, for a task whose evaluation computes its own.
        with torch.no_grad():
            loss, numbers = split_loss(loss)
        if numbers:
            pairs = {}
            for name, value in numbers.items():
                pairs[name] = sum_and_count(value, batch.items, mean=mean)
            metrics = {**pairs, **metrics}
        if not mean:
            return loss, metrics
        return loss * batch.items if batch.items else 0.0, metrics

    return measure


class WholeStepLosses:
    """Losses over all samples of a step, for steps cut as in training.

    Attributes:
        samples: number of samples in the steps so far, over all ranks.
    """

    def __init__(self, task: Task, batches: Batches, world: World, reseed: Callable[[int, int], None]) -> None:
        self._task = task
        self._batches = batches
        self._reseed = reseed
        self._whole = make_whole_step(task, world.data_parallel, batches.step_plan.micro_batches, batches.sharing)
        self._outputs: list[tuple[int, float, Any]] = []
        self._numbers: dict[str, list[list[Any]]] = {}
        self.samples = 0

    def measure(self, model: nn.Module, batch: MicroBatch) -> tuple[Any, Mapping[str, Any]]:
        """Store a micro-batch's outputs, and return (0.0, its metrics); `after` fills in the loss."""
        data = batch.data
        self._outputs.append((batch.index, batch.weight, self._task.outputs(model, data)))
        return 0.0, self._task.metrics(model, data) if has_own(self._task, "metrics") else {}

    def after(self, step: int, rows: list[list[Any]]) -> None:
        """Fill in the step's losses in `rows`, after its last micro-batch here. Collective."""
        if len(self._outputs) < self._batches.slots_of(step):
            return
        outputs = self._outputs
        self._outputs = []
        self._reseed(step, WHOLE_LOSS)
        self._batches.sharing.step = step
        losses = self._whole(outputs, gradient=False)
        counted = sum(bool(weight) for _, weight, _ in outputs)
        for row, loss in zip(rows[len(rows) - counted :], losses, strict=False):
            row[0] = _host_floats([loss.double() * self._whole.samples])[0]
        self.samples += self._whole.samples
        for _, numbers, counts in self._whole.numbers:
            for name, term in numbers.items() if counts else ():
                self._numbers.setdefault(name, []).append(_host_floats([term.value * term.factor, term.count]))

    def numbers(self) -> dict[str, list[list[float]]]:
        """Return name -> (sum, count) of this rank's numbers. Waits for the device."""
        return {name: _read_rows(rows) for name, rows in self._numbers.items()}


def _average_numbers(parts: list[dict[str, list[list[float]]]]) -> dict[str, float]:
    """Average each number over the parts of all ranks: the sum divided by the count."""
    names = dict.fromkeys(name for numbers in parts for name in numbers)
    rows = {}
    for name in names:
        rows[name] = [row for numbers in parts for row in numbers.get(name, ())]
    return mean_numbers({name: exact_sums([(row[0], row[1]) for row in pairs]) for name, pairs in rows.items()})


@dataclass
class _RankResults:
    """Results of this rank's micro-batches.

    Attributes:
        names: of the metrics, in the task's order.
        pairs: names of those that return (sum, count).
        metrics: (name, metric) of those that have a state.
        rows: loss, items, then the sum and count of each pair; a row for each micro-batch with a weight.
        states: ((step, micro-batch), name -> state), for the same micro-batches.
    """

    names: list[str]
    pairs: list[str]
    metrics: list[tuple[str, Any]]
    rows: list[list[float]]
    states: list[tuple[tuple[int, int], dict[str, Any]]]


def _offset_progress(progress: Progress, offset: int, total: int) -> Progress:
    return lambda done, _: progress(offset + done, total)


def _evaluate_rank(
    model: nn.Module,
    task: Task,
    batches: Batches,
    world: World,
    reseed: Any,
    progress: Progress | None,
    whole_step: "WholeStepLosses | None",
) -> _RankResults:
    report = (lambda done: progress(done, batches.slots_in_all)) if progress else None
    # Closing ends the loader processes, also after an error.
    with closing(batches.micro(0)) as micro:
        return _evaluate_micro_batches(model, task, micro, world, reseed, report, whole_step)


def _evaluate_micro_batches(
    model: nn.Module,
    task: Task,
    micro: Iterable[tuple[int, MicroBatch]],
    world: World,
    reseed: Any,
    progress: Callable[[int], None] | None,
    whole_step: "WholeStepLosses | None",
) -> _RankResults:
    measure = whole_step.measure if whole_step else _make_measure(task)
    results = _RankResults([], [], [], [], [])
    rows: list[list[Any]] = []
    for count, (step, batch) in enumerate(micro, 1):
        reseed(step, batch.index)
        with equal_forwards(model, world):  # collective under fsdp
            loss, metrics = measure(model, batch)
        if count == 1:
            results.names = list(metrics)
            results.pairs = [name for name, value in metrics.items() if not is_metric(value)]
            results.metrics = [(name, value) for name, value in metrics.items() if is_metric(value)]
        elif list(metrics) != results.names:
            raise LockstepError(
                f"the task's metrics are {', '.join(metrics) or 'none'} in one micro-batch and "
                f"{', '.join(results.names) or 'none'} in another: return the same names each time, with a count of 0 "
                "if there is nothing to count"
            )
        # Waits for the device, if the task has such metrics.
        states = {name: pop_state(metric) for name, metric in results.metrics}
        if batch.weight:
            numbers = (number for name in results.pairs for number in _numbers_of(name, metrics[name]))
            rows.append(_host_floats([loss, float(batch.items), *numbers]))
            results.states += [((step, batch.index), states)] if states else []
        if whole_step:
            whole_step.after(step, rows)  # collective, at the end of a step
        if progress:
            progress(count)
    results.rows = _read_rows(rows)
    return results


def _numbers_of(name: str, pair: Any) -> list[Any]:
    """Return sum and count of a metric. Raises LockstepError: they are no numbers."""
    if len(pair) != 2 or not all(map(is_number, pair)):
        kinds = ", ".join(map(describe_value, pair))
        raise LockstepError(f"the task's metric '{name}' is ({kinds}) in one micro-batch: return two numbers each time")
    return list(pair)


def _host_floats(row: list[Any]) -> list[Any]:
    """Convert a row's host tensors to floats.

    Small tensors that outlive a forward fragment the heap.
    """
    floats = []
    for v in row:
        floats.append(_detach(v) if isinstance(v, Tensor) and v.device.type != "cpu" else float_of(_detach(v)))
    return floats


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return value


def _read_rows(rows: list[list[Any]]) -> list[list[float]]:
    """Convert tensors to numbers, in a single transfer."""
    tensors = []
    for row in rows:
        for value in row:
            if isinstance(value, Tensor):
                tensors.append(value.detach().double().reshape(()))
    # Waits for the device, once for each set.
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    values = []
    for row in rows:
        values.append([next(numbers) if isinstance(v, Tensor) else float(v) for v in row])
    return values


# --- evaluation sets

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def sets_by_name(value: Any) -> dict[str, Any]:
    """Return the evaluation sets by name: {"": set} for a single one, {} for none.

    Args:
        value: what `task.dataset("evaluation")` returned. A mapping is several sets if all its keys are strings.

    Raises:
        DataError: a set is no dataset, is empty, or has an unsuitable name.
    """
    if not (isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value)):
        if value is None or (isinstance(value, Mapping) and not value):
            return {}
        check_dataset(value, "evaluation")
        if not len(value):
            raise DataError("the task's dataset('evaluation') is empty: return None where there is no evaluation")
        return {"": value}
    for name, dataset in value.items():
        if not _NAME.fullmatch(name):
            raise DataError(
                f"the task's dataset('evaluation') has a set named {name!r}: use letters, digits, '-', '_' and '.'"
            )
        check_dataset(dataset, "evaluation", name)
        if not len(dataset):
            raise DataError(f"the task's dataset('evaluation')['{name}'] is empty: leave it out of the dict")
    return dict(value)


def build_evaluation_batches(config: Config, task: Task, sets: Mapping[str, Any], world: World) -> dict[str, Batches]:
    """Cut the sets into steps. Collective.

    Raises:
        LockstepError: the ranks have different sets, or sets of different sizes.
    """
    sizes = {name: len(dataset) for name, dataset in sets.items()}
    # With sets of different lengths the ranks would wait for each other forever.
    world.check_same("evaluation set", {"names": list(sizes), "samples": list(sizes.values())})
    batches = {}
    for name, dataset in sets.items():
        batches[name] = _build_batches(config, task, dataset, world)
    return batches


def _build_batches(config: Config, task: Task, dataset: Any, world: World) -> Batches:
    micro_size = config.eval_micro_batch_size or config.micro_size
    if config.eval_workers < 0:
        workers = config.data.workers
    else:
        workers = config.eval_workers
    samples = samples_in_evaluation(config, len(dataset))
    loading = Loading(workers, config.data.prefetch, config.guards.retries)
    step_plan = _plan_steps(config, task, samples, micro_size)
    order = Sequential(len(dataset))
    guards = config.guards
    dataset = RetryingDataset(dataset, retries=guards.retries, skips=guards.bad_samples, rank=world.rank)
    return Batches(task, dataset, order, step_plan, world, seed=config.seed, loading=loading)


def _plan_steps(config: Config, task: Task, samples: int, micro_size: int) -> StepPlan:
    """Return a set's plan: one step, or steps as in training for a whole-step loss.

    Raises:
        ConfigError: --eval-micro-batch-size does not divide such a step.
    """
    if not has_step_loss(task):
        return one_step_plan(samples, micro_size)
    if config.batch_size % micro_size:
        raise ConfigError(
            f"--eval-micro-batch-size {micro_size} does not divide --batch-size {config.batch_size}, and the loss "
            "needs all samples of a step: leave it out, or set a divisor"
        )
    return StepPlan(config.batch_size, micro_size, samples)
