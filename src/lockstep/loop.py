"""The training loop.

for record in steps(engine, task, step_loader, exchange, control):
    ...                                             # log, evaluate, save: plain ifs, in the caller's body
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.clock import Clock
from lockstep.data.batches import MicroBatch, StepLoader, seed_everything
from lockstep.distributed.step_exchange import StepExchange
from lockstep.engines.base import Engine
from lockstep.errors import ConfigError
from lockstep.records import StepRecord
from lockstep.seeds import derive
from lockstep.task import Task

__all__ = ["UNAUDITED", "Audits", "StepControl", "described", "loss_of", "scalar", "seeder", "steps"]


class Audits(Protocol):
    """What looks at how micro-batches are computed; see `lockstep.guards.audit`."""

    def watch(self, step: int, batch: MicroBatch) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Around forward and backward; what it gives takes the loss between the two, and returns it."""

    def compare(self, step: int) -> None:
        """After the last micro-batch, before the update. May raise: then the step is not applied."""

    def close(self) -> None:
        """No step comes after it."""


class _Unaudited:
    """Looks at nothing."""

    _seen: AbstractContextManager[Callable[[Tensor], Tensor]] = nullcontext(lambda loss: loss)

    def watch(self, step: int, batch: MicroBatch) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        return self._seen

    def compare(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


UNAUDITED = _Unaudited()
_ANY: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class StepControl:
    """What the loop asks by step.

    Attributes:
        factor: step -> what the base learning rate is multiplied by.
        momentum: step -> that of every parameter group; None: as it is.
        audit: sees each micro-batch's loss and backward.
        before_update: called before what an engine changes in a step is changed.
        limit: step -> what its gradient's norm must stay below to be applied; -inf leaves the step out.
        seed: (step, micro-batch) -> None; seeds every generator that the model may draw from.
        kernels: (step, micro-batch) -> what its forward runs in; see `lockstep.run.kernels`.
        clock: adds up where the time goes.
    """

    factor: Callable[[int], float]
    seed: Callable[[int, int], None]
    clock: Clock
    limit: Callable[[int], float] = lambda step: math.inf
    momentum: Callable[[int], float | None] = lambda step: None
    audit: Audits = UNAUDITED
    kernels: Callable[[int, int], AbstractContextManager[Any]] = lambda step, index: _ANY
    before_update: Callable[[], None] = lambda: None


def steps(
    engine: Engine, task: Task, step_loader: StepLoader, exchange: StepExchange, control: StepControl
) -> Iterator[StepRecord]:
    """Trains, and yields what each step did. The loss of a step is the sum over its items divided by their number.

    `items` is counted over all ranks and micro-batches, so the gradient does not depend on who computed what.
    """
    clock, model, loss_sum, hooks = control.clock, engine.model, loss_of(task), task.hooks
    clock.start()
    for step, micro in step_loader:
        items = exchange.global_items(step)
        clock.lap("data")
        losses = []
        for slot, batch in enumerate(micro):
            if hooks:
                hooks.before_batch(step, batch.index, slot, len(micro), counts=bool(batch.weight))
            control.seed(step, batch.index)
            last = batch is micro[-1]
            with engine.accumulate(last), control.audit.watch(step, batch) as seen:
                with control.kernels(step, batch.index):
                    loss = seen(loss_sum(model, batch))
                clock.lap("forward")
                engine.backward(loss, batch.weight / max(items, 1))
                clock.lap("backward" if last else "backward/alone")  # in the last one ranks wait for each other
            if batch.weight:
                losses.append(loss.detach())
        control.audit.compare(step)
        exchange.send(step)  # under way while the optimizer steps; loads the next step where items must be counted
        clock.lap("data")
        factor = control.factor(step)
        limit = control.limit(step)
        control.before_update()
        result = engine.step(factor, limit, control.momentum(step))
        exchange.taken = step + 1
        clock.lap("update")
        stop_agreed = exchange.receive()
        clock.lap("data")
        yield StepRecord(step, items, losses, result.norm, factor, stop_agreed, result.applied, limit)
        clock.start()


def loss_of(task: Task) -> Callable[[nn.Module, MicroBatch], Tensor]:
    """The task's loss as a sum over the items of a micro-batch, whatever its `reduction`: 0-dim."""
    mean = task.reduction == "mean"

    def summed(model: nn.Module, batch: MicroBatch) -> Tensor:
        loss = task.loss(model, batch.data)
        if type(loss) is not Tensor or loss.ndim or not loss.requires_grad:
            loss = scalar(loss)
        return loss * batch.items if mean else loss

    return summed


def scalar(loss: Any) -> Tensor:
    """A loss as a 0-dim tensor; one of a single number, such as [1], is taken for it.

    Raises:
        ConfigError: it is no tensor of one floating-point number, or has no graph where a backward is to come.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        raise ConfigError(
            f"the task's `loss` returned {described(loss)}: it must return one number, a 0-dim float tensor"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            "the task's `loss` returned a tensor without a graph, so nothing is learnt: compute it from the model's "
            "output, without detach() and no_grad()"
        )
    return loss.reshape(()) if loss.ndim else loss


def described(value: Any) -> str:
    """What a method returned, in a word or two: `a float`, `a float32 tensor of shape [8, 2]`."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


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
