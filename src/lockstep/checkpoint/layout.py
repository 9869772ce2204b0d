"""Decide which rank writes which part of which tensor, and read the indexes.

    share = share_out(tensors, world)       share.pieces: what this rank writes; share.aliases: second names
    boxes_of(tensor)                        which parts of the full tensor this rank holds
    parts_of(tensor)                        the same, each with the values

A plain tensor is the same on every rank, and one rank writes it; a DTensor's slices are written by the first ranks of
the world that hold them.

A mesh may be a slice of one of more ranks, such as the tensor dimension of a mesh (dp, tp): then every slice has a
replica of the tensor.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

# Private: torch has no public test for tensors that wrap others.
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lockstep.checkpoint.files import parse_json, read_file
from lockstep.checkpoint.format import CODES, INDEX, JSON_LIMIT, dtype_name, is_known, is_size, itemsize
from lockstep.checkpoint.grid import MOST_PARTS, Grid, Slice, grid_of, runs_of
from lockstep.distributed.rows import assign_owners
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError
from lockstep.files import printable, retry_io
from lockstep.tensors import is_dtensor, local_of

__all__ = [
    "GridSlices",
    "Header",
    "Share",
    "SliceEntry",
    "TensorBox",
    "TensorPiece",
    "block_of",
    "boxes_of",
    "check_storable",
    "data_name",
    "gather_stages",
    "in_file_order",
    "key_of",
    "owners_of",
    "parts_of",
    "rank_of",
    "read_header",
    "read_index",
    "read_rank_index",
    "replicas_of",
    "share_out",
]


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box in a tensor: start and extent in each dimension; () for scalars."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of the tensor `name` of global `shape`: this rank's `local`, at `offsets`; its `part`-th, from 0."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor
    part: int = 0

    @property
    def key(self) -> str:
        """Its name in the data file."""
        return key_of(self.name, self.part)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a checkpoint that one rank writes.

    Attributes:
        pieces: its parts of tensors.
        aliases: second names of tied tensors, alias -> name.
        summary: what must be equal on all ranks.
        index: how all ranks' parts form each tensor: name -> (dtype, grid). On rank 0, which writes it; it follows from
            the meshes and placements, without an exchange. Includes names that are aliases on other ranks alone.
    """

    pieces: list[TensorPiece]
    aliases: dict[str, str]
    summary: dict[str, Any]
    index: dict[str, tuple[str, Grid]]


def _kind(placement: object) -> str:
    # By name, since importing the classes takes half a second, and exactly: a strided shard is a subclass of Shard with
    # another layout.
    return type(placement).__name__


def key_of(name: str, part: int) -> str:
    """Return the key of a tensor's part in a data file; part 0 has the tensor's name."""
    return f"{name}[{part}]" if part else name


def block_of(tensor: torch.Tensor) -> TensorBox | None:
    """Return the part of the full tensor that this rank holds.

    None for a DTensor whose mesh does not contain this rank.

    Raises:
        CheckpointError: a placement that is neither Shard nor Replicate, or a packed tensor, which has several parts.
    """
    boxes = boxes_of(tensor)
    if len(boxes) > 1:
        raise CheckpointError(
            f"a packed tensor of shape {list(tensor.shape)} has {len(boxes)} parts on a rank, and one is needed here; "
            "redistribute it to Shard first"
        )
    if boxes:
        return boxes[0]
    return None


def boxes_of(tensor: torch.Tensor) -> list[TensorBox]:
    """Return the parts of the full tensor that this rank holds.

    One; none of a DTensor whose mesh does not contain this rank; several of a packed one, as of joined weights for
    queries, keys and values, each cut over the ranks. They are in the order of the shard's rows.

    Raises:
        CheckpointError: a placement that is neither Shard nor Replicate.
    """
    if not is_dtensor(tensor):
        return [TensorBox((0,) * tensor.dim(), tuple(tensor.shape))]
    at = tensor.device_mesh.get_coordinate()
    if at is None:
        return []
    shards, packed = _cuts_of(tensor.placements, tensor.device_mesh.shape)
    runs = [[(0, size)] for size in tensor.shape]
    for dim in set(shards.values()):
        axes = [axis for axis, cut in shards.items() if cut == dim]
        cuts = [(tensor.device_mesh.shape[axis], packed.get(axis, 1)) for axis in axes]
        runs[dim] = runs_of(tensor.shape[dim], cuts, [at[axis] for axis in axes])
    boxes = []
    for box in product(*runs):
        boxes.append(TensorBox(tuple(start for start, _ in box), tuple(count for _, count in box)))
    return boxes


