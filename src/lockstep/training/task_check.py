"""Try each method of the user's task before step 1, to find mistakes early.

    trial = Trial(engine, model, task, world, config, say)
    names = check_task(trial, training, evaluation, state)      # each method, on a few samples of each rank
    recall(task, state)                                         # a resume: what was found then

A trial leaves no side effects: gradients, buffers, tensors of the task's `state_dict()` and generators are restored. It
refuses only what is wrong for any task; what merely looks odd (a loss that is not finite yet, a collation that draws,
or that fails for half of the samples) passes.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from lockstep.config.schema import Config
from lockstep.data.batches import Batches, MicroBatch
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.registry import check_audit, name_of
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.loop import described, loss_of
from lockstep.passes import unpacked
from lockstep.run_state import RunState
from lockstep.task import Task, averages, has_own, looks_at_whole_step, set_found, takes_gradients
from lockstep.training.evaluation import check_mergeable, is_metric, taken
from lockstep.training.loss_check import (
    Measurement,
    Trial,
    call_method,
    check_loss,
    classify,
    describe_measurement,
    loss_value,
    measure,
    suggest_fixes,
    try_loss,
)
from lockstep.transforms.determinism import autotuned, pin_compiler
from lockstep.whole_step import checked_outputs

__all__ = [
    "Trial",
    "check_auditable",
    "check_auditable_loss",
    "check_task",
    "restore_findings",
]


def check_auditable(config: Config, world: World) -> None:
    """Refuse settings that `--guards.audit` does not support.

    Pins the compiler, so that all ranks choose the same kernels.

    Raises:
        ConfigError: an engine, a BatchNorm or a compiler that does not go with `--guards.audit`.
    """
    if not config.guards.audit:
        return
    check_audit(name_of(config.engine, world))
    if config.weight_copies == "step":
        raise ConfigError(
            "--guards.audit does not go with --weight-copies step, where gradients come to the copies first: leave "
            "either out"
        )
    if config.batchnorm == "sync":
        raise ConfigError(
            "--guards.audit does not go with --batchnorm sync, whose forward takes all ranks: use --batchnorm replay"
        )
    if config.compile:
        if asked := autotuned():
            raise ConfigError(
                f"--guards.audit with --compile cannot hold with {asked[0]}=1, which takes the kernel that happens to "
                "be fastest; unset it"
            )
        pin_compiler()


def check_auditable_loss(config: Config, task: Task) -> None:
    """Raise ConfigError for a loss over the whole step: single micro-batches cannot be audited."""
    if config.guards.audit and looks_at_whole_step(task):
        raise ConfigError(
            "--guards.audit does not go with a task that has `outputs` and `step_loss`, whose gradient takes all of a "
            "step's samples: leave it out"
        )


# --- metrics

_METRICS_FORM = "`metrics` must return a dict of name -> (sum, count), both numbers"
_EVALUATE_FORM = "`evaluate` must return (loss, metrics), the loss as `loss` has it and a dict of name -> (sum, count)"
_CERTAIN_ERROR = 0.25  # a difference that rounding cannot cause


def _check_metrics(trial: Trial, evaluation: Mapping[str, Batches]) -> list[str] | None:
    """Try the evaluation's methods on each set. Collective.

    Returns:
        The names of the metrics, as in the record; None without an evaluation.

    Raises:
        ConfigError, DataError: a method fails, or its result has the wrong form or does not add up.
    """
    task = trial.task
    if looks_at_whole_step(task) and has_own(task, "evaluate"):
        raise ConfigError(
            "the task has `evaluate` beside `step_loss`, whose loss is of all samples together: leave it out, and "
            "write `metrics`"
        )
    found = {name: _check_set(trial, batches) for name, batches in evaluation.items()}
    if not found:
        return None
    if list(found) == [""]:
        return found[""]
    return [f"{name}/{key}" for name, keys in found.items() for key in ("loss", "items", *keys)]


def _check_set(trial: Trial, batches: Batches) -> list[str]:
    batch = on_all_ranks(trial.world, lambda: trial.first(batches))  # collective
    names, pairs = _with_or_without_graph(trial, lambda: _check_form(trial, batch))
    if trial.task.divisible and trial.task.reduction != "micro-batch":
        _check_sums(trial, batches, pairs)
    return names


def _with_or_without_graph(
    trial: Trial, action: Callable[[], tuple[list[str], list[str]]]
) -> tuple[list[str], list[str]]:
    """Run `action`, with a graph if it fails on a rank without one. Collective."""
    task, problem = trial.task, None
    for gradients in sorted({takes_gradients(task), True}):
        found = None
        try:
            with torch.set_grad_enabled(gradients):
                found = action()
        except (LockstepError, RuntimeError) as error:
            problem = problem or error
        if all(trial.world.gather(found is not None)) and found:  # collective
            set_found(task, "", gradients)
            return found
    trial.world.check(problem)  # collective
    raise AssertionError


def _check_form(trial: Trial, batch: MicroBatch) -> tuple[list[str], list[str]]:
    """Return the names of the metrics, and of those that are (sum, count).

    Raises:
        ConfigError: the result has another form.
    """
    task, model = trial.task, trial.model
    trial.seed()
    method = "evaluate" if has_own(task, "evaluate") else "metrics"
    beside = list[str]()
    if method == "metrics":
        beside = _number_names(call_method("loss", lambda data: task.loss(model, data), batch.data, model, task))
    result: Any = call_method(method, lambda data: getattr(task, method)(model, data), batch.data, model, task)
    if method == "evaluate":
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ConfigError(f"the task's {_EVALUATE_FORM}; it returned {described(result)}")
        beside, result = _number_names(result[0]), result[1]
    told = _EVALUATE_FORM if method == "evaluate" else _METRICS_FORM
    if not isinstance(result, dict):
        raise ConfigError(f"the task's {told}; it returned {described(result)}")
    names, pairs = [name for name in beside if name not in result], list[str]()
    for name, pair in result.items():
        if not isinstance(name, str) or name in ("loss", "items"):
            raise ConfigError(
                f"the task's {told}; one is named {name!r}, and 'loss' and 'items' are the evaluation's own"
            )
        if is_metric(pair):
            names += check_mergeable(name, pair, taken(pair))
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_number, pair)):
            kind = f"({', '.join(map(described, pair))})" if isinstance(pair, tuple | list) else described(pair)
            raise ConfigError(f"the task's {told}; '{name}' is {kind}")
        names.append(name)
        pairs.append(name)
    return names, pairs


def _number_names(returned: Any) -> list[str]:
    """Return the names of the numbers that came with a loss; they are metrics too."""
    with torch.no_grad():
        return list(unpacked(returned)[1])


def _is_number(value: Any) -> bool:
    """Whether a method returned one number."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float | np.number)


