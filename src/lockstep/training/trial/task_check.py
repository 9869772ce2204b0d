"""Try each method of the user's task before step 1, to find mistakes early.

    samples = load_trial_samples(task, world, training, evaluation)     # a few of each rank
    trial = Trial(engine, model, task, world, config, say)
    names = check_task(trial, samples, training, evaluation, state)
    restore_findings(task, state)                               # in place of a trial, at a resume

A trial has no side effects: gradients, buffers, tensors of the task's `state_dict()` and generators are restored. It
refuses only mistakes that are mistakes in any task. A loss that is not finite yet, and a collation that draws random
numbers or fails for half of the samples, pass.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lockstep.config.schema import Config
from lockstep.data.batches import Batches, MicroBatch
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.world import World
from lockstep.engines.base import at_rest
from lockstep.engines.fsdp.forwards import equal_forwards, same_units
from lockstep.engines.registry import check_audit, name_of
from lockstep.errors import ConfigError, DataError, DifferenceError, LockstepError
from lockstep.loop import describe_value, loss_of
from lockstep.parallel.context_task import first_positions, whole_task
from lockstep.passes import split_loss
from lockstep.records import float_of, is_number
from lockstep.run_state import RunState
from lockstep.task import Task, has_mean_loss, has_own, has_step_loss, needs_graph, set_detected
from lockstep.tensors import as_bytes, local_of
from lockstep.training.evaluation import check_mergeable, is_metric, pop_state
from lockstep.training.trial.isolation import leaves, training_modes
from lockstep.training.trial.loss_check import (
    PLACES,
    HalvedSamples,
    Measurement,
    call_method,
    check_loss,
    check_marks,
    classify,
    cut_places,
    describe_measurement,
    load_first,
    load_places,
    loss_value,
    measure,
    suggest_fixes,
    try_loss,
)
from lockstep.training.trial.trial import Trial
from lockstep.transforms.batchnorm import Synchronised
from lockstep.transforms.determinism import list_autotuning, pin_compiler
from lockstep.transforms.precision import without_autocast
from lockstep.whole_step import check_outputs

__all__ = [
    "check_auditable",
    "check_auditable_loss",
    "check_task",
    "load_trial_samples",
    "restore_findings",
]


def check_auditable(config: Config, world: World) -> None:
    """Refuse settings that `--guards.audit` does not support, and pin the compiler.

    Pinned, it chooses the same kernels on all ranks.

    Raises:
        ConfigError: an engine, a BatchNorm or a compiler that does not go with `--guards.audit`.
    """
    if not config.guards.audit:
        return
    check_audit(name_of(config.engine, world))
    if config.weight_copies == "step":
        raise ConfigError(
            "--guards.audit does not go with --weight-copies step, whose gradients belong to the copies: leave out "
            "either"
        )
    if config.batchnorm == "sync":
        raise ConfigError(
            "--guards.audit does not go with --batchnorm sync, whose forward needs all ranks: use --batchnorm replay"
        )
    if config.compile:
        if variables := list_autotuning():
            raise ConfigError(
                f"--guards.audit with --compile does not go with {variables[0]}=1, which chooses kernels by their "
                "measured time; unset it"
            )
        pin_compiler()


def check_auditable_loss(config: Config, task: Task) -> None:
    """Raise ConfigError for a loss over the whole step: single micro-batches cannot be audited."""
    if config.guards.audit and has_step_loss(task):
        raise ConfigError(
            "--guards.audit does not go with a task that has `outputs` and `step_loss`, whose gradient needs all "
            "samples of a step: leave it out"
        )


# --- metrics

_METRICS_FORM = "`metrics` must return a dict of name -> (sum, count), both numbers"
_EVALUATE_FORM = "`evaluate` must return (loss, metrics): the loss as in `loss`, and a dict of name -> (sum, count)"
# Relative difference that rounding cannot cause.
_CERTAIN_ERROR = 0.25


def _check_metrics(
    trial: Trial, evaluation: Mapping[str, Batches], samples: Mapping[str, "SetSamples"]
) -> list[str] | None:
    """Try the evaluation's methods on each set. Collective.

    Returns:
        The names of the metrics, as in the record; None without an evaluation set.

    Raises:
        ConfigError, DataError: a method fails, or its result has the wrong form or does not add up.
    """
    task = trial.task
    if has_step_loss(task) and has_own(task, "evaluate"):
        raise ConfigError(
            "the task has both `evaluate` and `step_loss`, whose loss needs all samples together: write `metrics` in "
            "place of `evaluate`"
        )
    metrics = {}
    for name, batches in evaluation.items():
        metrics[name] = _check_set(trial, batches, samples[name])
    if not metrics:
        return None
    if list(metrics) == [""]:
        return metrics[""]
    return [task.metric_name(name, key) for name, keys in metrics.items() for key in ("loss", "items", *keys)]


def _check_set(trial: Trial, batches: Batches, samples: "SetSamples") -> list[str]:
    names, pairs = _with_or_without_graph(trial, lambda: _check_form(trial, samples.first))  # collective
    if trial.task.divisible and trial.task.reduction != "micro-batch":
        _check_sums(trial, batches, pairs, samples.places)  # collective
    return names


def _with_or_without_graph(
    trial: Trial, action: Callable[[], tuple[list[str], list[str]]]
) -> tuple[list[str], list[str]]:
    """Run `action` without a graph, or with one if that fails on a rank. Collective."""
    task = trial.task
    problem = None
    for gradients in sorted({needs_graph(task), True}):
        result = None
        try:
            with torch.set_grad_enabled(gradients):
                result = action()
        except (LockstepError, RuntimeError) as error:
            problem = problem or error
        # All ranks use the same mode, because a forward may be collective.
        if all(trial.world.gather(result is not None)) and result:
            set_detected(task, "", gradients)
            return result
    # Both modes failed on some rank: every rank raises the error.
    trial.world.check(problem)
    raise AssertionError


def _check_form(trial: Trial, batch: MicroBatch) -> tuple[list[str], list[str]]:
    """Return the names of all metrics, and of those that are (sum, count).

    Raises:
        ConfigError: the result has the wrong form.
    """
    task = trial.task
    model = trial.model
    trial.seed()
    method = "evaluate" if has_own(task, "evaluate") else "metrics"
    numbers = list[str]()
    with same_units(model, trial.world), equal_forwards(model, trial.world):  # collective under fsdp
        if method == "metrics":
            numbers = _number_names(call_method("loss", lambda data: task.loss(model, data), batch.data, model, task))
        result: Any = call_method(method, lambda data: getattr(task, method)(model, data), batch.data, model, task)
    if method == "evaluate":
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ConfigError(f"the task's {_EVALUATE_FORM}; it returned {describe_value(result)}")
        numbers = _number_names(result[0])
        result = result[1]
    form = _EVALUATE_FORM if method == "evaluate" else _METRICS_FORM
    if not isinstance(result, dict):
        raise ConfigError(f"the task's {form}; it returned {describe_value(result)}")
    names = [name for name in numbers if name not in result]
    pairs = list[str]()
    for name, pair in result.items():
        if not isinstance(name, str) or name in ("loss", "items"):
            raise ConfigError(
                f"the task's {form}; the name {name!r} is no str, or is taken: 'loss' and 'items' are the evaluation's"
            )
        if is_metric(pair):
            names += check_mergeable(name, pair, pop_state(pair))
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(is_number, pair)):
            if isinstance(pair, tuple | list):
                text = f"({', '.join(map(describe_value, pair))})"
            else:
                text = describe_value(pair)
            raise ConfigError(f"the task's {form}; '{name}' is {text}")
        names.append(name)
        pairs.append(name)
    return names, pairs


def _number_names(returned: Any) -> list[str]:
    """Return the names of the numbers that come with a loss; they are metrics too."""
    with torch.no_grad():
        return list(split_loss(returned)[1])


def _check_sums(trial: Trial, batches: Batches, pairs: list[str], places: list[HalvedSamples]) -> None:
    """Check that the numbers of a few samples are the sums over their halves. Collective."""
    has_loss = has_own(trial.task, "evaluate")
    if not pairs and not has_loss:
        return
    measurements = list[Measurement]()
    width = has_loss + 2 * len(pairs)
    # `measure` calls it with a batch alone.
    probe = lambda batch: _compute_numbers(trial, batch, pairs)  # noqa: E731
    for measurements, _ in measure(trial, probe, batches, places, _adds_up):  # collective
        if all(any(measurement.scale(index) for measurement in measurements) for index in range(width)):
            break
    if has_loss:
        _check_loss(trial, measurements)
    for k, name in enumerate(pairs):
        for label, index in (("sum", has_loss + 2 * k), ("count", has_loss + 2 * k + 1)):
            if any(measurement.is_random(index) for measurement in measurements):
                # Two loads of random samples may agree by chance.
                continue
            bad = None
            for measurement in measurements:
                if _does_not_add_up(trial, measurement, index):
                    bad = measurement
                    break
            if bad is not None:
                raise ConfigError(
                    f"the task's metric '{name}' does not add up: of its {label} {describe_measurement([bad], index)}; "
                    "return (sum, count), both over the samples of the batch"
                )


def _compute_numbers(trial: Trial, batch: MicroBatch, pairs: list[str]) -> list[float]:
    """Compute the loss of the task's own `evaluate`, then sum and count of each pair."""
    task = trial.task
    model = trial.model
    loss = list[float]()
    with equal_forwards(model, trial.world):  # collective under fsdp
        if has_own(task, "evaluate"):
            value, metrics = task.evaluate(model, batch.data)
            loss = [loss_value(value)]
        else:
            # As an evaluation does, so that a rank whose metrics call no model has a forward.
            if trial.is_sharded:
                task.loss(model, batch.data)
            metrics = task.metrics(model, batch.data)
    for value in metrics.values():
        if is_metric(value):
            # Reset it, or the next batch would add to it.
            pop_state(value)
    # Waits for the device, once for each batch of the trial.
    return loss + [float_of(number) for name in pairs for number in metrics[name]]


