"""Read the result of `configure_optimizers`, and turn its schedulers into rates by step.

    config = read(module.configure_optimizers())
    rates = Rates(config.optimizers[0], config.schedulers, place)   # place: step -> (epoch, batch in it, ends)
    factors = rates.factors(step)                                 # by group: what its base rate is multiplied by

`read` accepts every form that Lightning 2 accepts. The schedulers are torch's own objects, stepped where Lightning
steps them. Their values depend on the step alone, so a resume steps them up to it again. A plateau depends on the
evaluations; their values are kept in the run's state.
"""

import math
import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.errors import ConfigError

__all__ = [
    "Configured",
    "EpochPosition",
    "Rates",
    "read",
]


_KEYS = ("scheduler", "name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict")
_MOMENTA = ("momentum", "betas")  # some schedulers cycle these too


class EpochPosition(NamedTuple):
    """The position of a step among the epochs.

    Attributes:
        epoch: of the step, 0-based.
        batches: of that epoch up to and including this step's.
        ends: the step ends the epoch.
    """

    epoch: int
    batches: int
    ends: bool


@dataclass
class Scheduler:
    """A scheduler, and when to step it.

    Attributes:
        scheduler: of torch, or any object with `step()`.
        interval: "step" or "epoch".
        frequency: intervals between its steps.
        monitor: name of the value that a plateau follows; else None.
        strict: a missing value is an error.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True


@dataclass
class Configured:
    """A module's optimizers and schedulers, in order."""

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Scheduler] = field(default_factory=list)


def read(result: Any, *, automatic: bool = True) -> Configured:
    """Return the optimizers and schedulers of a result of `configure_optimizers`.

    Args:
        automatic: lockstep takes the steps; else `training_step` does, and may have several optimizers.

    Raises:
        ConfigError: a form that Lightning 2 does not accept, or an optimizer that no engine can step.
    """
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    monitor = None
    if isinstance(result, Optimizer):
        optimizers = [result]
    elif isinstance(result, dict):
        optimizers, monitor = [result.get("optimizer")], result.get("monitor")
        schedulers = [result["lr_scheduler"]] if result.get("lr_scheduler") is not None else []
    elif isinstance(result, list | tuple) and len(result) == 2 and isinstance(result[0], list | tuple):
        optimizers = list(result[0])
        schedulers = list(result[1]) if isinstance(result[1], list | tuple) else [result[1]]
    elif isinstance(result, list | tuple) and result and all(isinstance(each, dict) for each in result):
        if any("frequency" in each for each in result):
            raise _error(
                "gives its optimizers a frequency, which Lightning 2 removed: set automatic_optimization = False "
                "and step them in training_step"
            )
        optimizers = [each.get("optimizer") for each in result]
        schedulers = [each["lr_scheduler"] for each in result if each.get("lr_scheduler") is not None]
    elif isinstance(result, list | tuple):
        optimizers = list(result)
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        kind = "None" if result is None else type(result).__name__
        raise _error(f"returned {kind}: it must return an optimizer, lists or dicts of them as Lightning 2 has it")
    if automatic and len(optimizers) > 1:
        raise _error(
            f"returned {len(optimizers)} optimizers: Lightning 2 steps one by itself; set automatic_optimization = "
            "False and step them in training_step"
        )
    if any(isinstance(each, LBFGS) for each in optimizers):
        raise _error("returned LBFGS, which computes the loss several times in a step: use another optimizer")
    configs = [_scheduler(each, monitor, automatic=automatic) for each in schedulers]
    return Configured(optimizers, configs)


