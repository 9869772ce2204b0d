"""`nn.DataParallel`: one process splits each micro-batch over its GPUs. For comparison; ddp is better."""

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed.world import World
from lockstep.engines.base import BareEngine, Evaluate, ScaledBackward, StepResult
from lockstep.engines.closure import Alone
from lockstep.engines.optimizer_step import OptimizerStep, UpdateSpec, list_trained
from lockstep.engines.request import EngineRequest, MakeOptimizer
from lockstep.errors import ConfigError

__all__ = ["DataParallel"]

_NAME = "--engine data-parallel"


@final
class DataParallel(BareEngine):
    """The engine `data-parallel`.

    Raises:
        ConfigError: fewer than two GPUs, more than one process, `--exact`, or a model whose `forward` was replaced
            (autocast, compile), which its copies would not follow.
    """

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, request: EngineRequest) -> None:
        count = torch.cuda.device_count()
        if count < 2:
            raise ConfigError(
                f"--engine data-parallel needs at least two GPUs in one process, found {count}; use --engine ddp"
            )
        if world.size > 1:
            raise ConfigError(f"--engine data-parallel runs in one process, not {world.size}; use --engine ddp")
        if request.exact:
            raise ConfigError(
                "--exact does not work with --engine data-parallel, which splits micro-batches; use --engine ddp"
            )
        # torch copies a model for each GPU attribute by attribute, so the copies would share a replaced forward.
        if "forward" in vars(model) or getattr(model, "_compiled_call_impl", None):
            raise ConfigError("--engine data-parallel cannot copy a model with autocast or --compile; use --engine ddp")
        request.say(
            "--engine data-parallel copies the model to every GPU in every forward and drives all of them from one "
            "Python thread's lock: --engine ddp is faster and uses memory evenly"
        )
        self._module = model
        # LS001 warns of DataParallel; this engine exists for comparison.
        self.model: nn.Module = nn.DataParallel(model)  # noqa: LS001
        instance = optimizer(model)
        parameters = list_trained(model, instance)
        spec = UpdateSpec(parameters, single_pass_flag=_NAME, dense_flag=_NAME)
        self._update = OptimizerStep(model, instance, request, spec)
        self._roots = ScaledBackward()

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._roots.run(loss, self._update.scale * weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        return self._update(factor, limit, momentum, evaluate)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        self._update.rehearse(Alone(loss, self.backward))

    def state_dict(self) -> dict[str, Tensor]:
        return self._update.state_dict(self._module)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._update.load_state_dict(self._module, state)

    @staticmethod
    def check_planned(options: EngineOptions) -> None:
        raise ConfigError(
            "--engine data-parallel cannot be planned: one process copies the model to all of its GPUs in each "
            "forward; plan --engine ddp instead"
        )
