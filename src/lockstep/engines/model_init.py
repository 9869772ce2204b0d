"""Create a model's weights once, and place them on the devices.

    with init_context(options, world):            rank 0 on the host, the others on the meta device, for `meta_init`
        model = task.model()
    place(modules, world, send=True)            their tensors on the device, rank 0's values on every rank

With `meta_init` the weights are those that a single process draws, for any world size: only rank 0 draws them, and
sends them one tensor at a time, block by block, as the blocks are sharded. So one host process holds the whole model
once, and every other process holds at most one whole block.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lockstep.config.engine_options import EngineOptions
from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING
from lockstep.errors import ConfigError
from lockstep.tensors import is_expanded

__all__ = [
    "check_placeable",
    "copy_expanded",
    "init_context",
    "place",
]


def init_context(options: EngineOptions, world: World) -> AbstractContextManager[object]:
    """Return the default device in which each rank builds its model."""
    if options.meta_init and not world.is_main:
        return torch.device("meta")
    return NOTHING


def check_placeable(model: nn.Module, world: World) -> None:
    """Raise ConfigError for a plain or sparse meta tensor, which would never get values. Collective.

    Parameters and dense buffers are placed; plain tensor attributes are not. Rank 0 has values for them, and relays the
    error of the other ranks.
    """
    for prefix, module in model.named_modules():
        sparse = {}
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout is not torch.strided:
                sparse[name] = buffer
        for name, value in {**vars(module), **sparse}.items():
            if isinstance(value, Tensor) and value.is_meta:
                path = f"{prefix}.{name}".lstrip(".")
                # All ranks take part. Rank 0 has values, so only the others can find such a tensor.
                world.check(
                    ConfigError(
                        f"--engine.meta-init: {path} of the model is a plain or sparse tensor, which gets no "
                        "values; register a dense one with register_buffer, or drop --engine.meta-init"
                    )
                )
    # All ranks: the ranks without an error end here.
    world.check(None)


def copy_expanded(model: nn.Module) -> None:
    """Give expanded buffers (a stride of 0) writable memory of their own."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and is_expanded(buffer):
                module._buffers[name] = buffer.contiguous()


def place(modules: list[nn.Module], world: World, *, send: bool, alone: bool = False) -> None:
    """Move each module's own tensors (not its children's) to `world.device`. Collective, unless `alone`.

    Args:
        modules: those of one unit, the same on every rank.
        send: broadcast rank 0's parameters; otherwise each rank keeps its own. Buffers are always broadcast.
        alone: broadcast nothing.
    """
    # The replacement of each parameter, so that tied ones stay tied. No parameter is tied across units (see
    # find_blocks). A memo for the whole model would keep every unit whole.
    memo: dict[Tensor, nn.Parameter] = {}
    with torch.no_grad():
        for module in modules:
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, name, _place_parameter(parameter, world, send and not alone, memo))
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.is_meta:
                    tensor = torch.empty_like(buffer, device=world.device)
                else:
                    tensor = buffer.to(world.device)
                if tensor.layout is torch.strided:
                    # A broadcast needs dense memory without pending conjugation or negation.
                    tensor = tensor.resolve_conj().resolve_neg().contiguous()
                    if not alone:
                        # All ranks: every rank keeps the whole buffer, as under ddp.
                        collectives.broadcast(tensor, group_src=0, group=world.group)  # collective
                module._buffers[name] = tensor


def _place_parameter(
    parameter: nn.Parameter, world: World, send: bool, memo: dict[Tensor, nn.Parameter]
) -> nn.Parameter:
    if parameter in memo:
        return memo[parameter]
    if parameter.is_meta:
        target = nn.Parameter(torch.empty_like(parameter, device=world.device), parameter.requires_grad)
    else:
        target = parameter
        target.data = target.data.to(world.device)
    memo[parameter] = memo[target] = target
    if send:
        # All ranks get rank 0's values, one tensor at a time, so that a rank has at most one whole unit.
        collectives.broadcast(target.data, group_src=0, group=world.group)  # collective
    return target
