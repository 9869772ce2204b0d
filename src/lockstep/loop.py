"""The training loop.

for record in steps(engine, task, feed, beat, plan):
    ...                                             # log, evaluate, save: plain ifs, in the caller's body
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.clock import Clock
from lockstep.data.batches import Feed, MicroBatch, seed_everything
from lockstep.engines.base import Engine
from lockstep.heartbeat import Heartbeat
from lockstep.records import StepRecord
from lockstep.seeds import derive

__all__ = ["Plan", "loss_of", "seeder", "steps"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the loop asks by step.

    Attributes:
        factor: step -> what the base learning rate is multiplied by.
        limit: step -> what its gradient's norm must stay below to be applied; -inf leaves the step out.
        seed: (step, micro-batch) -> None; seeds every generator that the model may draw from.
        clock: adds up where the time goes.
    """

    factor: Callable[[int], float]
    seed: Callable[[int, int], None]
    clock: Clock
    limit: Callable[[int], float] = lambda step: math.inf


def steps(engine: Engine, task: Any, feed: Feed, beat: Heartbeat, plan: Plan) -> Iterator[StepRecord]:
    """Trains, and yields what each step did. The loss of a step is the sum over its items divided by their number.

    `items` is counted over all ranks and micro-batches, so the gradient does not depend on who computed what.
    """
    clock, model, loss_sum = plan.clock, engine.model, loss_of(task)
    clock.start()
    for step, micro in feed:
        items = beat.items(step)
        clock.lap("data")
        losses = []
        for batch in micro:
            plan.seed(step, batch.index)
            with engine.accumulate(batch is micro[-1]):
                loss = loss_sum(model, batch)
                clock.lap("forward")
                engine.backward(loss, batch.weight / max(items, 1))
                clock.lap("backward")
            if batch.weight:
                losses.append(loss.detach())
        beat.send(step)  # under way while the optimizer steps; loads the next step where items must be counted
        clock.lap("data")
        factor = plan.factor(step)
        result = engine.step(factor, plan.limit(step))
        clock.lap("update")
        agreed = beat.receive()
        clock.lap("data")
        yield StepRecord(step, items, losses, result.norm, factor, agreed, result.applied)
        clock.start()


def loss_of(task: Any) -> Callable[[nn.Module, MicroBatch], Tensor]:
    """The task's loss as a sum over the items of a micro-batch, whatever its `reduction`."""
    if getattr(task, "reduction", "sum") == "mean":
        return lambda model, batch: task.loss(model, batch.data) * batch.items
    return lambda model, batch: task.loss(model, batch.data)


def seeder(seed: int, purpose: str, device: torch.device) -> Callable[[int, int], None]:
    """(step, micro-batch) -> None: seeds the CPU's generators and the device's, from these numbers alone."""
    if device.type != "cuda":
        return lambda step, index: seed_everything(derive(seed, purpose, step, index))
    generator = torch.cuda.default_generators[device.index]

    def reseed(step: int, index: int) -> None:
        key = derive(seed, purpose, step, index)
        seed_everything(key)
        generator.manual_seed(key)

    return reseed
