"""Planted faults of the engine, the loop around it, and the machine below."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.config.config import Config
from lockstep.counts import number
from lockstep.engines.base import Engine, Evaluate, StepResult
from lockstep.errors import ConfigError
from lockstep.tensors import local_of
from lockstep.verify.fault import Fault, FaultContext
from lockstep.verify.wrappers import EngineWrapper

__all__ = [
    "BitFlip",
    "ClipBeforeUnscale",
    "ExtraStep",
    "OtherRate",
    "RankAverage",
    "RankWeights",
    "SwappedState",
    "UnsentGradient",
]


class _StepCounter(EngineWrapper):
    """An engine that knows which step it is in."""

    def __init__(self, inner: Engine, context: FaultContext) -> None:
        super().__init__(inner)
        self.context = context
        self.done = context.begin

    @property
    def here(self) -> bool:
        """Whether this is the step at which the fault is planted, on the rank that has it."""
        return self.context.is_target_rank and self.done == self.context.step

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        result = self.inner.step(factor, limit, momentum, evaluate)
        self.done += 1
        return result


@final
class RankWeights(Fault):
    name, stage = "per-rank-weights", "initial weights"
    text = "the last rank begins with other weights"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        if context.is_target_rank and not context.resumed:
            with torch.no_grad():
                for parameter in context.parameters():
                    local_of(parameter).mul_(1.001)
        return engine


@final
class OtherRate(Fault):
    name, stage, moment = "other-rate", "optimizer", "step"
    text = "the last rank has another learning rate"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        return _OtherRate(engine, context)


class _OtherRate(_StepCounter):
    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        late = self.context.is_target_rank and self.done >= self.context.step
        return super().step(factor * 1.01 if late and factor is not None else factor, limit, momentum, evaluate)


@final
class ExtraStep(Fault):
    name, stage, moment = "extra-step", "optimizer", "step"
    text = "the last rank updates twice"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        return _Twice(engine, context)


class _Twice(_StepCounter):
    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        if not self.here:
            return super().step(factor, limit, momentum, evaluate)

        def again(optimizer: Any, *_: Any) -> None:
            handle.remove()  # the innermost optimizer ends first; it alone goes on once more, without its peers
            optimizer.step()

        handle = register_optimizer_step_post_hook(again)
        return super().step(factor, limit, momentum, evaluate)


@final
class BitFlip(Fault):
    name, stage, moment = "bit-flip", "weights", "step"
    text = "one bit of one parameter flips on the last rank, between two steps"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        return _Flipping(engine, context)


class _Flipping(_StepCounter):
    flipped = False

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        if self.here and not self.flipped:
            self.flipped = True
            parameter = next(local_of(p) for p in self.context.parameters() if local_of(p).numel())
            parameter.view(-1)[:1].view(torch.uint8)[0] ^= 1  # the lowest bit of the first element
        return self.inner.accumulate(last, counts)


@final
class UnsentGradient(Fault):
    name, stage, moment = "unsent-gradient", "reduction", "step"
    text = "the gradient of one micro-batch of the last rank is left out of the exchange"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        return _Unsent(engine, context)


class _Unsent(_StepCounter):
    kept = False

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if self.here and not self.kept:
            self.kept = True
            weight = 0.0
        self.inner.backward(loss, weight)


@final
class RankAverage(Fault):
    name, stage = "rank-average", "normalisation"
    text = "each rank divides by its own items, and the ranks' gradients are averaged"

    def outside(self, engine: Engine, context: FaultContext) -> Engine:
        return _Averaged(engine, context)


class _Averaged(_StepCounter):
    share = 1.0
    known = -1

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if self.known != self.done:
            assert self.context.step_loader is not None
            self.known, own = self.done, number(self.context.step_loader.items(self.done))
            every = self.context.world.gather(own)  # collective
            self.share = sum(every) / (own * len(every) or 1)
        self.inner.backward(loss, weight * self.share)


@final
class ClipBeforeUnscale(Fault):
    name, stage = "clip-before-unscale", "clipping"
    text = "the loss is scaled, and gradients are clipped before they are divided by the scale"
    scale = 2.0**16

    def __init__(self) -> None:
        self._handle: Any = None

    def check(self, config: Config, steps: int, resume: int) -> None:
        if not config.optim.clip:
            raise ConfigError(f"--plant {self.name} needs clipping: give --optim.clip a norm above 0")
        if config.precision == "fp16":  # both scales together overflow, which shows first
            raise ConfigError(f"--plant {self.name} scales the loss, as --precision fp16 does: use another precision")

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        seen: list[Any] = []

        def unscale(optimizer: Any, *_: Any) -> None:
            if seen and seen[0] is not optimizer:  # one inside another: the outermost has all parameters
                return
            seen[:] = [optimizer]
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            for gradient in gradients:
                local_of(gradient).div_(self.scale)

        wrapped = _Scaled(engine, self.scale, lambda: seen.clear())
        self._handle = register_optimizer_step_pre_hook(unscale)
        return wrapped

    def close(self) -> None:
        self._handle.remove()


class _Scaled(EngineWrapper):
    def __init__(self, inner: Engine, scale: float, reset: Callable[[], None]) -> None:
        super().__init__(inner)
        self._scale, self._reset = scale, reset

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self.inner.backward(loss, weight * self._scale)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        self._reset()
        result = self.inner.step(factor, limit, momentum, evaluate)
        found = StepResult(result.norm / self._scale, result.applied)
        found.penalty = result.penalty
        return found


@final
class SwappedState(Fault):
    name, stage, moment = "swapped-state", "optimizer state", "resume"
    text = "after a resume the last rank has another rank's part of the optimizer's state"

    def check(self, config: Config, steps: int, resume: int) -> None:
        if not resume:
            raise ConfigError(f"--plant {self.name} needs a resume: leave --resume-at out")

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        if context.resumed:
            state = engine.state_dict()  # may be collective
            moments = [local_of(t) for name, t in state.items() if context.is_target_rank and name.endswith("/exp_avg")]
            for moment in (m for m in moments if m.numel() > 1):
                moment.copy_(moment.flatten().roll(moment.numel() // 2).view_as(moment))
        return engine
