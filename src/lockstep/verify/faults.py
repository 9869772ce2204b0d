"""Plant faults: each makes one rank go wrong, to check that `verify` finds it."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.config.schema import Config, default_micro_batch_size
from lockstep.counts import number
from lockstep.data.batches import Batches, MicroBatch, seed_everything
from lockstep.data.sampler import Indices, SizedOrder, order_of
from lockstep.engines import mesh_norms
from lockstep.engines.base import Engine, Evaluate, ForwardingEngine, StepResult
from lockstep.errors import ConfigError
from lockstep.loop import seeder
from lockstep.parallel import activations, stages
from lockstep.parallel import context as parallel_context
from lockstep.parallel.context import ContextGroup
from lockstep.parallel.pipeline import Pipeline
from lockstep.seeds import derive
from lockstep.task import Order, Task
from lockstep.tensors import local_of
from lockstep.training.start.replicas import plan_of
from lockstep.verify.request import Fault, FaultContext, Seed
from lockstep.verify.wrappers import TaskWrapper

__all__ = [
    "fault",
]


@final
class RankSeed(Fault):
    name = "per-rank-seed"
    stage = "randomness"
    text = "each rank seeds its generators with seed + rank"

    def seed(self, seed: Seed, context: FaultContext) -> Seed:
        return seeder(context.config.seed + context.world.rank, "micro", context.world.device)


@final
class TiedDropout(Fault):
    name = "rank-dropout"
    stage = "randomness"
    text = "dropout draws from a generator that is seeded by the rank"

    def task(self, task: Task, context: FaultContext) -> Task:
        return _RankDropoutTask(task, derive(context.config.seed, "rank", context.world.rank))


class _RankDropoutTask(TaskWrapper):
    def __init__(self, inner: Task, key: int) -> None:
        super().__init__(inner)
        self._key = key

    def model(self) -> nn.Module:
        model = self.inner.model()
        model.register_forward_pre_hook(lambda module, _: seed_everything(self._key) if module.training else None)
        return model


@final
class OverlappingShards(Fault):
    name = "overlapping-data"
    stage = "data"
    text = "every rank reads the samples of rank 0"

    def task(self, task: Task, context: FaultContext) -> Task:
        config = context.config
        world = context.world
        # `verify` cuts every run in this way.
        size = config.micro_batch_size or default_micro_batch_size(config.batch_size)
        slots = -(-config.batch_size // (size * world.size))
        # Start of this rank's samples in a step.
        start = world.rank * slots * size
        return _Reordered(task, lambda place: place - start * (place % config.batch_size >= start))


@final
class DroppedOnResume(Fault):
    name = "dropped-sample"
    stage = "data"
    moment = "resume"
    text = "a resume skips one sample"

    def task(self, task: Task, context: FaultContext) -> Task:
        return _Reordered(task, lambda place: place + int(context.resumed))

    def check(self, config: Config, steps: int, resume: int) -> None:
        if not resume:
            raise ConfigError(f"--plant {self.name} needs a resume; drop --resume-at 0")


class _Reordered(TaskWrapper):
    """Task that reads the samples of other positions on this rank."""

    def __init__(self, inner: Task, move: Callable[[Indices], Indices]) -> None:
        super().__init__(inner)
        self._move = move

    def order(self, samples: int, seed: int) -> Order:
        return _MappedOrder(order_of(self.inner, samples, seed), self._move)


class _MappedOrder:
    def __init__(self, inner: SizedOrder, move: Callable[[Indices], Indices]) -> None:
        self._inner = inner
        self._move = move

    def __len__(self) -> int:
        return self._inner.size

    def at(self, start: int, stop: int) -> tuple[Indices, Indices]:
        # The inner order takes ranges only, so read the range of all wanted positions.
        places = self._move(np.arange(start, stop))
        if not places.size:
            return places, places
        lowest = int(places.min())
        epochs, samples = self._inner.at(lowest, int(places.max()) + 1)
        return epochs[places - lowest], samples[places - lowest]


@final
class PaddedEvaluation(Fault):
    name = "padded-evaluation"
    stage = "evaluation"
    moment = "end"
    text = "the evaluation set is padded with duplicates that count in the loss"

    def evaluation(self, batches: Batches, context: FaultContext) -> Any:
        return _PaddedBatches(batches, context)


class _PaddedBatches:
    """Batches plus a repeated micro-batch on every rank, which counts on the last."""

    def __init__(self, inner: Batches, context: FaultContext) -> None:
        self._inner = inner
        self._counts = float(context.is_target_rank)
        self.step_plan = inner.step_plan
        self.slots = inner.slots
        self.slots_in_all = inner.slots_in_all

    def micro(self, start: int) -> Iterator[tuple[int, MicroBatch]]:
        step = start
        micro = None
        for pair in self._inner.micro(start):
            step, batch = pair
            micro = batch if batch.weight or micro is None else micro
            yield pair
        if micro is not None:
            yield step, MicroBatch(micro.data, micro.index, micro.items, self._counts)


@final
class LocalBatchNorm(Fault):
    name = "local-batchnorm"
    stage = "buffers"
    text = "a running mean like BatchNorm's covers this rank's micro-batches only"

    # The single process has the layer too, and sees every micro-batch.
    everywhere = True

    def check(self, config: Config, steps: int, resume: int) -> None:
        if config.exact:
            raise ConfigError(f"--plant {self.name}: --exact refuses buffers that the forward writes; drop --exact")

    def task(self, task: Task, context: FaultContext) -> Task:
        return _RunningMeanTask(task)


class _RunningMeanTask(TaskWrapper):
    def model(self) -> nn.Module:
        model = self.inner.model()
        weight = next(model.parameters())
        model.register_buffer("running_mean", torch.zeros((), dtype=weight.dtype))
        model.register_forward_hook(_average)
        return model


@torch.no_grad()
def _average(module: nn.Module, _: Any, output: Any) -> None:
    """Update a running mean in a forward hook, with momentum 0.1 as in torch.nn.BatchNorm1d."""
    # Take the first tensor of a tuple or of a Hugging Face output.
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if hasattr(output, "values") else output))
    if module.training:
        mean = module.get_buffer("running_mean")
        mean.lerp_(output.detach().to(mean.dtype).mean(), 0.1)


class _StepCounter(ForwardingEngine):
    """Engine that counts its steps."""

    def __init__(self, inner: Engine, context: FaultContext) -> None:
        super().__init__(inner)
        self.context = context
        self.steps_done = context.begin

    @property
    def is_due(self) -> bool:
        """Whether this is the step and rank of the fault."""
        return self.context.is_target_rank and self.steps_done == self.context.step

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        result = self.inner.step(factor, limit, momentum, evaluate)
        self.steps_done += 1
        return result


@final
class RankWeights(Fault):
    name = "per-rank-weights"
    stage = "initial weights"
    text = "the last rank starts with other weights"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        if context.is_target_rank and not context.resumed:
            with torch.no_grad():
                for parameter in context.parameters():
                    local_of(parameter).mul_(1.001)
        return engine


@final
class OtherRate(Fault):
    name = "other-rate"
    stage = "optimizer"
    moment = "step"
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
        late = self.context.is_target_rank and self.steps_done >= self.context.step
        return super().step(factor * 1.01 if late and factor is not None else factor, limit, momentum, evaluate)


@final
class ExtraStep(Fault):
    name = "extra-step"
    stage = "optimizer"
    moment = "step"
    text = "the last rank updates twice"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        return _DoubleUpdate(engine, context)


class _DoubleUpdate(_StepCounter):
    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        if not self.is_due:
            return super().step(factor, limit, momentum, evaluate)

        def again(optimizer: Any, *_: Any) -> None:
            # The innermost optimizer ends first. Only it updates again, without its peers.
            handle.remove()
            optimizer.step()

        handle = register_optimizer_step_post_hook(again)
        return super().step(factor, limit, momentum, evaluate)


@final
class BitFlip(Fault):
    name = "bit-flip"
    stage = "weights"
    moment = "step"
    text = "one bit of one parameter flips on the last rank, between two steps"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        return _BitFlipEngine(engine, context)


class _BitFlipEngine(_StepCounter):
    flipped = False

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        if self.is_due and not self.flipped:
            self.flipped = True
            parameter = next(local_of(p) for p in self.context.parameters() if local_of(p).numel())
            # Address the memory directly, whatever the tensor's strides are.
            element = parameter.as_strided((1,), (1,))
            # The lowest bit.
            element.view(torch.uint8)[0] ^= 1
        return self.inner.accumulate(last, counts)


@final
class UnsentGradient(Fault):
    name = "unsent-gradient"
    stage = "reduction"
    moment = "step"
    text = "the all-reduce misses the gradient of one micro-batch of the last rank"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        return _UnsentEngine(engine, context)


class _UnsentEngine(_StepCounter):
    dropped = False

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if self.is_due and not self.dropped and weight:
            self.dropped = True
            # A weight of 0 would make this an empty slot, whose buffers would not count either.
            loss = loss * 0.0
        self.inner.backward(loss, weight)


@final
class RankAverage(Fault):
    name = "rank-average"
    stage = "normalisation"
    text = "each rank divides by its own items, and the ranks' gradients are averaged"

    def outside(self, engine: Engine, context: FaultContext) -> Engine:
        return _RankMeanEngine(engine, context)


class _RankMeanEngine(_StepCounter):
    share = 1.0
    share_step = -1

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if self.share_step != self.steps_done:
            assert self.context.step_loader is not None
            items = number(self.context.step_loader.items(self.steps_done))
            self.share_step = self.steps_done
            # All ranks, once for each step: the planted mean needs every rank's items.
            items_by_rank = self.context.world.gather(items)  # collective
            self.share = sum(items_by_rank) / (items * len(items_by_rank) or 1)
        self.inner.backward(loss, weight * self.share)


@final
class ClipBeforeUnscale(Fault):
    name = "clip-before-unscale"
    stage = "clipping"
    text = "scaled gradients are clipped before they are unscaled"
    scale = 2.0**16

    def __init__(self) -> None:
        self._handle: Any = None

    def check(self, config: Config, steps: int, resume: int) -> None:
        if not config.optim.clip:
            raise ConfigError(f"--plant {self.name} needs clipping; set --optim.clip above 0")
        # Together with the loss scale the gradients would overflow, which would show first.
        if config.precision == "fp16":
            raise ConfigError(
                f"--plant {self.name} conflicts with the loss scaling of --precision fp16; use another precision"
            )

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        optimizers: list[Any] = []

        def unscale(optimizer: Any, *_: Any) -> None:
            # Of nested optimizers the outermost has all parameters: unscale once.
            if optimizers and optimizers[0] is not optimizer:
                return
            optimizers[:] = [optimizer]
            gradients = []
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        gradients.append(p.grad)
            for gradient in gradients:
                local_of(gradient).div_(self.scale)

        wrapped = _ScaledEngine(engine, self.scale, lambda: optimizers.clear())
        self._handle = register_optimizer_step_pre_hook(unscale)
        return wrapped

    def close(self) -> None:
        self._handle.remove()


class _ScaledEngine(ForwardingEngine):
    def __init__(self, inner: Engine, scale: float, reset: Callable[[], None]) -> None:
        super().__init__(inner)
        self._scale = scale
        self._reset = reset

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
        return StepResult(result.norm / self._scale, result.applied, result.penalty)


@final
class SwappedState(Fault):
    name = "swapped-state"
    stage = "optimizer state"
    moment = "resume"
    text = "after a resume the last rank has another rank's shard of the optimizer state"

    def check(self, config: Config, steps: int, resume: int) -> None:
        if not resume:
            raise ConfigError(f"--plant {self.name} needs a resume; drop --resume-at 0")

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        if context.resumed:
            # Collective for engines that gather their state, so every rank calls it.
            state = engine.state_dict()
            moments = []
            for name, t in state.items():
                if context.is_target_rank and name.endswith("/exp_avg"):
                    moments.append(local_of(t))
            # Half a turn of the elements looks like another rank's shard.
            for moment in (m for m in moments if m.numel() > 1):
                moment.copy_(moment.flatten().roll(moment.numel() // 2).view_as(moment))
        return engine


class _DividedFault(Fault):
    """A fault in what the ranks of a replica do together, on all ranks: an exchange that one leaves out would hang."""

    divided = "tensor"

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute until the run ends."""
        # Of a class as it is stored: `getattr` unwraps a static method.
        original = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, original))

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


