"""Find ranks that use different parameters before FSDP exchanges their gradients.

From torch 2.13 on a rank sends zeros for the parameters that it left unused (`FILLS_UNUSED`). An older torch sends only
the gradients that there are, so the ranks' messages differ in size or number: gloo fails, and NCCL waits until
`--timeout`. There every exchange is preceded by this check.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lockstep.distributed.world import World
from lockstep.engines.shared.unused import Usage, listed
from lockstep.errors import ConfigError

__all__ = ["FILLS_UNUSED", "UsageCheck", "reached"]

FILLS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13 and newer


class UsageCheck:
    """A check before each backward that exchanges gradients.

    Args:
        usage: counts this rank's backwards since the step began.
        world: the ranks.
        every: whether each micro-batch is exchanged, rather than the sum of a step's micro-batches.
    """

    def __init__(self, usage: Usage, world: World, every: bool) -> None:
        self._usage, self._world, self._every = usage, world, every
        self._first: list[bool] | None = None

    def begin(self) -> None:
        """Start a step."""
        self._usage.begin()
        self._first = None

    def __call__(self, loss: Tensor) -> None:
        """Check the backward of `loss`, which has yet to run. One small collective.

        Raises:
            ConfigError: on every rank, if the coming exchange would not match.
        """
        used = self._used(loss)
        first = self._first = self._first or used
        mixed = [self._every and now is not before for now, before in zip(used, first, strict=True)]
        counts = torch.tensor([used, mixed], dtype=torch.int32)
        dist.all_reduce(counts, group=self._world.control)  # collective
        users, mixing = counts.tolist()
        names = [name for name, n in zip(self._usage.names, users, strict=True) if n not in (0, self._world.size)]
        if names:
            self._refuse(names, self._who(names[0], used))
        names = [name for name, n in zip(self._usage.names, mixing, strict=True) if n]
        if names:
            self._refuse(names, "used by some micro-batches of this step and not by others")

    def _used(self, loss: Tensor) -> list[bool]:
        """Tell which parameters will have a gradient after the backward of `loss`."""
        used = [False] * len(self._usage.names) if self._every else self._usage.used()
        if all(used):
            return used
        found = reached(loss)
        return [before or parameter in found for before, parameter in zip(used, self._usage.parameters, strict=True)]

    def _who(self, name: str, used: list[bool]) -> str:
        place = self._usage.names.index(name)
        told = self._world.gather(used[place])  # collective
        users, others = ([str(rank) for rank, uses in enumerate(told) if uses is wanted] for wanted in (True, False))
        return f"used by rank {listed(users)} and not by rank {listed(others)} in this step"

    def _refuse(self, names: list[str], who: str) -> None:
        raise ConfigError(
            f"--engine fsdp: torch {torch.__version__} cannot exchange the gradients of {listed(names)}, {who}; "
            "use torch 2.13 or newer, or --engine ddp, or have every rank use the same parameters in every step"
        )


def reached(loss: Tensor) -> set[Tensor]:
    """Collect the leaves that the backward of `loss` gives a gradient.

    What a reentrant activation checkpoint hides is not among them.
    """
    seen = {loss.grad_fn}
    todo, found = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if type(node).__name__ == "AccumulateGrad":
            found.add(node.variable)  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return found
