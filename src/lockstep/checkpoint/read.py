"""Load checkpoints: every rank reads only the slices that it needs.

    load(path, {"model/weight": tensor, ...}, world)    fills the tensors in place
    fingerprint(path)                                   "sha256:..." of the full model state

Any world size and engine may have written them. Nothing is read before the manifest, the sizes and the checksums match,
and nothing is written into a tensor before all names, dtypes and shapes agree on every rank.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from lockstep.checkpoint.check import (
    StoredTensor,
    check_headers,
    check_sizes,
    data_files,
    find_damage,
    find_source,
    index_files,
    read_contents,
)
from lockstep.checkpoint.format import PAIRS, STATE, dtype_name, itemsize, read_manifest
from lockstep.checkpoint.layout import SliceEntry, TensorBox, boxes_of, parts_of
from lockstep.checkpoint.write import bytes_of
from lockstep.distributed.agreement import LONG, on_all_ranks
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError
from lockstep.files import printable, retry_io

__all__ = [
    "AVERAGE",
    "EVALUATED",
    "Differences",
    "FullTensors",
    "advise_drop",
    "averages_of",
    "check_fits",
    "differences",
    "evaluated_of",
    "fingerprint",
    "fingerprint_of",
    "list_names",
    "load",
    "open_tensors",
]

# Prefix of the names of averaged weights.
AVERAGE = "average/"
# Prefix of the names of an optimizer's weights for evaluation.
EVALUATED = "evaluated/"


def load(
    path: Path,
    tensors: dict[str, torch.Tensor],
    world: World | None,
    *,
    verified: bool = False,
    leave: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fill `tensors` in place from the checkpoint folder `path`. Collective.

    A name up to its first "/" is a group. `tensors` must have all of the checkpoint's tensors of its groups:
    {"model/..."} alone loads only weights, and a forgotten weight is still an error.

    Only an optimizer's state of a parameter may be missing, if those of others are there: the parameter had no gradient
    yet (it is frozen, or no loss used it). These names are removed from `tensors`, as `load_state_dict` expects.

    Args:
        tensors: by global name; plain tensors (the full shape) or DTensors of any mesh; CPU or device.
        world: its ranks divide the checking of the files; None: this process is alone and checks what it reads.
        verified: `find_newest` or `find_resume` has just checked the data's checksums: they are not read again.
            Those of a store neither: of a file that the folder lacks, only the needed bytes are read.
        leave: whether a tensor of the checkpoint is not wanted, by its name; it is not in `tensors`.

    Raises:
        CheckpointError: damaged files; names, dtypes or shapes differ (up to three are named). Nothing was filled.
        PeerError: the same on another rank.
    """
    everybody = world or World()
    # Collective.
    contents = on_all_ranks(everybody, lambda: _check_files(path, tensors, world, verified, leave), signs=LONG)
    # A rank whose folder has all files must take part too, because the download is collective.
    if world and any(world.gather(find_source(path) is not None)):
        _fetch_whole(path, tensors, contents, world)  # collective
    on_all_ranks(everybody, lambda: _fill_all(path, tensors, contents), signs=LONG)  # collective


def _check_files(
    path: Path,
    tensors: dict[str, torch.Tensor],
    world: World | None,
    verified: bool,
    leave: Callable[[str], bool],
) -> dict[str, StoredTensor]:
    manifest = read_manifest(path)
    source = find_source(path)
    if world is None and not source:
        _raise_damage(check_sizes(path, manifest))
    else:
        # The ranks divide the data, and each checks what it reads.
        _raise_damage(find_damage(path, manifest, [*index_files(manifest), STATE]))
    contents = read_contents(path, manifest)
    for name in _names_without_state(tensors, contents):
        del tensors[name]
    if any(mismatch := differences(tensors, contents, leave)):
        raise CheckpointError(
            f"the checkpoint {printable(path.name)} {mismatch}; use the model and optimizer that wrote it"
        )
    if verified or source:
        return contents
    if world is None:
        names = sorted({entry.file for name in tensors for entry in contents[name].entries})
    else:
        # The ranks share the work of checksums.
        names = data_files(manifest, world.rank, world.size)
    _raise_damage(find_damage(path, manifest, names))
    check_headers(path, manifest, names)
    return contents


