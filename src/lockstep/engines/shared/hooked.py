"""A task's hooks around an engine: what they change of the model is a part of the step, as whoever watches it sees."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final

from torch import Tensor, nn

from lockstep.engines.base import Engine, Evaluate, StepResult
from lockstep.hooks import Hooks

__all__ = ["Hooked"]


@final
class Hooked:
    """Any engine, and the hooks that follow its backwards and updates."""

    def __init__(self, engine: Engine, hooks: Hooks) -> None:
        self.model: nn.Module = engine.model
        self._engine, self._hooks = engine, hooks

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._engine.accumulate(last, counts)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._engine.backward(loss, weight)
        self._hooks.after_backward()

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        result = self._engine.step(factor, limit, momentum, evaluate)
        self._hooks.after_update()
        return result

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        self._engine.rehearse(loss)

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._engine.load_state_dict(state)
