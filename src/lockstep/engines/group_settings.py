"""Write rates and momenta into an optimizer's groups, without overruling what somebody else wrote.

    settings = settings_of(optimizer)       # one object for an optimizer, whichever engine steps it
    settings.write(factor, momentum)        # at the end of a step, just before the optimizer's own
    stored = settings.changes()             # what changed since the optimizer was made, for a checkpoint
    settings.load(stored)

A rate is compared with the one that was written last before it is written again. Every other setting of a group
(weight decay, betas, a key of the user's) stays as it is.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakKeyDictionary, ref

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import ConfigError

__all__ = [
    "ChangeGroups",
    "GroupSettings",
    "settings_of",
]

Group = dict[str, Any]
ChangeGroups = Callable[[list[Group]], None]

# Keys of a group that are no settings.
_APART = ("params", "names")
# Keys that schedulers write.
_RATES = ("lr", "momentum", "betas")


@dataclass(slots=True)
class _GroupSetting:
    """One group: what it had when it was taken, and what lockstep wrote since.

    Attributes:
        base: its base rate, which factors multiply.
        rate: the rate that was written last; before that, the base rate.
        written: lockstep sets this rate, so that a checkpoint need not store it.
        momentum: its own momentum or betas, from before lockstep first wrote one; None: never written.
        written_momentum: the momentum or betas that were written last.
        initial: its settings when it was taken.
    """

    base: float
    rate: Any
    initial: Group
    written: bool = False
    momentum: Any = None
    written_momentum: Any = None


@final
class GroupSettings:
    """The settings of an optimizer's groups: lockstep's writes, and other changes since its creation.

    Attributes:
        change: called after a write with the groups, to set what the task wants in the step; None: nothing.
        rate: of the first group in the step of the last write.
    """

    # A weak reference: the table below would otherwise keep every optimizer.
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)
        self._rows: list[_GroupSetting] = []
        self.change: ChangeGroups | None = None
        self.rate = 0.0
        self._take()

    @property
    def _groups(self) -> list[Group]:
        """The optimizer's groups; its `load_state_dict` replaces the list."""
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        return optimizer.param_groups

    @property
    def base_rates(self) -> list[float]:
        """The base rate of each group."""
        self._take()
        return [row.base for row in self._rows]

    def _take(self) -> None:
        """Take the groups that were added, with their rates as base rates."""
        for group in self._groups[len(self._rows) :]:
            initial = _own_settings(group)
            # torch's schedulers store the base rate there.
            base: Any = group.get("initial_lr", group["lr"])
            self._rows.append(_GroupSetting(float(base), group["lr"], initial))

    def write(self, factor: float | None, momentum: float | None = None) -> None:
        """Write base rate times `factor` and the momentum into each group, then call `change`.

        Args:
            factor: None leaves the rates as they are.
            momentum: Adam's first beta; None: each group's own, from before the first that was written.

        Raises:
            ConfigError: somebody else has set a rate or a momentum that lockstep sets.
        """
        groups = self._groups
        if len(groups) != len(self._rows):
            self._take()
        for number, (group, row) in enumerate(zip(groups, self._rows, strict=True)):
            if factor is not None:
                # `is` first: comparing two tensors would wait for the device.
                if group["lr"] is not row.rate and group["lr"] != row.rate:
                    raise _foreign_error(number, "lr", group["lr"], row.rate)
                group["lr"] = row.rate = row.base * factor
                row.written = True
            if momentum is not None or row.written_momentum is not None:
                _write_momentum(number, group, row, momentum)
        if self.change is not None:
            self.change(groups)
            for group, row in zip(groups, self._rows, strict=True):
                row.rate = group["lr"]
                if row.written_momentum is not None:
                    row.written_momentum = group[_momentum_name(group)]
        self.rate = float(groups[0]["lr"]) if groups else 0.0

    def changes(self, *, rates: bool = False) -> list[Group]:
        """Return the settings of each group that differ from its initial ones, as JSON values.

        Rates and momenta that lockstep sets follow from the step, and are left out.

        Args:
            rates: include all rates and momenta, because schedulers set them.

        Raises:
            ConfigError: a changed setting is not JSON.
        """
        self._take()
        rows = []
        for number, (group, row) in enumerate(zip(self._groups, self._rows, strict=True)):
            rows.append(_changes_of(number, group, row, _RATES if rates else ()))
        return rows

    def load(self, changes: list[Group] | None) -> None:
        """Set what `changes` returned."""
        self._take()
        for group, row, stored in zip(self._groups, self._rows, changes or [], strict=False):
            for key, value in stored.items():
                present = group.get(key)
                if isinstance(present, Tensor):
                    present.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(present, tuple) else value
            # Otherwise the next write would take the rate for somebody else's.
            if "lr" in stored and row.written:
                row.rate = group["lr"]


def _write_momentum(place: int, group: Group, row: _GroupSetting, momentum: float | None) -> None:
    """Write the momentum under the name that the optimizer uses, if it has one."""
    name = _momentum_name(group)
    if not name:
        return
    if row.written_momentum is None:
        row.momentum = group[name]
    elif group[name] != row.written_momentum:
        raise _foreign_error(place, name, group[name], row.written_momentum)
    value = row.momentum
    if momentum is not None:
        value = (momentum, *row.momentum[1:]) if name == "betas" else momentum
    group[name] = row.written_momentum = value


def _momentum_name(group: Group) -> str:
    for name in ("betas", "momentum"):
        if name in group:
            return name
    return ""


def _foreign_error(place: int, name: str, value: Any, written: Any) -> ConfigError:
    return ConfigError(
        f"the optimizer's group {place} has {name} {_short(value)} in place of {_short(written)}, which the run's "
        "schedule wrote: set it in the task's `set_groups(groups, step, steps)`, or use --optim.schedule none, with "
        "which no rate is written (in your own loop: engine.step() without a factor)"
    )


def _short(value: Any) -> str:
    if isinstance(value, int | float | Tensor):
        return f"{float(value):g}"
    return str(value)


def _own_settings(group: Group) -> Group:
    """Return a group's settings; tensors as numbers, which later writes do not change."""
    settings = {}
    for key, value in group.items():
        if key not in _APART:
            settings[key] = _plain(value)
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            # Waits for the device if a rate is a tensor there; at a checkpoint only.
            return value.item()
        # As above.
        return value.tolist()
    if isinstance(value, np.generic):
        # A number of numpy, which JSON cannot write.
        return value.item()
    if isinstance(value, list):
        return list(value)
    return value


def _changes_of(place: int, group: Group, row: _GroupSetting, always: tuple[str, ...]) -> Group:
    present_settings = _own_settings(group)
    ours = {"lr"} if row.written else set()
    if row.written_momentum is not None:
        ours |= {"momentum", "betas"}
    changed = {}
    for key, value in present_settings.items():
        if key not in ours and (key in always or key not in row.initial or value != row.initial[key]):
            changed[key] = value
    for key, value in changed.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"the optimizer's group {place} has a new {key} of type {type(value).__name__}, which a checkpoint "
                "cannot store: use numbers, strings and lists of them"
            ) from None
    return changed


_SETTINGS: WeakKeyDictionary[Optimizer, GroupSettings] = WeakKeyDictionary()


def settings_of(optimizer: Optimizer) -> GroupSettings:
    """Return the settings of an optimizer's groups; the same object for the same optimizer."""
    settings = _SETTINGS.get(optimizer)
    if settings is None:
        settings = _SETTINGS[optimizer] = GroupSettings(optimizer)
    return settings