def _raise_damage(problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{problems[0]}; resume from an older checkpoint")


def _names_without_state(tensors: dict[str, torch.Tensor], contents: dict[str, StoredTensor]) -> list[str]:
    """Return the names of optimizer states that did not exist when the checkpoint was written."""
    stepped = set()
    for name in contents:
        if name.startswith("optimizer/"):
            stepped.add(name.rpartition("/")[0])
    optimizer_names = []
    for name in tensors:
        if name.startswith("optimizer/"):
            optimizer_names.append(name)
    names = []
    for name in optimizer_names:
        if stepped and name.rpartition("/")[0] not in stepped:
            names.append(name)
    return names


class Differences(NamedTuple):
    """Names of tensors that differ between a model and what is stored for it.

    Attributes:
        missing: the model's, which are not stored.
        extra: those stored, which the model lacks.
        forms: name -> how its dtype or shape differs.
        shapes: those of `forms` whose shape differs.
    """

    missing: list[str]
    extra: list[str]
    forms: dict[str, str]
    shapes: list[str]

    def __str__(self) -> str:
        forms = [f"{name} ({form})" for name, form in self.forms.items()]
        parts = (("has no", self.missing), ("also has", self.extra), ("differs in", forms))
        return ", ".join(f"{verb} {list_names(names)}" for verb, names in parts if names)


def differences(
    tensors: Mapping[str, torch.Tensor], contents: Mapping[str, StoredTensor], leave: Callable[[str], bool]
) -> Differences:
    """Compare names, dtypes and shapes with a checkpoint's, in the groups of `tensors`."""
    groups = {name.partition("/")[0] for name in tensors}
    names = set()
    for name in contents:
        if name.partition("/")[0] in groups and not leave(name):
            names.add(name)
    forms = dict[str, str]()
    shapes = list[str]()
    for name in sorted(tensors.keys() & names):
        source = contents[name]
        tensor = tensors[name]
        dtype = dtype_name(tensor.dtype)
        shape = tuple(tensor.shape)
        if (source.dtype, source.shape) != (dtype, shape):
            forms[name] = f"{source.dtype} {list(source.shape)}, not {dtype} {list(shape)}"
            shapes += [name] * (source.shape != shape)
    return Differences(sorted(tensors.keys() - names), sorted(names - tensors.keys()), forms, shapes)


def check_fits(
    label: str,
    tensors: Mapping[str, torch.Tensor],
    contents: Mapping[str, StoredTensor],
    leave: Callable[[str], bool],
) -> None:
    """Raise CheckpointError with the flag that helps, if initial weights do not fit."""
    if any(mismatch := differences(tensors, contents, leave)):
        raise CheckpointError(f"{label} {mismatch}; {advise_drop(mismatch, len(tensors))}")


def list_names(names: Sequence[str]) -> str:
    """List up to three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(printable(name, 150) for name in names[:3]) + more


def advise_drop(found: Differences, count: int) -> str:
    """Return the flag that begins with other weights in spite of the differences.

    Args:
        count: the model's tensors; if none would be loaded, no flag helps.
    """
    names = []
    for name in (*found.missing, *found.extra, *found.shapes):
        names.append(name.removeprefix("model/"))
    if len(found.missing) + len(found.shapes) >= count:
        return "give weights of this model"
    if not names:
        return "give the --precision that wrote them"
    patterns = list(dict.fromkeys(f"{parent}.*" if (parent := name.rpartition(".")[0]) else name for name in names))
    return (
        f"give weights of this model, or begin with its own values there: --init-drop '{','.join(patterns[:4])}"
        f"{',...' if len(patterns) > 4 else ''}'"
    )


def _fetch_whole(path: Path, tensors: dict[str, torch.Tensor], contents: dict[str, StoredTensor], world: World) -> None:
    """Download whole files once for all ranks of a folder. Collective.

    These are the files that the ranks together read completely.

    A local file that is damaged is removed. What is not downloaded each rank reads in ranges.
    """
    # What is worth a whole download depends on the needs of all ranks of a folder.
    needs = world.gather(_bytes_needed(tensors, contents))
    lead = world.leads[world.rank] if world.leads else 0
    ranks = []
    for rank in range(world.size):
        if (world.leads[rank] if world.leads else 0) == lead:
            ranks.append(rank)
    total = Counter[str]()
    for rank in ranks:
        total.update(needs[rank])
    names = sorted(total)[ranks.index(world.rank) :: len(ranks)]

    def fetch() -> None:
        source = find_source(path)
        manifest = read_manifest(path)
        for name in names if source else ():
            if not (path / name).exists() or find_damage(path, manifest, [name]):
                (path / name).unlink(missing_ok=True)
                if source and total[name] >= source.size(name) // 2:
                    source.fetch(name, path / name)

    on_all_ranks(world, fetch, signs=LONG)  # collective


def _bytes_needed(tensors: dict[str, torch.Tensor], contents: dict[str, StoredTensor]) -> dict[str, int]:
    """Return how many bytes of each file this rank reads."""
    needs = Counter[str]()
    for name, tensor in tensors.items():
        for block in boxes_of(tensor):
            for entry in contents[name].within(block):
                low, high = _overlap(block, entry)
                elements = math.prod(max(0, end - begin) for begin, end in zip(low, high, strict=True))
                needs[entry.file] += itemsize(entry.dtype) * elements
    counts = {}
    for name, count in needs.items():
        if count:
            counts[name] = count
    return counts


def _fill_all(path: Path, tensors: dict[str, torch.Tensor], contents: dict[str, StoredTensor]) -> None:
    with ExitStack() as stack:
        read = _reader(path, stack)
        for name, tensor in tensors.items():
            for block, local in parts_of(tensor, name):
                _fill(local, block, contents[name], read)


Read = Callable[[SliceEntry, tuple[slice, ...]], torch.Tensor]


def _reader(path: Path, stack: ExitStack) -> Read:
    """Return a function that reads parts of slices through memory maps that `stack` closes."""

    source = find_source(path)

    @cache
    def open_file(file: str) -> Any:
        if source and not (path / file).exists():
            return None
        return stack.enter_context(retry_io(lambda: safe_open(path / file, framework="pt")))

    def read(entry: SliceEntry, part: tuple[slice, ...]) -> torch.Tensor:
        is_full = all(cut.start == 0 and cut.stop == count for cut, count in zip(part, entry.local, strict=True))
        file = open_file(entry.file)
        if file is None and source:
            tensor = source.read(entry, part)
        else:
            if is_full:
                tensor = file.get_tensor(entry.key)
            else:
                tensor = file.get_slice(entry.key)[part]
        if entry.dtype in PAIRS:
            return _to_complex(tensor, entry.dtype)
        return tensor

    return read


def _to_complex(pairs: torch.Tensor, dtype: str) -> torch.Tensor:
    """Copy pairs of reals to complex numbers; a view would need aligned memory."""
    tensor = torch.empty(pairs.shape[:-1], dtype=getattr(torch, dtype))
    torch.view_as_real(tensor).copy_(pairs)
    return tensor


def _fill(target: torch.Tensor, block: TensorBox, source: StoredTensor, read: Read) -> None:
    """Copy the slices' overlap with `block` of the full tensor into `target`."""
    for entry in source.within(block):
        low, high = _overlap(block, entry)
        if all(begin < end for begin, end in zip(low, high, strict=True)):
            target[_cut(low, high, block.offsets)].copy_(read(entry, _cut(low, high, entry.offsets)))


def _overlap(block: TensorBox, entry: SliceEntry) -> tuple[list[int], list[int]]:
    """Return where the slice's part of a block begins and ends in the full tensor."""
    low = [max(pair) for pair in zip(block.offsets, entry.offsets, strict=True)]
    return low, [min(pair) for pair in zip(_ends(block), _ends(entry.block), strict=True)]


def _ends(block: TensorBox) -> list[int]:
    return [begin + count for begin, count in zip(block.offsets, block.shape, strict=True)]


def _cut(low: list[int], high: list[int], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin - zero, end - zero) for begin, end, zero in zip(low, high, origin, strict=True))