def _scheduler(entry: Any, monitor: str | None, *, automatic: bool) -> Scheduler:
    options = dict(entry) if isinstance(entry, dict) else {"scheduler": entry}
    options = {key: value for key, value in options.items() if key in _KEYS}
    scheduler = options.get("scheduler")
    if scheduler is None:
        raise _error("returned a dict for a scheduler without the key 'scheduler'")
    plateau = options.pop("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    interval, frequency = options.get("interval", "epoch"), int(options.get("frequency", 1))
    if interval not in ("step", "epoch") or frequency < 1:
        raise _error(f"returned a scheduler with interval '{interval}' and frequency {frequency}: step or epoch, 1..")
    followed = options.get("monitor") or monitor
    if plateau and automatic and not followed:
        raise _error(f"returned {type(scheduler).__name__} without a monitor: name the logged value that it follows")
    strict = bool(options.get("strict", True))
    return Scheduler(scheduler, options.get("name"), interval, frequency, followed if plateau else None, strict)


@final
class Rates:
    """The learning rates of an optimizer's groups in each step, by its schedulers.

    From here on the groups hold their base rates (`initial_lr`); the schedulers see their own values while they step.

    Args:
        optimizer: of the schedulers.
        schedulers: of the optimizer.
        place: step -> its position among the epochs.
        step_scheduler: (scheduler, value) -> None; the module's own `lr_scheduler_step`, if it has one.

    Attributes:
        watched: names of the values that plateaus follow.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: list[Scheduler],
        place: Callable[[int], EpochPosition],
        step_scheduler: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self._optimizer, self._schedulers, self._place = optimizer, schedulers, place
        self._step = step_scheduler or _step_scheduler
        groups = optimizer.param_groups
        self.base = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self.watched = [each.monitor for each in schedulers if each.monitor]
        self._momentum_names = [[name for name in _MOMENTA if name in group] for group in groups]
        self._now = self._values()
        self._position = 0  # the step that these values belong to
        self._history = array("d")  # of the steps before it, a row each; not kept where plateaus follow evaluations
        self._initial_values = [dict(row) for row in self._now]
        self._cycles = False
        self._momenta: dict[int, list[dict[str, Any]]] = {}  # of the steps before, once they differ from the first
        for group, base in zip(groups, self.base, strict=True):
            group["lr"] = base
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns: the engine's optimizer steps

    def factors(self, step: int) -> list[float]:
        """Return the factor of each group's base rate in `step` (0-based)."""
        if not self._schedulers:
            return [1.0] * len(self.base)
        if step < self._position and not self.watched:
            width = len(self.base)
            return list(self._history[step * width : (step + 1) * width])
        if not self.watched or step == self._position + 1:  # else it depends on future evaluations
            self.drive_to(step)
        return self._factors()

    def drive_to(self, step: int) -> None:
        """Step the schedulers that follow no evaluation up to `step`."""
        while self._position < step:
            self._advance()

    def momenta(self, step: int) -> list[dict[str, Any]] | None:
        """Return each group's `momentum` or `betas` in `step`; None if no scheduler cycles them.

        The step must have been reached.
        """
        if not self._cycles:
            return None
        if step in self._momenta:
            return self._momenta[step]
        return _momenta_of(self._initial_values if step < self._position else self._now)

    def due(self, epochs: int, values: Mapping[str, float], interval: str = "epoch") -> list[str]:
        """Return the names among `values` by which schedulers step after `epochs` epochs or steps."""
        return [
            each.monitor
            for each in self._schedulers
            if each.monitor and each.monitor in values and each.interval == interval and epochs % each.frequency == 0
        ]

    def unknown(self, values: Iterable[str]) -> str:
        """Return a name that a strict scheduler watches and `values` lacks; else ""."""
        names = set(values)
        return next(
            (each.monitor for each in self._schedulers if each.monitor and each.strict and each.monitor not in names),
            "",
        )

    def watch(self, done: int, name: str, value: float) -> None:
        """Step the plateaus that follow `name`, after `done` steps."""
        self.drive_to(done)
        self._drive([each for each in self._schedulers if each.monitor == name], value)

    def _advance(self) -> None:
        if not self.watched:
            self._history.extend(self._factors())
        if self._cycles:
            self._momenta[self._position] = _momenta_of(self._now)
        place = self._place(self._position)
        self._position += 1
        due = [each for each in self._schedulers if each.monitor is None and self._due(each, place)]
        if due:
            self._drive(due, None)

    def _due(self, each: Scheduler, place: EpochPosition) -> bool:
        if each.interval == "step":
            return place.batches % each.frequency == 0
        return place.ends and (place.epoch + 1) % each.frequency == 0

    def _drive(self, schedulers: list[Scheduler], value: float | None) -> None:
        """Step the schedulers with their own values in the groups, then restore the engine's."""
        engine_values = self._values()
        self._fill(self._now)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in schedulers:
                self._step(each.scheduler, value)
        self._now = self._values()
        self._fill(engine_values)
        self._cycles = self._cycles or _momenta_of(self._now) != _momenta_of(self._initial_values)

    def _factors(self) -> list[float]:
        factors = [row["lr"] / base if base else 0.0 for row, base in zip(self._now, self.base, strict=True)]
        if not all(map(math.isfinite, factors)):
            raise ConfigError(f"from_lightning: a scheduler gives a rate that is not finite in step {self._position}")
        return factors

    def _values(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [
            {"lr": float(group["lr"]), **{name: group[name] for name in names}}
            for group, names in zip(groups, self._momentum_names, strict=True)
        ]

    def _fill(self, values: list[dict[str, Any]]) -> None:
        for group, row in zip(self._optimizer.param_groups, values, strict=True):
            group.update(row)


def _momenta_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values without the rates."""
    return [{name: value for name, value in row.items() if name != "lr"} for row in rows]


def _step_scheduler(scheduler: Any, value: float | None) -> None:
    if value is None:
        scheduler.step()
    else:
        scheduler.step(value)


def _error(problem: str) -> ConfigError:
    return ConfigError(f"from_lightning: configure_optimizers {problem}")
