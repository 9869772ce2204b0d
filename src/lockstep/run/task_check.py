"""The user's task, tried once before the first step: a mistake in it is one line then, and not a lost run later.

    trial = Trial(engine, model, task, world, config, say)
    names = check_task(trial, training, evaluation, state)      # each method, on a few samples of each rank
    recall(task, state)                                         # a resume: what was found then

Nothing is left behind: no gradient, no buffer, no tensor of the task's `state_dict()`, no state of a generator. Refused
is what cannot be right whatever the task is; what only looks odd (a loss that is not finite yet, a collation that draws
or that fails for half of the samples) is passed over.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.batches import Batches, MicroBatch
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import ConfigError, DataError
from lockstep.loop import described, loss_of
from lockstep.run.loss_check import check_loss, try_loss
from lockstep.run.metric_check import check_metrics, is_number
from lockstep.run.trial import Trial, call
from lockstep.run.whole_step_check import check_whole_step
from lockstep.task import Task, has_own, looks_at_whole_step, set_found, takes_gradients

__all__ = ["Trial", "check_task", "recall"]


def check_task(
    trial: Trial, training: Batches, evaluation: Mapping[str, Batches], state: dict[str, Any]
) -> list[str] | None:
    """Try `count`, `loss` (or `outputs` and `step_loss`) and `metrics` (or `evaluate`). Collective.

    Args:
        state: of the run; takes what was found: whether the loss is a sum or a mean, and whether it takes gradients.

    Returns:
        The names of the evaluation's metrics, as its record has them; None where nothing is evaluated.

    Raises:
        DataError, ConfigError: a method fails, or returns what it must not; a loss that is neither a sum nor a mean, or
            not what the task declares; a `count` that does not add up, or finds nothing anywhere; a BatchNorm that gets
            one value a channel. The same on every rank, or a PeerError that names the first.
    """
    world, task = trial.world, trial.task
    first = on_all_ranks(world, lambda: _first(trial, training))  # collective
    norms = _norms(trial.plain, world)  # before eval mode
    with trial.running():
        if looks_at_whole_step(task):
            with _watched(norms, training):
                check_whole_step(trial, training, first)  # collective
            set_found(task, "sum", gradients=False)
        else:
            on_all_ranks(world, lambda: _check_first(trial, training, first, norms))  # collective
            check_loss(trial, training)  # collective
        on_all_ranks(world, lambda: _rehearse(trial, first))  # collective
        names = check_metrics(trial, evaluation)  # collective
    state |= {"reduction": task.reduction, "evaluation_graph": takes_gradients(task)}
    return names


def _rehearse(trial: Trial, first: MicroBatch) -> None:
    """Try what follows the loss in step 1, on copied state: backward, norm and the optimizer's step.

    Hooks, and those of another library's module, would be called for a step that is none: such tasks are left out.
    """
    if trial.task.hooks is not None or trial.task.framework:
        return
    loss = loss_of(trial.task)

    def compute() -> Tensor:
        trial.seed()
        with torch.enable_grad():
            found: Tensor = call("loss", lambda _: loss(trial.model, first), None, trial.model, trial.task)
        return found

    trial.engine.rehearse(compute)


def recall(task: Task, state: Mapping[str, Any]) -> None:
    """Set what a trial found of a task, from the state of a checkpoint."""
    found = str(state.get("reduction", "")) if task.reduction == "auto" else ""
    set_found(task, found, bool(state.get("evaluation_graph")))


def _first(trial: Trial, training: Batches) -> MicroBatch:
    """This rank's first micro-batch. Raises ConfigError for a `count` that cannot be."""
    first, task = trial.first(training), trial.task
    if has_own(task, "count"):
        found = call("count", task.count, first.held)
        if not is_number(found) or not 0 <= float(found) < math.inf:
            told = repr(found) if isinstance(found, int | float) else described(found)
            raise ConfigError(f"the task's `count` returned {told}: it must return a finite number of items, 0 or more")
    if not first.items:
        training.with_items(0)
    return first


def _check_first(trial: Trial, training: Batches, first: MicroBatch, norms: list[tuple[str, nn.Module]]) -> None:
    with _watched(norms, training):
        loss, _ = try_loss(trial, first)
    if trial.config.guards.nonfinite == "stop":  # else the guards see to it
        _check_inputs(first, loss)


def _norms(model: nn.Module, world: World) -> list[tuple[str, nn.Module]]:
    """The BatchNorm layers that will normalise by what one forward on one rank gives them, with their names."""
    return [
        (name or type(layer).__name__, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.training
        and not (isinstance(layer, nn.SyncBatchNorm) and world.size > 1)
    ]


@contextlib.contextmanager
def _watched(norms: list[tuple[str, nn.Module]], training: Batches) -> Iterator[None]:
    """Within it a layer of `norms` that gets one value a channel raises ConfigError: in eval mode torch takes that."""
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
    """Refuses NaN in what was loaded, where the loss is not finite either: alone it may stand for what is missing."""
    if math.isfinite(loss):
        return
    for name, values in _floats(first.held, ""):
        found = int(values.isnan().sum())
        if found:
            raise DataError(
                f"the first micro-batch has NaN in {name or 'its tensor'} ({found} of {values.numel()} values), and "
                f"its loss is {loss}: mend the data, or --guards.nonfinite skip leaves such steps out"
            )


def _floats(batch: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The float tensors of a batch in host memory, each with its name within it: `batch['x']`, `batch[0]`."""
    if isinstance(batch, Tensor):
        if batch.is_floating_point():
            yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _floats(value, f"{name or 'batch'}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for place, value in enumerate(batch):
            yield from _floats(value, f"{name or 'batch'}[{place}]")
