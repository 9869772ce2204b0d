"""A task around a task and an engine around an engine: what recorders and planted faults are made of."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from lockstep.config.config import Config
from lockstep.engines.base import Engine, Evaluate, StepResult
from lockstep.run.evaluation_sets import named_sets
from lockstep.task import Order, Task, items_of_a_sample

__all__ = ["EngineWrapper", "PreparedTask", "TaskWrapper"]


class TaskWrapper(Task):
    """Does what `inner` does; a subclass changes one thing."""

    def __init__(self, inner: Task) -> None:
        self.inner = inner
        self.reduction, self.items_per_sample = inner.reduction, items_of_a_sample(inner)
        self.item_name, self.defaults = inner.item_name, inner.defaults
        self.fingerprint, self.sources = inner.fingerprint, inner.sources
        self.hooks, self.own_steps, self.divisible = inner.hooks, inner.own_steps, inner.divisible
        self.attention_mask = inner.attention_mask

    def model(self) -> nn.Module:
        return self.inner.model()

    def dataset(self, split: str) -> Any:
        return self.inner.dataset(split)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.inner.loss(model, batch)

    def collate(self, samples: list[Any]) -> Any:
        return self.inner.collate(samples)

    def count(self, batch: Any) -> int:
        return self.inner.count(batch)

    def work(self, dataset: Any, samples: Sequence[int]) -> float | None:
        return self.inner.work(dataset, samples)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return self.inner.metrics(model, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        return self.inner.evaluate(model, batch)

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer | None:
        return self.inner.optimizer(model, config)

    def schedule(self, step: int, steps: int) -> float | None:
        return self.inner.schedule(step, steps)

    def order(self, samples: int, seed: int) -> Order | None:
        return self.inner.order(samples, seed)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        return self.inner.blocks(model)

    def untrained(self) -> Sequence[str]:
        return self.inner.untrained()

    def sample(self, model: nn.Module, device: torch.device) -> str:
        return self.inner.sample(model, device)

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.inner.load_state_dict(state)


class PreparedTask(TaskWrapper):
    """The task with its data in float64 (complex128) where `wide`, and at most `samples` to evaluate on."""

    def __init__(self, inner: Task, *, wide: bool, samples: int) -> None:
        super().__init__(inner)
        self._wide, self._samples = wide, samples

    def dataset(self, split: str) -> Any:
        found = self.inner.dataset(split)
        if split == "train":
            return found
        sets = named_sets(found)
        few = {
            name: each if len(each) <= self._samples else Subset(each, range(self._samples))
            for name, each in sets.items()
        }
        return few.get("", few)

    def collate(self, samples: list[Any]) -> Any:
        batch = self.inner.collate(samples)
        return _in_float64(batch) if self._wide else batch


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_complex():
            return value.to(torch.complex128)
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_float64(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_in_float64(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_in_float64(item) for item in value)
    return value


class EngineWrapper:
    """Does what `inner` does; a subclass changes one thing."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.model = inner, inner.model

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self.inner.accumulate(last, counts)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self.inner.backward(loss, weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        return self.inner.step(factor, limit, momentum, evaluate)

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner.load_state_dict(state)