@dataclass(frozen=True, slots=True)
class FullTensors:
    """The full tensors of a checkpoint.

    Attributes:
        contents: name -> dtype, shape and slices.
        read: name -> the tensor, read on each call.
    """

    contents: dict[str, StoredTensor]
    read: Callable[[str], torch.Tensor]


@contextmanager
def open_tensors(path: Path) -> Iterator[FullTensors]:
    """Check the files of a checkpoint, and yield its full tensors.

    No tensor is kept in memory.

    Raises:
        CheckpointError: damaged.
    """
    manifest = read_manifest(path)
    _raise_damage(find_damage(path, manifest, list(manifest.files)))
    contents = read_contents(path, manifest)
    check_headers(path, manifest, data_files(manifest))
    with ExitStack() as stack:
        read_slice = _reader(path, stack)
        yield FullTensors(contents, lambda name: _read_full(contents[name], read_slice))


def averages_of(path: Path, all_names: Iterable[str]) -> list[str]:
    """Return the names of averaged weights. Raises CheckpointError if there are none."""
    names = sorted(name for name in all_names if name.startswith(AVERAGE))
    if not names:
        raise CheckpointError(
            f"the checkpoint {printable(path.name)} has no averaged weights, since its run had no --optim.ema; "
            "omit --ema"
        )
    return names