def _adds_up(each: Measurement) -> bool:
    """Whether all numbers add up, so that none is random."""
    indices = range(len(each.whole))
    return all(abs(each.whole[k] - each.first[k] - each.second[k]) <= 1e-3 * each.scale(k) for k in indices)


def _does_not_add_up(trial: Trial, each: Measurement, index: int) -> bool:
    total, first_half, second_half = each.values(index)
    scale = each.scale(index)
    if not scale:
        return False
    error = abs(total - first_half - second_half) / scale
    # Rounding in half precision may flip a prediction.
    return error > (_CERTAIN_ERROR if trial.is_low_precision else trial.limit)


def _check_loss(trial: Trial, measurements: list[Measurement]) -> None:
    """Raise ConfigError if the loss of `evaluate` is reduced in another way than `loss`."""
    kinds = classify(measurements, 0, trial.limit)
    reduction = "mean" if has_mean_loss(trial.task) else "sum"
    if kinds is None or reduction in kinds or trial.task.reduction == "whole":
        return
    evidence = describe_measurement(measurements, 0)
    if kinds:
        if "sum" in kinds:
            other = "sum"
        else:
            other = "mean" if "mean" in kinds else "mean over samples"
        raise ConfigError(
            f"the task's `evaluate` returns a {other}, and `loss` a {reduction} over its items: {evidence}; return the "
            f"{reduction} in both"
        )
    raise ConfigError(suggest_fixes(f"the loss of the task's `evaluate` is neither a sum nor a mean: {evidence}"))