def _check_sums(trial: Trial, batches: Batches, pairs: list[str]) -> None:
    """Compare the numbers of a few samples with those of their halves. Collective."""
    own = has_own(trial.task, "evaluate")
    if not pairs and not own:
        return
    found, width = list[Measurement](), own + 2 * len(pairs)
    for found, _ in measure(trial, lambda batch: _compute_numbers(trial, batch, pairs), batches, _adds_up):
        if all(any(each.scale(place) for each in found) for place in range(width)):
            break
    if own:
        _check_loss(trial, found)
    for k, name in enumerate(pairs):
        for place in (own + 2 * k, own + 2 * k + 1):
            odd = next((each for each in found if _does_not_add_up(trial, each, place)), None)
            if odd is not None:
                what = ("count", "sum")[place == own + 2 * k]
                raise ConfigError(
                    f"the task's metric '{name}' does not add up: of its {what} {describe_measurement([odd], place)}; "
                    "return (sum, count), both over the samples of the batch"
                )


def _compute_numbers(trial: Trial, batch: MicroBatch, pairs: list[str]) -> list[float]:
    """Return the loss of the task's own `evaluate`, then sum and count of each pair."""
    task, model = trial.task, trial.model
    loss = list[float]()
    if has_own(task, "evaluate"):
        value, found = task.evaluate(model, batch.data)
        loss = [loss_value(value)]
    else:
        found = task.metrics(model, batch.data)
    for value in found.values():
        if is_metric(value):
            taken(value)  # reset it, or the next batch would add to it
    return loss + [float(number) for name in pairs for number in found[name]]  # waits for the device


