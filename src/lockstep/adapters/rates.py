"""Step torch's schedulers where the adapted library steps them; they write into the optimizer's groups.

    rates = Rates(optimizer, schedulers, place)     # place: step -> (epoch, batch in it, ends)
    rates.drive_to(done)                            # after each update: the groups have the next step's values
    rates.watch(done, name, value)                  # a plateau follows an evaluation

Nothing else writes rates, so a value that a callback or a hook sets holds until a scheduler writes again, as in the
library. Otherwise a scheduler's state depends on the step alone, or on the evaluations, whose values are
kept in the run's state: a resume steps it up to its step again, and then takes the groups' values of the checkpoint.
"""

import copy
import math
import warnings
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


# Entries of a group that schedulers write.
_WRITTEN = ("lr", "momentum", "betas")


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
    """The schedulers of an optimizer; see `lockstep.task.LiveRates`.

    Args:
        optimizer: its groups get the values.
        schedulers: of the optimizer, or of `shadow`.
        place: step -> its position among the epochs.
        step_scheduler: (scheduler, value) -> None; the module's own `lr_scheduler_step`, if it has one.
        caller: of lockstep's functions, for errors.
        shadow: an optimizer with the same groups, whose schedulers these are; None: they are the optimizer's own.

    Attributes:
        watched: names of the values that plateaus follow.
        position: updates after which the groups have their values.
        history: (updates, name, value) of the values that plateaus got so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: list[Scheduler],
        place: Callable[[int], EpochPosition],
        step_scheduler: Callable[[Any, Any], None] | None = None,
        caller: str = "from_lightning",
        shadow: Optimizer | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._shadow = shadow
        self._schedulers = schedulers
        self._place = place
        self._step = step_scheduler or step_one
        self._caller = caller
        self.watched = [entry.monitor for entry in schedulers if entry.monitor]
        self.position = 0
        self.history = list[tuple[int, str, float]]()
        self._initial_states = [_state_of(entry.scheduler) for entry in schedulers]
        self._copy(self._shadow, self._optimizer)
        self._initial_groups = [_written_of(group) for group in optimizer.param_groups]
        # Private in torch: without it a scheduler warns that it steps before the optimizer.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def check(self, steps: int) -> None:
        """Step the schedulers that follow no evaluation over a plan of `steps`, then restart.

        Raises:
            ConfigError: one failed, as OneCycleLR does after its `total_steps`, or gave no finite rate.
        """
        try:
            while self.position < steps - 1:
                self._advance()
        except ConfigError:
            raise
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"{self._caller}: a scheduler failed in one of the run's {steps} steps: {type(error).__name__}: "
                f"{line}: make it for {steps} steps"
            ) from error
        finally:
            self._begin()

    def drive_to(self, done: int) -> None:
        """Step the schedulers that follow no evaluation as after `done` updates."""
        if done < self.position:
            self.replay([list(entry) for entry in self.history], done)
        while self.position < done:
            self._advance()

    def replay(self, watched: list[list[Any]], done: int) -> None:
        """Restart, and step the schedulers with each (updates, name, value) up to `done`."""
        self._begin()
        for updates, name, value in watched:
            if updates <= done:
                self.watch(int(updates), str(name), float(value))
        self.drive_to(done)

    def due(self, epochs: int, values: Mapping[str, float], interval: str = "epoch") -> list[str]:
        """Return the names among `values` by which schedulers step after `epochs` epochs or steps."""
        monitors = []
        for entry in self._schedulers:
            if (
                entry.monitor
                and entry.monitor in values
                and entry.interval == interval
                and epochs % entry.frequency == 0
            ):
                monitors.append(entry.monitor)
        return monitors

    def unknown(self, values: Iterable[str]) -> str:
        """Return a name that a strict scheduler watches and `values` lacks; else ""."""
        names = set(values)
        for entry in self._schedulers:
            if entry.monitor and entry.strict and entry.monitor not in names:
                return entry.monitor
        return ""

    def watch(self, done: int, name: str, value: float) -> None:
        """Step the plateaus that follow `name`, after `done` updates."""
        self.drive_to(done)
        self.history.append((done, name, value))
        self._drive([entry for entry in self._schedulers if entry.monitor == name], value)

    def _begin(self) -> None:
        """Restore the schedulers and the groups as they were before the first step."""
        self.position = 0
        self.history = []
        for entry, state in zip(self._schedulers, self._initial_states, strict=True):
            _restore(entry.scheduler, copy.deepcopy(state))
        for group, values in zip(self._optimizer.param_groups, self._initial_groups, strict=False):
            group.update(values)

    def _advance(self) -> None:
        position = self._place(self.position)
        self.position += 1
        due = []
        for entry in self._schedulers:
            if entry.monitor is None and self._due(entry, position):
                due.append(entry)
        if due:
            self._drive(due, None)

    def _due(self, each: Scheduler, place: EpochPosition) -> bool:
        if each.interval == "step":
            return place.batches % each.frequency == 0
        return place.ends and (place.epoch + 1) % each.frequency == 0

    def _drive(self, schedulers: list[Scheduler], value: float | None) -> None:
        """Step the schedulers from the groups' present values, which a hook may have set."""
        self._copy(self._optimizer, self._shadow)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for entry in schedulers:
                self._step(entry.scheduler, value)
        self._copy(self._shadow, self._optimizer)
        if not all(math.isfinite(group["lr"]) for group in self._optimizer.param_groups):
            raise ConfigError(
                f"{self._caller}: a scheduler gives a rate that is not finite in step {self.position + 1}"
            )

    def _copy(self, source: Optimizer | None, target: Optimizer | None) -> None:
        if self._shadow is None or source is None or target is None:
            return
        for group, other in zip(source.param_groups, target.param_groups, strict=False):
            other.update({key: value for key, value in _written_of(group).items() if key in other})


def _written_of(group: dict[str, Any]) -> dict[str, Any]:
    settings = {}
    for key in _WRITTEN:
        if key in group:
            settings[key] = group[key]
    return settings


def _state_of(scheduler: Any) -> dict[str, Any]:
    """Return a copy of a scheduler's state, without its optimizer and its functions."""
    if hasattr(scheduler, "state_dict"):
        return copy.deepcopy(dict(scheduler.state_dict()))
    values = {}
    for name, value in vars(scheduler).items():
        if name != "optimizer":
            values[name] = value
    return values


def _restore(scheduler: Any, state: dict[str, Any]) -> None:
    if hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(state)
    else:
        vars(scheduler).update(state)


def step_one(scheduler: Any, value: float | None) -> None:
    """Step a scheduler of torch; `value` is what a plateau follows, else None."""
    if value is None:
        scheduler.step()
    else:
        scheduler.step(value)
