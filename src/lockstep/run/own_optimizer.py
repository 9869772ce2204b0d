"""A task's own optimizer and schedule, held to what they must be: a mistake in them is one line before step 1.

optimizer = optimizer_of(config, task, model)           # its own, else what --optim says
factor = own_factor(task, step, steps, otherwise)       # its own schedule, else what --optim.schedule says
momentum = own_momentum(task, step, steps, otherwise)
"""

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.config.config import Config
from lockstep.data.fetch import blamed
from lockstep.engines.shared.blocks import repeated_layers
from lockstep.errors import ConfigError, LockstepError
from lockstep.optim.optimizers import make_optimizer
from lockstep.task import Task

__all__ = ["optimizer_of", "own_factor", "own_momentum", "own_optimizer"]


def own_factor(task: Task, step: int, steps: int, otherwise: Callable[[int], float]) -> float:
    """What the task's `schedule` says, or `otherwise` where that is None.

    Raises:
        ConfigError: it is no finite number from 0.
        DataError: the method failed.
    """
    said = _said(task, step, steps)
    if said is None:
        return otherwise(step)
    try:
        factor = float(said)
    except (TypeError, ValueError):
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"the task's `schedule` returned {said!r} for step {step} of {steps}: it must return what the base rates "
            "are multiplied by, a finite number from 0, or None for what --optim.schedule says"
        )
    return factor


def own_momentum(task: Task, step: int, steps: int, otherwise: Callable[[int], float | None]) -> float | None:
    """`otherwise` in the steps that the task's `schedule` leaves to it; None, which is the groups' own, in its own.

    Raises:
        DataError: the method failed.
    """
    return otherwise(step) if _said(task, step, steps) is None else None


def _said(task: Task, step: int, steps: int) -> Any:
    try:
        return task.schedule(step, steps)
    except LockstepError:
        raise
    except Exception as error:
        raise blamed("schedule", error, f"step {step} of {steps}") from error


def optimizer_of(config: Config, task: Task, model: nn.Module) -> Optimizer:
    """The task's own optimizer, else that of the configuration, over the model as an engine holds it."""
    named = task.blocks(model)
    layers = repeated_layers(model) if named is None else list(named)
    return own_optimizer(config, task, model) or make_optimizer(model, config, layers)


def own_optimizer(config: Config, task: Task, model: nn.Module) -> Optimizer | None:
    """What the task's `optimizer` returns. Raises ConfigError for what is none, or not one of this model's."""
    try:
        made = task.optimizer(model, config)
    except LockstepError:
        raise
    except Exception as error:
        raise blamed("optimizer", error, "the start, before step 1") from error
    if made is None:
        return None
    if config.optim.groups or config.optim.layer_decay != 1.0:
        what = "--optim.groups" if config.optim.groups else "--optim.layer-decay"
        raise ConfigError(f"{what} makes groups for lockstep's optimizer, and the task has its own: leave one out")
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"the task's `optimizer` returned {type(made).__name__}: it must return a torch.optim.Optimizer over the "
            "parameters of the model that it is given, or None for the one that --optim says"
        )
    held = set(model.parameters())
    others = sum(parameter not in held for group in made.param_groups for parameter in group["params"])
    if others:
        raise ConfigError(
            f"the task's `optimizer` has {others} parameters that are not of the model that it was given, and an "
            "engine may hold others than task.model() made: take those of the argument `model`"
        )
    return made