# --- loss over the whole step

_OUTPUTS_FORM = "it must return a tensor of shape [samples, ...], or a tuple, list or dict of such"


def _check_whole_step(trial: Trial, samples: "SetSamples") -> None:
    """Try `outputs` and `step_loss` on a micro-batch and on its halves. Collective.

    Raises:
        ConfigError: a result has the wrong form; or `step_loss` uses a parameter of the model.
        DataError: one of them fails.
    """
    world = trial.world
    halved = samples.places[0] if samples.places else None
    outputs = on_all_ranks(world, lambda: _compute_outputs(trial, samples.first))  # collective
    # Every rank raises the error of one of them before the next forward.
    world.agree()
    if halved is None:
        on_all_ranks(world, lambda: _check_step_loss(trial, outputs, [outputs]))  # collective
    else:
        parts = (halved.whole, *halved.halves)
        whole, *halves = on_all_ranks(world, lambda: [_compute_outputs(trial, batch) for batch in parts])  # collective
        on_all_ranks(world, lambda: _check_halves(whole, halves))  # collective
        on_all_ranks(world, lambda: _check_step_loss(trial, whole, halves))  # collective
    # Every rank raises the error of one of them here.
    world.agree()


def _compute_outputs(trial: Trial, batch: MicroBatch) -> Any:
    """Compute the outputs of a batch, as leaf tensors for the loss."""
    task = trial.task
    model = trial.model
    trial.seed()
    with trial.with_graph():
        outputs = call_method("outputs", lambda data: task.outputs(model, data), batch.data, model, task)
    if not isinstance(outputs, Tensor | tuple | list | dict):
        raise ConfigError(f"the task's `outputs` returned {describe_value(outputs)}: {_OUTPUTS_FORM}")
    check_outputs(outputs)
    tensors, tree = pytree.tree_flatten(outputs)
    samples = _count_samples(task, batch)
    if samples is not None and len(tensors[0]) != samples:
        raise ConfigError(
            f"the task's `outputs` returned {describe_value(tensors[0])} for a batch of {samples} samples: "
            f"{_OUTPUTS_FORM}"
        )
    if not any(tensor.requires_grad for tensor in tensors):
        raise ConfigError(
            "the task's `outputs` returned no tensor with a graph, so nothing would be trained: compute it by the "
            "model, without detach() and no_grad()"
        )
    return pytree.tree_unflatten([_leaf(tensor) for tensor in tensors], tree)


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    if leaf.dtype in (torch.float16, torch.bfloat16):
        leaf = leaf.float()
    return leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def _count_samples(task: Task, batch: MicroBatch) -> int | None:
    """Return the samples of a batch, by its first tensor; None without one."""
    try:
        return int(Task.count(task, batch.held))
    except ConfigError:
        return None


