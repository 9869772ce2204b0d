"""Cut a model's layers over the tensor ranks of a replica.

    cut(model, mesh, {"blocks.*.up": "columns", "blocks.*.down": "rows", "*.qkv": "packed:3", "tokens": "vocabulary"})

The model is whole and the same on every rank, made from the seed; each rank keeps its own part. Cut parameters are
DTensors under their plain names, so that optimizers and checkpoints see whole shapes. The others stay plain.

| word | for | the parameters |
|---|---|---|
| columns | nn.Linear | rows of the weight and of the bias; the output is cut |
| columns | nn.Dropout | none; the input is cut, and the mask of the whole is drawn |
| rows | nn.Linear | columns of the weight; the bias is whole and added once; the input is cut |
| packed:n | nn.Linear | as columns, for n layers joined in one: each rank has its columns of all n |
| vocabulary | nn.Embedding, nn.Linear | the rows of the rank's tokens |
| replicated | a layer with parameters and none inside | none; the input is cut: the norm of a head's queries |

A value may also be a `ParallelStyle` of torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lockstep.errors import ConfigError
from lockstep.parallel.activations import TensorGroup
from lockstep.parallel.layers import (
    ColumnDropout,
    ColumnLinear,
    ReplicatedParameters,
    RowLinear,
    VocabularyEmbedding,
    VocabularyLinear,
)
from lockstep.tensors import reaches

__all__ = ["Plan", "cut"]


# Module name or pattern -> how its layer is cut.
Plan = Mapping[str, str | ParallelStyle]

_WORDS = ("columns", "rows", "packed:n", "vocabulary", "replicated")


@dataclass(frozen=True, slots=True)
class _PlannedLayer:
    """A layer and how it is cut.

    Attributes:
        name: its path in the model.
        word: of the plan, without the number of a "packed:n"; or torch's style.
        pieces: layers joined in it; 1 unless it is packed.
    """

    name: str
    module: Any
    word: str | ParallelStyle
    pieces: int = 1


def cut(model: nn.Module, mesh: DeviceMesh, plan: Plan, *, exact: bool = False) -> TensorGroup:
    """Cut a whole model in place by a plan. Collective only for a style of torch.

    Nothing is changed if the plan does not fit. A module with a method `divide_over(group)` gets a call of it
    afterwards, to divide what it counts for the whole, such as its attention heads.

    Args:
        model: the same on every rank. Its optimizer is made afterwards: cut parameters are new objects.
        mesh: the ranks that share the model, with one dimension.
        plan: see above. A key is a module's name or a pattern with `*`; it may also equal the name's last parts.
        exact: add activations in the order of the ranks' coordinates.

    Returns:
        The ranks that the model is cut over.

    Raises:
        ConfigError: a pattern matches nothing, a word is unknown or does not fit its module, or the degree does not
            divide a layer.
    """
    group = TensorGroup(mesh, exact)
    layers = _find_layers(model, plan, group.size)
    for layer in layers:
        _check(layer, group)
    _check_shared(model, layers, group.size)
    # Tied parameters stay one: each is cut once.
    parts: dict[Tensor, nn.Parameter] = {}
    for layer in layers:
        if isinstance(layer.word, ParallelStyle):
            parallelize_module(layer.module, mesh, layer.word)  # collective
        else:
            _cut_layer(layer, mesh, group, parts)
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "divide_over"):
            module.divide_over(group)
    return group


def _flag(size: int) -> str:
    return f"--parallel.tensor {size}"


def _find_layers(model: nn.Module, plan: Plan, size: int) -> list[_PlannedLayer]:
    """Return the layers that the plan names, in the model's order."""
    if not (isinstance(plan, Mapping) and plan and all(isinstance(pattern, str) for pattern in plan)):
        # An empty plan would have every rank train the whole model by itself.
        raise ConfigError(
            f'{_flag(size)}: the plan is {plan!r}; give a dict of module names, such as {{"mlp.up": "columns", '
            '"mlp.down": "rows"}'
        )
    found: dict[str, _PlannedLayer] = {}
    sources: dict[str, str] = {}
    for pattern, value in plan.items():
        word, pieces = _parse(pattern, value, size)
        matches = [(name, module) for name, module in model.named_modules() if name and reaches(pattern, name)]
        if not matches:
            raise ConfigError(f"{_flag(size)}: '{pattern}' in the plan matches no module; correct it, or leave it out")
        for name, module in matches:
            layer = _PlannedLayer(name, module, word, pieces)
            if found.setdefault(name, layer) != layer:
                raise ConfigError(
                    f"{_flag(size)}: {name} is planned as '{plan[sources[name]]}' by '{sources[name]}' and as "
                    f"'{value}' by '{pattern}'; make one of the patterns narrower"
                )
            sources.setdefault(name, pattern)
    return [found[name] for name, _ in model.named_modules() if name in found]


def _parse(pattern: str, value: str | ParallelStyle, size: int) -> tuple[str | ParallelStyle, int]:
    """Split a plan's value into its word and the number of joined layers."""
    if isinstance(value, ParallelStyle):
        return value, 1
    word, _, number = str(value).partition(":")
    if word == "packed" and number.isdecimal() and int(number):
        return word, int(number)
    if value not in _WORDS or word == "packed":
        raise ConfigError(
            f"{_flag(size)}: '{pattern}' is planned as '{value}'; use {', '.join(_WORDS)} or a ParallelStyle of torch"
        )
    return word, 1


