"""Which rank writes which part of which tensor.

    share = share_out(tensors, world)       share.pieces: what this rank writes; share.aliases: second names
    block_of(tensor)                        which part of the full tensor this rank holds

A plain tensor is the same on every rank and is written by one; a DTensor's slices are written by those who hold them.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lockstep.checkpoint.dtypes import dtype_name, is_known
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError
from lockstep.tensors import is_dtensor, local_of

__all__ = ["Block", "Piece", "Share", "block_of", "check_keepable", "in_file_order", "owners_of", "share_out"]


@dataclass(frozen=True, slots=True)
class Block:
    """A box in a tensor: where it begins and how far it goes, one number a dimension. A scalar's are both ()."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the tensor `name` of global `shape`: this rank's `local` tensor, which lies at `offsets`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes: its pieces, second names of tied tensors (alias -> name), and what all ranks agree on."""

    pieces: list[Piece]
    aliases: dict[str, str]
    summary: dict[str, Any]


def _kind(placement: object) -> str:
    # By name, since to import the classes costs half a second, and exactly: a strided shard is a kind of Shard but
    # lies elsewhere.
    return type(placement).__name__


def block_of(tensor: torch.Tensor) -> Block | None:
    """The part of the full tensor that this rank holds; None for a DTensor whose mesh leaves this rank out.

    Raises:
        CheckpointError: a placement that is neither Shard nor Replicate.
    """
    if not is_dtensor(tensor):
        return Block((0,) * tensor.dim(), tuple(tensor.shape))
    shape = list(tensor.shape)
    offsets = [0] * len(shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    placements: Sequence[Any] = tensor.placements
    for placement, ranks, index in zip(placements, tensor.device_mesh.shape, coordinate, strict=True):
        if _kind(placement) == "Shard":
            # As torch.chunk cuts: equal rows of ceil(n / ranks), the last ones shorter or empty.
            rows = math.ceil(shape[placement.dim] / ranks)
            start = min(index * rows, shape[placement.dim])
            offsets[placement.dim] += start
            shape[placement.dim] = min(rows, shape[placement.dim] - start)
        elif _kind(placement) != "Replicate":
            raise CheckpointError(f"a DTensor placed as {placement} cannot be kept; redistribute it to Shard first")
    return Block(tuple(offsets), tuple(shape))


def share_out(tensors: dict[str, torch.Tensor], world: World) -> Share:
    """What this rank writes of `tensors` (the same names on every rank), so that all is written once and in parallel.

    Raises:
        CheckpointError: a tensor that cannot be kept (its dtype, layout or placement), which is named.
    """
    for name, tensor in tensors.items():
        _check(name, tensor)
    names = sorted(tensors)
    aliases = _ties(tensors, names)
    whole = [name for name in names if name not in aliases and _is_whole(tensors[name], world)]
    owners = owners_of([(local_of(tensors[name]).nbytes, name) for name in whole], world.size)
    pieces = []
    for name in (name for name in names if name not in aliases):
        mine = owners[name] == world.rank if name in owners else _is_writer(tensors[name])
        block = block_of(tensors[name])
        if mine and block is not None:
            pieces.append(_piece(name, tensors[name], block))
    kept = {piece.name for piece in pieces}
    tied = {alias: name for alias, name in aliases.items() if name in kept}
    return Share(pieces, tied, _summary(tensors, names, whole))


def in_file_order(pieces: list[Piece]) -> list[Piece]:
    """The pieces with the widest elements first, so that every tensor lies aligned in the file."""
    return sorted(pieces, key=lambda piece: (-piece.local.itemsize, piece.name))


def _piece(name: str, tensor: torch.Tensor, block: Block) -> Piece:
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:  # there is nothing to cut: kept as one
        return Piece(name, shape, (0,) * len(shape), torch.empty(shape, dtype=tensor.dtype))
    return Piece(name, shape, block.offsets, local_of(tensor))


def check_keepable(tensors: Mapping[str, Any]) -> None:
    """Finds out whether a checkpoint can keep `tensors`, before there is anything to keep. Not collective.

    Args:
        tensors: a model's `state_dict()`, or an engine's state; tensors on the meta device are judged as what they
            will be.

    Raises:
        CheckpointError: the first that cannot be kept (no tensor, its dtype, layout or name); its module is named.
    """
    for name, value in tensors.items():
        problem = _problem(name, value)
        if problem:
            raise CheckpointError(problem)


def _check(name: str, tensor: torch.Tensor) -> None:
    problem = _problem(name, tensor)
    if not problem and tensor.is_meta:
        problem = f"the tensor {name!r:.300} cannot be kept in a checkpoint: it has no dense values (a meta tensor)"
    if problem:
        raise CheckpointError(problem)


def _problem(name: str, value: Any) -> str | None:
    """One line for why a checkpoint cannot keep this; None: it can."""
    if not isinstance(name, str) or not 0 < len(name) <= 1000 or name == "__metadata__":
        reason = "its name must be a text of 1 to 1000 characters other than '__metadata__'"
    elif not isinstance(value, torch.Tensor):
        return _no_tensor(name, value)
    elif value.layout is not torch.strided:
        reason = f"it has no dense values ({value.layout}); register a dense one"
    elif not is_known(dtype_name(value.dtype)):
        reason = f"the format has no {dtype_name(value.dtype)}"
    elif is_traceable_wrapper_subclass(value) and not is_dtensor(value):
        reason = f"it is a {type(value).__name__}, whose values lie in other tensors"
    else:
        return None
    return f"the tensor {name!r:.300} cannot be kept in a checkpoint: {reason}"


def _no_tensor(name: str, value: Any) -> str:
    module, _, last = name.removeprefix("model/").rpartition(".")
    if last == "_extra_state":  # torch's name for what get_extra_state returns
        where = f"the module {module!r:.300}" if module else "the model"
        return (
            f"{where} has a {type(value).__name__} as get_extra_state, and a checkpoint keeps tensors alone: return "
            "one tensor of a fixed shape there, or register buffers"
        )
    return (
        f"the state's {name!r:.300} is a {type(value).__name__}, and a checkpoint keeps tensors alone: make one of it"
    )


def _ties(tensors: dict[str, torch.Tensor], names: list[str]) -> dict[str, str]:
    """{second name: first name} of tensors that share all their memory. A rank with an empty shard sees no tie."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in names:
        tensor, local = tensors[name], local_of(tensors[name])
        if local.numel():
            placed = tensor.placements if is_dtensor(tensor) else None
            lazily = local.is_conj(), local.is_neg()  # the same memory, and other values
            identity = (local.data_ptr(), local.device, tensor.dtype, tensor.shape, local.stride(), placed, lazily)
            kept = first.setdefault(identity, name)
            if kept != name:
                aliases[name] = kept
    return aliases