@final
class UnsummedInput(_DividedFault):
    name = "unsummed-input"
    stage = "reduction"
    text = "the gradient of what enters a divided layer is not summed over the ranks that have its parts"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        self.replace(activations._Enter, "backward", staticmethod(lambda _, gradient: (gradient, None)))
        return engine


@final
class CountedTwice(_DividedFault):
    name = "counted-twice"
    stage = "clipping"
    text = "the norm counts gradients that each rank has in full once for each rank"

    def check(self, config: Config, steps: int, resume: int) -> None:
        if not config.optim.clip:
            raise ConfigError(f"--plant {self.name} needs clipping; set --optim.clip above 0")

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        cut_over = mesh_norms._cut_over
        every = (context.world.replica.group,)
        self.replace(mesh_norms, "_cut_over", lambda gradient, done: cut_over(gradient, done) or every)
        return engine


@final
class ItemsOfAll(_DividedFault):
    name = "items-of-all"
    stage = "normalisation"
    text = "every rank of a replica counts its items, which are those of the others"

    def task(self, task: Task, context: FaultContext) -> Task:
        replicas = context.world.replicas
        assert replicas is not None
        everyone = dataclasses.replace(replicas, leaders=tuple(range(context.world.size)))
        self.replace(context.world, "replicas", everyone)
        return task


