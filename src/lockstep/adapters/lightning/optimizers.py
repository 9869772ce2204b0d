"""Read the result of `configure_optimizers`, and turn its schedulers into rates by step.

    found = read(module.configure_optimizers())
    rates = Rates(found.optimizers[0], found.schedulers, place)   # place: step -> (epoch, batch in it, ends)
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
    "Scheduler",
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


def read(found: Any, *, automatic: bool = True) -> Configured:
    """Return the optimizers and schedulers of a result of `configure_optimizers`.

    Args:
        automatic: lockstep takes the steps; else `training_step` does, and may have several optimizers.

    Raises:
        ConfigError: a form that Lightning 2 does not accept, or an optimizer that no engine can step.
    """
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    monitor = None
    if isinstance(found, Optimizer):
        optimizers = [found]
    elif isinstance(found, dict):
        optimizers, monitor = [found.get("optimizer")], found.get("monitor")
        schedulers = [found["lr_scheduler"]] if found.get("lr_scheduler") is not None else []
    elif isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        optimizers = list(found[0])
        schedulers = list(found[1]) if isinstance(found[1], list | tuple) else [found[1]]
    elif isinstance(found, list | tuple) and found and all(isinstance(each, dict) for each in found):
        if any("frequency" in each for each in found):
            raise _refused(
                "gives its optimizers a frequency, which Lightning 2 has no more: set automatic_optimization = False "
                "and step them in training_step"
            )
        optimizers = [each.get("optimizer") for each in found]
        schedulers = [each["lr_scheduler"] for each in found if each.get("lr_scheduler") is not None]
    elif isinstance(found, list | tuple):
        optimizers = list(found)
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        kind = "None" if found is None else type(found).__name__
        raise _refused(f"returned {kind}: it must return an optimizer, lists or dicts of them as Lightning 2 has it")
    if automatic and len(optimizers) > 1:
        raise _refused(
            f"returned {len(optimizers)} optimizers: Lightning 2 steps one by itself; set automatic_optimization = "
            "False and step them in training_step"
        )
    if any(isinstance(each, LBFGS) for each in optimizers):
        raise _refused("returned LBFGS, which computes the loss several times in a step: use another optimizer")
    made = [_scheduler(each, monitor, automatic=automatic) for each in schedulers]
    return Configured(optimizers, made)


def _scheduler(given: Any, monitor: str | None, *, automatic: bool) -> Scheduler:
    said = dict(given) if isinstance(given, dict) else {"scheduler": given}
    said = {key: value for key, value in said.items() if key in _KEYS}
    scheduler = said.get("scheduler")
    if scheduler is None:
        raise _refused("returned a dict for a scheduler without the key 'scheduler'")
    plateau = said.pop("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    interval, frequency = said.get("interval", "epoch"), int(said.get("frequency", 1))
    if interval not in ("step", "epoch") or frequency < 1:
        raise _refused(f"returned a scheduler with interval '{interval}' and frequency {frequency}: step or epoch, 1..")
    watched = said.get("monitor") or monitor
    if plateau and automatic and not watched:
        raise _refused(f"returned {type(scheduler).__name__} without a monitor: name the logged value that it follows")
    strict = bool(said.get("strict", True))
    return Scheduler(scheduler, said.get("name"), interval, frequency, watched if plateau else None, strict)


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
        self._step = step_scheduler or _stepped
        groups = optimizer.param_groups
        self.base = [float(group.get("initial_lr", group["lr"])) for group in groups]
        self.watched = [each.monitor for each in schedulers if each.monitor]
        self._cycled = [[name for name in _MOMENTA if name in group] for group in groups]
        self._now = self._values()
        self._at = 0  # the step that these values belong to
        self._known = array("d")  # of the steps before it, a row each; not kept where plateaus follow evaluations
        self._plain = [dict(row) for row in self._now]
        self._cycles = False
        self._momenta: dict[int, list[dict[str, Any]]] = {}  # of the steps before, once they differ from the first
        for group, base in zip(groups, self.base, strict=True):
            group["lr"] = base
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns: the engine's optimizer steps

    def factors(self, step: int) -> list[float]:
        """Return the factor of each group's base rate in `step` (0-based)."""
        if not self._schedulers:
            return [1.0] * len(self.base)
        if step < self._at and not self.watched:
            width = len(self.base)
            return list(self._known[step * width : (step + 1) * width])
        if not self.watched or step == self._at + 1:  # else it depends on future evaluations
            self.drive_to(step)
        return self._present()

    def drive_to(self, step: int) -> None:
        """Step the schedulers that follow no evaluation up to `step`."""
        while self._at < step:
            self._advance()

    def momenta(self, step: int) -> list[dict[str, Any]] | None:
        """Return each group's `momentum` or `betas` in `step`; None if no scheduler cycles them.

        The step must have been reached.
        """
        if not self._cycles:
            return None
        if step in self._momenta:
            return self._momenta[step]
        return _others(self._plain if step < self._at else self._now)

    def due(self, epochs: int, values: Mapping[str, float], interval: str = "epoch") -> list[str]:
        """Return the names among `values` by which schedulers step after `epochs` epochs or steps."""
        return [
            each.monitor
            for each in self._schedulers
            if each.monitor and each.monitor in values and each.interval == interval and epochs % each.frequency == 0
        ]

    def unknown(self, values: Iterable[str]) -> str:
        """Return a name that a strict scheduler watches and `values` lacks; else ""."""
        known = set(values)
        return next(
            (each.monitor for each in self._schedulers if each.monitor and each.strict and each.monitor not in known),
            "",
        )

    def watch(self, done: int, name: str, value: float) -> None:
        """Step the plateaus that follow `name`, after `done` steps."""
        self.drive_to(done)
        self._drive([each for each in self._schedulers if each.monitor == name], value)

    def _advance(self) -> None:
        if not self.watched:
            self._known.extend(self._present())
        if self._cycles:
            self._momenta[self._at] = _others(self._now)
        place = self._place(self._at)
        self._at += 1
        due = [each for each in self._schedulers if each.monitor is None and self._due(each, place)]
        if due:
            self._drive(due, None)

    def _due(self, each: Scheduler, place: EpochPosition) -> bool:
        if each.interval == "step":
            return place.batches % each.frequency == 0
        return place.ends and (place.epoch + 1) % each.frequency == 0

    def _drive(self, schedulers: list[Scheduler], value: float | None) -> None:
        """Step the schedulers with their own values in the groups, then restore the engine's."""
        held = self._values()
        self._fill(self._now)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in schedulers:
                self._step(each.scheduler, value)
        self._now = self._values()
        self._fill(held)
        self._cycles = self._cycles or _others(self._now) != _others(self._plain)

    def _present(self) -> list[float]:
        found = [row["lr"] / base if base else 0.0 for row, base in zip(self._now, self.base, strict=True)]
        if not all(map(math.isfinite, found)):
            raise ConfigError(f"from_lightning: a scheduler gives a rate that is not finite in step {self._at}")
        return found

    def _values(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [
            {"lr": float(group["lr"]), **{name: group[name] for name in names}}
            for group, names in zip(groups, self._cycled, strict=True)
        ]

    def _fill(self, values: list[dict[str, Any]]) -> None:
        for group, row in zip(self._optimizer.param_groups, values, strict=True):
            group.update(row)


def _others(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values without the rates."""
    return [{name: value for name, value in row.items() if name != "lr"} for row in rows]


def _stepped(scheduler: Any, value: float | None) -> None:
    if value is None:
        scheduler.step()
    else:
        scheduler.step(value)


def _refused(what: str) -> ConfigError:
    return ConfigError(f"from_lightning: configure_optimizers {what}")
