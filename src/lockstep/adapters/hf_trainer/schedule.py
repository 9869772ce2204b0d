"""Turn a Trainer's scheduler into a schedule: (step, steps) -> factor of the base rates.

    schedule = schedule_of(trainer)     # None: a plateau, which the config's schedule follows
    schedule.attach(optimizer)          # a DrivenSchedule sets momenta and the rates of unlike groups too

The module does not import transformers.
"""

import copy
from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.adapters.hf_trainer.arguments import value
from lockstep.adapters.rates import EpochPosition, Rates, Scheduler
from lockstep.errors import ConfigError
from lockstep.optim.schedule import TorchSchedule, torch_schedule

__all__ = [
    "DrivenSchedule",
    "schedule_of",
]


Make = Callable[[Optimizer, int], Any]


@final
class DrivenSchedule:
    """The schedule of a scheduler that the user made: (step, steps) -> factor of the first group's base rate.

    A copy of the scheduler is stepped once per optimizer step, as the Trainer does, on an optimizer without parameters
    of the model. The user's own scheduler and optimizer do not change.

    Args:
        make: (optimizer with the groups of the run's, steps) -> a new scheduler, and the optimizer that it changes.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._groups: Optimizer | None = None
        self._rates: Rates | None = None
        self._steps = 0

    def __call__(self, step: int, steps: int) -> float:
        """Return the factor of `step` (0-based) in a plan of `steps`; after the plan's end, that of its last step.

        Raises:
            ConfigError: the scheduler is not one of torch's, depends on more than the step, or gives no finite rate.
        """
        if self._rates is None or steps != self._steps:
            assert self._groups is not None, "an optimizer is made before rates are asked for"
            scheduler = self._make(copy.deepcopy(self._groups), steps)
            served = [Scheduler(scheduler, interval="step")]
            self._rates, self._steps = Rates(scheduler.optimizer, served, _each_step, caller="from_trainer"), steps
        return self._rates.factors(min(step, steps - 1))[0]

    def attach(self, optimizer: Optimizer) -> None:
        """Set the momenta and the rates of unlike groups of a new optimizer before each of its steps."""
        self._groups, self._rates = _without_parameters(optimizer, optimizer), None
        optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._rates is not None:
            self._rates.apply(optimizer)


def schedule_of(trainer: Any) -> DrivenSchedule | TorchSchedule | None:
    """Return the Trainer's schedule; None for a plateau, which depends on the evaluations too.

    Raises:
        ConfigError: the Trainer has a scheduler that is no function of the step, or has been stepped.
    """
    if trainer.lr_scheduler is not None:
        return _given(trainer)
    if value(trainer.args.lr_scheduler_type) == "reduce_lr_on_plateau":
        return None

    def make(optimizer: Optimizer, steps: int) -> Any:
        former = trainer.optimizer
        trainer.optimizer, trainer.lr_scheduler = optimizer, None
        try:
            created = trainer.create_scheduler(steps, optimizer)
            return created if trainer.lr_scheduler is None else trainer.lr_scheduler
        finally:
            trainer.optimizer, trainer.lr_scheduler = former, None

    if type(trainer).create_scheduler.__module__.startswith(("transformers.", "trl.")):
        return torch_schedule(make, lr=float(trainer.args.learning_rate) or 1.0)  # one factor for all groups

    def make_own(optimizer: Optimizer, steps: int) -> Any:
        scheduler = make(optimizer, steps)
        _check(scheduler, optimizer, f"`create_scheduler` of {type(trainer).__name__} made")
        return scheduler

    return DrivenSchedule(make_own)


def _given(trainer: Any) -> DrivenSchedule:
    """Return the schedule of the scheduler that the Trainer was given.

    Raises:
        ConfigError: it is no function of the step, belongs to another optimizer, has been stepped or cannot be copied.
    """
    scheduler, what = trainer.lr_scheduler, "the Trainer's scheduler is"
    name = type(scheduler).__name__
    _check(scheduler, trainer.optimizer, what)
    if _steps_taken(scheduler):
        raise ConfigError(
            f"from_trainer: {what} a {name} that has been stepped already ({_steps_taken(scheduler)} times): pass a "
            "new one, and none that begins at a last_epoch"
        )
    try:
        initial = _without_parameters(scheduler, scheduler.optimizer)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"from_trainer: {what} a {name} that cannot be copied ({line}): make it in `create_scheduler` of a Trainer "
            "of your own"
        ) from error
    return DrivenSchedule(lambda _, steps: copy.deepcopy(initial))


def _check(scheduler: Any, optimizer: Optimizer, what: str) -> None:
    """Check that it is a scheduler of `optimizer` that depends on the step alone.

    Raises:
        ConfigError: it is not.
    """
    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"from_trainer: {what} a {name}, which depends on evaluations, not on the step: set "
            "lr_scheduler_type='reduce_lr_on_plateau' and lr_scheduler_kwargs"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"from_trainer: {what} a {name}, which is not supported: take one of torch.optim.lr_scheduler, or set "
            "lr_scheduler_type"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError(
            f"from_trainer: {what} a {name} of another optimizer than the Trainer's: pass both, "
            "optimizers=(optimizer, scheduler)"
        )


def _steps_taken(scheduler: Any) -> int:
    """Return how often a scheduler was stepped; a chained one has no counter of its own."""
    parts = [scheduler] if hasattr(scheduler, "last_epoch") else getattr(scheduler, "_schedulers", [])
    return max((int(part.last_epoch) for part in parts), default=0)


def _without_parameters(source: Any, optimizer: Optimizer) -> Any:
    """Copy a scheduler or an optimizer, with empty tensors in the place of the optimizer's parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copy.deepcopy(source, {id(parameter): torch.zeros(0, device="cpu") for parameter in parameters})


def _each_step(step: int) -> EpochPosition:
    return EpochPosition(0, step + 1, ends=False)