def _check_halves(whole: Any, halves: list[Any]) -> None:
    tensors, tree = pytree.tree_flatten(whole)
    for half in halves:
        half_tensors, half_tree = pytree.tree_flatten(half)
        if half_tree != tree or [*map(_row_form, tensors)] != [*map(_row_form, half_tensors)]:
            pairs = zip(tensors, half_tensors, strict=False)
            bad = None
            for pair in pairs:
                if _row_form(pair[0]) != _row_form(pair[1]):
                    bad = pair
                    break
            if bad:
                forms = f"{describe_value(bad[0])} and {describe_value(bad[1])}"
            else:
                forms = "containers of different forms"
            raise ConfigError(
                f"the task's `outputs` returned {forms} for some samples and for half of them: only the number of "
                "samples may differ; pad them to one size"
            )
    rows = [len(pytree.tree_leaves(outputs)[0]) for outputs in (whole, *halves)]
    if rows[0] != rows[1] + rows[2]:
        raise ConfigError(
            f"the task's `outputs` returned {rows[0]} rows for some samples, and {rows[1]} and {rows[2]} for their two "
            "halves: return one row for each sample"
        )


def _row_form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape[1:], tensor.dtype


def _check_step_loss(trial: Trial, whole: Any, halves: list[Any]) -> None:
    """Compute the loss of these outputs, and refuse one that uses parameters of the model."""
    task = trial.task
    if has_own(task, "step_loss_rows"):
        method = "step_loss_rows"
        offset = 0
        for half in halves:
            begin = offset
            _check_graph(trial, method, lambda half=half, begin=begin: task.step_loss_rows(half, whole, begin))
            offset += len(pytree.tree_leaves(half)[0])
        return
    _check_graph(trial, "step_loss", lambda: task.step_loss(whole))


