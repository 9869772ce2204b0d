"""Models that were made before the run: their values are rank 0's on every rank.

with watch_new_modules() as new:
    model = task.model()
align(model, new, world)        # the number of tensors that other ranks held otherwise
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from lockstep.distributed.world import World

__all__ = ["align", "watch_new_modules"]


@contextmanager
def watch_new_modules() -> Iterator[list[nn.Module]]:
    """Collect the modules that are made within it."""
    new: list[nn.Module] = []
    init = nn.Module.__init__

    @functools.wraps(init)
    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        new.append(self)
        init(self, *args, **kwargs)

    nn.Module.__init__ = noted  # type: ignore[method-assign]
    try:
        yield new
    finally:
        nn.Module.__init__ = init  # type: ignore[method-assign]


@torch.no_grad()
def align(model: nn.Module, new: list[nn.Module], world: World) -> int:
    """Give the parameters and buffers of modules that are not new rank 0's values. Collective.

    What the task draws in `model()` is drawn under the run's seed, and is left to the comparison of all weights (see
    lockstep.guards.start), as are tensors whose shapes differ.

    Returns:
        How many tensors differed on some rank.
    """
    if world.size == 1:
        return 0
    held = _held(model, {id(module) for module in new})
    mine = {name: [f"{t.dtype} {list(t.shape)}", _hash(t)] for name, t in held.items()}
    ranks = world.gather(mine)  # collective
    kinds = [{name: kind for name, (kind, _) in each.items()} for each in ranks]
    if any(each != kinds[0] for each in kinds):
        return 0
    odd = [name for name, value in ranks[0].items() if any(each[name] != value for each in ranks)]
    for name in odd:
        tensor = held[name]
        sent = _bytes(tensor).clone()
        dist.broadcast(sent, src=0, group=world.control)  # collective
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
    return len(odd)


def _held(model: nn.Module, new: set[int]) -> dict[str, Tensor]:
    """The tensors of modules that were there before, each once, but for those that have no memory yet."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        if id(module) not in new:
            own = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            for name, tensor in own:
                if not tensor.is_meta and tensor.layout == torch.strided:
                    found.setdefault(id(tensor), (f"{prefix}.{name}", tensor))
    return dict(found.values())


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes in host memory, row by row. uint8 [n]"""
    return tensor.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)  # waits for the device


def _hash(tensor: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes(tensor).numpy().data)
