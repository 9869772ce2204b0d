"""One process, one device, the plain model."""

import math
from collections.abc import Callable
from typing import final

from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.engines.base import BareEngine, Evaluate, ScaledBackward, StepResult
from lockstep.engines.closure import Alone
from lockstep.engines.exact import Tree
from lockstep.engines.optimizer_step import OptimizerStep, UpdateSpec, list_trained
from lockstep.engines.request import EngineRequest, MakeOptimizer
from lockstep.errors import ConfigError

__all__ = ["Single"]


@final
class Single(BareEngine):
    """The engine `single`. Raises ConfigError if there is more than one rank."""

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, request: EngineRequest) -> None:
        if world.size > 1:
            raise ConfigError(f"--engine single with {world.size} processes: use --engine ddp, or start one process")
        self.model = model
        instance = optimizer(model)
        parameters = list_trained(model, instance)
        self._tree = Tree(parameters, request.exact, world) if request.exact else None
        spec = UpdateSpec(
            parameters,
            is_fixed=bool(request.exact),
            exchange=self._finish,
            dense_flag="--exact" if request.exact else request.single_pass_flag,
        )
        self._update = OptimizerStep(model, instance, request, spec)
        self._roots = ScaledBackward()

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._roots.run(loss, self._update.scale * weight)
        if self._tree:
            self._tree.push()

    def _backward_alone(self, loss: Tensor) -> None:
        self._roots.run(loss, self._update.scale)

    def _finish(self) -> None:
        if self._tree:
            self._tree.finish()

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        if self._tree:
            self._tree.finish()
        return self._update(factor, limit, momentum, evaluate)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        self._update.rehearse(Alone(loss, self._backward_alone))

    def state_dict(self) -> dict[str, Tensor]:
        return self._update.state_dict(self.model)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._update.load_state_dict(self.model, state)
