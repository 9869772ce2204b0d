"""Which parameters a backward leaves without a gradient: counted by hooks, agreed over the ranks.

usage = Usage(named_parameters, world)  counts from now on
usage.missed(backwards)                 names that one of these backwards did not use, the same on every rank
usage.close()
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.world import World

__all__ = ["Usage", "listed"]


class Usage:
    """Counts, for each parameter, the backwards that gave it a gradient.

    Args:
        named: the parameters that are trained, in the same order on every rank; each is hooked before the next is asked
            for, so that a generator may hold one at a time.
        world: the ranks.

    Attributes:
        names: of these parameters, in that order.
        parameters: the tensors themselves.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], world: World) -> None:
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self._world = world
        self._counts: list[int] = []
        self._handles: list[Any] = []
        # Also where the engine is made again before it has asked.
        self._end = weakref.finalize(self, _remove, self._handles)
        for index, (name, tensor) in enumerate(named):
            parameter: Any = tensor
            self._handles.append(parameter.register_post_accumulate_grad_hook(Hook(self._counts, index)))
            self._counts.append(0)
            self.names.append(name)
            self.parameters.append(tensor)

    def begin(self) -> None:
        """Count from zero."""
        self._counts[:] = [0] * len(self._counts)

    def used(self) -> list[bool]:
        """For each parameter, whether a backward of this rank used it."""
        return [count > 0 for count in self._counts]

    def missed(self, backwards: int) -> list[str]:
        """The parameters that were not used by each of this rank's `backwards`, on any rank."""
        return [name for name, count in zip(self.names, self._over_ranks(backwards), strict=True) if count[0]]

    def unused(self) -> list[bool]:
        """For each parameter, whether no backward of any rank used it. Begins to count anew."""
        found = [not count[1] for count in self._over_ranks(0)]
        self.begin()
        return found

    def _over_ranks(self, backwards: int) -> list[tuple[int, int]]:
        """For each parameter: on how many ranks it missed one of `backwards`; how often it was used."""
        mine = torch.tensor([[int(count < backwards), count] for count in self._counts], dtype=torch.int64)
        if self._world.size > 1:
            dist.all_reduce(mine, group=self._world.control)  # collective
        return [(missed, used) for missed, used in mine.reshape(-1, 2).tolist()]

    def close(self) -> None:
        """Takes the hooks away."""
        self._end()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class Hook:
    """Adds one at its place; an object, so that copies of a model can be made while it hangs there."""

    def __init__(self, counts: list[int], index: int) -> None:
        self._counts, self._index = counts, index

    def __call__(self, parameter: Tensor) -> None:
        self._counts[self._index] += 1


def listed(names: list[str], most: int = 4) -> str:
    """`a, b, c, d and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
