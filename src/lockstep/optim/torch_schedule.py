"""torch's own schedulers as a pure function of the step, for a task's `schedule`.

    class Mine(lockstep.Task):
        rates = lockstep.torch_schedule(lambda optimizer, steps: CosineAnnealingWarmRestarts(optimizer, T_0=steps // 4))

        def schedule(self, step, steps):
            return self.rates(step, steps)

A scheduler counts its own calls, which a resume, a skipped step or a rollback would put out of place. So it is driven
once over the whole plan, on an optimizer of nothing, and what it says in each step is looked up from then on.
"""

import math
import warnings
from array import array
from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.errors import ConfigError

__all__ = ["TorchSchedule", "torch_schedule"]

Make = Callable[[Optimizer, int], Any]

_MOMENTUM = 0.9  # of the optimizer of nothing: some schedulers ask for one


@final
class TorchSchedule:
    """(step, steps) -> what the base rates are multiplied by. See `torch_schedule`."""

    def __init__(self, make: Make, lr: float) -> None:
        self._make, self._lr = make, lr
        self._table, self._steps = array("d"), 0

    def __call__(self, step: int, steps: int) -> float:
        """The factor of `step` (0-based) in a plan of `steps`; after its end that of the last step.

        The whole plan is tabulated when its number of steps is first asked for: some ten microseconds a step.

        Raises:
            ConfigError: `make` failed, made no scheduler, or one that is more than a function of the step.
        """
        if steps != self._steps:
            self._table, self._steps = _tabulated(self._make, self._lr, steps), steps
        return self._table[min(step, steps - 1)]


def torch_schedule(make: Make, lr: float = 1.0) -> TorchSchedule:
    """A scheduler of `torch.optim.lr_scheduler`, or one that derives from its LRScheduler, for a task's `schedule`.

    Args:
        make: (optimizer, steps) -> the scheduler of that optimizer in a plan of so many steps. The optimizer has one
            group, of nothing: a factor is of all groups, whose rates keep their ratio.
        lr: the optimizer's rate, to which rates that the scheduler names itself (`eta_min`, OneCycleLR's `max_lr`) are
            compared: with 1 they are shares of the base rate, with --lr they are rates.

    Raises:
        ConfigError: `lr` is not above 0.
    """
    if not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"torch_schedule: lr is {lr}: it must be a rate above 0, of which the schedule makes shares")
    return TorchSchedule(make, lr)


def _tabulated(make: Make, lr: float, steps: int) -> "array[float]":
    optimizer = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=lr, momentum=_MOMENTUM)
    (group,) = optimizer.param_groups
    table = array("d")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR's of torch itself
            scheduler = make(optimizer, steps)
            _check(scheduler, optimizer)
            for step in range(steps):
                if step:
                    optimizer.step()  # before the scheduler's, as torch wants it
                    scheduler.step()
                table.append(float(group["lr"]) / lr)
                if group["momentum"] != _MOMENTUM:
                    raise ConfigError(
                        f"torch_schedule: {type(scheduler).__name__} cycles the momentum too, which a task's "
                        "`schedule` cannot: give it cycle_momentum=False, or use --optim.schedule one-cycle, which "
                        "does both"
                    )
    except ConfigError:
        raise
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ConfigError(
            f"torch_schedule: the scheduler failed in step {len(table)} of {steps}: {type(error).__name__}: {line}"
        ) from error
    return table


def _check(scheduler: Any, optimizer: Optimizer) -> None:
    """Raises ConfigError for what is no scheduler of `optimizer` that the step alone decides."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "torch_schedule: ReduceLROnPlateau follows the evaluations, and not the step: use --optim.schedule "
            "plateau, which does the same, and leave `schedule` out"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"torch_schedule: the function returned {type(scheduler).__name__}: it must return a scheduler of "
            "torch.optim.lr_scheduler over the optimizer that it is given"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError(
            "torch_schedule: the scheduler has another optimizer than the one that the function is given: take that"
        )
