"""The exact distributed evaluation: every sample counts once, whatever the world size.

record = evaluate(engine, task, batches, world, step=500, seed=0)
"""

import math
from typing import Any

import torch

from lockstep.data.batches import Batches, Cut
from lockstep.engines.base import Engine
from lockstep.loop import loss_of, seeder
from lockstep.records import EvaluationRecord
from lockstep.world import World

__all__ = ["evaluate", "one_step"]


def one_step(samples: int, micro_size: int) -> Cut:
    """The whole set as a single step, so that the rule of slots shares its micro-batches out over the ranks."""
    return Cut(-(-samples // micro_size) * micro_size, micro_size, samples)


def evaluate(engine: Engine, task: Any, batches: Batches, world: World, *, step: int, seed: int) -> EvaluationRecord:
    """Mean loss and metrics over the set, in `eval()` and without gradients; each module's mode is put back.

    Every micro-batch is computed alike at every world size, repeats weigh 0, and the sums are formed in float64 by an
    exactly rounded sum, so that neither the number of ranks nor their order shows in the result.
    """
    modes = [(module, module.training) for module in engine.model.modules()]
    engine.model.eval()
    try:
        with torch.no_grad():
            names, rows = _own_rows(engine, task, batches, seeder(seed, "evaluation", world.device))
    finally:
        for module, mode in modes:
            module.training = mode
    gathered = [row for part in world.gather(rows) for row in part]  # collective
    sums = [math.fsum(column) for column in zip(*gathered, strict=True)] if gathered else [0.0, 0.0]
    items = int(sums[1])
    metrics = {name: sums[2 + 2 * k] / max(sums[3 + 2 * k], 1.0) for k, name in enumerate(names)}
    return EvaluationRecord(step, sums[0] / items if items else math.nan, items, metrics)


def _own_rows(engine: Engine, task: Any, batches: Batches, reseed: Any) -> tuple[list[str], list[list[float]]]:
    """(names of the metrics, a row a micro-batch of this rank that counts: loss, items, then sum and count of each)."""
    loss_sum, measure = loss_of(task), getattr(task, "metrics", None)
    names: list[str] = []
    rows: list[list[Any]] = []
    for _, batch in batches.micro(0):
        reseed(0, batch.index)
        loss = loss_sum(engine.model, batch)
        found = measure(engine.model, batch.data) if measure else {}
        names = list(found)
        if batch.weight:
            rows.append([loss, float(batch.items), *(number for pair in found.values() for number in pair)])
    return names, _read(rows)


def _read(rows: list[list[Any]]) -> list[list[float]]:
    """Numbers for tensors: all of a device's are read at once, so that it is waited for a single time."""
    tensors = [value.detach().double().reshape(()) for row in rows for value in row if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])  # waits for the device
    return [[next(numbers) if isinstance(v, torch.Tensor) else float(v) for v in row] for row in rows]
