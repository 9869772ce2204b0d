"""Verify that a checkpoint is complete and undamaged.

problems = verify(path)             [] when it is
tensors = contents(path, manifest)  what its indexes say, held against the files
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.files import Seen, damage, printable
from lockstep.checkpoint.format import MANIFEST, Manifest, read_manifest, read_state, stored_as
from lockstep.checkpoint.layout import Header, SliceEntry, TensorBox, read_header, read_index
from lockstep.errors import CheckpointError, StorageError
from lockstep.files import retry_io

__all__ = [
    "StoredTensor",
    "contents",
    "damaged",
    "data_files",
    "hold",
    "is_marked",
    "not_finite_line",
    "outline",
    "strangers",
    "unusable",
    "verify",
]

_HIDDEN = (".nfs", ".fuse_hidden")  # names that a network file system gives to open files that are removed


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint: dtype name, global shape, and its slices."""

    dtype: str
    shape: tuple[int, ...]
    entries: list[SliceEntry]


def verify(path: Path) -> list[str]:
    """Return everything that is wrong with a checkpoint, a line each; [] if complete.

    Checks every file's existence, kind, size and checksum, files that do not belong there, and that the slices in the
    indexes are in the files and cover every tensor exactly once. Everything is read once; nothing is kept in memory.
    Tensors that are not finite are those that the manifest names.
    """
    try:
        manifest = read_manifest(path)
        problems = unusable(path, manifest) + strangers(path, manifest)
        problems += damaged(path, manifest, list(manifest.files))
        if not problems:
            hold(path, manifest)
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{printable(path.name)} cannot be read: {error.strerror}"]
    return problems


def unusable(path: Path, manifest: Manifest) -> list[str]:
    """Return why an undamaged checkpoint cannot be resumed, as one line; [] if it can."""
    if not manifest.not_finite:
        return []
    return [not_finite_line(manifest.not_finite, f" of {printable(path.name)}")]


def is_marked(path: Path) -> bool:
    """Whether the manifest names tensors that are not finite; False if it is unreadable."""
    try:
        return bool(read_manifest(path).not_finite)
    except (CheckpointError, StorageError, OSError):
        return False


def not_finite_line(names: list[str], where: str = "") -> str:
    """Describe tensors that are not finite: the first name, and how many more."""
    more = len(names) - 1
    shown = printable(names[0], 150)
    others = f" and {more} more tensor{'s' * (more > 1)}" if more else ""
    return f"{shown}{others}{where} {'are' if more else 'is'} not finite"


def outline(path: Path, manifest: Manifest) -> list[str]:
    """Find missing files and wrong kinds or sizes, without reading the tensors.

    JSON files are read, and their checksums checked.
    """
    found = [
        damage(path / name, each["size"], None if name.endswith(".safetensors") else each["xxh3_64"])
        for name, each in _sorted(manifest)
    ]
    return [problem for problem in found if problem]


def damaged(path: Path, manifest: Manifest, names: list[str], seen: Seen = lambda count: None) -> list[str]:
    """Read the files of these `names`, and return what is wrong with them.

    Args:
        seen: as in `damage`.
    """
    chosen = set(names)
    found = [
        damage(path / name, each["size"], each["xxh3_64"], seen) for name, each in _sorted(manifest) if name in chosen
    ]
    return [problem for problem in found if problem]


def _sorted(manifest: Manifest) -> list[tuple[str, dict[str, Any]]]:
    return sorted(manifest.files.items())


def data_files(manifest: Manifest, rank: int = 0, size: int = 1) -> list[str]:
    """Return the data files whose checksums this rank verifies, of `size` ranks.

    The default is all of them.
    """
    names = [name for name in manifest.files if name.endswith(".safetensors")]
    names.sort(key=lambda name: (-manifest.files[name]["size"], name))
    return names[rank::size]


def hold(path: Path, manifest: Manifest) -> None:
    """Check that the state is valid and that indexes and headers agree.

    Raises:
        CheckpointError: they do not.
    """
    read_state(path)
    contents(path, manifest)


def strangers(path: Path, manifest: Manifest) -> list[str]:
    """Return what is in the folder and does not belong there.

    Raises:
        OSError: the folder cannot be listed.
    """
    known = {MANIFEST, *manifest.files}
    return [
        f"{printable(path.name)}/{printable(found.name)} does not belong there"
        for found in sorted(retry_io(lambda: list(path.iterdir())))
        if found.name not in known and not found.name.startswith(_HIDDEN)
    ]


def contents(path: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint by name, aliases included.

    All indexes and headers are compared first.

    Raises:
        CheckpointError: they contradict each other; the file or the tensor is named.
    """
    found: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    listed: dict[str, set[str]] = {name: set() for name in manifest.files if name.endswith(".safetensors")}
    headers = {name: read_header(path / name) for name in listed}
    for index in sorted(name for name in manifest.files if name.startswith("rank-") and name.endswith(".json")):
        entries, names = read_index(path, index, manifest.files)
        aliases |= names
        for entry in entries:
            where = f"{printable(path.name)}/{index} is damaged: {printable(entry.name, 120)!r}"
            if headers[entry.file].get(entry.key) != stored_as(entry.dtype, entry.local):
                raise CheckpointError(f"{where} is not so in {entry.file}")
            stored = found.setdefault(entry.name, StoredTensor(entry.dtype, entry.shape, []))
            if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"{where} has another dtype or shape than in another index")
            stored.entries.append(entry)
            listed[entry.file].add(entry.key)
    _check_complete(path, found, headers, listed)
    return found | _resolved(path, found, aliases)


def _check_complete(
    path: Path,
    found: dict[str, StoredTensor],
    headers: dict[str, Header],
    listed: dict[str, set[str]],
) -> None:
    for file, keys in listed.items():
        stray = headers[file].keys() - keys
        if stray:
            raise CheckpointError(f"{printable(path.name)}/{file}: no index has {printable(min(stray), 120)!r}")
    for name, stored in found.items():
        if not tiles([entry.block for entry in stored.entries], stored.shape):
            raise CheckpointError(
                f"{printable(path.name)}: the slices of {printable(name, 120)!r} do not cover it exactly once"
            )


def _resolved(path: Path, found: dict[str, StoredTensor], aliases: dict[str, str]) -> dict[str, StoredTensor]:
    for alias, name in aliases.items():
        if alias in found or name not in found:
            raise CheckpointError(f"{printable(path.name)}: {printable(alias, 120)!r} is a second name of no tensor")
    return {alias: found[name] for alias, name in aliases.items()}


def tiles(blocks: list[TensorBox], shape: tuple[int, ...], dimension: int = 0) -> bool:
    """Whether the blocks cover `shape` exactly once.

    They must be cut as sharding cuts: dimension by dimension, each cut going through.
    """
    if dimension == len(shape):
        return len(blocks) == 1
    bands: dict[tuple[int, int], list[TensorBox]] = {}
    for block in blocks:
        bands.setdefault((block.offsets[dimension], block.shape[dimension]), []).append(block)
    end = 0
    for begin, count in sorted(bands):
        if begin != end or (count == 0 and shape[dimension] > 0):
            return False
        end += count
    return bool(bands) and end == shape[dimension] and all(tiles(band, shape, dimension + 1) for band in bands.values())
