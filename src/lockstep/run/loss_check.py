"""Whether a task's loss is a sum or a mean over its items, found on a few samples and their halves.

    check_loss(trial, training)         # sets task.reduction where it is "auto"; refuses a loss that is neither
    fits(measures, place, limit)        # {"sum": 0.0002} of number `place`: what it is, and how far off

The two differ by a factor, so four samples show which it is. A loss that draws random numbers is judged by that factor
alone. Nothing needs to be known where a step has one micro-batch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.batches import Batches, MicroBatch
from lockstep.errors import ConfigError
from lockstep.passes import unpacked
from lockstep.run.trial import Measure, Trial, as_it_was, call, measures
from lockstep.task import Task, averages, has_own, set_found, takes_gradients

__all__ = ["check_loss", "fits", "loss_number", "shown", "try_loss", "ways_out"]

_EXACT = 1e-5  # the share by which rounding may be off
_VOTES = 8  # runs of a loss that draws, at least
_LOOKED = 3  # places in the data
_SAMPLES = "samples"  # a mean over samples, where `count` counts other items


def try_loss(trial: Trial, batch: MicroBatch) -> tuple[float, list[str]]:
    """Compute the loss of a batch as step 1 does.

    Returns:
        The loss, and the names of the numbers beside it.

    Raises:
        ConfigError: it is no number with a graph; or it has a collective of its own, under `--exact` or `verify`.
        DataError: `loss` fails.
    """
    task, model = trial.task, trial.model
    must_agree = (trial.config.exact or task.is_compared) and trial.world.size > 1
    if must_agree and not task.gathers and task.own_steps is None:
        with as_it_was(model, task, trial.world.device, training=True):  # it may gather in training alone
            for module in model.modules():
                module.training = trial.modes.get(module, module.training)
            trial.seed()
            with trial.with_graph(), _no_collectives(trial):
                call("loss", lambda data: task.loss(model, data), batch.data, model, task)
    trial.seed()
    with trial.with_graph():
        loss = call("loss", lambda data: task.loss(model, data), batch.data, model, task)
        number, beside = unpacked(loss)
        return float(number.detach()), list(beside)  # waits for the device


def loss_number(value: Any) -> float:
    """A loss as a number, with or without a graph; without the numbers beside it."""
    with torch.no_grad():
        return float(unpacked(value)[0].detach())  # waits for the device


def check_loss(trial: Trial, training: Batches) -> None:
    """Find out whether the loss is a sum or a mean, where the task does not say; refuse what is neither. Collective.

    Raises:
        ConfigError: it is not what the task declares, or neither, or it cannot be told; a `count` that does not add up.
    """
    task, found, looked = trial.task, list[Measure](), 0
    if task.reduction == "micro-batch":
        if not task.framework:  # which the line of the step says
            trial.say(
                "reduction = 'micro-batch': the loss of each micro-batch of "
                f"{training.step_plan.micro_size} by itself, averaged by its items; it is not checked, and another "
                "--micro-batch-size is another training"
            )
        return
    if task.divisible:
        probe = _probe(trial)
        for found, needs_graph in measures(trial, probe, training, lambda m: _is_clean(trial, m)):
            if needs_graph:
                set_found(task, "", gradients=True)
            looked += 1  # at more than one place, since a forward may take a branch by what a batch holds
            if looked < _LOOKED:
                continue
            if _is_known(kinds := fits(found, 0, trial.limit)) and min(kinds.values(), default=1.0) < _EXACT:
                break
    one = training.step_plan.micro_batches == 1
    kinds, what = fits(found, 0, trial.limit), shown(found, 0)
    if task.reduction == "auto":
        _find(trial, kinds, what, one, alone=training.size == 1 and not has_own(task, "count"))
    else:
        _compare(task, kinds, what, one)
    if not one and task.reduction in (kinds or {}):
        _check_count(found)
        _warn(trial, (kinds or {})[task.reduction], what)


def fits(found: list[Measure], place: int, limit: float) -> dict[str, float] | None:
    """What number `place` of these measures may be, each with the largest share by which it is off.

    Returns:
        a dict with "sum" and "mean" (over items), and "samples", a mean over samples; {} for none of these; None where
        no measure can tell.
    """
    if any(each.is_random(place) for each in found):
        return _drawn(found, place)
    offs = [off for each in found if (off := _off(each, place)) is not None]
    if not offs:
        return None
    worst = {kind: max(off[kind] for off in offs) for kind in offs[0]}
    if worst[_SAMPLES] < _EXACT < worst["mean"]:  # where items are alike the two means are close, and one is exact
        worst["mean"] = math.inf
    return {kind: value for kind, value in worst.items() if value <= limit}


def _drawn(found: list[Measure], place: int) -> dict[str, float] | None:
    """The same of a number that depends on random numbers: judged by the factor between a sum and a mean alone."""
    told = [each for each in found if _off(each, place) is not None]
    whole = sum((each.whole[place] + (each.again or each.whole)[place]) / 2 for each in told)
    total = sum(each.first[place] + each.second[place] for each in told)
    mean = sum(each.mean(place, each.samples) for each in told)
    gap, noise = abs(total - mean), math.hypot(*(each.noise(place) for each in told))
    if noise > gap / 2:
        return _by_votes(told, place)
    if abs(whole - total) < gap / 4:
        return {"sum": 0.0}
    return {"mean": 0.0, _SAMPLES: 0.0} if abs(whole - mean) < gap / 4 else None


def _by_votes(found: list[Measure], place: int) -> dict[str, float] | None:
    """The same where a few large numbers would drown the others: what most runs look like."""
    votes = list[str]()
    for each in found:
        total, mean = each.first[place] + each.second[place], each.mean(place, each.samples)
        for whole in (each.whole[place], (each.again or each.whole)[place]):
            nearness = (whole - mean) / (total - mean) if total != mean else math.nan  # 1: as a sum; 0: as a mean
            votes.append("sum" if nearness > 0.4 else _SAMPLES if nearness > -0.6 else "")
    most = max(set(votes), key=votes.count, default="")
    if not most or len(votes) < _VOTES or votes.count(most) < 0.75 * len(votes):
        return None
    return {"sum": 0.0} if most == "sum" else {"mean": 0.0, _SAMPLES: 0.0}


def shown(found: list[Measure], place: int) -> str:
    """The first measure that tells something, for a message."""
    each = next((each for each in found if _off(each, place) is not None), None) or next(iter(found), None)
    if each is None:
        return "the first samples cannot be cut in halves"
    whole, first, second = each.three(place)
    return f"{sum(each.samples)} samples give {whole:.4g}, and their two halves {first:.4g} and {second:.4g}"


def ways_out(what: str) -> str:
    """What to do with a loss, or a number beside it, that depends on how a step is cut."""
    return (
        f"{what}: give the task a `count` under which it is a mean (labelled tokens, weights), write what looks at all "
        "samples as `outputs` and `step_loss`, and what looks at the weights alone as `penalty`; or set "
        "micro_batch_size = batch_size, or reduction = 'micro-batch'"
    )


def _off(each: Measure, place: int) -> dict[str, float] | None:
    """By what share of its size the number is off a sum and off both means; None where it tells nothing."""
    whole, first, second = each.three(place)
    scale = each.scale(place)
    if not scale or not all(map(math.isfinite, each.three(place))):
        return None
    wanted = {"sum": first + second, "mean": each.mean(place, each.items), _SAMPLES: each.mean(place, each.samples)}
    return {kind: abs(whole - value) / scale if math.isfinite(value) else math.inf for kind, value in wanted.items()}


def _is_known(kinds: dict[str, float] | None) -> TypeGuard[dict[str, float]]:
    return kinds is not None and not {"sum", "mean"} <= kinds.keys() and not {"sum", _SAMPLES} <= kinds.keys()


def _is_clean(trial: Trial, each: Measure) -> bool:
    off = _off(each, 0)
    return off is None or min(off["sum"], off["mean"]) <= trial.doubt


def _probe(trial: Trial) -> Callable[[MicroBatch], list[float]]:
    return lambda batch: [loss_number(trial.task.loss(trial.model, batch.data))]


def _find(trial: Trial, kinds: dict[str, float] | None, what: str, one: bool, alone: bool) -> None:
    """Set the reduction of a task that does not declare one."""
    task = trial.task
    if kinds is not None and "mean" in kinds and "sum" not in kinds:
        found, words = "mean", "a mean over its items"
    elif kinds is not None and "sum" in kinds and "mean" not in kinds:
        found, words = "sum", "a sum over its items"
    elif one:
        found, words = "micro-batch", "taken as it is, since a step has one micro-batch"
    elif alone:
        found, words = "sum", "that of one sample"
    elif kinds is None or "sum" in kinds:
        raise ConfigError(
            f"whether the task's `loss` is a sum or a mean over its items cannot be told: {what}; declare it: "
            "reduction = 'sum' or 'mean'"
        )
    else:
        raise _neither(kinds, what)
    set_found(task, found, takes_gradients(task))
    trial.say(f"the loss is {words} (found in the trial; `reduction` of the task declares it)")


def _compare(task: Task, kinds: dict[str, float] | None, what: str, one: bool) -> None:
    """Raises ConfigError where the loss is not what the task declares."""
    if kinds is None or task.reduction in kinds:
        return
    if task.reduction == "sum" and kinds:
        raise ConfigError(
            f"the task's `loss` looks like a mean: {what}; return the sum over the items that `count` counts, or give "
            "the task reduction = 'mean', or none at all"
        )
    if "sum" in kinds:
        raise ConfigError(
            f"the task says reduction = 'mean', but its `loss` looks like a sum: {what}; return the mean over the "
            "items that `count` counts, or leave reduction out"
        )
    if not one:
        raise _neither(kinds, what)


def _neither(kinds: dict[str, float], what: str) -> ConfigError:
    if _SAMPLES in kinds:
        return ConfigError(
            f"the task's `loss` is a mean over its samples, and `count` counts other items: {what}; leave `count` out, "
            "or return the mean, or the sum, over what it counts"
        )
    return ConfigError(ways_out(f"the task's `loss` is neither a sum nor a mean over its items: {what}"))


def _check_count(found: list[Measure]) -> None:
    for each in found:
        whole, first, second = each.items
        if not each.drew and abs(whole - first - second) > 1e-5 * abs(whole):
            raise ConfigError(
                f"the task's `count` finds {whole:g} items in {sum(each.samples)} samples and {first:g} and {second:g} "
                "in their two halves: it must count what the loss sums over (labels, not padding)"
            )


def _warn(trial: Trial, off: float, what: str) -> None:
    if off > trial.doubt:
        trial.say(
            f"warning: the loss is off the {trial.task.reduction} of its parts by {off:.1%} ({what}), as that of a "
            "router's balance or of class weights without their `count` is: it is computed of each micro-batch by "
            f"itself, and {'averaged' if averages(trial.task) else 'added up'}"
        )


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the collectives that are issued while no module of the model runs."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.depth = list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.depth and getattr(func, "namespace", "").lstrip("_").startswith("c10d"):
            self.seen.append(func.__name__.partition(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_collectives(trial: Trial) -> Iterator[None]:
    """Raises ConfigError, at its end, where a collective was issued outside of the model's forward."""
    model = trial.model
    mode = _Collectives()

    def enter(*_: Any) -> None:
        mode.depth += 1

    def leave(*_: Any) -> None:
        mode.depth -= 1

    hooks = [module.register_forward_pre_hook(enter, prepend=True) for module in model.modules()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in model.modules()]
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    if mode.seen:
        start = "--exact cannot hold with" if trial.config.exact else "another number of ranks is another training with"
        raise ConfigError(
            f"{start} a collective inside the task's `loss` ({mode.seen[0]}), which gathers what these ranks have: "
            "write `outputs` and `step_loss`, which get all samples of a step"
        )
