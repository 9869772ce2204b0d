"""Choose the units that a model is sharded into: given blocks, or repeated layers."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from lockstep.errors import ConfigError

__all__ = [
    "BlockUnits",
    "find_blocks",
    "repeated_layers",
]


_LEAST = 1_000_000  # parameters of a unit found by size: for smaller ones a collective costs more than it saves


class BlockUnits(NamedTuple):
    """Units in forward order, and one line on their origin."""

    modules: list[nn.Module]
    origin: str


def find_blocks(model: nn.Module, given: Iterable[nn.Module] = ()) -> BlockUnits:
    """Return the units: `given`, else repeated layers, else submodules by size, else none.

    Without units the whole model is one. Repeated layers are the entries of a ModuleList of at least two modules of
    one class; of nested lists the outermost counts. Submodules by size have from 1 million parameters up to half of
    the model's.

    Raises:
        ConfigError: a given block is not in the model, or shares a parameter with another block or the rest of the
            model.
    """
    blocks = list(given)
    if blocks:
        inside = set(model.modules())
        if any(block not in inside for block in blocks):
            raise ConfigError("the task's blocks(model) returns a module that is not in the model; return parts of it")
        shared = _shared(model, blocks)
        if shared:
            raise ConfigError(
                f"--engine fsdp: the parameter {shared} is shared across blocks, and each block is split on its own; "
                "leave what shares it out of the task's blocks, or use --engine ddp"
            )
        return BlockUnits(blocks, f"{len(blocks)} blocks that the task names")
    for found, origin in ((repeated_layers(model), "repeated layers"), (_by_size(model), "submodules by size")):
        if found and not _shared(model, found):
            kinds = ", ".join(sorted({type(module).__name__ for module in found}))
            return BlockUnits(found, f"{len(found)} {origin} ({kinds})")
    return BlockUnits([], "the model as one unit")


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the entries of ModuleLists with at least two modules of one class, in order."""
    found: list[nn.Module] = []
    covered: set[nn.Module] = set()
    for module in model.modules():  # outer modules come before those within them
        if module in covered or not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if len({type(entry) for entry in module}) == 1 and all(_callable(entry) for entry in module):
            found += list(module)
            covered.update(module.modules())
    return found


def _callable(module: nn.Module) -> bool:
    """Whether the module has a forward of its own (containers do not) and parameters."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and any(True for _ in module.parameters())


def _by_size(model: nn.Module) -> list[nn.Module]:
    most = _count(model) // 2
    found: list[nn.Module] = []
    for child in model.children():
        if _callable(child) and _LEAST <= _count(child) <= most:
            found.append(child)
        elif _count(child) > most:
            found += _by_size(child)
    return found


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shared(model: nn.Module, blocks: list[nn.Module]) -> str:
    """Return a parameter's name that blocks share with others or the rest, else ""."""
    names: dict[Tensor, str] = {}
    homes: dict[Tensor, nn.Module | None] = {}
    owner = {part: block for block in blocks for part in block.modules()}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, f"{prefix}.{name}".lstrip("."))
            if homes.setdefault(parameter, owner.get(module)) is not owner.get(module):
                return names[parameter]
    repeated = len({id(block) for block in blocks}) < len(blocks)
    return next(iter(names.values())) if repeated else ""
