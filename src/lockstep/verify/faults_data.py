"""Planted faults of data, randomness and the model."""

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.config import Config
from lockstep.data.batches import Batches, MicroBatch, seed_everything
from lockstep.data.order import Indices
from lockstep.data.sampler import SizedOrder, order_of
from lockstep.errors import ConfigError
from lockstep.loop import seeder
from lockstep.seeds import derive
from lockstep.task import Order, Task
from lockstep.verify.fault import Fault, FaultContext, Seed
from lockstep.verify.wrappers import TaskWrapper

__all__ = ["DroppedOnResume", "LocalBatchNorm", "OverlappingShards", "PaddedEvaluation", "RankSeed", "TiedDropout"]


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
        own = world.rank * each * config.micro_size  # where this rank's samples begin in a step
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
    """A task whose positions have the samples of other positions on this rank."""

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
        return _Padded(batches, context)


class _Padded:
    """Every rank computes one micro-batch more, a repeat; it counts on the last rank."""

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
    """A forward hook: momentum 0.1, as in torch.nn.BatchNorm1d."""
    while not isinstance(output, Tensor):  # the first tensor of a tuple, or of what a hub model returns
        output = next(iter(output.values() if hasattr(output, "values") else output))
    if module.training:
        mean = module.get_buffer("running_mean")
        mean.lerp_(output.detach().to(mean.dtype).mean(), 0.1)