def evaluated_of(all_names: Iterable[str]) -> dict[str, str]:
    """Map `model/NAME` to the name of its value for evaluation.

    {} if the optimizer has no such values.
    """
    names = {}
    for name in all_names:
        if name.startswith(EVALUATED):
            names[f"model/{name.removeprefix(EVALUATED)}"] = name
    return names


def fingerprint(path: Path, prefix: str = "model/") -> str:
    """Hash the full tensors whose names begin with `prefix`, with sha256.

    The hash does not depend on the world or engine that wrote them. The files are checked first. One full tensor is in
    memory at a time. A tied tensor counts under each of its names.

    Raises:
        CheckpointError: damaged, or without such tensors.
    """
    with open_tensors(path) as tensors:
        names = sorted(name for name in tensors.contents if name.startswith(prefix))
        if not names:
            raise CheckpointError(
                f"the checkpoint {printable(path.name)} has no tensor whose name begins with {prefix!r}"
            )
        return _digest((name.removeprefix(prefix), tensors.read(name)) for name in names)


def fingerprint_of(tensors: dict[str, torch.Tensor]) -> str:
    """Hash full, plain tensors in memory as `fingerprint` does, by name without a prefix."""
    return _digest((name, tensors[name]) for name in sorted(tensors))


def _read_full(source: StoredTensor, read: Read) -> torch.Tensor:
    if len(source.entries) == 1:
        return read(source.entries[0], tuple(slice(0, count) for count in source.shape))
    full = torch.empty(source.shape, dtype=getattr(torch, source.dtype))
    _fill(full, TensorBox((0,) * len(source.shape), source.shape), source, read)
    return full


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        # A line of JSON gives the number of bytes that follow, so that no two states have the same stream.
        digest.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        digest.update(bytes_of(tensor))
    return f"sha256:{digest.hexdigest()}"
