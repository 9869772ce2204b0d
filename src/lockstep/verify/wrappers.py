"""Wrap tasks and engines, for recorders and planted faults."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from lockstep.engines.base import Engine, Evaluate, ForwardingEngine, StepResult
from lockstep.task import METHODS, VALUES, LiveRates, Task, has_own, items_of_a_sample, user_task
from lockstep.training.evaluation import sets_by_name

__all__ = ["Disturbed", "PreparedTask", "TaskWrapper", "reversed_steps"]


class TaskWrapper(Task):
    """Task that delegates to `inner`; a subclass overrides one method."""

    def __init__(self, inner: Task) -> None:
        self.inner = self._wrapped = inner
        overridden = {name for base in type(self).__mro__ if base not in Task.__mro__ for name in vars(base)}
        # Copy only existing methods, so that those the task lacks are missing here too.
        for name in METHODS:
            if name not in overridden and has_own(inner, name):
                setattr(self, name, getattr(inner, name))
        for name in VALUES:
            setattr(self, name, getattr(inner, name))
        self.items_per_sample = items_of_a_sample(inner)
        self.framework = inner.framework
        self.gathers = inner.gathers
        self.is_compared = True
        self.data_facts = inner.data_facts
        self.autocast_scope = inner.autocast_scope
        self.switches_modes = inner.switches_modes

    @property
    # The base class has a plain attribute; here it is read from the wrapped task each time.
    def live_rates(self) -> LiveRates | None:  # type: ignore[override]
        return self.inner.live_rates

    def model(self) -> nn.Module:
        return self.inner.model()

    def dataset(self, split: str) -> Any:
        return self.inner.dataset(split)


class PreparedTask(TaskWrapper):
    """Task in float64 if `wide`, with at most `samples` evaluation samples.

    Tensors and modules in its attributes, lists and dicts (class weights, a criterion) are converted in place: the
    task belongs to this process alone.
    """

    def __init__(self, inner: Task, *, wide: bool, samples: int) -> None:
        super().__init__(inner)
        self._wide = wide
        self._samples = samples
        if wide:
            _widen(user_task(inner))

    def dataset(self, split: str) -> Any:
        data = self.inner.dataset(split)
        # All training samples are needed: their number decides the epochs and the order.
        if split == "train":
            return data
        sets = sets_by_name(data)
        few = {}
        for name, data_set in sets.items():
            if len(data_set) <= self._samples:
                few[name] = data_set
            else:
                few[name] = Subset(data_set, range(self._samples))
        return few.get("", few)

    def collate(self, samples: list[Any]) -> Any:
        batch = self.inner.collate(samples)
        if self._wide:
            return _in_float64(batch)
        return batch


def _widen(task: Any) -> None:
    """Convert a task's own tensors to float64 (complex128)."""
    attributes = getattr(task, "__dict__", {})
    for container in (attributes, *attributes.values()):
        places = (
            container.items()
            if isinstance(container, dict)
            else enumerate(container)
            if isinstance(container, list)
            else ()
        )
        for key, value in list(places):
            if isinstance(value, nn.Module):
                value.double()
            elif isinstance(value, Tensor):
                container[key] = _in_float64(value.detach()).requires_grad_(value.requires_grad)


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_complex():
            return value.to(torch.complex128)
        if value.is_floating_point():
            return value.double()
        return value
    if isinstance(value, dict):
        return {key: _in_float64(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_in_float64(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_in_float64(item) for item in value)
    return value


class Disturbed(ForwardingEngine):
    """Engine that changes some gradient elements by their last bit, as another summation order would.

    It serves steps of one or two micro-batches, where `reversed_steps` does not change any sum.
    """

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._generator = torch.Generator().manual_seed(0)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    parameter.grad.mul_(self._nudges(parameter.grad))
        return self.inner.step(factor, limit, momentum, evaluate)

    def _nudges(self, gradient: Tensor) -> Tensor:
        """Return a factor per element, which changes a quarter of them by a last bit.

        The factor is 1 plus or minus the spacing of numbers at 1, or 1.
        """
        choices = torch.randint(0, 8, gradient.shape, generator=self._generator, dtype=torch.int8)
        signs = (choices == 0).to(torch.int8) - (choices == 1).to(torch.int8)
        # A complex number moves along itself.
        dtype = gradient.abs().dtype
        return 1 + signs.to(gradient.device, dtype) * torch.finfo(dtype).eps


def reversed_steps(steps: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield (step, its micro-batches in reverse order)."""
    for step, micro in steps:
        yield step, micro[::-1]