def _adds_up(each: Measurement) -> bool:
    """Whether every number adds up, so that nothing random was involved."""
    places = range(len(each.whole))
    return all(abs(each.whole[k] - each.first[k] - each.second[k]) <= 1e-3 * each.scale(k) for k in places)


def _does_not_add_up(trial: Trial, each: Measurement, place: int) -> bool:
    whole, first, second = each.three(place)
    scale = each.scale(place)
    if not scale or each.is_random(place):
        return False
    off = abs(whole - first - second) / scale
    return off > (_CERTAIN_ERROR if trial.is_rough else trial.limit)  # rounding may flip a prediction


def _check_loss(trial: Trial, found: list[Measurement]) -> None:
    """Raise ConfigError if the loss of `evaluate` does not match `loss`."""
    kinds, wanted = classify(found, 0, trial.limit), "mean" if averages(trial.task) else "sum"
    if kinds is None or wanted in kinds:
        return
    what = describe_measurement(found, 0)
    if kinds:
        other = "sum" if "sum" in kinds else "mean" if "mean" in kinds else "mean over samples"
        raise ConfigError(
            f"the task's `evaluate` returns a {other} where `loss` is a {wanted} over its items: {what}; return the "
            f"{wanted} in both"
        )
    raise ConfigError(suggest_fixes(f"the loss of the task's `evaluate` is neither a sum nor a mean: {what}"))


# --- loss over the whole step

_OUTPUTS_FORM = "it must return a tensor of shape [samples, ...], or a tuple, list or dict of such"


def _check_whole_step(trial: Trial, training: Batches, first: MicroBatch) -> None:
    """Try `outputs` and `step_loss` on a micro-batch and on halves of samples. Collective.

    Raises:
        ConfigError: a result has the wrong form; or `step_loss` uses a parameter of the model.
        DataError: one of them fails.
    """
    own = on_all_ranks(trial.world, lambda: _compute_outputs(trial, first))  # collective
    cut = trial.cut(training, 0) if trial.task.divisible else None  # collective
    if cut is None:
        on_all_ranks(trial.world, lambda: _check_step_loss(trial, own, [own]))  # collective
        return
    parts = (cut.whole, *cut.halves)
    whole, *halves = on_all_ranks(trial.world, lambda: [_compute_outputs(trial, part) for part in parts])  # collective
    on_all_ranks(trial.world, lambda: _check_halves(whole, halves))  # collective
    on_all_ranks(trial.world, lambda: _check_step_loss(trial, whole, halves))  # collective


def _compute_outputs(trial: Trial, batch: MicroBatch) -> Any:
    """Compute the outputs of a batch, as leaf tensors for the loss."""
    task, model = trial.task, trial.model
    trial.seed()
    with trial.with_graph():
        found = call_method("outputs", lambda data: task.outputs(model, data), batch.data, model, task)
    if not isinstance(found, Tensor | tuple | list | dict):
        raise ConfigError(f"the task's `outputs` returned {described(found)}: {_OUTPUTS_FORM}")
    checked_outputs(found)
    tensors, tree = pytree.tree_flatten(found)
    samples = _count_samples(task, batch)
    if samples is not None and len(tensors[0]) != samples:
        raise ConfigError(
            f"the task's `outputs` returned {described(tensors[0])} for a batch of {samples} samples: {_OUTPUTS_FORM}"
        )
    if not any(tensor.requires_grad for tensor in tensors):
        raise ConfigError(
            "the task's `outputs` returned no tensor with a graph, so nothing is learnt: compute it by the model, "
            "without detach() and no_grad()"
        )
    return pytree.tree_unflatten([_leaf(tensor) for tensor in tensors], tree)


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    if leaf.dtype in (torch.float16, torch.bfloat16):
        leaf = leaf.float()
    return leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def _count_samples(task: Task, batch: MicroBatch) -> int | None:
    """Return the number of samples of a batch, by its first tensor; None without one."""
    try:
        return int(Task.count(task, batch.held))
    except ConfigError:
        return None