def parts_of(tensor: torch.Tensor, name: str = "a tensor") -> list[tuple[TensorBox, torch.Tensor]]:
    """Return the parts of the full tensor that this rank holds, with their values.

    The values share the shard's memory.

    Args:
        name: for messages.

    Raises:
        CheckpointError: as `boxes_of`, or its shard has another shape than the placements give.
    """
    boxes = boxes_of(tensor)
    local = local_of(tensor)
    if len(boxes) == 1 and boxes[0].shape == tuple(local.shape):
        return [(boxes[0], local)]
    # In each dimension, where each part's rows begin in the shard.
    places: list[dict[int, int]] = []
    shape = []
    for dim in range(local.dim()):
        rows = {}
        end = 0
        for start, count in sorted({(box.offsets[dim], box.shape[dim]) for box in boxes}):
            rows[start] = end
            end += count
        places.append(rows)
        shape.append(end)
    # A mesh may cut a dimension several times in other orders, which matters only where the cuts are uneven.
    if boxes and tensor.numel() and shape != list(local.shape):
        raise CheckpointError(
            f"{name}: the shard on this rank has the shape {list(local.shape)}, and by its placements {shape}; cut "
            "dimensions that the sizes of the mesh divide"
        )
    parts = []
    for box in boxes:
        part = local
        for dim, (start, count) in enumerate(zip(box.offsets, box.shape, strict=True)):
            part = part.narrow(dim, places[dim][start], count)
        parts.append((box, part))
    return parts


