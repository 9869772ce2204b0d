"""Handle 0-dim and empty parameters, which FSDP cannot split.

Every rank holds them whole; CLIP's temperature is one.

FSDP ignores them. `WholeParameters` sums their gradients once a step, in exact mode in the fixed tree.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.exact import Tree

__all__ = ["WholeParameters", "find_whole", "is_whole"]


def is_whole(parameter: Tensor) -> bool:
    """Whether a parameter, gathered or not yet split, is one that FSDP cannot split."""
    return parameter.ndim == 0 or parameter.numel() == 0


def find_whole(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not split, before or after `fully_shard`."""
    whole = []
    for p in model.parameters():
        if is_whole(p) and not isinstance(p, DTensor):
            whole.append(p)
    return whole


class WholeParameters:
    """The gradients of the parameters that every rank holds.

    Args:
        parameters: trained ones, in the same order on every rank.
        exact: M of exact mode; 0: gradients are summed as the backend does.
        world: the ranks.
    """

    def __init__(self, parameters: list[nn.Parameter], exact: int, world: World) -> None:
        self._parameters = parameters
        self._world = world
        self._tree = Tree(list[Tensor](parameters), exact, world) if exact and parameters else None

    def push(self) -> None:
        """Take over the gradients of a micro-batch in exact mode.

        Call it after each backward of a step.
        """
        if self._tree:
            self._tree.push()

    def finish(self) -> None:
        """Sum the gradients over the ranks; None for a parameter that no rank used. Collective."""
        if self._tree:
            self._tree.finish()
        elif self._parameters:
            self._sum()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Sum the gradients of a backward outside of steps. Collective.

        FSDP does the same with those of shards.
        """
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        yield
        if self._parameters:
            self._sum()
        for parameter, gradient in zip(self._parameters, before, strict=True):
            if gradient is not None:
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad = gradient + parameter.grad

    def _sum(self) -> None:
        used = [parameter.grad is not None for parameter in self._parameters]
        # The narrowest dtype that represents every gradient exactly.
        dtype = reduce(torch.promote_types, {parameter.dtype for parameter in self._parameters})
        gradients = []
        for p in self._parameters:
            if p.grad is None:
                gradients.append(torch.zeros_like(p))
            else:
                gradients.append(p.grad)
        flags = torch.tensor(used, dtype=dtype).to(self._world.device)
        vector = torch.cat([*(gradient.to(dtype).view(-1) for gradient in gradients), flags])
        # All ranks. One exchange for all parameters, since each has one number or none.
        collectives.all_reduce(vector, group=self._world.group)  # collective
        *sums, counts = torch.split(vector, [*(p.numel() for p in self._parameters), len(used)])
        # Waits for the device, only if this rank did not use some parameter.
        users = used if all(used) else counts.tolist()
        for parameter, total, count in zip(self._parameters, sums, users, strict=True):
            if count:
                parameter.grad = total.view(parameter.shape).to(parameter.dtype)
            else:
                parameter.grad = None
