"""Step a copy of a Trainer's scheduler, for the groups of the run's optimizer.

    schedule = schedule_of(trainer)     # None: lr_scheduler_type is a plateau, which the config's schedule follows
    schedule.attach(optimizer)          # whose groups get rates and momenta
    schedule.hooks                      # of a scheduler that follows evaluations, else None

The module does not import transformers.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.adapters.hf_trainer.arguments import best_metric, value
from lockstep.adapters.hf_trainer.one_device import one_device
from lockstep.adapters.rates import EpochPosition, Rates, Scheduler, step_one
from lockstep.errors import ConfigError
from lockstep.hooks import Hooks, RunContext

__all__ = [
    "SchedulerReplay",
    "describe_scheduler",
    "schedule_of",
]


# Entries of an optimizer's groups in which schedulers store settings.
_GROUP_SETTINGS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")

Make = Callable[[Optimizer, int], Any]


@final
class SchedulerReplay:
    """A scheduler that the Trainer makes or was given; see `lockstep.task.LiveRates`.

    A copy of it is stepped as the Trainer does, once per optimizer step or once per evaluation, on an optimizer without
    parameters of the model. The user's own scheduler and optimizer do not change.

    Args:
        trainer: shows one device while its scheduler steps.
        make: (optimizer with the groups of the run's, steps) -> a new scheduler, and the optimizer that it changes.
        metric: of an evaluation, which the scheduler follows; "": it is a function of the step.

    Attributes:
        hooks: pass the evaluations' metric to the scheduler; None for a function of the step.
    """

    def __init__(self, trainer: Any, make: Make, metric: str = "") -> None:
        self._trainer = trainer
        self._make = make
        self.metric = metric
        self.hooks = _Evaluations(self) if metric else None
        self._optimizer: Optimizer | None = None
        self._base: list[dict[str, Any]] = []
        self._rates: Rates | None = None
        self._steps = 0

    def attach(self, optimizer: Optimizer) -> None:
        """Write into the groups of a new optimizer from now on."""
        self._optimizer = optimizer
        self._base = []
        for group in optimizer.param_groups:
            self._base.append({key: setting for key, setting in group.items() if key != "params"})
        # The run may make a new optimizer for other parameters; the schedule continues on it.
        if before := self._rates:
            self._make_rates().replay([list(entry) for entry in before.history], before.position)

    def check(self, steps: int) -> None:
        """See `LiveRates.check`; makes the scheduler for a plan of `steps`."""
        self._steps = steps
        self._make_rates().check(steps)

    def drive_to(self, done: int) -> None:
        assert self._rates is not None, "they are checked before the first step"
        self._rates.drive_to(done)

    def replay(self, watched: list[list[Any]], done: int) -> None:
        assert self._rates is not None, "they are checked before the first step"
        named = [[updates, self.metric, number] for updates, number in watched]
        self._rates.replay(named, done)

    def watch(self, done: int, number: float) -> None:
        """Step the scheduler with the metric of the evaluation after `done` steps."""
        assert self._rates is not None, "they are checked before the first step"
        self._rates.watch(done, self.metric, number)

    def _make_rates(self) -> Rates:
        assert self._optimizer is not None, "an optimizer is made before rates are asked for"
        for group, settings in zip(self._optimizer.param_groups, self._base, strict=False):
            group.update(settings)
        try:
            scheduler = self._make(_shadow_of(self._optimizer), self._steps)
        except ConfigError:
            raise
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"from_trainer: the Trainer's scheduler cannot be made for {self._steps} steps: "
                f"{type(error).__name__}: {line}"
            ) from error
        served = [Scheduler(scheduler, interval="step", monitor=self.metric or None)]
        options = {"caller": "from_trainer", "shadow": scheduler.optimizer}
        self._rates = Rates(self._optimizer, served, _each_step, self._step, **options)
        return self._rates

    def _step(self, scheduler: Any, value: float | None) -> None:
        # A LambdaLR may read the number of processes, which must be 1.
        with one_device(self._trainer):
            step_one(scheduler, value)


def _shadow_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same groups, without parameters of the model."""
    groups = []
    for group in optimizer.param_groups:
        settings = {}
        for key, setting in group.items():
            if key not in ("params", "names"):
                settings[key] = setting
        # An empty tensor in place of the group's parameters takes no memory.
        groups.append({**settings, "params": [torch.zeros(0, device="cpu")]})
    shadow = torch.optim.SGD(groups, lr=float(optimizer.param_groups[0]["lr"]))
    # Schedulers choose between momentum and betas by these.
    shadow.defaults = dict(optimizer.defaults)
    return shadow


@final
class _Evaluations(Hooks):
    """Step a scheduler after each evaluation; the run's state keeps its metrics."""

    def __init__(self, schedule: SchedulerReplay) -> None:
        self._schedule = schedule

    def after_evaluation(self, context: RunContext, done: int, metrics: Mapping[str, float]) -> bool:
        # The metric of the best model; the run has checked that evaluations have it.
        number = float(metrics[self._schedule.metric])
        self._schedule.watch(done, number)
        context.state.setdefault("watched", []).append([done, number])
        return False


def schedule_of(trainer: Any) -> SchedulerReplay | None:
    """Return the Trainer's scheduler; None if `lr_scheduler_type` is a plateau, which the config's schedule is.

    Raises:
        ConfigError: the Trainer has a scheduler that is not served, or that has been stepped.
    """
    if trainer.lr_scheduler is not None:
        return _replay_of(trainer)
    if value(trainer.args.lr_scheduler_type) == "reduce_lr_on_plateau":
        return None

    def make(optimizer: Optimizer, steps: int) -> Any:
        former = trainer.optimizer
        trainer.optimizer = optimizer
        trainer.lr_scheduler = None
        try:
            with one_device(trainer):
                created = trainer.create_scheduler(steps, optimizer)
            if trainer.lr_scheduler is None:
                return created
            return trainer.lr_scheduler
        finally:
            trainer.optimizer = former
            trainer.lr_scheduler = None

    if type(trainer).create_scheduler.__module__.startswith(("transformers.", "trl.")):
        return SchedulerReplay(trainer, make)

    def make_own(optimizer: Optimizer, steps: int) -> Any:
        scheduler = make(optimizer, steps)
        _check(scheduler, optimizer, f"`create_scheduler` of {type(trainer).__name__} made")
        return scheduler

    return SchedulerReplay(trainer, make_own)


def _replay_of(trainer: Any) -> SchedulerReplay:
    """Return the schedule of the scheduler that the Trainer was given.

    Raises:
        ConfigError: it is not one of torch's or transformers', belongs to another optimizer, follows a metric without a
            name, has been stepped or cannot be copied.
    """
    scheduler = trainer.lr_scheduler
    what = "the Trainer's scheduler is"
    name = type(scheduler).__name__
    metric = ""
    _check(scheduler, trainer.optimizer, what, may_follow=True)
    if _follows_metric(scheduler):
        metric = str(best_metric(trainer).get("best_metric", "")).partition(":")[0]
        if not metric:
            raise ConfigError(
                f"from_trainer: {what} a {name}, which follows the evaluations' metric_for_best_model: set it, and "
                "eval_strategy"
            )
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
    return SchedulerReplay(trainer, lambda _, steps: copy.deepcopy(initial), metric)


def describe_scheduler(scheduler: Any) -> dict[str, Any]:
    """Return the class and settings of a new scheduler, by which a resume recognizes it."""
    rates = []
    for group in scheduler.optimizer.param_groups:
        rates.append({name: group[name] for name in _GROUP_SETTINGS if name in group})
    return {"class": type(scheduler).__qualname__, **_plain(scheduler.state_dict()), "groups": _plain(rates)}


def _plain(setting: Any) -> Any:
    """Convert a setting to JSON; functions become names, partial ones also arguments."""
    if isinstance(setting, Mapping):
        return {str(name): _plain(item) for name, item in setting.items()}
    if isinstance(setting, list | tuple):
        return [_plain(item) for item in setting]
    if isinstance(setting, functools.partial):
        return [_plain(setting.func), _plain(setting.args), _plain(setting.keywords)]
    if setting is None or isinstance(setting, bool | int | float | str):
        return setting
    if isinstance(setting, Tensor) and setting.numel() == 1:
        return float(setting)
    return _name_of(setting)


def _name_of(setting: Any) -> str:
    return str(getattr(setting, "__qualname__", type(setting).__qualname__))


def _follows_metric(scheduler: Any) -> bool:
    """Whether the Trainer steps it with the metric of each evaluation."""
    kinds = []
    for base in type(scheduler).__mro__:
        if base.__module__.startswith("transformers."):
            kinds.append(base)
    return isinstance(scheduler, ReduceLROnPlateau) or any(base.__name__ == "GreedyLR" for base in kinds)


def _check(scheduler: Any, optimizer: Optimizer, what: str, *, may_follow: bool = False) -> None:
    """Check that a scheduler is supported, and belongs to `optimizer`.

    Unless it may follow evaluations, it must be a function of the step.

    Raises:
        ConfigError: it is not.
    """
    name = type(scheduler).__name__
    if _follows_metric(scheduler) and not may_follow:
        raise ConfigError(
            f"from_trainer: {what} a {name}, which depends on evaluations, not on the step: pass it to the Trainer, "
            "optimizers=(optimizer, scheduler)"
        )
    if not isinstance(scheduler, LRScheduler) and not _follows_metric(scheduler):
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
    """Return how often a scheduler was stepped."""
    if hasattr(scheduler, "last_epoch"):
        parts = [scheduler]
    else:
        # Private in torch: a ChainedScheduler has no counter of its own.
        parts = getattr(scheduler, "_schedulers", [])
    return max((int(inner.last_epoch) for inner in parts), default=0)


def _without_parameters(source: Any, optimizer: Optimizer) -> Any:
    """Copy a scheduler or an optimizer, with empty tensors as its parameters."""
    parameters = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    # deepcopy takes the empty tensors from its memo instead of copying the parameters.
    return copy.deepcopy(source, {id(parameter): torch.zeros(0, device="cpu") for parameter in parameters})


def _each_step(step: int) -> EpochPosition:
    return EpochPosition(0, step + 1, ends=False)
