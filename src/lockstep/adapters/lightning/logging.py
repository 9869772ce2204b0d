"""Collect what a module logs, by name, and reduce it over items: Lightning's result collection.

logged = Logged()                         # is `trainer._results` while a hook runs
entries = logged.taken()                  # what was logged since the last call, in order
totals.add(name, value, weight, "mean")   # of a `Totals`, for many micro-batches and steps
together([totals.plain()])                # name -> number, of the totals of all ranks
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lockstep.adapters.lightning.refusals import LOGGING
from lockstep.errors import ConfigError

__all__ = [
    "Logged",
    "LoggedValue",
    "Totals",
    "number",
    "rows_of",
    "together",
]


_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "amin": "min", "max": "max", "amax": "max"}


class LoggedValue(NamedTuple):
    """One `self.log`.

    Attributes:
        value: a 0-dim tensor, detached; a metric with a state; or a number.
        weight: of the value in a mean: the samples, or the `batch_size` that `self.log` received.
        reduce: "mean", "sum", "min" or "max".
        metric: the name of the module's attribute that is the metric, else "".
        place: index of the evaluation set that is added to the name; None: none is.
    """

    name: str
    value: Any
    weight: float
    on_step: bool
    on_epoch: bool
    reduce: str
    metric: str
    place: int | None = None

    @property
    def epoch_name(self) -> str:
        """The name of the epoch's value, with a suffix if steps are logged too."""
        return self._full(f"{self.name}_epoch" if self.on_step else self.name)

    @property
    def step_name(self) -> str:
        return self._full(f"{self.name}_step" if self.on_epoch else self.name)

    @property
    def plain_name(self) -> str:
        """The name without a suffix for steps or epochs, which callbacks monitor too."""
        return self._full(self.name)

    def _full(self, name: str) -> str:
        if self.place is None:
            return name
        return f"{name}/dataloader_idx_{self.place}"


