"""The exact distributed evaluation: every sample counts once, whatever the world size.

record = evaluate(engine, task, batches, world, step=500, seed=0)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batches import Batches, Cut, MicroBatch
from lockstep.engines.base import Engine
from lockstep.errors import LockstepError
from lockstep.loop import scalar, seeder
from lockstep.records import EvaluationRecord
from lockstep.task import Task
from lockstep.world import World

__all__ = ["evaluate", "measures", "one_step"]


def one_step(samples: int, micro_size: int) -> Cut:
    """The whole set as a single step, so that the rule of slots shares its micro-batches out over the ranks."""
    return Cut(-(-samples // micro_size) * micro_size, micro_size, samples)


def evaluate(
    engine: Engine,
    task: Task,
    batches: Batches,
    world: World,
    *,
    step: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationRecord:
    """Mean loss and metrics over the set, in `eval()` and without gradients; each module's mode is put back.

    Every micro-batch is computed alike at every world size, repeats weigh 0, and the sums are formed in float64 by an
    exactly rounded sum, so that neither the number of ranks nor their order shows in the result. What is kept of a
    micro-batch is a few numbers: on a CPU they are read at once, on a device once, at the end.

    Args:
        progress: told after each micro-batch of this rank: how many are done, and of how many.
    """
    modes = [(module, module.training) for module in engine.model.modules()]
    engine.model.eval()
    try:
        with torch.no_grad():
            reseed = seeder(seed, "evaluation", world.device)
            names, rows = _own_rows(engine.model, task, batches, reseed, progress)
    finally:
        for module, mode in modes:
            module.training = mode
    gathered = [row for part in world.gather(rows) for row in part]  # collective
    sums = [math.fsum(column) for column in zip(*gathered, strict=True)] if gathered else [0.0, 0.0]
    items = int(sums[1])
    metrics = {name: sums[2 + 2 * k] / max(sums[3 + 2 * k], 1.0) for k, name in enumerate(names)}
    return EvaluationRecord(step, sums[0] / items if items else math.nan, items, metrics)


def measures(task: Task) -> Callable[[nn.Module, MicroBatch], tuple[Any, Mapping[str, Any]]]:
    """(model, micro-batch) -> (the loss, summed over the items; name -> (sum, count)), as the task offers them.

    The loss of a micro-batch without items is 0 where it is a mean, which would be 0 / 0.
    """
    mean = task.reduction == "mean"

    def measured(model: nn.Module, batch: MicroBatch) -> tuple[Any, Mapping[str, Any]]:
        loss, found = task.evaluate(model, batch.data)
        loss = scalar(loss)
        if not mean:
            return loss, found
        return loss * batch.items if batch.items else 0.0, found

    return measured


def _own_rows(
    model: nn.Module, task: Task, batches: Batches, reseed: Any, progress: Callable[[int, int], None] | None
) -> tuple[list[str], list[list[float]]]:
    """(names of the metrics, a row a micro-batch of this rank that counts: loss, items, then sum and count of each)."""
    measure, names = measures(task), None
    mine = -(-batches.cut.micro_batches // batches.world_size)
    rows: list[list[Any]] = []
    for done, (_, batch) in enumerate(batches.micro(0), 1):
        reseed(0, batch.index)
        loss, found = measure(model, batch)
        if names is None:
            names = list(found)
        elif list(found) != names:
            raise LockstepError(
                f"the task's metrics are named {', '.join(found) or 'nothing'} in one micro-batch and "
                f"{', '.join(names) or 'nothing'} in another: return the same names each time, with count 0 if need be"
            )
        if batch.weight:
            rows.append(_kept([loss, float(batch.items), *(number for pair in found.values() for number in pair)]))
        if progress:
            progress(done, mine)
    return names or [], _read(rows)


def _kept(row: list[Any]) -> list[Any]:
    """A row without what lies on the host: small tensors that outlive a forward hold the heap apart, and it grows."""
    return [v if isinstance(v, Tensor) and v.device.type != "cpu" else float(v) for v in row]


def _read(rows: list[list[Any]]) -> list[list[float]]:
    """Numbers for tensors: all of a device's are read at once, so that it is waited for a single time."""
    tensors = [value.detach().double().reshape(()) for row in rows for value in row if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])  # waits for the device
    return [[next(numbers) if isinstance(v, Tensor) else float(v) for v in row] for row in rows]
