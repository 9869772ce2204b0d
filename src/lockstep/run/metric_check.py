"""The evaluation's methods, tried before step 1: their form, and whether what they return adds up.

names = check_metrics(trial, evaluation)        # of the record; None where nothing is evaluated

An evaluation adds up the sums and the counts of its micro-batches. So a (mean, count), or the mean loss of an
`evaluate` beside a summed `loss`, would be shown as another number than it is, and the best checkpoint chosen by it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batches import Batches, MicroBatch
from lockstep.distributed.world import on_all_ranks
from lockstep.errors import ConfigError, LockstepError
from lockstep.loop import described
from lockstep.passes import unpacked
from lockstep.run.loss_check import fits, loss_number, shown, ways_out
from lockstep.run.stateful_metrics import check_mergeable, is_metric, taken
from lockstep.run.trial import Measure, Trial, call, measures
from lockstep.task import averages, has_own, looks_at_whole_step, set_found, takes_gradients

__all__ = ["check_metrics", "is_number"]

_PAIR = "`metrics` must return a dict of name -> (sum, count), both numbers"
_BOTH = "`evaluate` must return (loss, metrics), the loss as `loss` has it and a dict of name -> (sum, count)"
_SURE = 0.25  # what rounding cannot do


def check_metrics(trial: Trial, evaluation: Mapping[str, Batches]) -> list[str] | None:
    """Try what an evaluation calls, on each set. Collective.

    Returns:
        The names of the evaluation's metrics, as its record has them; None where nothing is evaluated.

    Raises:
        ConfigError, DataError: a method fails, or returns what it must not, or what does not add up.
    """
    task = trial.task
    if looks_at_whole_step(task) and has_own(task, "evaluate"):
        raise ConfigError(
            "the task has `evaluate` beside `step_loss`, whose loss is of all samples together: leave it out, and "
            "write `metrics`"
        )
    found = {name: _of_set(trial, batches) for name, batches in evaluation.items()}
    if not found:
        return None
    if list(found) == [""]:
        return found[""]
    return [f"{name}/{key}" for name, keys in found.items() for key in ("loss", "items", *keys)]


def _of_set(trial: Trial, batches: Batches) -> list[str]:
    batch = on_all_ranks(trial.world, lambda: trial.first(batches))  # collective
    names, pairs = _with_or_without_graph(trial, lambda: _form(trial, batch))
    if trial.task.divisible and trial.task.reduction != "micro-batch":
        _check_sums(trial, batches, pairs)
    return names


def _with_or_without_graph(
    trial: Trial, action: Callable[[], tuple[list[str], list[str]]]
) -> tuple[list[str], list[str]]:
    """What `action` returns; with a graph where it fails on a rank without one. Collective."""
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


def _form(trial: Trial, batch: MicroBatch) -> tuple[list[str], list[str]]:
    """The names of the metrics, and of those that are (sum, count). Raises ConfigError for what has another form."""
    task, model = trial.task, trial.model
    trial.seed()
    method = "evaluate" if has_own(task, "evaluate") else "metrics"
    beside = list[str]()
    if method == "metrics":
        beside = _beside(call("loss", lambda data: task.loss(model, data), batch.data, model, task))
    result: Any = call(method, lambda data: getattr(task, method)(model, data), batch.data, model, task)
    if method == "evaluate":
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ConfigError(f"the task's {_BOTH}; it returned {described(result)}")
        beside, result = _beside(result[0]), result[1]
    told = _BOTH if method == "evaluate" else _PAIR
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
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(is_number, pair)):
            kind = f"({', '.join(map(described, pair))})" if isinstance(pair, tuple | list) else described(pair)
            raise ConfigError(f"the task's {told}; '{name}' is {kind}")
        names.append(name)
        pairs.append(name)
    return names, pairs


def _beside(returned: Any) -> list[str]:
    """The names of the numbers that came with a loss, which are metrics too."""
    with torch.no_grad():
        return list(unpacked(returned)[1])


def is_number(value: Any) -> bool:
    """Whether a method returned one number."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float | np.number)


def _check_sums(trial: Trial, batches: Batches, pairs: list[str]) -> None:
    """Compare what a few samples give with what their halves give. Collective."""
    own = has_own(trial.task, "evaluate")
    if not pairs and not own:
        return
    found, width = list[Measure](), own + 2 * len(pairs)
    for found, _ in measures(trial, lambda batch: _numbers(trial, batch, pairs), batches, _is_clean):
        if all(any(each.scale(place) for each in found) for place in range(width)):
            break
    if own:
        _check_loss(trial, found)
    for k, name in enumerate(pairs):
        for place in (own + 2 * k, own + 2 * k + 1):
            odd = next((each for each in found if _is_off(trial, each, place)), None)
            if odd is not None:
                what = ("count", "sum")[place == own + 2 * k]
                raise ConfigError(
                    f"the task's metric '{name}' does not add up: of its {what} {shown([odd], place)}; return (sum, "
                    "count), both over the samples of the batch"
                )


def _numbers(trial: Trial, batch: MicroBatch, pairs: list[str]) -> list[float]:
    """The loss of an own `evaluate`, then sum and count of each pair."""
    task, model = trial.task, trial.model
    loss = list[float]()
    if has_own(task, "evaluate"):
        value, found = task.evaluate(model, batch.data)
        loss = [loss_number(value)]
    else:
        found = task.metrics(model, batch.data)
    for value in found.values():
        if is_metric(value):
            taken(value)  # or the next would begin with it
    return loss + [float(number) for name in pairs for number in found[name]]  # waits for the device


def _is_clean(each: Measure) -> bool:
    """Whether every number adds up, so that nothing was drawn."""
    places = range(len(each.whole))
    return all(abs(each.whole[k] - each.first[k] - each.second[k]) <= 1e-3 * each.scale(k) for k in places)


def _is_off(trial: Trial, each: Measure, place: int) -> bool:
    whole, first, second = each.three(place)
    scale = each.scale(place)
    if not scale or each.is_random(place):
        return False
    off = abs(whole - first - second) / scale
    return off > (_SURE if trial.is_rough else trial.limit)  # rounding may turn a prediction


def _check_loss(trial: Trial, found: list[Measure]) -> None:
    """Raises ConfigError where the loss of `evaluate` is not what `loss` is."""
    kinds, wanted = fits(found, 0, trial.limit), "mean" if averages(trial.task) else "sum"
    if kinds is None or wanted in kinds:
        return
    what = shown(found, 0)
    if kinds:
        other = "sum" if "sum" in kinds else "mean" if "mean" in kinds else "mean over samples"
        raise ConfigError(
            f"the task's `evaluate` returns a {other} where `loss` is a {wanted} over its items: {what}; return the "
            f"{wanted} in both"
        )
    raise ConfigError(ways_out(f"the loss of the task's `evaluate` is neither a sum nor a mean: {what}"))
