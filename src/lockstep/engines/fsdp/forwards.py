"""Let each rank call a sharded model as often as its metrics need.

    with equal_forwards(model, world):
        metrics = task.metrics(model, batch)    # two forwards on one rank, one on another

Every forward of a sharded model gathers parameters from all ranks. Before each one the ranks tell each other whether
they compute; a rank that has finished repeats its last forward, and drops the result, until all have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.distributed import collectives
from lockstep.distributed.membership import lost_peers
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.tensors import is_dtensor
from lockstep.transforms.precision import is_compiled

__all__ = ["equal_forwards", "is_split", "same_units"]


@contextmanager
def equal_forwards(model: nn.Module, world: World) -> Iterator[None]:
    """Make every rank take part in all forwards of the context.

    Collective for a sharded model on several ranks.

    Raises:
        ConfigError: some ranks call the model and others never do, so these have no input to repeat.
    """
    # The stages of a pipeline call one after the other, each time together: none could announce what follows.
    if world.size == 1 or world.part("pp").size > 1 or not is_split(model):
        yield
        return
    forwards = _Forwards(world)
    # Prepended, so that it runs before FSDP's own hook, which gathers.
    handle = model.register_forward_pre_hook(forwards.announce, prepend=True, with_kwargs=True)
    try:
        yield
    except BaseException:
        # Also for sys.exit and a KeyboardInterrupt of the task.
        forwards.has_failed = True
        raise
    finally:
        # Also after an error of this rank, since the others may be in a forward.
        handle.remove()
        forwards.follow(model)  # collective


def is_split(model: nn.Module) -> bool:
    """Whether a forward gathers parameters from other ranks: under fsdp, and DeepSpeed's stage 3.

    Not by the parameters alone: fsdp keeps its outermost unit gathered after a forward.
    """
    return any(hasattr(module, "unshard") for module in model.modules()) or any(
        is_dtensor(parameter) or hasattr(parameter, "ds_tensor") for parameter in model.parameters()
    )


@contextmanager
def same_units(model: nn.Module, world: World) -> Iterator[None]:
    """Check before each unit that every rank runs it. Collective on several ranks.

    `model` is a sharded one.

    A compiled model is not checked: its hooks would be traced.

    Raises:
        ConfigError: the ranks run different units, so that one would wait for shards that another does not send.
    """
    names = []
    for name, module in model.named_modules():
        if hasattr(module, "unshard"):
            names.append(name)
    if world.size == 1 or not names or is_compiled(model):
        yield
        return
    order = _UnitOrder(names, world)
    handles = []
    for index, name in enumerate(names):
        handles.append(
            model.get_submodule(name).register_forward_pre_hook(partial(order.announce, index), prepend=True)
        )
    outcome = _FAILED
    try:
        yield
        outcome = _ENDED
    finally:
        for handle in handles:
            handle.remove()
        order.agree(outcome)  # collective


_ENDED = -1
_FAILED = -2


class _UnitOrder:
    """The units that this rank runs, compared with those of the others."""

    def __init__(self, names: list[str], world: World) -> None:
        self._names = names
        self._world = world
        self._is_over = False

    def announce(self, index: int, module: nn.Module, args: Any) -> None:
        """Compare the next unit before it gathers. Collective."""
        self.agree(index)

    def agree(self, place: int) -> None:
        """Compare what comes next: a unit's index, or the end. Collective."""
        if self._is_over:
            return
        ends = torch.tensor([place, -place])
        # All ranks, before each unit: the largest and the smallest index. Only if they differ do the ranks ask who.
        collectives.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._world.control)  # collective
        most = int(ends[0])
        least = -int(ends[1])
        self._is_over = most != least or place < 0
        if most == least:
            return
        # All ranks, only before an error.
        indices = self._world.gather(place)  # collective
        if _FAILED in indices and place != _FAILED:
            raise ConfigError(f"{rank_label(indices.index(_FAILED))} failed in its forward; its log has the cause")
        other = next(rank for rank, index in enumerate(indices) if index != indices[0])
        raise ConfigError(
            f"--engine fsdp: {rank_label(0)} runs {self._describe(indices[0])} where {rank_label(other)} runs "
            f"{self._describe(indices[other])}, but ranks gather a block's parameters together: run the same blocks "
            "for every batch, or use --engine ddp or zero"
        )

    def _describe(self, place: int) -> str:
        if place < 0:
            return "no further block"
        return self._names[place] or "the model"


class _Forwards:
    """The forwards of one context on this rank.

    Attributes:
        has_failed: an error of this rank ended the context.
    """

    def __init__(self, world: World) -> None:
        self.has_failed = False
        self._world = world
        self._inputs: tuple[Any, Any] | None = None
        self._is_over = self._has_graph = False

    def announce(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Announce a forward to the other ranks before it begins. Collective."""
        self._inputs = (args, kwargs)
        self._exchange(True)  # collective

    def follow(self, model: nn.Module) -> None:
        """Repeat the last forward until no rank computes. Collective."""
        while not self._is_over and self._exchange(False):  # collective
            assert self._inputs is not None
            args, kwargs = self._inputs
            # With a graph FSDP keeps other parameters gathered, so all ranks must agree on it.
            with torch.set_grad_enabled(self._has_graph):
                model(*args, **kwargs)

    def _exchange(self, computes: bool) -> bool:
        """Return whether any rank computes a forward now. Collective.

        Raises:
            ConfigError: some ranks call the model and others never do.
            PeerError: another rank has failed before its first call.
        """
        world = self._world
        is_idle = self._inputs is None
        row = [computes, is_idle, computes and torch.is_grad_enabled(), is_idle and self.has_failed]
        table = torch.zeros(world.size, len(row), dtype=torch.int32)
        table[world.rank] = torch.tensor(row)
        # All ranks, on the host: which of them compute, and which have nothing more to compute.
        collectives.all_reduce(table, group=world.control)  # collective
        # The table is on the host, so this does not wait for the device.
        computing, idle, with_graph, failed = (column.nonzero().flatten().tolist() for column in table.unbind(1))
        self._has_graph = bool(with_graph)
        if computing and failed:
            self._is_over = True
            # This rank's own error passes on.
            if self.has_failed:
                return False
            raise lost_peers(world.rank)
        if computing and idle:
            self._is_over = True
            raise ConfigError(
                f"the engine splits the parameters: the task's metrics call the model on {rank_label(computing[0])} "
                f"and not on {rank_label(idle[0])}, but all ranks take part in each forward: call it for every batch, "
                "or use --engine ddp"
            )
        return bool(computing)
