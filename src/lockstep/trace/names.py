"""Which tensor is which: the modules that a script calls, the names of their parameters, the places of their shards.

names = Names()
names.called(module)                # a module that the script itself called
names.of(parameter, "group0.3")     # "layers.3.weight"
piece(parameter)                    # (local tensor, place of its first element in the whole, elements of the whole)
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OPAQUE", "Names", "generators", "is_wrapper", "piece"]

OPAQUE = -1  # the place of a shard whose place is not known
_WRAPPERS = {
    *("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine", "PipelineEngine"),
    *("_FabricModule", "_LightningModuleWrapperBase", "_LightningPrecisionModuleWrapperBase"),
}
_INSIDE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def is_wrapper(module: nn.Module) -> bool:
    """Whether it stands around the model that the script means, rather than being it."""
    names = {kind.__name__ for kind in type(module).__mro__}
    if names & _WRAPPERS:
        return True
    # Lightning sends training_step through the forward of what wraps its module, by another forward for one call.
    return "LightningModule" in names and "forward" in vars(module)


class Names:
    """The roots: modules with parameters that are called by the script and not by another module."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[nn.Module]] = []
        self._known: dict[int, str] = {}
        self._flat: dict[int, int] = {}  # of FSDP 1: where a parameter's shard begins

    def called(self, module: nn.Module) -> int:
        """The number of this root, in the order of their first calls; of a module within a root that root's."""
        for number, root in enumerate(self._roots):
            if root() is module:
                return number
        for number, root in enumerate(self._roots):
            held = root()
            if held is not None and any(part is module for part in held.modules()):
                return number
        self._roots.append(weakref.ref(module))
        self._known.clear()
        return len(self._roots) - 1

    def roots(self) -> Iterator[tuple[str, nn.Module]]:
        """(what its names begin with, root): nothing for the first."""
        for number, root in enumerate(self._roots):
            held = root()
            if held is not None:
                kind = type(held).__name__.removeprefix("FSDP")
                yield (f"{kind}#{number}/" if number else ""), held

    def of(self, parameter: Tensor, otherwise: str) -> str:
        """Its name; `otherwise` where no root has it."""
        if id(parameter) not in self._known:
            self._learn()
        return self._known.get(id(parameter), otherwise)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, root in self.roots():
            for name, parameter in root.named_parameters():
                yield prefix + _clean(name), parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, root in self.roots():
            for name, buffer in root.named_buffers():
                yield prefix + _clean(name), buffer

    def start(self, parameter: Tensor) -> int | None:
        """Where this shard of FSDP 1 begins, or None for a parameter of any other kind."""
        return self._flat.get(id(parameter))

    def _learn(self) -> None:
        self._known = {id(parameter): name for name, parameter in reversed(list(self.parameters()))}
        self._flat = {}
        for _, root in self.roots():
            for module in root.modules():
                flat = getattr(getattr(module, "_handle", None), "flat_param", None)
                infos = getattr(flat, "_shard_param_infos", None)
                if flat is not None and infos is not None:
                    for parameter, info in zip(flat._params or (), infos, strict=False):
                        self._flat[id(parameter)] = info.intra_param_start_idx or 0


def _clean(name: str) -> str:
    for part in _INSIDE:
        name = name.replace(part, "")
    return name


def piece(tensor: Tensor) -> tuple[Tensor, int, int]:
    """(what this rank holds, where it begins in the whole in row-major order or OPAQUE, elements of the whole)."""
    shard = getattr(tensor, "ds_tensor", None)
    if shard is not None:  # of DeepSpeed's stage 3: a run of the flattened tensor, filled up at the end
        whole, rank = int(tensor.ds_numel), torch.distributed.get_rank()  # type: ignore[attr-defined]
        begin = min(whole, rank * shard.numel())
        return shard[: whole - begin], begin, whole
    if not hasattr(tensor, "placements"):
        return tensor, 0, tensor.numel()
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    split = [place for place in tensor.placements if not place.is_replicate()]
    if any(place.is_partial() for place in split) or any(getattr(place, "dim", 0) != 0 for place in split):
        return local, OPAQUE, tensor.numel()
    if not split:
        return local, 0, tensor.numel()
    if any(type(place).__name__ != "Shard" for place in split):
        return local, OPAQUE, tensor.numel()
    offset = _offset(tensor)
    return local, offset * (tensor.numel() // max(1, tensor.shape[0])), tensor.numel()


def _offset(tensor: Any) -> int:
    """The first row of a DTensor that is cut by rows; torch.chunk's sizes, of each mesh dimension in turn."""
    begin, rows = 0, tensor.shape[0]
    coordinate = tensor.device_mesh.get_coordinate()
    for place, at, parts in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if place.is_replicate():
            continue
        size = -(-rows // parts)
        first = min(rows, at * size)
        begin, rows = begin + first, min(size, rows - first)
    return int(begin)


def generators(module: nn.Module) -> Iterator[tuple[str, torch.Generator]]:
    """Generators that a module or one of its parts keeps for itself."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Generator):
                yield f"{_clean(name)}.{key}".lstrip("."), value