def _check_halves(whole: Any, halves: list[Any]) -> None:
    tensors, tree = pytree.tree_flatten(whole)
    for half in halves:
        others, other = pytree.tree_flatten(half)
        forms = [[(t.shape[1:], t.dtype) for t in each] for each in (tensors, others)]
        if other != tree or forms[0] != forms[1]:
            odd = next(
                (pair for pair in zip(tensors, others, strict=False) if _row_form(pair[0]) != _row_form(pair[1])), None
            )
            apart = f"{described(odd[0])} and {described(odd[1])}" if odd else "containers of different forms"
            raise ConfigError(
                f"the task's `outputs` returned {apart} for some samples and for half of them: only the number of "
                "samples may differ; pad them to one size"
            )
    rows = [len(pytree.tree_leaves(each)[0]) for each in (whole, *halves)]
    if rows[0] != rows[1] + rows[2]:
        raise ConfigError(
            f"the task's `outputs` returned {rows[0]} rows for some samples, and {rows[1]} and {rows[2]} for their two "
            "halves: each needs one row a sample"
        )


def _row_form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape[1:], tensor.dtype


def _check_step_loss(trial: Trial, whole: Any, halves: list[Any]) -> None:
    """Compute the loss of these outputs, and look for parameters that it uses."""
    task = trial.task
    if has_own(task, "step_loss_rows"):
        method, first = "step_loss_rows", 0
        for half in halves:
            begin = first
            _check_graph(trial, method, lambda half=half, begin=begin: task.step_loss_rows(half, whole, begin))
            first += len(pytree.tree_leaves(half)[0])
        return
    _check_graph(trial, "step_loss", lambda: task.step_loss(whole))


def _check_graph(trial: Trial, method: str, action: Any) -> None:
    trial.seed()
    with torch.enable_grad():
        loss, _ = unpacked(call_method(method, lambda _: action(), None), method)
    names: dict[Tensor, str] = {parameter: name for name, parameter in trial.plain.named_parameters()}
    names |= {parameter: name for name, parameter in trial.model.named_parameters() if parameter not in names}
    for leaf in _leaves(loss):
        if leaf in names or isinstance(leaf, nn.Parameter):
            name = names.get(leaf, "a parameter")
            raise ConfigError(
                f"the task's `{method}` uses {name} of the model, whose gradient would be counted on every rank: "
                f"return it from `outputs`, as {name.rpartition('.')[2]}.repeat(samples)"
            )


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaf tensors of a loss's graph."""
    found, seen, coming = list[Tensor](), set[Any](), [loss.grad_fn]
    while coming:
        node = coming.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        coming += [following for following, _ in node.next_functions]
    return found


# --- all methods


def check_task(trial: Trial, training: Batches, evaluation: Mapping[str, Batches], state: RunState) -> list[str] | None:
    """Try `count`, `loss` or `outputs` and `step_loss`, and the evaluation's methods. Collective.

    Args:
        state: of the run; it receives what the trial detects: whether the loss is a sum or a mean, and whether an
            evaluation needs a graph.

    Returns:
        The names of the metrics, as in the record; None without an evaluation.

    Raises:
        DataError, ConfigError: a method fails, or its result has the wrong form; a loss that is neither a sum nor a
            mean, or not what the task declares; a `count` that does not add up, or finds nothing anywhere; a BatchNorm
            that gets one value per channel. The same on every rank, or a PeerError that names the first.
    """
    world, task = trial.world, trial.task
    first = on_all_ranks(world, lambda: _load_first(trial, training))  # collective
    norms = _batchnorms(trial.plain, world)  # before eval mode
    with trial.running():
        if looks_at_whole_step(task):
            with _check_batchnorms(norms, training):
                _check_whole_step(trial, training, first)  # collective
            set_found(task, "sum", gradients=False)
        else:
            on_all_ranks(world, lambda: _try_first(trial, training, first, norms))  # collective
            check_loss(trial, training)  # collective
        on_all_ranks(world, lambda: _try_update(trial, first))  # collective
        names = _check_metrics(trial, evaluation)  # collective
    state.reduction, state.evaluation_graph = task.reduction, takes_gradients(task)
    return names