def _check(layer: _PlannedLayer, group: TensorGroup) -> None:
    """Refuse a layer that cannot be cut as planned."""
    where = f"{_flag(group.size)}: {layer.name}"
    if isinstance(layer.word, ParallelStyle):
        if group.exact:
            raise ConfigError(
                f"{where} is planned as torch's {type(layer.word).__name__}, which adds in no fixed order; drop "
                f"--exact, or plan it as one of {', '.join(_WORDS)}"
            )
        return
    if layer.word == "replicated":
        if next(layer.module.children(), None) or not layer.module._parameters:
            raise ConfigError(
                f"{where} is planned as 'replicated' but is not a single layer with parameters; name the layer"
            )
        return
    if layer.word == "columns" and type(layer.module) is nn.Dropout:
        return
    kinds = (nn.Linear, nn.Embedding) if layer.word == "vocabulary" else (nn.Linear,)
    # The exact class: another forward than torch's would be lost, or would get DTensors.
    if type(layer.module) not in kinds or "forward" in vars(layer.module):
        fitting = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
        raise ConfigError(
            f"{where} is planned as '{layer.word}' but is {type(layer.module).__name__}; that needs a plain {fitting}"
        )
    _check_table(layer, where)
    count, noun = _count_cut(layer)
    ranks = group.size * layer.pieces
    if count % ranks:
        raise ConfigError(
            f"{where} has {count} {noun}, not a multiple of {ranks}; use a degree that divides them, or another width"
        )


def _check_table(layer: _PlannedLayer, where: str) -> None:
    """Refuse options of an embedding that look at more than the rows of one rank."""
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(layer.module, option, None):
            raise ConfigError(f"{where} is an embedding with {option}, which is not supported; drop {option}")


def _count_cut(layer: _PlannedLayer) -> tuple[int, str]:
    """Return what a layer has of the things that are shared out, and their name."""
    if isinstance(layer.module, nn.Embedding):
        return layer.module.num_embeddings, "rows"
    if layer.word == "rows":
        return layer.module.in_features, "inputs"
    return layer.module.out_features, "outputs"


def _check_shared(model: nn.Module, layers: Sequence[_PlannedLayer], size: int) -> None:
    """Refuse tied parameters of which the plan cuts one and not the other, or in another way."""
    cuts: dict[Tensor, object] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(recurse=False):
            cuts[parameter] = _cut_key(layer, name)
    planned = {layer.name: layer for layer in layers}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            own = _cut_key(planned.get(path), name)
            if cuts.get(parameter, own) != own:
                raise ConfigError(
                    f"{_flag(size)}: {path}.{name} is tied to a parameter that the plan cuts in another way; plan both "
                    "modules alike"
                )


def _cut_key(layer: _PlannedLayer | None, name: str) -> object:
    """Return a key that is equal for tied parameters that are cut alike."""
    if layer is None:
        return []
    # A style of torch would part the two.
    return layer.name if isinstance(layer.word, ParallelStyle) else _placement(layer, name)


def _placement(layer: _PlannedLayer, name: str) -> list[Placement]:
    """Return where a parameter of a layer is cut; [] if it stays whole."""
    if isinstance(layer.word, ParallelStyle) or layer.word == "replicated":
        return []
    if layer.word == "rows":
        return [Shard(1)] if name == "weight" else []
    if layer.pieces > 1:
        # Private to torch: each rank has its rows of every piece, in turn. `Shard(0)` would give the first rank all
        # queries and the last all values.
        return [_StridedShard(0, split_factor=layer.pieces)]
    return [Shard(0)]


def _cut_layer(layer: _PlannedLayer, mesh: DeviceMesh, group: TensorGroup, parts: dict[Tensor, nn.Parameter]) -> None:
    """Replace a layer's parameters by this rank's, and its class by one that computes with them."""
    module = layer.module
    for name, parameter in list(module.named_parameters(recurse=False)):
        placements = _placement(layer, name)
        if placements and parameter not in parts:
            parts[parameter] = _cut_parameter(parameter, mesh, placements, layer.pieces, group)
        if placements:
            setattr(module, name, parts[parameter])
    module.tensor_group = group
    # Change the class and not the instance's forward, which other techniques wrap.
    module.__class__ = _class_of(layer)


def _class_of(layer: _PlannedLayer) -> type[nn.Module]:
    if layer.word == "replicated":
        kind = type(layer.module)
        return type(f"Replicated{kind.__name__}", (ReplicatedParameters, kind), {})
    if layer.word == "vocabulary":
        return VocabularyEmbedding if isinstance(layer.module, nn.Embedding) else VocabularyLinear
    if layer.word == "rows":
        return RowLinear
    return ColumnDropout if isinstance(layer.module, nn.Dropout) else ColumnLinear


@torch.no_grad()
def _cut_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, placements: list[Placement], pieces: int, group: TensorGroup
) -> nn.Parameter:
    """Return this rank's part as a DTensor of the whole shape."""
    whole = parameter.detach()
    dim = getattr(placements[0], "dim", 0)
    own = group.own(whole.shape[dim] // pieces)
    shares = [piece.narrow(dim, own.start, own.stop - own.start) for piece in whole.chunk(pieces, dim)]
    # A copy, so that the whole is freed.
    local = torch.cat(shares, dim).contiguous()
    part = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