@final
class PlainShard(_DividedFault):
    name = "plain-shard"
    stage = "forward"
    text = "joined queries, keys and values are divided as one layer, and not each by itself"

    def task(self, task: Task, context: FaultContext) -> Task:
        return _UnpackedTask(task, context)


class _UnpackedTask(TaskWrapper):
    def __init__(self, inner: Task, context: FaultContext) -> None:
        super().__init__(inner)
        self._context = context

    def parallelize(self, model: nn.Module) -> dict[str, Any]:
        base = self._context.config.parallel
        own = dataclasses.replace(base, tensor=self._context.world.part("tp").size)
        plan = dict(plan_of(dataclasses.replace(self._context.config, parallel=own), self.inner, model))
        for pattern, word in plan.items():
            if str(word).startswith("packed"):
                plan[pattern] = "columns"
        return plan


@final
class RestartedPositions(_DividedFault):
    name = "restarted-positions"
    divided = "context"
    stage = "forward"
    text = "each rank that has a part of a sequence counts its positions from 0"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        def positions(group: ContextGroup, time: int, device: torch.device) -> Tensor:
            return torch.arange(time // group.size, device=device)

        self.replace(ContextGroup, "positions", positions)
        return engine


@final
class UnsummedKeys(_DividedFault):
    name = "unsummed-keys"
    divided = "context"
    stage = "reduction"
    text = "the gradients of keys and values are not summed over the ranks that attend to them"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return ctx.group.keep(gradient, ctx.dim), None, None

        self.replace(parallel_context._Join, "backward", staticmethod(backward))
        return engine


@final
class LocalDraws(_DividedFault):
    name = "local-draws"
    divided = "pipeline"
    stage = "randomness"
    text = "each stage of a pipeline draws its own random numbers, and does not continue those of the stage before"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        self.replace(stages, "_set_generators", lambda states, device: None)
        return engine


@final
class TiedEnds(_DividedFault):
    name = "tied-ends"
    divided = "pipeline"
    stage = "reduction"
    text = "the gradients of a table that the first and the last stage hold are not added"

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        self.replace(Pipeline, "add_tied", lambda pipeline, model: None)
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
        UnsummedInput,
        CountedTwice,
        ItemsOfAll,
        PlainShard,
        RestartedPositions,
        UnsummedKeys,
        LocalDraws,
        TiedEnds,
    )
}


def fault(name: str) -> Fault:
    """Create the fault of a name; "" is no fault.

    Raises:
        ConfigError: the name is unknown.
    """
    if not name:
        return Fault()
    if name not in _FAULTS:
        raise ConfigError(f"--plant '{name}' is unknown; choose one of {', '.join(_FAULTS)}")
    return _FAULTS[name]()
