"""What all ranks found in a step, brought together: each sample once, in the order of the data.

for step in lockstep.loader(held_out, world, batch_size=64, micro_batch_size=16, shuffle=False):
    found = [(model(batch.data[0]).argmax(1), batch.data[1]) for batch in step]
    predicted, wanted = lockstep.gather_for_metrics(step, found)
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lockstep.distributed.world import World
from lockstep.errors import UsageError
from lockstep.own_loop.loader import LoaderStep
from lockstep.transforms.precision import AUTOCAST

__all__ = ["autocast", "gather_for_metrics"]


def gather_for_metrics(step: LoaderStep, found: Sequence[Any]) -> Any:
    """The rows of all ranks' micro-batches of a step, as one, on every rank. Collective.

    A sample comes once: the repetitions by which a step is filled up for all ranks are left out. The order is that of
    the data in the step, at any world size.

    Args:
        found: for each micro-batch of `step`, in its order: a tensor of shape [rows, ...], or a tuple, list or dict of
            such. Rows may differ in number; all other sizes and the dtypes are the same everywhere.

    Returns:
        the same form, with tensors of shape [rows of the step, ...] on the device of what was given.

    Raises:
        UsageError: not one for each micro-batch, or forms that differ.
    """
    if len(found) != len(step):
        raise UsageError(f"gather_for_metrics: {len(found)} were given for the {len(step)} micro-batches of the step")
    leaves, forms = zip(*(pytree.tree_flatten(each) for each in found), strict=True)
    if any(form != forms[0] for form in forms):
        raise UsageError("gather_for_metrics: the micro-batches gave values of different forms; give the same of each")
    if not all(isinstance(leaf, Tensor) and leaf.ndim for each in leaves for leaf in each):
        raise UsageError("gather_for_metrics: give tensors of shape [rows, ...]; numbers have no rows")
    columns = []
    for rows in zip(*leaves, strict=True):
        kept = [each.detach() for each, counts in zip(rows, step.counted, strict=True) if counts]
        columns.append(_gathered(torch.cat(kept) if kept else rows[0].detach()[:0], step.world))
    return pytree.tree_unflatten(columns, forms[0])


def _gathered(mine: Tensor, world: World) -> Tensor:
    if world.size == 1:
        return mine
    lengths = [int(length) for length in world.gather(len(mine))]  # collective
    sent = mine.new_zeros((max(lengths), *mine.shape[1:]))
    sent[: len(mine)] = mine
    as_bytes = sent.resolve_conj().contiguous().reshape(-1).view(torch.uint8)  # gloo does not know each dtype
    received = [torch.empty_like(as_bytes) for _ in lengths]
    dist.all_gather(received, as_bytes)  # collective
    parts = [each.view(mine.dtype).view(sent.shape)[:length] for each, length in zip(received, lengths, strict=True)]
    return torch.cat(parts)


def autocast(world: World, precision: str) -> AbstractContextManager[Any]:
    """Around a forward: matrix products in "bf16" or "fp16"; "float32": as they are.

    Under fp16 make the engine with `loss_scaling=True`, which scales the loss and leaves out steps that overflow.

    Raises:
        UsageError: another precision.
    """
    if precision == "float32":
        return nullcontext()
    if precision not in AUTOCAST:
        raise UsageError(f"lockstep.autocast: precision is '{precision}': give one of float32, {', '.join(AUTOCAST)}")
    return torch.autocast(world.device.type, AUTOCAST[precision])