def _check_graph(trial: Trial, method: str, action: Any) -> None:
    trial.seed()
    with torch.enable_grad():
        loss, _ = split_loss(call_method(method, lambda _: action(), None), method)
    names: dict[Tensor, str] = {parameter: name for name, parameter in trial.plain.named_parameters()}
    names |= {parameter: name for name, parameter in trial.model.named_parameters() if parameter not in names}
    for leaf in leaves(loss):
        if leaf in names or isinstance(leaf, nn.Parameter):
            name = names.get(leaf, "a parameter")
            raise ConfigError(
                f"the task's `{method}` uses {name} of the model, whose gradient would be counted on every rank: "
                f"return it from `outputs`, as {name.rpartition('.')[2]}.repeat(samples)"
            )


# --- all methods


class SetSamples(NamedTuple):
    """A rank's samples of one set, for the trial.

    Attributes:
        places: halved samples of the first places; on all ranks as many.
    """

    first: MicroBatch
    places: list[HalvedSamples]


class TrialSamples(NamedTuple):
    """A rank's samples for the trial."""

    training: SetSamples
    evaluation: dict[str, SetSamples]


def load_trial_samples(task: Task, world: World, training: Batches, evaluation: Mapping[str, Batches]) -> TrialSamples:
    """Load this rank's samples, before the first forward. Collective.

    A forward may be collective, and then needs every rank.

    Raises:
        ConfigError: an invalid `count`.
        DataError: a sample cannot be loaded.
    """

    divides = task.divisible and task.reduction != "micro-batch"
    # A loss that is used whole needs no halves; `check_loss` loads them if the run may cut it later.
    has_numbers = has_own(task, "evaluate") or has_own(task, "metrics")
    count = divides * (1 if has_step_loss(task) else PLACES * (training.step_plan.micro_batches > 1))

    def load() -> TrialSamples:
        first_batch = _load_first(task, training)
        others = {name: load_first(item) for name, item in evaluation.items()}
        return TrialSamples(
            SetSamples(first_batch, load_places(training, count, task)),
            {
                name: SetSamples(others[name], load_places(item, int(divides and has_numbers)))
                for name, item in evaluation.items()
            },
        )

    samples = on_all_ranks(world, load)  # collective
    for item in (samples.training, *samples.evaluation.values()):
        cut_places(item.places, world)  # collective
    return samples


