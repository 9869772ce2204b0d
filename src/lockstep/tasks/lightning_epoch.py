"""An evaluation's epoch as one metric with a state: what each micro-batch logged, and what it left in the module.

    epoch = Epoch(module, trainer, place=0, sets=1, ...)
    with epoch.batch(samples):              # around one `validation_step`
        ...
    epoch.compute()                         # name -> number, over all micro-batches of all ranks, in their order

What a `validation_step` leaves behind for `on_validation_epoch_end`, items that it appends to lists of the module and
states of its metrics, is taken out after each micro-batch and put together in order, so that the hook finds on every
rank what it would find on one. See `lockstep.run.stateful_metrics` for how a run uses it.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.tasks.lightning_leavings import (
    is_metric,
    list_at,
    lists_of,
    metrics_of,
    put_back,
    put_together,
    set_aside,
    taken_apart,
    was_updated,
)
from lockstep.tasks.lightning_log import Entry, Logged, number, together
from lockstep.tasks.metric_states import merge
from lockstep.tasks.rows_metric import RowsMetric

__all__ = ["Epoch"]


@final
class Epoch(RowsMetric):
    """What an evaluation of one set came to.

    Args:
        module: whose lists and metrics are looked after.
        logged: takes what is logged.
        ends: called at the end of the set with its numbers; what hooks log at the end of the epoch it puts to them.
        tries: whether all this is a trial before the run, of which nothing is to be left behind.

    Attributes:
        loss: the value of the last micro-batch that is taken for its loss; None where nothing of the kind was logged.
    """

    def __init__(
        self, module: nn.Module, logged: Logged, ends: Callable[[dict[str, float]], None], tries: Callable[[], bool]
    ) -> None:
        self._module, self._logged, self._ends, self._tries = module, logged, ends, tries
        super().__init__()
        self.loss: Any = None

    @contextlib.contextmanager
    def batch(self, samples: int) -> Iterator[None]:
        """Around the step of one micro-batch; what it logs and leaves behind is a row of the state."""
        metrics, lists = metrics_of(self._module), lists_of(self._module)
        lengths = {name: len(held) for name, held in lists.items()}
        aside = {name: set_aside(metric) for name, metric in metrics.items()}
        self._logged.samples = samples
        self._logged.taken()
        yield
        entries = self._logged.taken()
        self.loss = _loss_of(entries)
        row: list[Any] = []
        form = {
            "logged": [_plain_entry(entry) for entry in entries if entry.on_epoch],
            "appended": {
                name: taken_apart(held[lengths.get(name, 0) :], row, name)
                for name, held in lists_of(self._module).items()
                if len(held) > lengths.get(name, 0)
            },
            "metrics": {
                name: taken_apart(dict(metric.metric_state), row, name)
                for name, metric in metrics.items()
                if was_updated(metric)
            },
        }
        for name, held in lists_of(self._module).items():
            del held[lengths.get(name, 0) :]
        for name, metric in metrics.items():
            put_back(metric, aside[name])
        self._rows.append([_text(form), *row])

    def compute(self) -> dict[str, float]:
        """The numbers that were logged for the epoch; after the last set those of the epoch's end too."""
        forms = [(json.loads(bytes(row[0].tolist())), row[1:]) for row in self._rows]
        entries = [entry for form, _ in forms for entry in form["logged"]]
        parts = [
            {name: [kind, value * weight if kind == "mean" else value, weight]}
            for name, kind, value, weight, metric in entries
            if not metric
        ]
        found = together(parts)
        logged_metrics = {name: metric for name, _, _, _, metric in entries if metric}
        metrics, lists = metrics_of(self._module), lists_of(self._module)
        used = {name for form, _ in forms for name in form["metrics"]}
        aside = {name: set_aside(metrics[name]) for name in used}
        lengths = {name: len(held) for name, held in lists.items()}
        try:
            for name in used:
                merge(
                    metrics[name],
                    [put_together(form["metrics"][name], row) for form, row in forms if name in form["metrics"]],
                )
            for form, row in forms:
                for name, items in form["appended"].items():
                    list_at(self._module, name).extend(put_together(items, row))
            found |= {name: number(metrics[attribute].compute()) for name, attribute in logged_metrics.items()}
            found = {name: found[name] for name in dict.fromkeys([*(entry[0] for entry in entries), *found])}
            self._ends(found)
        finally:
            for name in used:
                put_back(metrics[name], aside[name])
            for name, held in lists_of(self._module).items() if self._tries() else ():
                del held[lengths.get(name, 0) :]
        return {name: value for name, value in found.items() if name not in ("loss", "items")}


def _plain_entry(entry: Entry) -> list[Any]:
    """[name, reduction, value, weight, the module's metric] of what was logged. Waits for the device."""
    if is_metric(entry.value):
        return [entry.epoch_name, "metric", 0.0, 0.0, entry.metric]
    return [entry.epoch_name, entry.reduce, number(entry.value), entry.weight, ""]


def _loss_of(entries: list[Entry]) -> Any:
    """What is most likely the loss of a step that returns none: the first that is called so."""
    plain = [entry for entry in entries if not is_metric(entry.value)]
    return next((entry.value for entry in plain if "loss" in entry.name.lower()), None)


def _text(form: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)
