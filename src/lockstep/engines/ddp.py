"""DistributedDataParallel: every rank holds the whole model; gradients are exchanged once a step."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final

from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.engines.base import Evaluate, MakeOptimizer, Settings, StepResult
from lockstep.engines.shared.ddp_common import ReplicatedEngine
from lockstep.engines.shared.optimizer_step import OptimizerStep, trained
from lockstep.engines.shared.rehearsal import Alone

__all__ = ["DDP"]


@final
class DDP:
    """The engine `ddp`. Raises ConfigError without a launcher."""

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, settings: Settings) -> None:
        self._module = model
        made = optimizer(model)
        exchanged = trained(model, made)
        self._replicas = ReplicatedEngine("ddp", model, exchanged, world, settings)
        self._update = OptimizerStep(
            model,
            made,
            settings,
            cleared=exchanged,
            fixed=True,
            exchange=self._replicas.finish,
            shared=world.size > 1,
            dense="--engine ddp",
        )
        self.model = self._replicas.model

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return self._replicas.accumulate(last)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._replicas.backward(loss, self._update.scale * weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        self._replicas.finish()
        return self._update(factor, limit, momentum, evaluate)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        with self._replicas.alone():
            self._update.rehearse(Alone(loss, self._alone))

    def _alone(self, loss: Tensor) -> None:
        self._replicas.backward_alone(loss, self._update.scale)

    def state_dict(self) -> dict[str, Tensor]:
        return self._update.state_dict(self._module)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._update.load_state_dict(self._module, state)