def check_task(
    trial: Trial,
    samples: TrialSamples,
    training: Batches,
    evaluation: Mapping[str, Batches],
    state: RunState,
    recorded: str = "",
) -> list[str] | None:
    """Try `count`, `loss` or `outputs` and `step_loss`, and the evaluation's methods. Collective.

    An engine's forward may be collective, so the ranks agree before each further one.

    Args:
        state: of the run; gets the findings: whether the loss is a sum or a mean, and whether an evaluation needs a
            graph.
        recorded: the reduction with which a resumed run has trained so far; "": a new run.

    Returns:
        The names of the metrics, as in the record; None without an evaluation set.

    Raises:
        DataError, ConfigError: a method fails, or its result has the wrong form; the loss is neither a sum nor a mean,
            or not as declared; `count` does not add up, or is 0 everywhere; a BatchNorm gets one value per channel. A
            rank without the error raises a PeerError that names the first rank with it.
    """
    world = trial.world
    task = trial.task
    first_batch = samples.training.first
    # Found before the sandbox sets eval mode.
    norms = _batchnorms(trial.plain, training, world)
    with trial.sandbox():
        if has_step_loss(task):
            # This trial computes halves too, of which the number of samples is not known here.
            with _check_batchnorms([norm._replace(least=norm.samples) for norm in norms]):
                _check_whole_step(trial, samples.training)  # collective
            set_detected(task, "sum", gradients=False)
        else:
            on_all_ranks(world, lambda: _try_first(trial, first_batch, norms))  # collective
            # Every rank raises the error of one of them before `check_loss` exchanges gradients.
            world.agree()
            check_loss(trial, training, samples.training.places, recorded)  # collective
        _check_replicas(trial, first_batch)  # collective
        _check_buffers(trial, first_batch)  # collective
        state.unsaved = check_marks(trial, training, first_batch) or None  # collective
        samples.training.places.clear()
        on_all_ranks(world, lambda: _try_update(trial, first_batch))  # collective
        # Every rank raises the error of one of them before the metrics' forwards.
        world.agree()
        names = _check_metrics(trial, evaluation, samples.evaluation)  # collective
    state.reduction = task.reduction
    state.evaluation_graph = needs_graph(task)
    return names


# Relative difference between the losses of a replica's ranks that rounding cannot cause.
_SAME_LOSS = 1e-4
# The same for the sum of the context ranks' losses, without autocast: a new model's loss depends little on attention.
_SAME_SUM = 1e-5
# Positions of a sequence whose loss is computed on one rank, where the whole may not fit.
_TRIED_POSITIONS = 2048


def _check_replicas(trial: Trial, first: MicroBatch) -> None:
    """Check that the ranks that hold one model between them compute one loss. Collective.

    Raises:
        DifferenceError: on every rank, naming the first replica whose ranks differ.
    """
    if trial.world.part("tp").size > 1:
        _check_tensor_ranks(trial, first)  # collective
    if trial.world.part("cp").size > 1:
        _check_context_ranks(trial, first)  # collective


def _check_tensor_ranks(trial: Trial, first: MicroBatch) -> None:
    """Check that the ranks that divide layers have equal losses. Collective.

    They have not if a layer's output is cut and no later layer adds the parts up: each would train another model.
    """
    world = trial.world
    size = world.part("tp").size
    loss = loss_of(trial.task)

    def compute() -> float:
        trial.seed()
        with trial.with_graph():
            value = call_method("loss", lambda _: loss(trial.model, first), None, trial.model, trial.task)
            # Waits for the device, once before step 1.
            return float(value.detach())

    losses = world.gather(on_all_ranks(world, compute))  # collective
    for start in range(0, world.size, size):
        own = losses[start : start + size]
        # NaN and infinity are for the guards.
        if all(map(math.isfinite, own)) and max(own) - min(own) > _SAME_LOSS * max(map(abs, own)):
            raise DifferenceError(
                f"--parallel.tensor {size}: ranks {start} to {start + size - 1} hold one model, and its loss is "
                f"{min(own):.6g} on one and {max(own):.6g} on another: a layer planned as 'columns' gives its part to "
                "code that needs all of it; plan the layer after it as 'rows', or leave both out of the plan"
            )


