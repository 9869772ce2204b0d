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


# Fewest parameters of a unit found by size: for smaller ones a collective costs more than it saves.
_MIN_PARAMETERS = 1_000_000


class BlockUnits(NamedTuple):
    """Units in forward order, and one line on their origin."""

    modules: list[nn.Module]
    origin: str


def find_blocks(model: nn.Module, task_blocks: Iterable[nn.Module] = ()) -> BlockUnits:
    """Return the units: `task_blocks`, else repeated layers, else submodules by size, else none.

    Without units the whole model is one. Repeated layers are the entries of a ModuleList of at least two modules of
    one class; of nested lists the outermost counts. Submodules by size have from 1 million parameters up to half of
    the model's.

    Raises:
        ConfigError: a given block is not in the model, or shares a parameter with another block or the rest of the
            model.
    """
    blocks = list(task_blocks)
    if blocks:
        inside = set(model.modules())
        if any(block not in inside for block in blocks):
            raise ConfigError("the task's blocks(model) returns a module that is not in the model; return parts of it")
        shared = _find_shared(model, blocks)
        if shared:
            raise ConfigError(
                f"--engine fsdp: the parameter {shared} is shared across blocks, and each block is sharded separately; "
                "leave the modules that share it out of the task's blocks, or use --engine ddp"
            )
        return BlockUnits(blocks, f"{len(blocks)} blocks that the task names")
    for units, origin in ((repeated_layers(model), "repeated layers"), (_by_size(model), "submodules by size")):
        if units and not _find_shared(model, units):
            class_names = ", ".join(sorted({type(module).__name__ for module in units}))
            return BlockUnits(units, f"{len(units)} {origin} ({class_names})")
    return BlockUnits([], "the model as one unit")


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the entries of ModuleLists with at least two modules of one class, in order."""
    layers: list[nn.Module] = []
    covered: set[nn.Module] = set()
    # `modules` yields outer modules before those within them.
    for module in model.modules():
        if module in covered or not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if len({type(entry) for entry in module}) == 1 and all(_has_forward(entry) for entry in module):
            layers += list(module)
            covered.update(module.modules())
    return layers


def _has_forward(module: nn.Module) -> bool:
    """Whether the module has a forward of its own (containers do not) and parameters."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and any(True for _ in module.parameters())


def _by_size(model: nn.Module) -> list[nn.Module]:
    most = _count(model) // 2
    units: list[nn.Module] = []
    for child in model.children():
        if _has_forward(child) and _MIN_PARAMETERS <= _count(child) <= most:
            units.append(child)
        elif _count(child) > most:
            units += _by_size(child)
    return units


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _find_shared(model: nn.Module, blocks: list[nn.Module]) -> str:
    """Return a parameter's name that blocks share with others or the rest, else ""."""
    names: dict[Tensor, str] = {}
    homes: dict[Tensor, nn.Module | None] = {}
    owner = {}
    for block in blocks:
        for submodule in block.modules():
            owner[submodule] = block
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, f"{prefix}.{name}".lstrip("."))
            if homes.setdefault(parameter, owner.get(module)) is not owner.get(module):
                return names[parameter]
    repeated = len({id(block) for block in blocks}) < len(blocks)
    if repeated:
        return next(iter(names.values()))
    return ""
