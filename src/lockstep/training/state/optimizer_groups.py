"""Hold an engine's optimizer with its groups, and call a task's `schedule` and `set_groups`.

groups = OptimizerGroups(gradients=GradientNorms(...))
groups.set_optimizer(optimizer)
schedule_factor(task, step, steps, default)     # checks what the task returns
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.data.loader import blame
from lockstep.engines.gradient_norms import NO_NORMS, GradientNorms
from lockstep.engines.group_settings import ChangeGroups, GroupSettings, settings_of
from lockstep.errors import ConfigError, LockstepError
from lockstep.task import Task

__all__ = [
    "OptimizerGroups",
    "schedule_factor",
    "schedule_momentum",
    "set_groups",
]


@dataclass
class OptimizerGroups:
    """An engine's optimizer, the settings of its groups, and its gradient norms.

    Attributes:
        change: sets what the task wants in the groups in each step; None: nothing.
    """

    optimizer: Optimizer | None = None
    gradients: GradientNorms = NO_NORMS
    change: ChangeGroups | None = None

    def set_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Store a new optimizer."""
        self.optimizer = optimizer
        self.settings.change = self.change
        return optimizer

    @property
    def settings(self) -> GroupSettings:
        """The settings of the optimizer's groups."""
        assert self.optimizer is not None, "the engine makes the optimizer"
        return settings_of(self.optimizer)

    def replace_optimizer(self, optimizer: Optimizer) -> None:
        """Store another optimizer of the same model, and copy the states to it."""
        before = self.optimizer
        self.set_optimizer(optimizer)
        if before is not None:
            optimizer.state.update(before.state)


def schedule_factor(task: Task, step: int, steps: int, default: Callable[[int], float | None]) -> float | None:
    """Return the factor of the task's `schedule`; `default(step)` if it returns None.

    Raises:
        ConfigError: the factor is not a finite number of 0 or more.
        DataError: the method failed.
    """
    value = _call_schedule(task, step, steps)
    if value is None:
        return default(step)
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"the task's `schedule` returned {value!r} for schedule({step}, {steps}): return the factor of the base "
            "rates, a finite number of 0 or more, or None to use --optim.schedule"
        )
    return factor


def schedule_momentum(task: Task, step: int, steps: int, default: Callable[[int], float | None]) -> float | None:
    """Return `default(step)` if the task's `schedule` returns None, otherwise None.

    None leaves the momentum of the groups unchanged.

    Raises:
        DataError: the method failed.
    """
    if _call_schedule(task, step, steps) is None:
        return default(step)
    return None


def _call_schedule(task: Task, step: int, steps: int) -> Any:
    try:
        return task.schedule(step, steps)
    except LockstepError:
        raise
    except Exception as error:
        raise blame("schedule", error, f"step {step + 1} of {steps}") from error


def set_groups(task: Task, groups: list[dict[str, Any]], step: int, steps: int) -> None:
    """Call the task's `set_groups`.

    Raises:
        ConfigError: it left a rate that is not a finite number of 0 or more.
        DataError: it failed.
    """
    try:
        task.set_groups(groups, step, steps)
    except LockstepError:
        raise
    except Exception as error:
        raise blame("set_groups", error, f"step {step + 1} of {steps}") from error
    for index, group in enumerate(groups):
        if not (isinstance(group["lr"], Real | Tensor) and 0 <= float(group["lr"]) < math.inf):
            raise ConfigError(
                f"the task's `set_groups` left group {index} with lr {group['lr']!r} in step {step + 1} of {steps}: "
                "set a finite number of 0 or more"
            )
