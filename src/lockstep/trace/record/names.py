"""Identify tensors: the modules that a script calls, parameter names, places of shards.

names = Names()
names.called(module)                # a module that the script itself called
names.of(parameter)                 # "layers.3.weight"
piece(parameter)                    # (local tensor, its place in the whole)
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


Entry = tuple[str, Tensor, ElementPlaces]  # name, local tensor, its place in the whole

_OPAQUE = ElementPlaces(-1)  # a shard with an unknown place
WHOLE = ElementPlaces(0)
_WRAPPERS = {
    *("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine", "PipelineEngine"),
    *("_FabricModule", "_LightningModuleWrapperBase", "_LightningPrecisionModuleWrapperBase"),
}
_INSIDE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module wraps the script's model."""
    names = _class_names(type(module).__mro__)
    if names & _WRAPPERS:
        return True
    # Lightning routes training_step through the wrapper's forward by replacing the module's forward for one call.
    return "LightningModule" in names and "forward" in vars(module)


@functools.cache
def _class_names(kinds: tuple[type, ...]) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in kinds)


class Names:
    """The roots: modules with parameters that the script itself calls."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[nn.Module]] = []
        self._known: dict[int, str] = {}
        self._flat: dict[int, int] = {}  # of FSDP 1: where a parameter's shard begins
        self._modules: list[tuple[str, str, weakref.ref[nn.Module]]] = []
        self._drawing: dict[int, list[tuple[str, weakref.ref[nn.Module], str]]] = {}

    def called(self, module: nn.Module) -> int:
        """Return the number of a module's root, in the order of their first calls."""
        for number, root in enumerate(self._roots):
            if root() is module:
                return number
        for number, root in enumerate(self._roots):
            held = root()
            if held is not None and any(part is module for part in held.modules()):
                return number
        self._roots.append(weakref.ref(module))
        self._known.clear()
        self._modules.clear()
        return len(self._roots) - 1

    @property
    def count(self) -> int:
        """Number of roots called so far."""
        return len(self._roots)

    def roots(self, only: int | None = None) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name prefix, root): no prefix for the first; only root number `only` if set."""
        for number, root in enumerate(self._roots):
            held = root()
            if held is not None and only in (None, number):
                kind = type(held).__name__.removeprefix("FSDP")
                yield (f"{kind}#{number}/" if number else ""), held

    def of(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter; None if no root has it."""
        if id(parameter) not in self._known:
            self._learn()
        return self._known.get(id(parameter))

    def parameters(self, only: int | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, root in self.roots(only):
            for name, parameter in root.named_parameters():
                yield prefix + _clean(name), parameter

    def buffers(self, look: bool, only: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the named buffers of the known modules, or of root `only`.

        Args:
            look: search the roots for modules first.
        """
        modules = self._modules
        if look or not modules:
            modules = [
                (prefix, _clean(name + "." * bool(name)), weakref.ref(module))
                for prefix, root in self.roots(only)
                for name, module in root.named_modules()
            ]
            self._modules = modules if only is None else self._modules
        seen = set()
        for prefix, path, known in modules:
            module = known()
            for name, buffer in module._buffers.items() if module is not None else ():
                if buffer is not None and (prefix, id(buffer)) not in seen:
                    seen.add((prefix, id(buffer)))
                    yield prefix + path + name, buffer

    def entry(self, name: str, tensor: Tensor) -> Entry:
        """Return (name, this rank's part of a tensor, its place in the whole)."""
        local, place = piece(tensor)
        flat = self._flat.get(id(tensor))  # where this shard of FSDP 1 begins
        return name, local, place if flat is None else ElementPlaces(flat)

    def entries(self, named: Iterable[tuple[str, Tensor]]) -> list[Entry]:
        """Return the entries of several tensors, without those on meta."""
        return [self.entry(name, tensor) for name, tensor in named if not tensor.is_meta]

    def generators(self, module: nn.Module, look: bool) -> list[tuple[str, torch.Generator]]:
        """Return the generators among the attributes of a module; `look`: search again."""
        if look or id(module) not in self._drawing:
            self._drawing[id(module)] = [
                (f"{_clean(name)}.{key}".lstrip("."), weakref.ref(part), key)
                for name, part in module.named_modules()
                for key, value in vars(part).items()
                if isinstance(value, torch.Generator)
            ]
        found = [(name, getattr(part(), key, None)) for name, part, key in self._drawing[id(module)]]
        return [(name, value) for name, value in found if isinstance(value, torch.Generator)]

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


def piece(tensor: Tensor) -> tuple[Tensor, ElementPlaces]:
    """Return (this rank's part of a tensor, its place in the whole)."""
    shard = getattr(tensor, "ds_tensor", None)
    if shard is not None:  # DeepSpeed stage 3: a run of the flattened tensor, padded at the end
        whole, rank = int(tensor.ds_numel), torch.distributed.get_rank()  # type: ignore[attr-defined]
        begin = min(whole, rank * shard.numel())
        return shard[: whole - begin], ElementPlaces(begin)
    if not hasattr(tensor, "placements"):
        return tensor, WHOLE
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local, _place(tensor, local)


def _place(tensor: Any, local: Tensor) -> ElementPlaces:
    """The place of a DTensor's shard, from torch.chunk's sizes over each mesh dimension in turn.

    FSDP on top of tensor parallelism shards last on the first mesh dimension (`_StridedShard`).
    """
    shape, begins, sizes = list(tensor.shape), [0] * tensor.ndim, list(tensor.shape)
    cuts = list(zip(tensor.placements, tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape, strict=True))
    kinds = [type(placement).__name__ for placement, _, _ in cuts]
    if not {"Replicate", "Shard", "_StridedShard"}.issuperset(kinds):
        return _OPAQUE
    strided = [cut for cut, kind in zip(cuts, kinds, strict=True) if kind == "_StridedShard"]
    for placement, at, parts in [cut for cut, kind in zip(cuts, kinds, strict=True) if kind == "Shard"] + strided:
        dim = placement.dim
        size = -(-sizes[dim] // parts)
        first = min(sizes[dim], at * size)
        begins[dim], sizes[dim] = begins[dim] + first, min(size, sizes[dim] - first)
    cut = [dim for dim in range(tensor.ndim) if sizes[dim] != shape[dim]]
    if list(local.shape) != sizes or len(strided) > 1 or len(set(cut) - {0}) > 1:
        return _OPAQUE
    rows = begins[0] * math.prod(shape[1:]) if cut else 0
    if not cut or cut == [0] or not local.numel():
        return ElementPlaces(rows)
    last, inner = cut[-1], math.prod(shape[cut[-1] + 1 :])
    return ElementPlaces(rows + begins[last] * inner, sizes[last] * inner, shape[last] * inner)