def _try_update(trial: Trial, first: MicroBatch) -> None:
    """Try backward, norm and optimizer step on copied state.

    Tasks with hooks, and modules of another library, are skipped: their hooks would be called for a step that does not
    exist.
    """
    if trial.task.hooks is not None or trial.task.framework:
        return
    loss = loss_of(trial.task)

    def compute() -> Tensor:
        trial.seed()
        with torch.enable_grad():
            found: Tensor = call_method("loss", lambda _: loss(trial.model, first), None, trial.model, trial.task)
        return found

    trial.engine.rehearse(compute)


def restore_findings(task: Task, state: RunState) -> None:
    """Restore what an earlier trial detected, from the state of a checkpoint."""
    found = state.reduction or "" if task.reduction == "auto" else ""
    set_found(task, found, bool(state.evaluation_graph))


def _load_first(trial: Trial, training: Batches) -> MicroBatch:
    """Load this rank's first micro-batch. Raises ConfigError for an invalid `count`."""
    first, task = trial.first(training), trial.task
    if has_own(task, "count"):
        found = call_method("count", task.count, first.held)
        if not _is_number(found) or not 0 <= float(found) < math.inf:
            told = repr(found) if isinstance(found, int | float) else described(found)
            raise ConfigError(f"the task's `count` returned {told}: it must return a finite number of items, 0 or more")
    if not first.items:
        training.with_items(0)
    return first


def _try_first(trial: Trial, training: Batches, first: MicroBatch, norms: list[tuple[str, nn.Module]]) -> None:
    with _check_batchnorms(norms, training):
        loss, _ = try_loss(trial, first)
    if trial.config.guards.nonfinite == "stop":  # otherwise the guards handle it
        _check_inputs(first, loss)


def _batchnorms(model: nn.Module, world: World) -> list[tuple[str, nn.Module]]:
    """Find the BatchNorm layers that normalise over one forward on one rank, with their names."""
    return [
        (name or type(layer).__name__, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.training
        and not (isinstance(layer, nn.SyncBatchNorm) and world.size > 1)
    ]


@contextlib.contextmanager
def _check_batchnorms(norms: list[tuple[str, nn.Module]], training: Batches) -> Iterator[None]:
    """Raise ConfigError if a layer of `norms` gets one value per channel.

    In eval mode torch accepts that.
    """
    samples = training.own_samples(0)

    def look(name: str, given: Tensor | None = None) -> None:
        if given is not None and given.ndim > 1 and given.numel() == given.shape[1]:
            raise ConfigError(
                f"BatchNorm ({name}) gets one value a channel from a forward of {samples} sample{'s' * (samples > 1)}, "
                "and cannot normalise by one: give a larger --micro-batch-size (16 or more train better), with a "
                "--batch-size that is a multiple of it, or use another norm, such as GroupNorm or LayerNorm"
            )

    hooks = [layer.register_forward_pre_hook(lambda _, inputs, name=name: look(name, *inputs)) for name, layer in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_inputs(first: MicroBatch, loss: float) -> None:
    """Refuse NaN in the input if the loss is not finite either.

    NaN alone may mean missing values.
    """
    if math.isfinite(loss):
        return
    for name, values in _float_tensors(first.held, ""):
        found = int(values.isnan().sum())
        if found:
            raise DataError(
                f"the first micro-batch has NaN in {name or 'its tensor'} ({found} of {values.numel()} values), and "
                f"its loss is {loss}: mend the data, or --guards.nonfinite skip leaves such steps out"
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
        for place, value in enumerate(batch):
            yield from _float_tensors(value, f"{name or 'batch'}[{place}]")
