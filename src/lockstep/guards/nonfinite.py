"""A loss or gradient that is not finite: where it comes from.

    found = origin(...)     # "micro-batch 3 (samples 17, 4) on rank 1: the first output that is not finite is ..."

The engine has left the step out already, on the device and in the same step. Here the micro-batches are run again,
without gradients and without the compiler, which hooks would break up, to find the first module whose output is not
finite; the model's buffers are left as they are.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.world import World
from lockstep.engines.base import at_rest
from lockstep.engines.shared.buffers import unmoved
from lockstep.guards.reading import ReadStep
from lockstep.transforms.eager import eager

__all__ = ["origin"]


def origin(
    step: ReadStep,
    plain: nn.Module,
    loss_of: Callable[[Any], Tensor],
    seed: Callable[[int, int], None],
    samples: Callable[[int, int], list[int]],
    world: World,
    *,
    whole: bool = False,
) -> str:
    """What is known of the first micro-batch with a value that is not finite. Every rank calls it. Collective.

    Args:
        plain: the model without what an engine put around it; its modules are watched.
        loss_of: the loss of a micro-batch, or what is finite where its outputs are, through the engine's model.
        seed: as in the loop, so that dropout falls as it did.
        samples: of (step, micro-batch).
        whole: the loss is that of the whole step, so that no micro-batch has one of its own.
    """
    mine: list[Any] | None = None
    losses = iter(step.losses)
    with unmoved(plain.buffers()):
        for batch in step.micro:  # all of them, on every rank: their forwards may have collectives
            seed(step.record.step, batch.index)
            module, finite = _first(plain, loss_of, batch)
            before = whole or not batch.weight or math.isfinite(next(losses))
            if mine is None and batch.weight and (module or not finite or not before):
                mine = [batch.index, module, finite, samples(step.record.step, batch.index)]
    at_rest(plain)
    found = [[*each, rank] for rank, each in enumerate(world.gather(mine)) if each]  # collective
    if not found and whole:
        return "every micro-batch's outputs are finite: the loss over the whole step made it, or a backward"
    if not found:
        return "the losses are finite: the backward made it"
    index, module, finite, chosen, rank = min(found)
    shown = ", ".join(str(sample) for sample in chosen[:16]) + (", ..." if len(chosen) > 16 else "")
    where = f"every module's output is finite, {'what `outputs` returned' if whole else 'its loss'} is not"
    if module:
        where = f"the first output that is not finite is of module '{module}'"
    elif finite:
        where = "its loss was not finite, and is when computed again: suspect the hardware"
    return f"micro-batch {index} (samples {shown}) on {rank_label(rank)}: {where}"


def _first(plain: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any) -> tuple[str, bool]:
    """The first module whose output is not finite, and whether the loss is finite."""
    found: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not _finite(output):
                found.append(name)

        return look

    handles = [module.register_forward_hook(hook(name or type(module).__name__)) for name, module in _named(plain)]
    try:
        with torch.no_grad(), eager():
            loss = float(loss_of(batch))  # waits for the device: the run is stopping or losing a step anyway
    finally:
        for handle in handles:
            handle.remove()
    return (found[0] if found else ""), math.isfinite(loss)


def _named(plain: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in plain.named_modules() if not name.endswith("_checkpoint_wrapped_module")]


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(item) for item in value)
    return True
