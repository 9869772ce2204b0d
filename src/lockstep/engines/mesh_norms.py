"""Norms of gradients of which each rank of a replica has a part.

    norm = MeshNorm(exact=False)
    norm(gradients)             # the 2-norm of all, the same on every rank
    norm.each(gradients)        # of each
    norm = StageNorm(stage, model, world.part("pp"))    # each stage of a pipeline has some of the parameters

torch's `clip_grad_norm_` fails where gradients are on several meshes, and a plain sum over the ranks would count a
whole gradient once a rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.optimizer_step import combine_norms, norms_of
from lockstep.errors import LockstepError
from lockstep.parallel.stages import PipelineStage
from lockstep.tensors import is_dtensor, local_of

__all__ = ["MeshNorm", "StageNorm"]


class MeshNorm:
    """The 2-norm of gradients that are cut over dimensions of a mesh, each counted once.

    Args:
        exact: add in the order of the coordinates, and then in the order of the gradients, so that the bits do not
            depend on an all-reduce.
        norms: computes the norm of each gradient, over the ranks of the mesh's dimension "dp" too; None: of the part
            that this rank has.
    """

    def __init__(self, *, exact: bool = False, norms: Callable[[Sequence[Tensor]], list[Tensor]] | None = None) -> None:
        self._add = _gather_and_add if exact else _all_reduce
        self._exact = exact
        self._norms = norms or _local_norms
        # The dimension over which nothing is left to add.
        self._done = "" if norms is None else "dp"

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients, 0-dim; the same on every rank. Collective."""
        if not gradients:
            return torch.zeros(())
        squares = self._squares(gradients)  # collective if `norms` is
        if self._exact:
            # One square for each gradient, so that the order of addition is the model's, however it is cut.
            return torch.stack(self._sum_each(squares, gradients)).sum().sqrt()
        totals = []
        for groups, indices in self._by_groups(gradients).items():
            total = torch.stack([squares[index] for index in indices]).sum()
            totals.append(self._sum_over(total, groups))  # collective
        return torch.stack(totals).sum().sqrt()

    def each(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the norm of each gradient, 0-dim. Collective."""
        if not gradients:
            return []
        return [square.sqrt() for square in self._sum_each(self._squares(gradients), gradients)]

    def _squares(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the square of each gradient's norm on this rank, 0-dim. Collective if `norms` is."""
        return list(torch.stack(self._norms(gradients)).square().unbind())

    def _sum_each(self, squares: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return each gradient's square over all ranks. Collective."""
        sums = list(squares)
        for groups, indices in self._by_groups(gradients).items():
            together = torch.stack([squares[index] for index in indices])
            totals = self._sum_over(together, groups).unbind()  # collective
            for index, total in zip(indices, totals, strict=True):
                sums[index] = total
        return sums

    def _sum_over(self, squares: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        """Add squares over one mesh dimension after the other. Collective."""
        for group in groups:
            squares = self._add(squares, group)  # collective
        return squares

    def _by_groups(self, gradients: Sequence[Tensor]) -> dict[tuple[dist.ProcessGroup, ...], list[int]]:
        """Return the indices of the gradients by the groups over which their squares are added.

        The order is the same on every rank, since it is the model's.
        """
        found: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for index, gradient in enumerate(gradients):
            found.setdefault(_cut_over(gradient, self._done), []).append(index)
        return found


class StageNorm:
    """The 2-norm of the gradients of all stages of a pipeline, each parameter counted once.

    Every parameter's norm travels, and they are combined in the whole model's order, as `total_norm` does in one
    process: the number of stages changes no bit. A parameter without a gradient counts as 0.

    Args:
        stage: of this rank.
        model: this rank's part.
        world: its ranks are the stages.
        norms: computes the norm of each gradient of this stage; see `MeshNorm.each`. May be collective over the stage.
    """

    def __init__(
        self,
        stage: PipelineStage,
        model: nn.Module,
        world: World,
        norms: Callable[[list[Tensor]], list[Tensor]] = norms_of,
    ) -> None:
        self._world = world
        self._norms = norms
        self._dtype = stage.norm_dtype
        self._size = len(stage.trained)
        # Of this rank's parameters: the index among all trained ones. None where another stage counts them.
        self._indices: dict[Tensor, int | None] = {}
        order = {name: index for index, name in enumerate(stage.trained)}
        for name, parameter in model.named_parameters():
            if name in order:
                is_counted = stage.holders[name][0] == stage.index.index
                self._indices[parameter] = order[name] if is_counted else None

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients, 0-dim; the same bits on every stage. Collective.

        Args:
            gradients: of this rank's trained parameters that have one, in the model's order.
        """
        indices = [index for parameter, index in self._indices.items() if parameter.grad is not None]
        norms = torch.zeros(self._size, dtype=self._dtype, device=self._world.device)
        own = self._norms(list(gradients))  # collective if `norms` is
        for norm, index in zip(own, indices, strict=True):
            if index is not None:
                norms[index] = norm
        # Exact in any order: each number is added to zeros.
        collectives.all_reduce(norms, group=self._world.group)  # collective
        return combine_norms(list(norms.unbind()))


def _local_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    return norms_of([local_of(gradient) for gradient in gradients])


def _cut_over(gradient: Any, done: str) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of the mesh dimensions over which a gradient is cut, except `done`; () for a whole one."""
    if not is_dtensor(gradient):
        return ()
    names = gradient.device_mesh.mesh_dim_names or [""] * len(gradient.placements)
    groups = []
    for dim, (name, placement) in enumerate(zip(names, gradient.placements, strict=True)):
        if placement.is_partial():
            raise LockstepError("a gradient has not been summed over the ranks of its model; this is a bug")
        # Not `is_shard`, which is false for the placement of packed layers.
        if not placement.is_replicate() and not (done and name == done):
            groups.append(gradient.device_mesh.get_group(dim))
    return tuple(groups)


def _all_reduce(squares: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = squares.clone()
    collectives.all_reduce(total, group=group)  # collective
    return total


def _gather_and_add(squares: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(squares) for _ in range(group.size())]
    collectives.all_gather(parts, squares, group=group)  # collective
    total, *others = parts
    for other in others:
        total = total + other
    return total