def _check_buffers(trial: Trial, first: MicroBatch) -> None:
    """Refuse a loss that writes buffers, of which each stage of a pipeline would have its own. Collective.

    Raises:
        ConfigError: on every rank, naming the first one.
    """
    stages = trial.world.part("pp").size
    if stages == 1:
        return
    loss = loss_of(trial.task)

    def find_changed() -> list[str]:
        # Waits for the device, once before step 1.
        before = {name: buffer.clone() for name, buffer in trial.plain.named_buffers()}
        with trial.preserve(), training_modes(trial.model, trial.training_modes):
            trial.seed()
            changed = []
            # Its end restores the buffers.
            with trial.with_graph():
                call_method("loss", lambda _: loss(trial.model, first), None, trial.model, trial.task)
                for name, buffer in trial.plain.named_buffers():
                    # By bytes, as NaN is not equal to itself.
                    if not torch.equal(as_bytes(buffer), as_bytes(before[name])):
                        changed.append(name)
        return changed

    for names in trial.world.gather(on_all_ranks(trial.world, find_changed)):  # collective
        if names:
            raise ConfigError(
                f"--parallel.pipeline {stages}: the forward writes the model's buffer '{names[0]}', which each stage "
                "would write with values of its own; write it in the hook `after_update`, or leave the flag out"
            )


def _check_context_ranks(trial: Trial, first: MicroBatch) -> None:
    """Check that the losses of the ranks that divide sequences add up to that of whole sequences. Collective.

    They do not if a layer other than attention looks at other positions, if attention does not see those of all ranks,
    or if labels are shifted in the loss, where the last position of a part has none.
    """
    task = trial.task
    world = trial.world
    size = world.part("cp").size
    data = first_positions(task, first.data, _TRIED_POSITIONS)

    def compute(loss: Callable[[], Tensor]) -> float:
        trial.seed()
        try:
            with torch.no_grad(), without_autocast():
                # Waits for the device, twice before step 1.
                return float(call_method("loss", lambda _: loss(), None, trial.model, task))
        finally:
            at_rest(trial.model)

    with _fill_zeros(trial.model):
        parts = world.gather(on_all_ranks(world, lambda: compute(lambda: task.loss(trial.model, data))))  # collective
        whole = on_all_ranks(world, lambda: compute(lambda: whole_task(task).loss(trial.model, data)))  # collective
    wholes = world.gather_counted(whole)  # collective
    limit = trial.limit if trial.is_low_precision else _SAME_SUM
    width = world.replica.size
    for index, whole in enumerate(wholes):
        start = index * width
        total = math.fsum(parts[start : start + width]) * size / width
        # NaN and infinity are for the guards.
        if math.isfinite(total) and math.isfinite(whole) and abs(total - whole) > limit * abs(whole):
            raise DifferenceError(
                f"--parallel.context {size}: ranks {start} to {start + width - 1} divide sequences, and their losses "
                f"add up to {total:.8g}, where one rank has {whole:.8g} of the whole: compute attention by "
                "lockstep.attention, let no other layer mix positions, shift labels in `collate`, and return a sum"
            )


@contextlib.contextmanager
def _fill_zeros(model: nn.Module) -> Iterator[None]:
    """Give parameters that are all zero some values for a while: the loss depends on no layer before such a one."""
    generator = torch.Generator()
    filled = []
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            # By its number: of another parameter this rank alone may have a part of zeros.
            generator.manual_seed(number)
            local = local_of(parameter)
            if local.is_floating_point() and local.numel() and not local.any():
                local.copy_(0.1 * torch.randn(local.shape, generator=generator))
                filled.append(local)
    try:
        yield
    finally:
        for local in filled:
            local.detach().zero_()


def _try_update(trial: Trial, first: MicroBatch) -> None:
    """Try backward, norm and optimizer step on copied state.

    Tasks with hooks and modules of another library are skipped: their hooks would see a step that does not exist.
    """
    if trial.task.hooks is not None or trial.task.framework:
        return
    loss = loss_of(trial.task)

    def compute() -> Tensor:
        trial.seed()
        with torch.enable_grad():
            value: Tensor = call_method("loss", lambda _: loss(trial.model, first), None, trial.model, trial.task)
        return value

    trial.engine.rehearse(compute)


def restore_findings(task: Task, state: RunState) -> None:
    """Restore the findings of an earlier trial from the state of a checkpoint."""
    reduction = state.reduction or "" if task.reduction == "auto" else ""
    set_detected(task, reduction, bool(state.evaluation_graph))


