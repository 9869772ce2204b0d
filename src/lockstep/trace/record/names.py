"""Identify tensors by the called module, by name, and by a shard's position.

names = Names()
names.called(module)                # a module that the script called itself
names.of(parameter)                 # "layers.3.weight"
piece(parameter)                    # (local tensor, its position in the whole tensor)
"""

import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.trace.record.sums import ElementPlaces

__all__ = [
    "WHOLE",
    "Entry",
    "Names",
    "is_wrapper",
    "piece",
]


# (name, local tensor, its position in the whole tensor)
Entry = tuple[str, Tensor, ElementPlaces]

# A shard with an unknown position.
_OPAQUE = ElementPlaces(-1)
WHOLE = ElementPlaces(0)
# Classes that wrap the script's model: the call of the model inside is recorded.
_WRAPPERS = {
    *("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine", "PipelineEngine"),
    *("_FabricModule", "_LightningModuleWrapperBase", "_LightningPrecisionModuleWrapperBase"),
}
# Components that wrappers add to the names of parameters.
_INSIDE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module wraps the script's model."""
    names = _class_names(type(module).__mro__)
    if names & _WRAPPERS:
        return True
    # Lightning routes training_step through the wrapper's forward by replacing the module's forward for one call.
    return "LightningModule" in names and "forward" in vars(module)


@functools.cache
def _class_names(kinds: tuple[type, ...]) -> frozenset[str]:
    return frozenset(base.__name__ for base in kinds)