@final
class Logged:
    """Receiver of `LightningModule.log`.

    Attributes:
        samples: of the current batch.
        place: index of the current batch's set, if there are several; else None.
        shown: names that were logged with `prog_bar=True`.
        hidden: names that were logged with `logger=False`.
    """

    def __init__(self) -> None:
        self.samples = 1
        self.place: int | None = None
        self.shown: set[str] = set()
        self.hidden: set[str] = set()
        self._entries: list[LoggedValue] = []

    # LightningModule.log calls it by this signature.
    def log(  # noqa: PLR0913
        self,
        fx: str,
        name: str,
        value: Any,
        *,
        on_step: bool,
        on_epoch: bool,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        prog_bar: bool = False,
        logger: bool = True,
        metric_attribute: str | None = None,
        add_dataloader_idx: bool = True,
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_fn: Any = None,
        sync_dist_group: Any = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a value; `refusals.LOGGING` has what becomes of each argument of `self.log`.

        Raises:
            ConfigError: a reduction that cannot be computed from parts, or one over a group of ranks.
        """
        reduce = _reduction_of(name, reduce_fx)
        set_index = self.place if add_dataloader_idx else None
        if sync_dist_group is not None:
            raise ConfigError(
                f"from_lightning: self.log('{name}', sync_dist_group=...) is not supported: "
                f"{LOGGING['sync_dist_group'].what}"
            )
        values = value if isinstance(value, Mapping) else {"": value}
        for key, element in values.items():
            item = element.detach() if isinstance(element, Tensor) else element
            weight = float(batch_size if batch_size is not None else self.samples)
            full = f"{name}.{key}" if key else name
            attribute = metric_attribute or ""
            entry = LoggedValue(full, item, weight, on_step, on_epoch, reduce, attribute, set_index)
            self._entries.append(entry)
            if prog_bar:
                self.shown |= {entry.epoch_name, entry.step_name, entry.plain_name}
            if not logger:
                self.hidden |= {entry.epoch_name, entry.step_name, entry.plain_name}

    def swap(self, entries: list[LoggedValue], samples: int) -> list[LoggedValue]:
        """Swap in the entries of another micro-batch, and return the previous ones."""
        former = self._entries
        self._entries = entries
        self.samples = samples
        return former

    def reset(self, *_: Any, **__: Any) -> None:
        """Do nothing; Lightning calls this, and there is no state to reset."""

    def take(self) -> list[LoggedValue]:
        """Return and clear the values logged since the last call, the last of each name."""
        entries = self._entries
        self._entries = []
        if len(entries) > 1:
            return list({entry.plain_name: entry for entry in entries}.values())
        return entries


def _reduction_of(name: str, reduce_fx: Any) -> str:
    """Return the name of a `reduce_fx`.

    Raises:
        ConfigError: the function is not known.
    """
    if isinstance(reduce_fx, str):
        word = reduce_fx
    else:
        word = getattr(reduce_fx, "__name__", "")
    reduction = _REDUCTIONS.get(word.lower())
    if reduction is None:
        raise ConfigError(
            f"from_lightning: self.log('{name}', reduce_fx={word or reduce_fx}): an epoch is reduced by mean, sum, min "
            "or max; use one of them, or a torchmetrics.Metric"
        )
    return reduction


def number(value: Any) -> float:
    """Return a logged value as a number. Waits for the device."""
    return float(value.double().mean() if isinstance(value, Tensor) and value.numel() > 1 else value)


@final
class Totals:
    """Weighted sums by name, which can be merged over micro-batches and ranks."""

    def __init__(self) -> None:
        self._totals: dict[str, list[Any]] = {}

    def add(self, name: str, value: Any, weight: float, reduce: str) -> None:
        """Add a value; a tensor on a device stays there, so nothing waits."""
        if isinstance(value, Tensor) and value.device.type != "cpu":
            value = value.double()
            value = value.mean() if value.numel() > 1 else value.reshape(())
        else:
            value = number(value)
        entry = self._totals.get(name)
        weighted = value * weight if reduce == "mean" else value
        if entry is None:
            self._totals[name] = [reduce, weighted, weight]
            return
        if isinstance(weighted, float) and isinstance(entry[1], float):
            combine = _COMBINE
        else:
            combine = _ON_DEVICE
        entry[1], entry[2] = combine[reduce](entry[1], weighted), entry[2] + weight

    def plain(self) -> dict[str, list[Any]]:
        """Return name -> [reduction, value, weight] as plain numbers. Waits for the device."""
        plain_totals = {}
        for name, (reduction, value, weight) in self._totals.items():
            plain_totals[name] = [reduction, float(value), weight]
        return plain_totals

    def clear(self) -> None:
        self._totals.clear()


def together(parts: list[dict[str, list[Any]]]) -> dict[str, float]:
    """Merge the results of `Totals.plain` of all ranks or micro-batches into name -> number."""
    kinds: dict[str, str] = {}
    values: dict[str, list[tuple[float, float]]] = {}
    for totals in parts:
        for name, (reduction, value, weight) in totals.items():
            kinds[name] = reduction
            values.setdefault(name, []).append((value, weight))
    return {name: _reduce(kinds[name], pairs) for name, pairs in values.items()}


def _reduce(kind: str, values: list[tuple[float, float]]) -> float:
    numbers = [value for value, _ in values]
    if kind in ("min", "max"):
        if any(map(math.isnan, numbers)):
            return math.nan
        return (min if kind == "min" else max)(numbers)
    # math.fsum raises an error for infinities of both signs.
    if all(map(math.isfinite, numbers)):
        total = math.fsum(numbers)
    else:
        total = sum(numbers)
    weight = math.fsum(weight for _, weight in values)
    if kind == "sum":
        return total
    if weight:
        return total / weight
    return math.nan


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {"mean": operator.add, "sum": operator.add, "min": min, "max": max}
# Python's min and max would compare tensors, and so wait for the device.
_ON_DEVICE = _COMBINE | {"min": torch.minimum, "max": torch.maximum}


def rows_of(batch: Any) -> int:
    """Return the length of a batch's first tensor, as Lightning does; else 1."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            return len(batch)
        return 1
    if isinstance(batch, str):
        return len(batch)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for value in batch:
            if rows := _rows(value):
                return rows
        return 1
    return 1


def _rows(value: Any) -> int:
    if isinstance(value, Tensor):
        if value.ndim:
            return len(value)
        return 1
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            if rows := _rows(item):
                return rows
        return 0
    return 0
