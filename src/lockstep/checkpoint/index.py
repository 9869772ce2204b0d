"""The indexes of a checkpoint and the headers of its data files, read so that nothing in them is believed unseen.

    entries, aliases = read_index(path, "rank-00000.json", manifest.files)
    header = read_header(path / "rank-00000.safetensors")

Both raise CheckpointError, in one line that names the file.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.dtypes import CODES, is_known, itemsize
from lockstep.checkpoint.files import parse_json, printable, read_file
from lockstep.checkpoint.format import FORMAT, JSON_LIMIT, is_size
from lockstep.checkpoint.layout import Block
from lockstep.errors import CheckpointError
from lockstep.files import retry_io

__all__ = ["Entry", "Header", "read_header", "read_index"]

_HEADER_LIMIT = 100_000_000  # bytes: the safetensors format's own limit
_DIMENSIONS = 64  # torch's own limit

Header = dict[str, tuple[str, tuple[int, ...]]]  # key -> dtype code, shape


@dataclass(frozen=True, slots=True)
class Entry:
    """One slice: the box `local` at `offsets` of the tensor `name` of the full `shape`; it is `key` in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: tuple[int, ...]
    file: str
    key: str

    @property
    def block(self) -> Block:
        """Where in the full tensor it lies."""
        return Block(self.offsets, self.local)


def read_index(path: Path, name: str, files: dict[str, dict[str, Any]]) -> tuple[list[Entry], dict[str, str]]:
    """The slices and the second names (alias -> name) of the index `name` in the folder `path`.

    Args:
        files: the manifest's; an entry must name a data file that it lists.
    """
    where = f"{printable(path.name)}/{name}"
    content = parse_json(read_file(path / name, JSON_LIMIT), path / name)
    if not isinstance(content, dict) or content.keys() != {"format", "tensors", "aliases"}:
        raise CheckpointError(f"{where} is damaged: it is not an index")
    if content["format"] != FORMAT or not isinstance(content["tensors"], list):
        raise CheckpointError(f"{where} is damaged: it has another format than {FORMAT}")
    entries = []
    for number, fields in enumerate(content["tensors"]):
        problem = _entry_problem(fields, files)
        if problem:
            raise CheckpointError(f"{where} is damaged: entry {number}: {problem}")
        values: dict[str, Any] = {key: tuple(value) if type(value) is list else value for key, value in fields.items()}
        entries.append(Entry(**values))
    aliases = content["aliases"]
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise CheckpointError(f"{where} is damaged: its second names are not names")
    return entries, aliases


def _entry_problem(fields: Any, files: dict[str, dict[str, Any]]) -> str | None:
    wanted = {"name": str, "dtype": str, "shape": list, "offsets": list, "local": list, "file": str, "key": str}
    if not isinstance(fields, dict) or fields.keys() != wanted.keys():
        return f"it does not have the fields {', '.join(wanted)}"
    for key, kind in wanted.items():
        if type(fields[key]) is not kind or (kind is list and not all(is_size(value) for value in fields[key])):
            return f"its {key} is of another type or out of range"
    if not is_known(fields["dtype"]):
        return f"unknown dtype {printable(fields['dtype'], 40)!r}"
    if not fields["file"].endswith(".safetensors") or fields["file"] not in files:
        return f"its file {printable(fields['file'], 80)!r} is none of the manifest's"
    shape, offsets, local = fields["shape"], fields["offsets"], fields["local"]
    if not len(shape) == len(offsets) == len(local) <= _DIMENSIONS:
        return "its shape, offsets and local shape differ in length"
    if any(begin + count > size for begin, count, size in zip(offsets, local, shape, strict=True)):
        return f"{printable(fields['name'], 100)!r}: its slice reaches outside the tensor"
    return None


def read_header(path: Path) -> Header:
    """{key: (dtype code, shape)} of a safetensors file, whose tensors fill it without a gap and without an overlap."""
    where = f"{printable(path.parent.name)}/{path.name}"
    size, length, text = retry_io(lambda: _header_text(path, where))
    header = parse_json(text, path)
    if not isinstance(header, dict):
        raise CheckpointError(f"{where} is damaged: its header is not an object")
    header.pop("__metadata__", None)
    found: Header = {}
    ranges = []
    for key, fields in header.items():
        if not _is_header_entry(fields):
            raise CheckpointError(f"{where} is damaged: its header's entry {printable(key, 100)!r} does not hold")
        found[key] = (fields["dtype"], tuple(fields["shape"]))
        ranges.append(tuple(fields["data_offsets"]))
    end = 0
    for begin, finish in sorted(ranges):
        if begin != end:
            raise CheckpointError(f"{where} is damaged: its tensors overlap or leave a gap at byte {end}")
        end = finish
    if end != size - 8 - length:
        raise CheckpointError(f"{where} is damaged: its tensors take {end} bytes of {size - 8 - length}")
    return found


def _header_text(path: Path, where: str) -> tuple[int, int, bytes]:
    """The file's size, the header's length and what it says."""
    size = path.lstat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER_LIMIT, size - 8):  # also of a file that is too short to say it
            raise CheckpointError(f"{where} is damaged: its header claims {length} bytes of a file of {size}")
        return size, length, file.read(length)


_SIZES = {code: itemsize(name) for name, code in CODES.items()}


def _is_header_entry(fields: Any) -> bool:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets = fields["shape"], fields["data_offsets"]
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
