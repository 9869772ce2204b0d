"""Plant faults: each makes one rank go wrong, to check that `verify` finds it."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.config.schema import Config
from lockstep.counts import number
from lockstep.data.batches import Batches, MicroBatch, seed_everything
from lockstep.data.sampler import Indices, SizedOrder, order_of
from lockstep.engines.base import Engine, Evaluate, StepResult
from lockstep.errors import ConfigError
from lockstep.loop import seeder
from lockstep.seeds import derive
from lockstep.task import Order, Task
from lockstep.tensors import local_of
from lockstep.verify.request import Fault, FaultContext, Seed
from lockstep.verify.wrappers import EngineWrapper, TaskWrapper

__all__ = [
    "BitFlip",
    "ClipBeforeUnscale",
    "DroppedOnResume",
    "ExtraStep",
    "LocalBatchNorm",
    "OtherRate",
    "OverlappingShards",
    "PaddedEvaluation",
    "RankAverage",
    "RankSeed",
    "RankWeights",
    "SwappedState",
    "TiedDropout",
    "UnsentGradient",
    "fault",
]


@final
class RankSeed(Fault):
    name, stage = "per-rank-seed", "randomness"
    text = "each rank seeds its generators with the run's seed plus its rank"

    def seed(self, seed: Seed, context: FaultContext) -> Seed:
        return seeder(context.config.seed + context.world.rank, "micro", context.world.device)


@final
class TiedDropout(Fault):
    name, stage = "rank-dropout", "randomness"
    text = "the model draws its dropout from a generator that is tied to the rank"

    def task(self, task: Task, context: FaultContext) -> Task:
        return _Tied(task, derive(context.config.seed, "rank", context.world.rank))


class _Tied(TaskWrapper):
    def __init__(self, inner: Task, key: int) -> None:
        super().__init__(inner)
        self._key = key

    def model(self) -> nn.Module:
        model = self.inner.model()
        model.register_forward_pre_hook(lambda module, _: seed_everything(self._key) if module.training else None)
        return model


@final
class OverlappingShards(Fault):
    name, stage = "overlapping-data", "data"
    text = "every rank reads the samples of rank 0"

    def task(self, task: Task, context: FaultContext) -> Task:
        config, world = context.config, context.world
        each = -(-config.micro_batches // world.size)
        own = world.rank * each * config.micro_size  # offset of this rank's samples in a step
        return _Ordered(task, lambda place: place - own * (place % config.batch_size >= own))


@final
class DroppedOnResume(Fault):
    name, stage, moment = "dropped-sample", "data", "resume"
    text = "a resume begins one sample too late"

    def task(self, task: Task, context: FaultContext) -> Task:
        return _Ordered(task, lambda place: place + int(context.resumed))

    def check(self, config: Config, steps: int, resume: int) -> None:
        if not resume:
            raise ConfigError(f"--plant {self.name} needs a resume: leave --resume-at out")


class _Ordered(TaskWrapper):
    """A task that on this rank reads the samples of other positions."""

    def __init__(self, inner: Task, move: Callable[[Indices], Indices]) -> None:
        super().__init__(inner)
        self._move = move

    def order(self, samples: int, seed: int) -> Order:
        return _Moved(order_of(self.inner, samples, seed), self._move)


class _Moved:
    def __init__(self, inner: SizedOrder, move: Callable[[Indices], Indices]) -> None:
        self._inner, self._move = inner, move

    def __len__(self) -> int:
        return self._inner.size

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        places = self._move(np.arange(start, stop))
        if not places.size:
            return places, places
        first = int(places.min())
        epochs, samples = self._inner.at(first, int(places.max()) + 1)
        return epochs[places - first], samples[places - first]


@final
class PaddedEvaluation(Fault):
    name, stage, moment = "padded-evaluation", "evaluation", "end"
    text = "the evaluation set is padded with duplicates, which count"

    def evaluation(self, batches: Batches, context: FaultContext) -> Any:
        return _PaddedBatches(batches, context)


class _PaddedBatches:
    """Batches plus a repeated micro-batch on every rank, which counts on the last."""

    def __init__(self, inner: Batches, context: FaultContext) -> None:
        self._inner, self._counts = inner, float(context.is_target_rank)
        self.step_plan, self.slots, self.slots_in_all = inner.step_plan, inner.slots, inner.slots_in_all

    def micro(self, start: int) -> Iterator[tuple[int, MicroBatch]]:
        step, micro = start, None
        for found in self._inner.micro(start):
            step, batch = found
            micro = batch if batch.weight or micro is None else micro
            yield found
        if micro is not None:
            yield step, MicroBatch(micro.data, micro.index, micro.items, self._counts)


@final
class LocalBatchNorm(Fault):
    name, stage = "local-batchnorm", "buffers"
    text = "a running mean, as BatchNorm keeps it, takes in this rank's micro-batches alone"

    everywhere = True  # the single process has the layer too, and sees every micro-batch

    def check(self, config: Config, steps: int, resume: int) -> None:
        if config.exact:
            raise ConfigError(f"--plant {self.name}: --exact refuses a buffer that a forward writes; leave --exact out")

    def task(self, task: Task, context: FaultContext) -> Task:
        return _Averaging(task)


class _Averaging(TaskWrapper):
    def model(self) -> nn.Module:
        model = self.inner.model()
        weight = next(model.parameters())
        model.register_buffer("running_mean", torch.zeros((), dtype=weight.dtype))
        model.register_forward_hook(_average)
        return model


@torch.no_grad()
def _average(module: nn.Module, _: Any, output: Any) -> None:
    """Update a running mean in a forward hook, with momentum 0.1 as in torch.nn.BatchNorm1d."""
    while not isinstance(output, Tensor):  # the first tensor of a tuple, or of what a hub model returns
        output = next(iter(output.values() if hasattr(output, "values") else output))
    if module.training:
        mean = module.get_buffer("running_mean")
        mean.lerp_(output.detach().to(mean.dtype).mean(), 0.1)


class _StepCounter(EngineWrapper):
    """An engine that counts its steps."""

    def __init__(self, inner: Engine, context: FaultContext) -> None:
        super().__init__(inner)
        self.context = context
        self.done = context.begin

    @property
    def here(self) -> bool:
        """Whether this is the step and the rank of the fault."""
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
        return _RateEngine(engine, context)


class _RateEngine(_StepCounter):
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
            handle.remove()  # the innermost optimizer ends first; only it steps once more, without its peers
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
        return _RankMean(engine, context)


class _RankMean(_StepCounter):
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
            if seen and seen[0] is not optimizer:  # nested optimizers: the outermost has all parameters
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


_FAULTS: dict[str, type[Fault]] = {
    kind.name: kind
    for kind in (
        RankSeed,
        RankWeights,
        OverlappingShards,
        DroppedOnResume,
        UnsentGradient,
        LocalBatchNorm,
        RankAverage,
        OtherRate,
        TiedDropout,
        ExtraStep,
        BitFlip,
        ClipBeforeUnscale,
        PaddedEvaluation,
        SwappedState,
    )
}


def fault(name: str) -> Fault:
    """Make a fault by its name; "" is none.

    Raises:
        ConfigError: the name is unknown.
    """
    if not name:
        return Fault()
    if name not in _FAULTS:
        raise ConfigError(f"--plant '{name}': choose one of {', '.join(_FAULTS)}")
    return _FAULTS[name]()
