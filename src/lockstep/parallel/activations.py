"""Activations under tensor parallelism: whole on every rank, or cut by heads or columns.

    group = TensorGroup(mesh, exact=False)          # of one dimension
    hidden = enter(x, group) @ own_columns.T        # x whole, hidden cut
    y = leave(hidden @ own_rows.T, group)           # y whole again

A forward runs on plain local tensors. `enter` and `leave` are the f and g of Shoeybi et al., "Megatron-LM",
arXiv 1909.08053, section 3: each is the other's backward.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lockstep.distributed import collectives

__all__ = [
    "TensorGroup",
    "attention_with_dropout",
    "dropout_of_part",
    "enter",
    "gather_columns",
    "largest",
    "leave",
]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks of a replica that cut its layers among them.

    Attributes:
        mesh: of these ranks, with one dimension.
        exact: add in the order of the coordinates. An all-reduce may choose another order on another node.
    """

    mesh: DeviceMesh
    exact: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; its backend is that of the activations."""
        # Asked each time (2 us): after a loss the mesh has another one, and the layers stay.
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """This rank's tensor coordinate, 0 <= rank < size."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """The tensor degree."""
        return self.mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorGroup":
        # A copied layer belongs to the same ranks; torch cannot copy their group.
        return self

    def own(self, count: int) -> slice:
        """Return this rank's slice of `count` columns, rows or heads, which the degree divides."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors as a new tensor. Collective."""
        if self.exact:
            first, *others = self.gather(part)
            # A copy, which does not keep the other parts alive.
            total = first.clone()
            for other in others:
                total.add_(other)
            return total
        # A copy: autograd may still need the tensor.
        total = part.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(total, group=self.group)  # collective
        return total

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the ranks' tensors, equal in shape, in the order of the coordinates. Collective."""
        part = part.contiguous()
        parts = list(part.new_empty(self.size, *part.shape).unbind())
        collectives.all_gather(parts, part, group=self.group)  # collective
        return parts


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A call of the other function, so that a gradient of the gradient is right too.
        return leave(gradient, ctx.group), None  # collective


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.sum(part)  # collective

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return enter(gradient, ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return torch.cat(group.gather(part), dim=-1)  # collective

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _KeepColumns.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _KeepColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return whole[..., group.own(whole.shape[-1])].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather_columns(gradient, ctx.group), None  # collective


def enter(x: Tensor, group: TensorGroup) -> Tensor:
    """Use a whole tensor in a cut part of the model. Collective in the backward.

    Each rank's part gives a part of the gradient; the backward adds them. This is how a whole parameter enters too, as
    the norm of cut queries: a hook on `.grad` would add up earlier micro-batches' gradients again.
    """
    # torch gives the method no types, here and below.
    entered: Tensor = _Enter.apply(x, group)  # type: ignore[no-untyped-call]
    return entered


def leave(part: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of the ranks' parts, whole on every rank. Collective."""
    total: Tensor = _Leave.apply(part, group)  # type: ignore[no-untyped-call]
    return total


def gather_columns(part: Tensor, group: TensorGroup) -> Tensor:
    """Join the ranks' parts of the last dimension, for a use that is the same on every rank. Collective."""
    whole: Tensor = _GatherColumns.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


def largest(part: Tensor, group: TensorGroup) -> Tensor:
    """Return the elementwise largest of the ranks' tensors, without gradient. Collective."""
    top = part.detach().clone(memory_format=torch.contiguous_format)
    # The order does not matter: a maximum is not rounded.
    collectives.all_reduce(top, op=dist.ReduceOp.MAX, group=group.group)  # collective
    return top


def dropout_of_part(x: Tensor, probability: float, dim: int, group: TensorGroup) -> Tensor:
    """Drop elements of a cut tensor as a single process would drop them.

    The mask of the whole is drawn and the own part kept: the draws do not depend on the degree, and no two ranks drop
    the same places of their parts.

    Args:
        x: this rank's part.
        probability: of an element to be dropped.
        dim: the dimension that is cut.
    """
    shape = list(x.shape)
    shape[dim] *= group.size
    # Through torch's own dropout, so that the draws are those of a whole tensor on the same device.
    mask = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), probability)
    own = group.own(shape[dim])
    return x * mask.narrow(dim, own.start, x.shape[dim])


# Each operand of attention, and the two things that decide its dropout.
def attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, probability: float, group: TensorGroup
) -> Tensor:
    """Compute attention over this rank's heads, with dropout drawn for all heads.

    Plain operations: fused kernels draw their masks inside, for the heads that they see.

    Args:
        query, key, value: [batch, own heads, time, size].
        mask: bool, true where a position may attend; None: each attends to those up to itself.
        probability: of a weight to be dropped.

    Returns:
        [batch, own heads, time, size].
    """
    time = query.shape[-2]
    if mask is None:
        mask = torch.ones(time, time, dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)  # noqa: LS035
    return dropout_of_part(weights, probability, 1, group) @ value