def _is_whole(tensor: torch.Tensor, world: World) -> bool:
    """Whether every rank of the world holds all of it, so that any of them may write it."""
    if not is_dtensor(tensor):
        return True
    return tensor.device_mesh.size() == world.size and all(_kind(place) == "Replicate" for place in tensor.placements)


def _is_writer(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of the DTensor that is not empty and of which it has the first copy."""
    assert is_dtensor(tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    if tensor.numel() == 0:  # no rank has a part; one of them must keep the name
        return not any(coordinate)
    copies = [at for at, place in zip(coordinate, tensor.placements, strict=True) if _kind(place) == "Replicate"]
    return not any(copies) and local_of(tensor).numel() > 0


def owners_of(sizes: list[tuple[int, str]], ranks: int) -> dict[str, int]:
    """{name: rank} for (size, name) of `sizes`: the largest first, each to the rank with the least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    for size, name in sorted(sizes, reverse=True):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + size, rank))
        owners[name] = rank
    return owners


def _summary(tensors: dict[str, torch.Tensor], names: list[str], whole: list[str]) -> dict[str, Any]:
    digest = xxhash.xxh3_64()
    for name in names:
        digest.update(repr((name, dtype_name(tensors[name].dtype), tuple(tensors[name].shape))).encode())
    return {
        "tensors": len(names),
        "names and shapes": digest.hexdigest(),
        "replicated": xxhash.xxh3_64_hexdigest(repr(whole).encode()),
    }
