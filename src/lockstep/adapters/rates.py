"""Turn torch's schedulers into the rates and momenta of each step.

    rates = Rates(optimizer, schedulers, place)     # place: step -> (epoch, batch in it, ends)
    factors = rates.factors(step)                   # by group: what its base rate is multiplied by
    rates.apply(optimizer)                          # just before its step: the groups' momenta and unlike rates

The schedulers are torch's own objects, stepped where the other library steps them. Their values depend on the step
alone, so a resume steps them up to it again. A plateau depends on the evaluations; their values are kept in the run's
state.
"""

import math
import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch.optim import Optimizer

from lockstep.errors import ConfigError

__all__ = [
    "EpochPosition",
    "Rates",
    "Scheduler",
    "step_one",
]


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


@final
class Rates:
    """The learning rates of an optimizer's groups in each step, by its schedulers.

    From here on the groups hold their base rates (`initial_lr`); the schedulers see their own values while they step.

    Args:
        optimizer: of the schedulers.
        schedulers: of the optimizer.
        place: step -> its position among the epochs.
        step_scheduler: (scheduler, value) -> None; the module's own `lr_scheduler_step`, if it has one.
        caller: of lockstep's functions, for errors.
        base: rates of the groups that the factors multiply; None: the groups' initial rates.

    Attributes:
        watched: names of the values that plateaus follow.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: list[Scheduler],
        place: Callable[[int], EpochPosition],
        step_scheduler: Callable[[Any, Any], None] | None = None,
        caller: str = "from_lightning",
        base: list[float] | None = None,
    ) -> None:
        self._optimizer, self._schedulers, self._place = optimizer, schedulers, place
        self._step, self._caller = step_scheduler or step_one, caller
        groups = optimizer.param_groups
        self.base = base or [float(group.get("initial_lr", group["lr"])) for group in groups]
        self.watched = [each.monitor for each in schedulers if each.monitor]
        self._momentum_names = [[name for name in _MOMENTA if name in group] for group in groups]
        self._now = self._values()
        self._position = 0  # the step that these values belong to
        self._history = array("d")  # of the steps before it, a row each; not kept where plateaus follow evaluations
        self._momenta = array("d")  # of the steps from the first with other momenta to the position, a row each
        self._initial_values = [dict(row) for row in self._now]
        self._cycles, self._cycle_start = False, 0
        self._current_step, self._current_factors = 0, [1.0] * len(self.base)
        for group, rate in zip(groups, self.base, strict=True):
            group["lr"] = rate
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns: the engine's optimizer steps

    def factors(self, step: int) -> list[float]:
        """Return the factor of each group's base rate in `step` (0-based)."""
        self._current_step, self._current_factors = step, self._factors_in(step)
        return self._current_factors

    def apply(self, optimizer: Optimizer) -> None:
        """Set the momenta and rates of the optimizer's groups for the step whose factors were last asked for.

        Rates that all have one factor are left to the engine.
        """
        momenta = self.momenta(self._current_step)
        if momenta is not None:
            for group, values in zip(optimizer.param_groups, momenta, strict=True):
                group.update(values)
        factors = self._current_factors
        if any(factor != factors[0] for factor in factors):
            for group, base, factor in zip(optimizer.param_groups, self.base, factors, strict=True):
                group["lr"] = base * factor

    def _factors_in(self, step: int) -> list[float]:
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
        if step >= self._position:
            return _momenta_of(self._now)
        if step < self._cycle_start:
            return _momenta_of(self._initial_values)
        width = len(self._momenta) // (self._position - self._cycle_start)
        row = (step - self._cycle_start) * width
        return _like(self._momenta[row : row + width], _momenta_of(self._initial_values))

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
            self._momenta.extend(_flat(_momenta_of(self._now)))
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
        if not self._cycles and _momenta_of(self._now) != _momenta_of(self._initial_values):
            self._cycles, self._cycle_start = True, self._position

    def _factors(self) -> list[float]:
        factors = [row["lr"] / base if base else 0.0 for row, base in zip(self._now, self.base, strict=True)]
        if not all(map(math.isfinite, factors)):
            raise ConfigError(
                f"{self._caller}: a scheduler gives a rate that is not finite in step {self._position + 1}"
            )
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


def _flat(momenta: list[dict[str, Any]]) -> list[float]:
    values = [value for row in momenta for value in row.values()]
    return [float(each) for value in values for each in (value if isinstance(value, tuple | list) else (value,))]


def _like(numbers: Iterable[float], template: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return flat numbers in the form of `template`."""
    rest = iter(numbers)
    return [
        {
            name: tuple(next(rest) for _ in value) if isinstance(value, tuple | list) else next(rest)
            for name, value in row.items()
        }
        for row in template
    ]


def step_one(scheduler: Any, value: float | None) -> None:
    """Step a scheduler of torch's, with the value that a plateau follows; None: it follows none."""
    if value is None:
        scheduler.step()
    else:
        scheduler.step(value)