class Names:
    """Names of the tensors of all roots: modules with parameters that the script itself calls."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[nn.Module]] = []
        self._names: dict[int, str] = {}
        # FSDP 1: offset of a parameter's shard, by the id of the parameter.
        self._flat: dict[int, int] = {}
        self._modules: list[tuple[str, str, weakref.ref[nn.Module]]] = []
        self._generators: dict[int, list[tuple[str, weakref.ref[nn.Module], str]]] = {}

    def number_root(self, module: nn.Module) -> int:
        """Return the number of a module's root, in order of first calls."""
        for number, root in enumerate(self._roots):
            if root() is module:
                return number
        for number, root in enumerate(self._roots):
            model = root()
            if model is not None and any(submodule is module for submodule in model.modules()):
                return number
        self._roots.append(weakref.ref(module))
        self._names.clear()
        self._modules.clear()
        return len(self._roots) - 1

    @property
    def count(self) -> int:
        """Number of roots called so far."""
        return len(self._roots)

    def roots(self, only: int | None = None) -> Iterator[tuple[str, nn.Module]]:
        """Yield the name prefix and the module of each root, or of root `only`.

        The first root has no prefix.
        """
        for number, root in enumerate(self._roots):
            model = root()
            if model is not None and only in (None, number):
                class_name = type(model).__name__.removeprefix("FSDP")
                yield (f"{class_name}#{number}/" if number else ""), model

    def of(self, parameter: Tensor) -> str | None:
        """Return a parameter's name; None if no root has it."""
        if id(parameter) not in self._names:
            self._read_names()
        return self._names.get(id(parameter))

    def parameters(self, only: int | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, root in self.roots(only):
            for name, parameter in root.named_parameters():
                yield prefix + _clean(name), parameter

    def buffers(self, look: bool, only: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the named buffers of all roots, or of root `only`.

        Args:
            look: search the roots for modules again.
        """
        modules = self._modules
        if look or not modules:
            modules = [
                (prefix, _clean(name + "." * bool(name)), weakref.ref(module))
                for prefix, root in self.roots(only)
                for name, module in root.named_modules()
            ]
            self._modules = modules if only is None else self._modules
        ids = set()
        for prefix, path, ref in modules:
            module = ref()
            for name, buffer in module._buffers.items() if module is not None else ():
                if buffer is not None and (prefix, id(buffer)) not in ids:
                    ids.add((prefix, id(buffer)))
                    yield prefix + path + name, buffer

    def entry(self, name: str, tensor: Tensor) -> Entry:
        """Return (name, this rank's shard of a tensor, its position in the whole tensor)."""
        local, position = piece(tensor)
        # Offset of a shard of FSDP 1.
        flat = self._flat.get(id(tensor))
        return name, local, position if flat is None else ElementPlaces(flat)

    def entries(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Entry]:
        """Return the entries of several tensors, without those on the meta device."""
        named = []
        for name, tensor in tensors:
            if not tensor.is_meta:
                named.append(self.entry(name, tensor))
        return named

    def generators(self, module: nn.Module, look: bool) -> list[tuple[str, torch.Generator]]:
        """Return the generators among a module's attributes; `look`: search again."""
        if look or id(module) not in self._generators:
            self._generators[id(module)] = [
                (f"{_clean(name)}.{key}".lstrip("."), weakref.ref(submodule), key)
                for name, submodule in module.named_modules()
                for key, value in vars(submodule).items()
                if isinstance(value, torch.Generator)
            ]
        values = []
        for name, submodule, key in self._generators[id(module)]:
            values.append((name, getattr(submodule(), key, None)))
        entries = []
        for name, value in values:
            if isinstance(value, torch.Generator):
                entries.append((name, value))
        return entries

    def _read_names(self) -> None:
        # Reversed, so that a tied parameter has its first name.
        self._names = {id(parameter): name for name, parameter in reversed(list(self.parameters()))}
        self._flat = {}
        for _, root in self.roots():
            for module in root.modules():
                # Private in FSDP 1: nothing public gives the offsets of shards.
                flat = getattr(getattr(module, "_handle", None), "flat_param", None)
                infos = getattr(flat, "_shard_param_infos", None)
                if flat is not None and infos is not None:
                    for parameter, info in zip(flat._params or (), infos, strict=False):
                        self._flat[id(parameter)] = info.intra_param_start_idx or 0


def _clean(name: str) -> str:
    for component in _INSIDE:
        name = name.replace(component, "")
    return name


def piece(tensor: Tensor) -> tuple[Tensor, ElementPlaces]:
    """Return this rank's shard of a tensor, and its position in the whole tensor."""
    shard = getattr(tensor, "ds_tensor", None)
    # DeepSpeed stage 3 sets ds_tensor and ds_numel: a run of the flattened tensor, padded at the end.
    if shard is not None:
        # mypy does not know the attributes that DeepSpeed sets.
        numel, rank = int(tensor.ds_numel), torch.distributed.get_rank()  # type: ignore[attr-defined]
        begin = min(numel, rank * shard.numel())
        return shard[: numel - begin], ElementPlaces(begin)
    if not hasattr(tensor, "placements"):
        return tensor, WHOLE
    # A DTensor, whose class need not be imported.
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local, _place(tensor, local)


def _place(tensor: Any, local: Tensor) -> ElementPlaces:
    """Locate a DTensor's shard, from torch.chunk's sizes over each mesh dimension in turn.

    FSDP on top of tensor parallelism shards last on the first mesh dimension (`_StridedShard`).
    """
    shape = list(tensor.shape)
    begins = [0] * tensor.ndim
    sizes = list(tensor.shape)
    cuts = list(zip(tensor.placements, tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape, strict=True))
    kinds = [type(placement).__name__ for placement, _, _ in cuts]
    if not {"Replicate", "Shard", "_StridedShard"}.issuperset(kinds):
        return _OPAQUE
    strided = [cut for cut, class_name in zip(cuts, kinds, strict=True) if class_name == "_StridedShard"]
    for placement, at, parts in [
        cut for cut, class_name in zip(cuts, kinds, strict=True) if class_name == "Shard"
    ] + strided:
        dim = placement.dim
        size = -(-sizes[dim] // parts)
        begin = min(sizes[dim], at * size)
        begins[dim], sizes[dim] = begins[dim] + begin, min(size, sizes[dim] - begin)
    cut = [dim for dim in range(tensor.ndim) if sizes[dim] != shape[dim]]
    if list(local.shape) != sizes or len(strided) > 1 or len(set(cut) - {0}) > 1:
        return _OPAQUE
    rows = begins[0] * math.prod(shape[1:]) if cut else 0
    if not cut or cut == [0] or not local.numel():
        return ElementPlaces(rows)
    # A shard of columns is a run in each row.
    last_cut = cut[-1]
    inner = math.prod(shape[cut[-1] + 1 :])
    return ElementPlaces(rows + begins[last_cut] * inner, sizes[last_cut] * inner, shape[last_cut] * inner)
