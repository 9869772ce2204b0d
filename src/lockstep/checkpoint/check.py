"""Verify that a checkpoint is complete and undamaged.

problems = verify(path)                     [] if it is
tensors = read_contents(path, manifest)     its indexes, checked against the files
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lockstep.checkpoint.files import OnRead, file_damage
from lockstep.checkpoint.format import INDEX, MANIFEST, Manifest, read_manifest, read_state, stored_as
from lockstep.checkpoint.grid import Grid
from lockstep.checkpoint.layout import (
    GridSlices,
    Header,
    SliceEntry,
    TensorBox,
    key_of,
    rank_of,
    read_header,
    read_index,
    read_rank_index,
)
from lockstep.errors import CheckpointError, StorageError
from lockstep.files import printable, retry_io

__all__ = [
    "DataSource",
    "StoredTensor",
    "attach",
    "check_contents",
    "check_headers",
    "check_sizes",
    "data_files",
    "detach",
    "find_damage",
    "find_source",
    "find_strays",
    "index_files",
    "is_marked",
    "not_finite_line",
    "read_contents",
    "resume_problems",
    "verify",
    "verify_data",
]

_RANK_INDEX = re.compile(r"rank-\d{5,9}\.json", re.ASCII)
# Prefixes that network file systems give to removed files that are still open.
_HIDDEN = (".nfs", ".fuse_hidden")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint: dtype name, global shape, and its slices."""

    dtype: str
    shape: tuple[int, ...]
    entries: Sequence[SliceEntry]

    def within(self, box: TensorBox) -> Iterable[SliceEntry]:
        """Return the slices that may overlap `box`; few, whatever the number of ranks that wrote."""
        if isinstance(self.entries, GridSlices):
            return self.entries.within(box)
        return self.entries


class DataSource(Protocol):
    """Place of the data files that a checkpoint's folder lacks.

    Attributes:
        problems: what is wrong there by the files' sizes, a line each.
    """

    problems: list[str]

    def read(self, entry: SliceEntry, part: tuple[slice, ...]) -> Tensor:
        """Return a part of a slice, as the file has it."""

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to `path`, and compare its checksum."""

    def size(self, name: str) -> int:
        """Return the bytes of a file."""

    def verify(self) -> list[str]:
        """Read all files; return what is wrong, a line each."""


# Sources of checkpoints whose folders here lack data files.
_SOURCES: dict[Path, DataSource] = {}


def attach(path: Path, source: DataSource) -> None:
    """Read the data files that the checkpoint's folder `path` lacks from `source`, until `detach`."""
    _SOURCES[path] = source


def detach(path: Path) -> None:
    """Undo `attach`. Safe to call twice."""
    _SOURCES.pop(path, None)


def find_source(path: Path) -> DataSource | None:
    """Return what `attach` was called with; None without one."""
    return _SOURCES.get(path)


def _here(path: Path, names: Iterable[str]) -> list[str]:
    """Return the files to check in this folder.

    Of a checkpoint that is attached to a source these are the files that the folder has.
    """
    present = []
    for name in names:
        if path not in _SOURCES or (path / name).exists():
            present.append(name)
    return present


def verify(path: Path) -> list[str]:
    """Return everything that is wrong with a checkpoint, a line each; [] if complete.

    Checks the existence, kind, size and checksum of every file, stray files, that the indexes' slices are in the files
    and cover every tensor exactly once, and that the manifest names no tensor that is not finite. Everything is read
    once; nothing is kept in memory.
    """
    try:
        manifest = read_manifest(path)
        problems = resume_problems(path, manifest) + find_strays(path, manifest)
        problems += source.problems if (source := find_source(path)) else []
        problems += find_damage(path, manifest, list(manifest.files))
        if not problems:
            check_contents(path, manifest)
            check_headers(path, manifest, data_files(manifest))
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{printable(path.name)} cannot be read: {error.strerror}"]
    return problems


