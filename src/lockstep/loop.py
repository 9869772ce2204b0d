"""Define the training loop.

for record in steps(engine, task, step_loader, exchange, control):
    ...                                             # log, evaluate, save: plain ifs, in the caller's body
"""

from collections.abc import Iterator

import torch

from lockstep.data.batches import StepLoader
from lockstep.distributed.exchange import StepExchange
from lockstep.engines.base import Engine
from lockstep.passes import (
    NO_AUDIT,
    Audits,
    Passes,
    StepControl,
    StepOutOfMemory,
    check_scalar,
    describe_value,
    loss_of,
    seeder,
)
from lockstep.records import StepRecord
from lockstep.task import Task, has_step_loss
from lockstep.whole_step import WholeStepPasses

__all__ = [
    "NO_AUDIT",
    "Audits",
    "StepControl",
    "StepOutOfMemory",
    "check_scalar",
    "describe_value",
    "loss_of",
    "seeder",
    "steps",
]


def steps(
    engine: Engine, task: Task, step_loader: StepLoader, exchange: StepExchange, control: StepControl
) -> Iterator[StepRecord]:
    """Train, and yield the record of each step.

    The loss of a step is the sum over its items divided by their number. Items are counted over all ranks and
    micro-batches, so the gradient does not depend on which rank computes what.
    """
    passes = (WholeStepPasses if has_step_loss(task) else Passes)(engine, task, control)
    clock = control.clock
    clock.start()
    for step, micro in step_loader:
        # All ranks must have the same divisor. The counts were exchanged during the previous update, so this rarely
        # waits.
        items = exchange.global_items(step)
        clock.lap("data")
        control.before_passes(step, micro)
        try:
            losses = passes.first(step, micro, items)
        except torch.OutOfMemoryError as error:
            # Raised before the update: the caller may repeat the step with smaller micro-batches.
            raise StepOutOfMemory(*error.args) from error
        # Collective in the first step only, where the ranks compare the names of the task's numbers.
        numbers = passes.numbers(step)
        control.audit.compare(step)
        # Collective. The exchange of the next step's counts overlaps the optimizer step. It loads the next step if
        # items must be counted.
        exchange.send(step)
        clock.lap("data")
        factor = control.factor(step)
        limit = control.limit(step)
        control.before_update()
        control.gradients.begin(step)
        evaluate = passes.evaluation(step, micro, items, losses)
        result = engine.step(factor, limit, control.momentum(step), evaluate)
        # From here on the parameters have changed; a failure after this line must not repeat the step.
        exchange.engine_steps, rate = step + 1, control.rate()
        control.after_update(step + 1)
        if result.penalty is not None and any(not batch.index and batch.weight for batch in micro):
            # Every rank computes the same penalty. Only the rank of micro-batch 0 records it, so that it counts once.
            losses.append(result.penalty * items)
        clock.lap("update")
        # Waits for the other ranks' counts on the host, and learns whether any rank asks to stop.
        stop_agreed = exchange.receive()
        clock.lap("data")
        outcome = (rate, stop_agreed, result.applied, limit, numbers, control.gradients.found)
        yield StepRecord(step, items, losses, result.norm, factor, *outcome)
        clock.start()
