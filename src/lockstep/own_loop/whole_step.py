"""A loss over all samples of a step, in a loop of one's own.

for step in lockstep.loader(pairs, world, batch_size=64, micro_batch_size=8):
    loss = lockstep.step_backward(step, engine, lambda model, data: model(*data), info_nce)
    engine.step()
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.clock import HostClock
from lockstep.engines.base import Engine
from lockstep.errors import UsageError
from lockstep.own_loop.loader import LoaderStep
from lockstep.passes import StepControl
from lockstep.task import Task
from lockstep.whole_step import WholeStepPasses

__all__ = ["step_backward"]


def step_backward(
    step: LoaderStep,
    engine: Engine,
    outputs: Callable[[nn.Module, Any], Any],
    step_loss: Callable[[Any], Tensor] | None = None,
    *,
    step_loss_rows: Callable[[Any, Any, int], Tensor] | None = None,
) -> Tensor:
    """Compute the gradient of a loss over all samples of a step; `engine.step()` follows. Collective.

    Two forwards of each micro-batch, or one where this rank has one micro-batch. The gradient is that of one forward
    over the whole step, on any number of ranks.

    Args:
        step: of a `lockstep.loader`; its micro-batches are not to be computed besides.
        outputs: (engine.model, a micro-batch's data) -> a tensor of shape [samples, ...], or a tuple or dict of such.
        step_loss: these outputs of all samples of the step, in their order -> the loss, 0-dim. It uses no parameter.
        step_loss_rows: in its place, (own, whole, first) -> the part of the micro-batch whose outputs are `own`, which
            begin at row `first` of `whole`. The loss is the sum of the parts.

    Returns:
        the step's loss, 0-dim, the same on every rank.

    Raises:
        UsageError: neither `step_loss` nor `step_loss_rows` was given, or both.
    """
    if (step_loss is None) == (step_loss_rows is None):
        raise UsageError("lockstep.step_backward: give step_loss or step_loss_rows, and not both")
    passes = WholeStepPasses(engine, _Losses(outputs, step_loss, step_loss_rows), _control(step))
    found = passes.first(step.number, step.micro, 1.0)
    total = torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=step.world.device)
    if step.world.size > 1:
        dist.all_reduce(total)  # collective
    return total


def _control(step: LoaderStep) -> StepControl:
    return StepControl(
        factor=lambda number: 1.0,
        seed=step.seed,
        clock=HostClock(),
        world=step.world,
        micro_batches=step.micro_batches,
    )


class _Losses(Task):
    """What the passes ask of a task."""

    def __init__(self, outputs: Any, step_loss: Any, rows: Any) -> None:
        self.outputs = outputs  # type: ignore[method-assign]
        if step_loss:
            self.step_loss = step_loss  # type: ignore[method-assign]
        if rows:
            self.step_loss_rows = rows  # type: ignore[method-assign]

    def model(self) -> NoReturn:
        raise NotImplementedError

    def dataset(self, split: str) -> NoReturn:
        raise NotImplementedError
