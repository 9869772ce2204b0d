"""A task whose batches are divided over context ranks.

task = divide_task(task, group)         # its loss is this rank's part; evaluations are sums over the ranks
whole_task(task).loss(model, batch)     # of whole batches
"""

from collections.abc import Callable, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.parallel.context import ContextDivision, ContextGroup, watch
from lockstep.records import float_of, is_number
from lockstep.task import Task, TaskAround

__all__ = [
    "divide_task",
    "first_positions",
    "whole_task",
    "wrap_whole",
]


def divide_task(task: Task, group: ContextGroup) -> Task:
    """Return the task with its batches divided over the ranks of `group`; the object is unchanged."""
    return cast("Task", _ContextTask(task, ContextDivision(group, task.sequence)))


def whole_task(task: Task) -> Task:
    """Return the task of whole batches: the one that was divided, or this one."""
    # Not isinstance, here and below: the task passes for the one inside.
    if type(task) is not _ContextTask:  # type: ignore[comparison-overlap]
        return task
    inner: Task = object.__getattribute__(task, "_inner")
    return inner


def wrap_whole(task: Task, wrap: Callable[[Task], Task]) -> Task:
    """Return the task with `wrap` applied to the task of whole batches, so that its batches stay divided."""
    wrapped = wrap(whole_task(task))
    if type(task) is not _ContextTask:  # type: ignore[comparison-overlap]
        return wrapped
    return cast("Task", _ContextTask(wrapped, object.__getattribute__(task, "_division")))


def first_positions(task: Task, batch: Any, most: int) -> Any:
    """Return a batch of a divided task with at most `most` positions of each sequence, or a few more."""
    division: ContextDivision = object.__getattribute__(task, "_division")
    return division.shorten(batch, most)


@final
class _ContextTask(TaskAround):
    """A task that computes this rank's positions of each batch."""

    __slots__ = ("_division",)

    def __init__(self, inner: Task, division: ContextDivision) -> None:
        super().__init__(inner, _division=division)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return this rank's part of the loss. Collective."""
        division = self._division
        with division.forward(batch) as part:
            return watch(self._check(self._inner.loss(model, part)))

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and metrics of all positions, the same on every rank. Collective."""
        with self._division.forward(batch) as part:
            loss, metrics = self._inner.evaluate(model, part)
        return self._sum(self._check(loss).detach(), metrics)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the metrics of all positions, the same on every rank. Collective."""
        with self._division.forward(batch) as part:
            metrics = self._inner.metrics(model, part)
        device = next(leaf.device for leaf in part.values() if isinstance(leaf, Tensor))
        return self._sum(torch.zeros((), device=device), metrics)[1]

    def _check(self, loss: Any) -> Tensor:
        """Return a loss, and refuse numbers that come with it, of which each rank would have a part."""
        if isinstance(loss, Tensor):
            only: Tensor = loss
            return only
        raise ConfigError(
            f"{self._flag}: the task's `loss` must return the loss alone; return other numbers from `metrics`"
        )

    def _sum(self, loss: Tensor, metrics: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Add the loss, and the sums and counts of metrics, over the ranks."""
        group = self._division.group
        numbers = [loss.double().reshape(())]
        for name, pair in metrics.items():
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(is_number, pair)):
                raise ConfigError(f"{self._flag}: the metric '{name}' must be (sum, count), both over positions")
            for value in pair:
                number = value.detach() if isinstance(value, Tensor) else torch.tensor(float_of(value))
                numbers.append(number.to(loss.device, torch.float64).reshape(()))
        # One message, and no wait for the device.
        total, *sums = group.sum(torch.stack(numbers)).unbind()  # collective
        pairs = {}
        for index, name in enumerate(metrics):
            pairs[name] = (sums[2 * index], sums[2 * index + 1])
        return total.to(loss.dtype), pairs

    @property
    def _flag(self) -> str:
        return f"--parallel.context {self._division.group.size}"