def verify_data(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint, as `verify`.

    Of a checkpoint that is attached to a source it reads all data there.
    """
    source = find_source(path)
    if source:
        return source.verify()
    return verify(path)


def resume_problems(path: Path, manifest: Manifest) -> list[str]:
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


def not_finite_line(names: list[str], place: str = "") -> str:
    """Describe tensors that are not finite: the first name, and how many more."""
    more = len(names) - 1
    name = printable(names[0], 150)
    more_text = f" and {more} more tensor{'s' * (more > 1)}" if more else ""
    return f"{name}{more_text}{place} {'are' if more else 'is'} not finite"


def check_sizes(path: Path, manifest: Manifest) -> list[str]:
    """Find missing files, and files of a wrong kind or size.

    Only JSON files are read, to compare their checksums.
    """
    problems = []
    for name, entry in _sort_files(manifest):
        problems.append(
            file_damage(path / name, entry["size"], None if name.endswith(".safetensors") else entry["xxh3_64"])
        )
    return [problem for problem in problems if problem]


def find_damage(path: Path, manifest: Manifest, names: list[str], on_read: OnRead = lambda count: None) -> list[str]:
    """Read the files of these `names`, and return what is wrong with them.

    Args:
        on_read: as in `file_damage`.
    """
    chosen = set(_here(path, names))
    problems = []
    for name, entry in _sort_files(manifest):
        if name in chosen:
            problems.append(file_damage(path / name, entry["size"], entry["xxh3_64"], on_read))
    return [problem for problem in problems if problem]


def _sort_files(manifest: Manifest) -> list[tuple[str, dict[str, Any]]]:
    return sorted(manifest.files.items())


def data_files(manifest: Manifest, rank: int = 0, size: int = 1) -> list[str]:
    """Return the data files whose checksums this rank of `size` verifies; by default all."""
    names = []
    for name in manifest.files:
        if name.endswith(".safetensors"):
            names.append(name)
    names.sort(key=lambda name: (-manifest.files[name]["size"], name))
    return names[rank::size]


def check_contents(path: Path, manifest: Manifest) -> None:
    """Check that the state and the index are valid.

    Under format 1 indexes and headers must agree too.

    Raises:
        CheckpointError: they do not.
    """
    read_state(path)
    read_contents(path, manifest)


def index_files(manifest: Manifest) -> list[str]:
    """Return the index files: one, or one of each rank under format 1."""
    if manifest.format > 1:
        return [INDEX]
    return sorted(name for name in manifest.files if _RANK_INDEX.fullmatch(name))


def check_headers(path: Path, manifest: Manifest, names: list[str]) -> None:
    """Check that these data files have the tensors of the index.

    Under format 1 `read_contents` does that, for all files.

    One file's header is in memory at a time.

    Raises:
        CheckpointError: they do not; the file and the tensor are named.
    """
    names = _here(path, names)
    if manifest.format == 1 or not names:
        return
    tensors, _ = read_index(path, manifest.files)
    # By identity, because tensors that are cut in the same way share a grid.
    by_grid: dict[int, tuple[Grid, list[tuple[str, str]]]] = {}
    for name, slices in tensors.items():
        by_grid.setdefault(id(slices.grid), (slices.grid, []))[1].append((name, slices.dtype))
    places = []
    for grid, named in by_grid.values():
        parts: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for number, offsets, local in grid.slices():
            parts.setdefault(number, []).append((grid.part_of(offsets), local))
        places.append((parts, named))
    for file in names:
        header = read_header(path / file)
        expected = {}
        for parts, named in places:
            for part, local in parts.get(rank_of(file), ()):
                for name, dtype in named:
                    expected[key_of(name, part)] = stored_as(dtype, local)
        if header != expected:
            name = min(name for name in header.keys() | expected.keys() if header.get(name) != expected.get(name))
            raise CheckpointError(
                f"{printable(path.name)}/{INDEX} is damaged: {printable(name, 120)!r} does not match {file}"
            )


def find_strays(path: Path, manifest: Manifest) -> list[str]:
    """Return the files that do not belong in the folder, a line each.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = {MANIFEST, *manifest.files}
    return [
        f"{printable(path.name)}/{printable(file.name)} does not belong there"
        for file in sorted(retry_io(lambda: list(path.iterdir())))
        if file.name not in names and not file.name.startswith(_HIDDEN)
    ]


def read_contents(path: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint by name, aliases included.

    Raises:
        CheckpointError: indexes and headers contradict each other; the file or the tensor is named.
    """
    if manifest.format > 1:
        slices, names = read_index(path, manifest.files)
        stored = {}
        for name, grid_slices in slices.items():
            stored[name] = StoredTensor(grid_slices.dtype, grid_slices.grid.shape, grid_slices)
        return stored | _resolve_aliases(path, stored, names)
    return _read_rank_indexes(path, manifest)


def _read_rank_indexes(path: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """Read the contents of a checkpoint of format 1.

    It takes time for each slice of each tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    slices: dict[str, list[SliceEntry]] = {}
    aliases: dict[str, str] = {}
    listed: dict[str, set[str]] = {}
    for name in manifest.files:
        if name.endswith(".safetensors"):
            listed[name] = set()
    headers = {name: read_header(path / name) for name in listed}
    for index in index_files(manifest):
        entries, names = read_rank_index(path, index, manifest.files)
        aliases |= names
        for entry in entries:
            problem = f"{printable(path.name)}/{index} is damaged: {printable(entry.name, 120)!r}"
            if headers[entry.file].get(entry.key) != stored_as(entry.dtype, entry.local):
                raise CheckpointError(f"{problem} does not match {entry.file}")
            tensor_slices = slices.setdefault(entry.name, [])
            tensor = tensors.setdefault(entry.name, StoredTensor(entry.dtype, entry.shape, tensor_slices))
            if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"{problem} has another dtype or shape than in another index")
            tensor_slices.append(entry)
            listed[entry.file].add(entry.key)
    _check_complete(path, tensors, headers, listed)
    return tensors | _resolve_aliases(path, tensors, aliases)


def _check_complete(
    path: Path,
    tensors: dict[str, StoredTensor],
    headers: dict[str, Header],
    listed: dict[str, set[str]],
) -> None:
    for file, keys in listed.items():
        stray = headers[file].keys() - keys
        if stray:
            raise CheckpointError(f"{printable(path.name)}/{file}: no index has {printable(min(stray), 120)!r}")
    for name, tensor in tensors.items():
        if not covers_once([entry.block for entry in tensor.entries], tensor.shape):
            raise CheckpointError(
                f"{printable(path.name)}: the slices of {printable(name, 120)!r} do not cover it exactly once"
            )


def _resolve_aliases(path: Path, tensors: dict[str, StoredTensor], aliases: dict[str, str]) -> dict[str, StoredTensor]:
    for alias, name in aliases.items():
        if alias in tensors or name not in tensors:
            raise CheckpointError(f"{printable(path.name)}: {printable(alias, 120)!r} is an alias of no tensor")
    return {alias: tensors[name] for alias, name in aliases.items()}


def covers_once(blocks: list[TensorBox], shape: tuple[int, ...], dimension: int = 0) -> bool:
    """Whether the blocks cover `shape` exactly once, cut dimension by dimension as sharding does."""
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
    return (
        bool(bands)
        and end == shape[dimension]
        and all(covers_once(band, shape, dimension + 1) for band in bands.values())
    )
