"""Copies of the weights around an engine: written before a step's first forward, used within its micro-batches.

Where something else wrote a weight since the last step (an update, a checkpoint, a hook, the body of the caller's
loop) need not be known: each step begins by writing all copies, 6 bytes a parameter.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import final

from torch import Tensor, nn

from lockstep.engines.base import Engine, Evaluate, StepResult
from lockstep.errors import ConfigError
from lockstep.transforms.weight_copies import WeightCopies

__all__ = ["Copied"]


@final
class Copied:
    """An engine that holds its parameters whole, and the copies of its model's weights."""

    def __init__(self, engine: Engine, copies: WeightCopies) -> None:
        self.model: nn.Module = engine.model
        self._engine, self._copies = engine, copies
        self._begun = False  # a backward of the present step was made

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._micro_batch(last, counts)

    @contextmanager
    def _micro_batch(self, last: bool, counts: bool) -> Iterator[None]:
        if not self._begun or self._copies.moved():
            self._copies.write()
        with self._engine.accumulate(last, counts), self._copies.used():
            yield

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if name := self._copies.moved():
            raise ConfigError(
                f"--weight-copies step does not go with a forward that writes {name}: it has multiplied by what was "
                "there before; leave it out"
            )
        self._begun = True
        self._engine.backward(loss, weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        self._begun = False
        self._copies.hand_over()
        return self._engine.step(factor, limit, momentum, evaluate)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        """As the engine; with the weights themselves, since the copies are only faster."""
        self._engine.rehearse(loss)

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._engine.load_state_dict(state)