def _load_first(task: Task, training: Batches) -> MicroBatch:
    """Load this rank's first micro-batch. Raises ConfigError for an invalid `count`."""
    batch = load_first(training)
    if has_own(task, "count"):
        count = call_method("count", task.count, batch.held)
        if not is_number(count) or not 0 <= float_of(count) < math.inf:
            if isinstance(count, int | float):
                text = repr(count)
            else:
                text = describe_value(count)
            raise ConfigError(f"the task's `count` returned {text}: it must return a finite number of items, 0 or more")
    if not batch.items:
        training.with_items(training.step_plan.origin.step)
    return batch


def _try_first(trial: Trial, first: MicroBatch, norms: list["_Norm"]) -> None:
    with _check_batchnorms(norms):
        loss, _ = try_loss(trial, first)
    # With another setting the guards handle it.
    if trial.config.guards.nonfinite == "stop":
        _check_inputs(first, loss)


class _Norm(NamedTuple):
    """A BatchNorm layer in training mode.

    Attributes:
        samples: of the trial, that it normalises over.
        least: the fewest that it normalises over in a step.
        is_shared: these are the samples of all ranks, so that one value per channel on this rank may be enough.
    """

    name: str
    layer: nn.Module
    samples: int
    least: int
    is_shared: bool


def _batchnorms(model: nn.Module, training: Batches, world: World) -> list[_Norm]:
    """Return the model's BatchNorm layers in training mode."""
    norms = []
    step = training.step_plan.origin.step
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            is_shared = world.size > 1 and isinstance(layer, Synchronised | nn.SyncBatchNorm)
            if is_shared:
                samples = training.step_plan.samples(step)
                least = samples
            else:
                samples = training.own_samples(step)
                # The last micro-batch of a step may be shorter.
                least = min(samples, training.least_samples(step))
            norms.append(_Norm(name or type(layer).__name__, layer, samples, least, is_shared))
    return norms


@contextlib.contextmanager
def _check_batchnorms(norms: list[_Norm]) -> Iterator[None]:
    """Raise ConfigError if a layer of `norms` gets one value per channel.

    The trial runs in eval mode, where torch accepts that.
    """

    def check(norm: _Norm, values: Tensor | None = None) -> None:
        enough = norm.is_shared and norm.samples > 1
        if values is None or values.ndim < 2 or enough:
            return
        # A sample may have several places of a channel, as an image has.
        if values.numel() * norm.least <= values.shape[1] * norm.samples:
            raise ConfigError(
                f"BatchNorm ({norm.name}) gets one value per channel from a forward of {norm.least} sample"
                f"{'s' * (norm.least > 1)}, and needs more: give a larger --micro-batch-size (16 or more train "
                "better), with a --batch-size that is a multiple of it, or use another norm, such as GroupNorm or "
                "LayerNorm"
            )

    hooks = [norm.layer.register_forward_pre_hook(lambda _, inputs, norm=norm: check(norm, *inputs)) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_inputs(first: MicroBatch, loss: float) -> None:
    """Refuse NaN in the inputs of a loss that is not finite.

    With a finite loss NaN may mean missing values.
    """
    if math.isfinite(loss):
        return
    for name, values in _float_tensors(first.held, ""):
        count = int(values.isnan().sum())
        if count:
            raise DataError(
                f"the first micro-batch has NaN in {name or 'its tensor'} ({count} of {values.numel()} values), and "
                f"its loss is {loss}: repair the data, or skip such steps: --guards.nonfinite skip"
            )


def _float_tensors(batch: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors of a batch with their paths: `batch['x']`, `batch[0]`."""
    if isinstance(batch, Tensor):
        if batch.is_floating_point():
            yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _float_tensors(value, f"{name or 'batch'}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from _float_tensors(value, f"{name or 'batch'}[{index}]")
