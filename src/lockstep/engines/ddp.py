"""DistributedDataParallel: every rank holds the whole model; gradients are exchanged once a step."""

import math
from contextlib import AbstractContextManager
from typing import ClassVar, final

from torch import Tensor, nn

from lockstep.engines.base import MakeOptimizer, Settings, StepResult
from lockstep.engines.replicas import OPTIONS, Replicas
from lockstep.engines.update import Update, trained
from lockstep.world import World

__all__ = ["DDP"]


@final
class DDP:
    """The engine `ddp`. Raises ConfigError without a launcher."""

    options: ClassVar[tuple[str, ...]] = OPTIONS

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, settings: Settings) -> None:
        self._module = model
        made = optimizer(model)
        exchanged = trained(model, made)
        self._update = Update(made, settings, cleared=exchanged, fixed=True)
        self._replicas = Replicas("ddp", model, exchanged, world, settings)
        self.model = self._replicas.model

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return self._replicas.accumulate(last)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._replicas.backward(loss, self._update.scale * weight)

    def step(self, factor: float | None = None, limit: float = math.inf) -> StepResult:
        self._replicas.finish()
        return self._update(factor, limit)

    def state(self) -> dict[str, Tensor]:
        return self._update.state(self._module)

    def restore(self, state: dict[str, Tensor]) -> None:
        self._update.restore(self._module, state)