def _cuts_of(placements: Sequence[Any], sizes: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return how a mesh cuts a tensor.

    Args:
        sizes: of the mesh's dimensions.

    Returns:
        (dimension of the mesh -> dimension of the tensor that it cuts, in the order of cutting; dimension of the mesh
        -> number of joined weights, if it cuts each of them).
    """
    shards: dict[int, int] = {}
    packed: dict[int, int] = {}
    # From the last dimension of the mesh to the first: a cut of a part comes after the cut that makes it.
    for axis in reversed(range(len(sizes))):
        placement = placements[axis]
        kind = _kind(placement)
        if kind == "Replicate":
            continue
        if kind not in {"Shard", "_StridedShard"}:
            raise CheckpointError(f"a DTensor placed as {placement} cannot be stored; redistribute it to Shard first")
        ranks = math.prod(sizes[later] for later, dim in shards.items() if dim == placement.dim)
        if kind == "Shard":
            shards = {axis: placement.dim, **shards}
        elif ranks > 1 and placement.split_factor == ranks:
            # FSDP cuts what each rank has by tensor parallelism.
            shards[axis] = placement.dim
        else:
            shards = {axis: placement.dim, **shards}
            packed[axis] = placement.split_factor
    return shards, packed


def replicas_of(mesh: Any, world: World) -> torch.Tensor:
    """Return the ranks of a mesh's replicas: of all slices like it.

    A mesh that is no slice has one replica, itself. The first holders of a tensor are in the first one.

    Args:
        world: of a pipeline's slices, those of this rank's stage count, as others have other tensors.

    Returns:
        int64 [replicas, *shape of the mesh].
    """
    own: torch.Tensor = mesh.mesh
    # Private: torch has no public way from a slice of a mesh to the whole.
    whole: torch.Tensor = mesh._get_root_mesh().mesh
    numbers = torch.empty(int(whole.max()) + 1, dtype=torch.int64)
    numbers[whole.reshape(-1)] = torch.arange(whole.numel())
    index = []
    for dim, places in enumerate(torch.unravel_index(numbers[own], whole.shape)):
        if places.min() < places.max():
            index.append(places)
        else:
            # The slices differ in this dimension, which comes before those of the mesh.
            shape = [1] * (whole.ndim + own.ndim)
            shape[dim] = whole.shape[dim]
            index.append(torch.arange(whole.shape[dim]).reshape(shape))
    replicas: torch.Tensor = whole[tuple(index)].reshape(-1, *own.shape)
    if world.part("pp").size == 1:
        return replicas
    return replicas[torch.isin(replicas, torch.tensor(world.stage_ranks)).flatten(1).all(dim=1)]


class _MeshReplicas(NamedTuple):
    """The ranks of a mesh's replicas, and whether this rank's mesh is the first one."""

    ranks: torch.Tensor
    is_first: bool


class StageTensor(NamedTuple):
    """A tensor of a pipeline, of which the ranks of some stages have nothing.

    Attributes:
        dtype: by its name in the format.
        shape: of the whole.
        nbytes: likewise.
        grid: how the ranks of its stage write it; None: one of them writes all.
        stage: the first one that has it.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    grid: Grid | None
    stage: int


def gather_stages(tensors: Mapping[str, torch.Tensor], world: World) -> dict[str, StageTensor]:
    """Return the tensors of all stages of a pipeline; {} without one. Collective over the stages.

    Raises:
        CheckpointError: a tensor that cannot be stored, on this stage or another.
    """
    stages = world.part("pp")
    if stages.size == 1:
        return {}
    rows: list[Any] = []
    error = None
    try:
        rows = _describe_stage(tensors, world)
    except CheckpointError as failure:
        error = failure
    found: dict[str, StageTensor] = {}
    # Every stage writes the index's part of the others, so that all agree on the writers.
    for stage, rows_of_stage in enumerate(stages.gather_checked(rows, error)):  # collective
        for name, dtype, shape, nbytes, cut in rows_of_stage:
            grid = Grid(tuple(map(tuple, cut[0])), tuple(cut[1])) if cut else None
            found.setdefault(name, StageTensor(dtype, tuple(shape), nbytes, grid, stage))
    return found


def _describe_stage(tensors: Mapping[str, torch.Tensor], world: World) -> list[Any]:
    """Return the fields of a `StageTensor` for each tensor, as JSON values; second names of tied ones are left out."""
    _check_all(tensors)
    replicas = _replicas_by_mesh(tensors, world)
    grids = _Grids(replicas)
    aliases = _ties(tensors, sorted(tensors))
    rows = []
    for name, tensor in tensors.items():
        if name not in aliases:
            cut = None
            if is_dtensor(tensor):
                grid = grids.of(tensor, None)
                cut = (grid.edges, grid.files)
            rows.append([name, dtype_name(tensor.dtype), list(tensor.shape), tensor.nbytes, cut])
    return rows


def _stage_writers(tensors: Mapping[str, StageTensor], world: World) -> dict[str, int]:
    """Return the rank that writes each whole tensor: one of the first stage that has it."""
    assert world.replicas is not None
    writers = {}
    for stage, ranks in enumerate(world.replicas.stages):
        sizes = []
        for name, tensor in tensors.items():
            if tensor.stage == stage and tensor.grid is None:
                sizes.append((tensor.nbytes, name))
        for name, place in owners_of(sizes, len(ranks)).items():
            writers[name] = ranks[place]
    return writers


def share_out(tensors: dict[str, torch.Tensor], world: World, stages: Mapping[str, StageTensor] | None = None) -> Share:
    """Divide `tensors` among the ranks, and return this rank's share. Not collective.

    Args:
        tensors: with the same names on every rank, but for `stages`. A DTensor's mesh is one of all ranks with a
            shard, or each rank's slice of it.
        stages: see `gather_stages`.

    Raises:
        CheckpointError: a tensor that cannot be stored (its dtype, layout or placement), which is named.
    """
    _check_all(tensors)
    if stages:
        return _share_out_stages(tensors, world, stages)
    names = sorted(tensors)
    replicas = _replicas_by_mesh(tensors, world)
    aliases = _ties(tensors, names)
    # Any rank can write a tensor that all have, so these are divided by size.
    replicated = []
    for name in names:
        if name not in aliases and _is_replicated(tensors[name], world, replicas):
            replicated.append(name)
    owners = owners_of([(local_of(tensors[name]).nbytes, name) for name in replicated], world.size)
    pieces = []
    for name in (name for name in names if name not in aliases):
        if name in owners:
            is_owner = owners[name] == world.rank
        else:
            is_owner = _is_writer(tensors[name], replicas)
        if is_owner:
            pieces += _pieces(name, tensors)
    written = {piece.name for piece in pieces}
    own_aliases = {}
    for alias, name in aliases.items():
        if name in written:
            own_aliases[alias] = name
    index = {}
    if world.is_main:
        grids = _Grids(replicas)
        for name in names:
            if name not in aliases:
                index[name] = (dtype_name(tensors[name].dtype), grids.of(tensors[name], owners.get(name)))
    return Share(pieces, own_aliases, _summary(tensors, names, replicated, replicas), index)


def _share_out_stages(tensors: dict[str, torch.Tensor], world: World, stages: Mapping[str, StageTensor]) -> Share:
    """Divide the tensors of a pipeline's stages."""
    writers = _stage_writers(stages, world)
    replicas = _replicas_by_mesh(tensors, world)
    pieces = []
    for name in sorted(tensors):
        # Second names are not in `stages`.
        entry = stages.get(name)
        if entry is None or entry.stage != world.part("pp").rank:
            continue
        if writers[name] == world.rank if entry.grid is None else _is_writer(tensors[name], replicas):
            pieces += _pieces(name, tensors)
    written = {piece.name for piece in pieces}
    aliases = {alias: name for alias, name in _ties(tensors, sorted(tensors)).items() if name in written}
    index = {}
    if world.is_main:
        for name, tensor in stages.items():
            index[name] = (tensor.dtype, tensor.grid or Grid.whole(tensor.shape, writers[name]))
    digest = xxhash.xxh3_64_hexdigest(repr(sorted(stages.items())).encode())
    return Share(pieces, aliases, {"tensors": len(stages), "names, shapes and stages": digest}, index)


def _replicas_by_mesh(tensors: Mapping[str, torch.Tensor], world: World) -> dict[Any, _MeshReplicas]:
    replicas: dict[Any, _MeshReplicas] = {}
    for tensor in tensors.values():
        if is_dtensor(tensor) and tensor.device_mesh not in replicas:
            ranks = replicas_of(tensor.device_mesh, world)
            replicas[tensor.device_mesh] = _MeshReplicas(ranks, torch.equal(ranks[0], tensor.device_mesh.mesh))
    return replicas


class _Grids:
    """The grids of tensors; each kind of sharding and shape is computed once.

    Args:
        replicas: of the meshes; the first one writes.
    """

    def __init__(self, replicas: Mapping[Any, _MeshReplicas]) -> None:
        self._replicas = replicas
        self._grids: dict[Any, Grid] = {}

    def of(self, tensor: torch.Tensor, owner: int | None) -> Grid:
        """Return a tensor's grid.

        Args:
            owner: the rank that writes all of it; None: the ranks of its mesh write their parts.
        """
        shape = tuple(tensor.shape)
        if owner is not None or not is_dtensor(tensor):
            key: Any = (owner, shape)
            return self._grids.setdefault(key, Grid.whole(shape, owner or 0))
        mesh = tensor.device_mesh
        placements: tuple[Any, ...] = tuple(tensor.placements)
        # Most tensors share mesh, placements and shape, so few grids are computed.
        key = (mesh, placements, shape)
        if key not in self._grids:
            ranks = self._replicas[mesh].ranks[0]
            if tensor.numel():
                self._grids[key] = grid_of(shape, ranks, *_cuts_of(placements, mesh.shape))
            else:
                self._grids[key] = Grid.whole(shape, int(ranks.reshape(-1)[0]))
        return self._grids[key]


def in_file_order(pieces: list[TensorPiece]) -> list[TensorPiece]:
    """Sort the pieces by element size, largest first, so that every tensor is aligned."""
    return sorted(pieces, key=lambda piece: (-piece.local.itemsize, piece.name))


def _pieces(name: str, tensors: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
    tensor = tensors[name]
    shape = tuple(tensor.shape)
    # An empty tensor cannot be cut.
    if tensor.numel() == 0:
        return [TensorPiece(name, shape, (0,) * len(shape), torch.empty(shape, dtype=tensor.dtype))]
    pieces = []
    for part, (box, local) in enumerate(parts_of(tensor, name)):
        pieces.append(TensorPiece(name, shape, box.offsets, local, part))
    if len(pieces) > MOST_PARTS:
        raise CheckpointError(
            f"{name!r:.300} has {len(pieces)} parts on a rank, and a checkpoint stores {MOST_PARTS}; join fewer "
            "weights in a tensor"
        )
    for piece in pieces[1:]:
        if piece.key in tensors:
            raise CheckpointError(
                f"part {piece.part} of {name!r:.300} is stored as {piece.key!r:.300}, which is another tensor's name; "
                "rename that one"
            )
    return pieces


def check_storable(tensors: Mapping[str, Any]) -> None:
    """Check that a checkpoint can store `tensors`, before they have values. Not collective.

    Args:
        tensors: a model's `state_dict()`, or an engine's state; meta tensors count as dense.

    Raises:
        CheckpointError: names the first that cannot be stored (no tensor, its dtype, layout or name) and its module.
    """
    for name, value in tensors.items():
        problem = _problem(name, value)
        if problem:
            raise CheckpointError(problem)


def _check_all(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        _check(name, tensor)


def _check(name: str, tensor: torch.Tensor) -> None:
    problem = _problem(name, tensor)
    if not problem and tensor.is_meta:
        problem = f"the tensor {name!r:.300} cannot be stored in a checkpoint: it has no dense values (a meta tensor)"
    if problem:
        raise CheckpointError(problem)


def _problem(name: str, value: Any) -> str | None:
    """Return why a checkpoint cannot store this, in one line; None: it can."""
    if not isinstance(name, str) or not 0 < len(name) <= 1000 or name == "__metadata__":
        reason = "its name must be a string of 1 to 1000 characters other than '__metadata__'"
    elif not isinstance(value, torch.Tensor):
        return _no_tensor(name, value)
    elif value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        reason = f"it has no dense values ({layout}); register a dense one, or a buffer with persistent=False"
    elif not is_known(dtype_name(value.dtype)):
        reason = f"the format has no {dtype_name(value.dtype)}"
    elif is_traceable_wrapper_subclass(value) and not is_dtensor(value):
        reason = f"it is a {type(value).__name__}, whose values are in other tensors"
    else:
        return None
    return f"the tensor {name!r:.300} cannot be stored in a checkpoint: {reason}"


def _no_tensor(name: str, value: Any) -> str:
    module, _, attribute = name.removeprefix("model/").rpartition(".")
    # torch's name for what get_extra_state returns.
    if attribute == "_extra_state":
        owner = f"the module {module!r:.300}" if module else "the model"
        return (
            f"{owner} returns a {type(value).__name__} from get_extra_state, and a checkpoint stores only tensors: "
            "return one tensor of a fixed shape there, or register buffers"
        )
    return f"the state's {name!r:.300} is a {type(value).__name__}, and a checkpoint stores only tensors: make it one"


def _ties(tensors: Mapping[str, torch.Tensor], names: list[str]) -> dict[str, str]:
    """Return {alias: first name} of tensors that share all their memory; none for empty shards."""
    originals: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in names:
        tensor = tensors[name]
        local = local_of(tensors[name])
        if local.numel():
            placements = tensor.placements if is_dtensor(tensor) else None
            # A conjugated or negated view has the same memory, but other values.
            lazily = local.is_conj(), local.is_neg()
            identity = (local.data_ptr(), local.device, tensor.dtype, tensor.shape, local.stride(), placements, lazily)
            original = originals.setdefault(identity, name)
            if original != name:
                aliases[name] = original
    return aliases


def _is_replicated(tensor: torch.Tensor, world: World, replicas: Mapping[Any, _MeshReplicas]) -> bool:
    """Whether every rank of the world has the full tensor: any may write it."""
    if not is_dtensor(tensor):
        return True
    return replicas[tensor.device_mesh].ranks.numel() == world.size and all(
        _kind(placement) == "Replicate" for placement in tensor.placements
    )


def _is_writer(tensor: torch.Tensor, replicas: Mapping[Any, _MeshReplicas]) -> bool:
    """Whether this rank holds the first copy, in the world, of a non-empty part of the DTensor."""
    assert is_dtensor(tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not replicas[tensor.device_mesh].is_first:
        return False
    # No rank has a part, but one must write the name.
    if tensor.numel() == 0:
        return not any(coordinate)
    copies = []
    for at, placement in zip(coordinate, tensor.placements, strict=True):
        if _kind(placement) == "Replicate":
            copies.append(at)
    return not any(copies) and local_of(tensor).numel() > 0


def owners_of(sizes: list[tuple[int, str]], ranks: int) -> dict[str, int]:
    """Assign tensors to ranks, largest first, each to the rank with the least.

    Args:
        sizes: (size, name) of each.

    Returns:
        {name: rank}.
    """
    largest_first = sorted(sizes, reverse=True)
    costs = [size for size, _ in largest_first]
    names = [name for _, name in largest_first]
    return dict(zip(names, assign_owners(costs, ranks), strict=True))


def _summary(
    tensors: dict[str, torch.Tensor],
    names: list[str],
    replicated: list[str],
    replicas: Mapping[Any, _MeshReplicas],
) -> dict[str, Any]:
    # Digests, because a large model has too many names and shapes to exchange.
    digest = xxhash.xxh3_64()
    placement = xxhash.xxh3_64()
    places: dict[Any, bytes] = {}
    for name in names:
        tensor = tensors[name]
        digest.update(repr((name, dtype_name(tensor.dtype), tuple(tensor.shape))).encode())
        if is_dtensor(tensor):
            key = (tensor.device_mesh, tuple(tensor.placements))
            if key not in places:
                # A mesh is in host memory. All slices of one have the same replicas.
                places[key] = repr((replicas[tensor.device_mesh].ranks.tolist(), tensor.placements)).encode()
            placement.update(places[key])
    return {
        "tensors": len(names),
        "names and shapes": digest.hexdigest(),
        "meshes and placements": placement.hexdigest(),
        "replicated": xxhash.xxh3_64_hexdigest(repr(replicated).encode()),
    }


# --- indexes and headers

# Bytes: the safetensors format's own limit.
_HEADER_LIMIT = 100_000_000
# torch's own limit.
_DIMENSIONS = 64
# Version of index.json.
_INDEX_FORMAT = 2

# key -> dtype code, shape.
Header = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class SliceEntry:
    """A slice in an index: a box of a tensor, stored under `key` in `file`.

    Attributes:
        shape: of the full tensor.
        offsets: of the box.
        local: shape of the box.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: tuple[int, ...]
    file: str
    key: str

    @property
    def block(self) -> TensorBox:
        """The slice's box in the full tensor."""
        return TensorBox(self.offsets, self.local)


class GridSlices(Sequence[SliceEntry]):
    """The slices of a tensor that a grid describes, made as they are needed."""

    __slots__ = ("_dtype", "_grid", "_name")

    def __init__(self, name: str, dtype: str, grid: Grid) -> None:
        self._name = name
        self._dtype = dtype
        self._grid = grid

    @property
    def dtype(self) -> str:
        """Name of the tensor's dtype."""
        return self._dtype

    @property
    def grid(self) -> Grid:
        """The grid of the tensor's slices."""
        return self._grid

    def __len__(self) -> int:
        """Return the number of slices."""
        return len(self._grid.files)

    def __getitem__(self, index: Any) -> Any:
        """Return a slice, in row-major order."""
        return [self._entry(box) for box in self._grid.slices()][index]

    def __iter__(self) -> Iterator[SliceEntry]:
        """Yield the slices."""
        return map(self._entry, self._grid.slices())

    def within(self, box: TensorBox) -> Iterator[SliceEntry]:
        """Yield the slices that overlap `box`."""
        return map(self._entry, self._grid.within(box.offsets, box.shape))

    def _entry(self, each: Slice) -> SliceEntry:
        file, offsets, local = each
        key = key_of(self._name, self._grid.part_of(offsets))
        return SliceEntry(self._name, self._dtype, self._grid.shape, offsets, local, data_name(file), key)


def data_name(rank: int) -> str:
    """Return the name of the data file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(name: str) -> int:
    """Return the rank that wrote this data file."""
    return int(name.removeprefix("rank-").partition(".")[0])


def read_index(path: Path, files: dict[str, dict[str, Any]]) -> tuple[dict[str, GridSlices], dict[str, str]]:
    """Read the index: the slices of each tensor, and the aliases (alias -> name).

    Args:
        path: the checkpoint's folder.
        files: the manifest's; every slice must be in a data file that it lists.
    """
    label = f"{printable(path.name)}/{INDEX}"
    content = parse_json(read_file(path / INDEX, JSON_LIMIT), path / INDEX)
    if not isinstance(content, dict) or content.keys() != {"format", "tensors", "aliases"}:
        raise CheckpointError(f"{label} is damaged: it is not an index")
    if content["format"] != _INDEX_FORMAT or not isinstance(content["tensors"], list):
        raise CheckpointError(f"{label} is damaged: it has another format than {_INDEX_FORMAT}")
    numbers = frozenset(rank_of(name) for name in files if name.endswith(".safetensors"))
    # Most tensors are cut in the same way, and share an entry.
    grids: dict[str, Grid | str] = {}
    tensors: dict[str, GridSlices] = {}
    for number, fields in enumerate(content["tensors"]):
        grid = _grid(fields, numbers, grids)
        if isinstance(grid, str):
            raise CheckpointError(f"{label} is damaged: entry {number}: {grid}")
        if fields["name"] in tensors:
            raise CheckpointError(f"{label} is damaged: it has {printable(fields['name'], 120)!r} twice")
        tensors[fields["name"]] = GridSlices(fields["name"], fields["dtype"], grid)
    return tensors, _aliases(content["aliases"], label)


def _grid(fields: Any, numbers: frozenset[int], grids: dict[str, "Grid | str"]) -> "Grid | str":
    """Return the grid of an index's entry, or what is wrong with it.

    Args:
        numbers: of the data files.
        grids: cache of parsed grids.
    """
    if not isinstance(fields, dict) or fields.keys() - {"parts"} != {"name", "dtype", "cuts", "files"}:
        return "it does not have the fields name, dtype, cuts, files"
    if type(fields["name"]) is not str or type(fields["dtype"]) is not str:
        return "its name or dtype is of another type"
    if not is_known(fields["dtype"]):
        return f"unknown dtype {printable(fields['dtype'], 40)!r}"
    parts = fields.get("parts", 1)
    key = repr((fields["cuts"], fields["files"], parts))
    if key not in grids:
        grid = Grid.from_json(fields["cuts"], fields["files"], len(numbers), parts)
        if isinstance(grid, Grid) and (len(grid.edges) > _DIMENSIONS or not numbers.issuperset(grid.files)):
            grid = "it has a file that is not in the manifest, or too many dimensions"
        grids[key] = grid
    return grids[key]


def _aliases(aliases: Any, label: str) -> dict[str, str]:
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise CheckpointError(f"{label} is damaged: its aliases are not names")
    return aliases


def read_rank_index(path: Path, name: str, files: dict[str, dict[str, Any]]) -> tuple[list[SliceEntry], dict[str, str]]:
    """Read slices and aliases (alias -> name) of a rank's index, of format 1.

    Args:
        path: the checkpoint's folder.
        name: of the index.
        files: the manifest's; an entry must name a data file that it lists.
    """
    label = f"{printable(path.name)}/{name}"
    content = parse_json(read_file(path / name, JSON_LIMIT), path / name)
    if not isinstance(content, dict) or content.keys() != {"format", "tensors", "aliases"}:
        raise CheckpointError(f"{label} is damaged: it is not an index")
    if content["format"] != 1 or not isinstance(content["tensors"], list):
        raise CheckpointError(f"{label} is damaged: it has another format than 1")
    entries = []
    for number, fields in enumerate(content["tensors"]):
        problem = _entry_problem(fields, files)
        if problem:
            raise CheckpointError(f"{label} is damaged: entry {number}: {problem}")
        values: dict[str, Any] = {}
        for key, value in fields.items():
            values[key] = tuple(value) if type(value) is list else value
        entries.append(SliceEntry(**values))
    return entries, _aliases(content["aliases"], label)


def _entry_problem(fields: Any, files: dict[str, dict[str, Any]]) -> str | None:
    types = {"name": str, "dtype": str, "shape": list, "offsets": list, "local": list, "file": str, "key": str}
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        return f"it does not have the fields {', '.join(types)}"
    for key, expected in types.items():
        if type(fields[key]) is not expected or (expected is list and not all(is_size(value) for value in fields[key])):
            return f"its {key} is of another type or out of range"
    if not is_known(fields["dtype"]):
        return f"unknown dtype {printable(fields['dtype'], 40)!r}"
    if not fields["file"].endswith(".safetensors") or fields["file"] not in files:
        return f"its file {printable(fields['file'], 80)!r} is not in the manifest"
    shape = fields["shape"]
    offsets = fields["offsets"]
    local = fields["local"]
    if not len(shape) == len(offsets) == len(local) <= _DIMENSIONS:
        return "its shape, offsets and local shape differ in length"
    if any(begin + count > size for begin, count, size in zip(offsets, local, shape, strict=True)):
        return f"{printable(fields['name'], 100)!r}: its slice exceeds the tensor"
    return None


def read_header(path: Path) -> Header:
    """Return {key: (dtype code, shape)} of a safetensors file without gaps or overlaps."""
    label = f"{printable(path.parent.name)}/{path.name}"
    size, length, text = retry_io(lambda: _header_text(path, label))
    header = parse_json(text, path)
    if not isinstance(header, dict):
        raise CheckpointError(f"{label} is damaged: its header is not an object")
    header.pop("__metadata__", None)
    entries: Header = {}
    ranges = []
    for key, fields in header.items():
        if not _is_header_entry(fields):
            raise CheckpointError(f"{label} is damaged: its header's entry {printable(key, 100)!r} is invalid")
        entries[key] = (fields["dtype"], tuple(fields["shape"]))
        ranges.append(tuple(fields["data_offsets"]))
    end = 0
    for begin, finish in sorted(ranges):
        if begin != end:
            raise CheckpointError(f"{label} is damaged: its tensors overlap or leave a gap at byte {end}")
        end = finish
    if end != size - 8 - length:
        raise CheckpointError(f"{label} is damaged: its tensors take {end} bytes of {size - 8 - length}")
    return entries


def _header_text(path: Path, label: str) -> tuple[int, int, bytes]:
    """Return the file's size, the header's length and its text."""
    size = path.lstat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # This holds for a file of fewer than 8 bytes too.
        if length > min(_HEADER_LIMIT, size - 8):
            raise CheckpointError(f"{label} is damaged: its header claims {length} bytes of a file of {size}")
        return size, length, file.read(length)


_SIZES = {code: itemsize(name) for name, code in CODES.items()}


def _is_header_entry(fields: Any) -> bool:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    shape = fields["shape"]
    offsets = fields["data_offsets"]
    if (
        not isinstance(shape, list)
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or len(shape) > _DIMENSIONS + 1
    ):
        return False
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in _SIZES:
        return False
    if not all(is_size(value) for value in [*shape, *offsets]):
        return False
    return bool(math.prod(shape) * _SIZES[fields["dtype"]] == offsets[1] - offsets[0])
