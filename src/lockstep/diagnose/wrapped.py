"""An engine around an engine: what probes and planted faults are made of."""

import math
from contextlib import AbstractContextManager

from torch import Tensor

from lockstep.engines.base import Engine, StepResult

__all__ = ["Wrapped"]


class Wrapped:
    """Does what `inner` does; a subclass changes one thing."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.model = inner, inner.model

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return self.inner.accumulate(last)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self.inner.backward(loss, weight)

    def step(self, factor: float | None = None, limit: float = math.inf) -> StepResult:
        return self.inner.step(factor, limit)

    def state(self) -> dict[str, Tensor]:
        return self.inner.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        self.inner.restore(state)
