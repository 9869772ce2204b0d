"""Check micro-batches without items, which a mean over items leaves out of a step.

    check = EmptyBatchCheck(built, seed)
    check(step, batch)          # raises DataError if such a batch has a loss or a gradient

A mean over no items is 0 / 0, so another micro-batch is computed in its place with weight 0
(`Batches.replace_empty`). That is wrong for a loss that `count` does not describe: a focal loss divided by at least one
positive still trains on the negatives.
"""

import math
from collections.abc import Callable
from typing import final

import torch

from lockstep.config.engine_options import ENGINES
from lockstep.data.batches import MicroBatch
from lockstep.distributed.progress import rank_label
from lockstep.engines.registry import name_of
from lockstep.errors import DataError
from lockstep.passes import split_loss
from lockstep.training.state.parts import RunParts
from lockstep.training.trial.trial_state import preserve_state

__all__ = ["EmptyBatchCheck"]


@final
class EmptyBatchCheck:
    """A check of one rank's micro-batches without items.

    It computes nothing where a forward is collective, as with sharded parameters: only this rank has such a batch.

    Args:
        built: the run's parts.
        seed: (step, micro-batch) -> None; seeds the generators.
    """

    def __init__(self, built: RunParts, seed: Callable[[int, int], None]) -> None:
        self._built = built
        self._seed = seed
        is_alone = ENGINES[name_of(built.config.engine, built.world)].shares
        # A stage of a pipeline computes the gradients of its own parameters alone.
        self._is_local = is_alone and built.task.own_steps is None and built.pipeline is None

    def __call__(self, step: int, batch: MicroBatch) -> None:
        """Check the batch that `batch` replaces.

        Raises:
            DataError: it has a loss or a gradient.
        """
        if not self._is_local:
            return
        model = self._built.model
        task = self._built.task
        if batch.move is None:
            data = batch.replaced
        else:
            data = batch.move(batch.replaced)
        with preserve_state(model, task, self._built.world.device, training=True):
            self._seed(step, batch.index)
            with torch.enable_grad():
                loss, _ = split_loss(task.loss(model, data))
            # Waits for the device. Such batches are rare.
            value = float(loss.detach())
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            # Waits for the device.
            is_zero = all(not bool(gradient.count_nonzero()) for gradient in gradients if gradient is not None)
        if not math.isfinite(value) or (not value and is_zero):
            return
        rank = rank_label(self._built.world.rank)
        raise DataError(
            f"{rank}, step {step + 1}: a micro-batch of 0 items by the task's `count` has a loss of {value:.4g}, which "
            "a mean over the items leaves out: return the sum over the items from `loss`, with reduction = 'sum'"
        )
