"""Define a checkpoint's files, and read them without trusting them.

    checkpoints/step-00000500/
        rank-00000.safetensors   the tensors, or slices of them, that rank 0 wrote
        index.json               how each tensor is cut, and which rank's file has each slice; the aliases. A file has
                                 a second slice of the tensor "a" under the key "a[1]"
        state.json               plain numbers and strings of the run
        manifest.json            format, step, world size, engine, size and xxh3_64 of every other file; written last.
                                 `not_finite`, only if there are any: the tensors that prevent a resume

Format 1, which is read too, has in place of index.json a list of its slices for each rank: rank-00000.json, [{name,
dtype, shape, offsets, local, file, key}], and its aliases.

Sizes and shapes are compared with the real sizes of the files before any memory is allocated for them; names cannot
leave the folder; links in it are refused. Every function raises CheckpointError, in one line that names the file.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from lockstep.checkpoint.files import parse_json, read_file
from lockstep.errors import CheckpointError
from lockstep.files import printable
from lockstep.run_state import RunState

__all__ = [
    "CODES",
    "FORMAT",
    "INDEX",
    "JSON_LIMIT",
    "MANIFEST",
    "PAIRS",
    "STATE",
    "Manifest",
    "dtype_name",
    "dump",
    "is_known",
    "is_size",
    "itemsize",
    "read_manifest",
    "read_run_state",
    "read_state",
    "step_name",
    "step_of",
    "stored_as",
]


# torch dtype name -> the code of the safetensors format
CODES = {
    "complex64": "C64",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}

# torch dtype name -> dtype of its real and imaginary part, stored as a last dimension of 2
PAIRS = {"complex128": "float64"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without its package: "float32"."""
    return str(dtype).removeprefix("torch.")


def is_known(dtype: str) -> bool:
    """Whether a checkpoint can store tensors of this dtype name."""
    return dtype in CODES or dtype in PAIRS


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of this dtype name."""
    size: int = getattr(torch, dtype).itemsize
    return size


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the code and shape of a tensor in a safetensors file."""
    if dtype in PAIRS:
        return CODES[PAIRS[dtype]], (*shape, 2)
    return CODES[dtype], shape


# Version of the checkpoint format.
FORMAT = 2
INDEX = "index.json"
MANIFEST = "manifest.json"
STATE = "state.json"

_FILE = re.compile(r"rank-\d{5,9}\.(safetensors|json)|(state|index)\.json", re.ASCII)
_STEP = re.compile(r"step-\d{8,18}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{16}", re.ASCII)
# Bytes: an index of about 300,000 tensors, whose parsed form fits into memory.
JSON_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of a checkpoint's files, and how they were written.

    Attributes:
        world: number of ranks.
        written: seconds since 1970.
        files: name -> {size, xxh3_64}.
        not_finite: tensors that hold NaN or an infinity and should not.
    """

    step: int
    world: int
    engine: str
    written: int
    files: dict[str, dict[str, Any]]
    format: int = FORMAT
    not_finite: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all listed files."""
        return sum(file["size"] for file in self.files.values())

    @property
    def checksum(self) -> str:
        """xxh3_64 of all its fields."""
        return xxhash.xxh3_64_hexdigest(dump(self._fields()))

    def dump(self) -> bytes:
        """Return the file's content, with its own checksum, so that any changed byte is noticed."""
        return dump({**self._fields(), "xxh3_64": self.checksum})

    def _fields(self) -> dict[str, Any]:
        """Return the fields as the file has them; `not_finite` only if there are any."""
        fields = asdict(self)
        if not self.not_finite:
            del fields["not_finite"]
        return fields


def step_name(step: int) -> str:
    """Return the folder name of this step's checkpoint: "step-00000500" for 500."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return 500 for "step-00000500"; None if `name` is not a checkpoint's."""
    if not _STEP.fullmatch(name):
        return None
    step = int(name.removeprefix("step-"))
    if step_name(step) == name:
        return step
    return None


def dump(value: Any, indent: int | None = 1) -> bytes:
    """Encode `value` as JSON, always the same bytes for the same value.

    Raises:
        CheckpointError: it takes more bytes than a reader accepts.
    """
    data = json.dumps(value, sort_keys=True, indent=indent).encode() + b"\n"
    if len(data) > JSON_LIMIT:
        raise CheckpointError(f"{len(data)} bytes of JSON are too many for a checkpoint; store large data in tensors")
    return data


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint folder `path`, and check its checksum.

    Raises:
        CheckpointError: missing, damaged, of a newer format, or of another step than the folder's name.
    """
    file = path / MANIFEST
    data = read_file(file, JSON_LIMIT)
    fields = parse_json(data, file)
    label = printable(f"{path.name}/{MANIFEST}")
    if not isinstance(fields, dict):
        raise CheckpointError(f"{label} is damaged: it is not an object")
    if type(fields.get("format")) is int and fields["format"] > FORMAT:
        raise CheckpointError(f"{label} has format {fields['format']}, this lockstep reads {FORMAT}; update lockstep")
    checksum = fields.pop("xxh3_64", None)
    if _dump_or_none({**fields, "xxh3_64": checksum}) != data or xxhash.xxh3_64_hexdigest(dump(fields)) != checksum:
        raise CheckpointError(f"{label} is damaged: its own checksum does not match")
    problem = _manifest_problem(fields)
    if problem:
        raise CheckpointError(f"{label} is damaged: {problem}")
    manifest = Manifest(**fields)
    if path.name != step_name(manifest.step) and step_of(path.name) is not None:
        raise CheckpointError(f"{label} belongs to step {manifest.step}")
    return manifest


def _dump_or_none(value: Any) -> bytes | None:
    try:
        return dump(value)
    except (ValueError, RecursionError, CheckpointError):
        return None


def _manifest_problem(fields: dict[str, Any]) -> str | None:
    types = {"step": int, "world": int, "engine": str, "written": int, "files": dict, "format": int}
    if "not_finite" in fields:
        types["not_finite"] = list
    for key in sorted(types.keys() | fields.keys()):
        if key not in types or type(fields.get(key)) is not types[key]:
            return f"its field {printable(key, 40)!r} is missing, unknown or of another type"
    if not 1 <= fields["format"] <= FORMAT or fields["step"] < 0 or fields["world"] < 1 or len(fields["engine"]) > 200:
        return "its format, step, world or engine is out of range"
    if not all(isinstance(name, str) for name in fields.get("not_finite", ["a name"])):
        return "its list of tensors that are not finite has other values than names"
    for name, file in fields["files"].items():
        if not _FILE.fullmatch(name):
            return f"it lists {printable(name, 80)!r}, which is not a checkpoint's file"
        if not isinstance(file, dict) or file.keys() != {"size", "xxh3_64"} or not is_size(file["size"]):
            return f"the size of {name} is missing or out of range"
        if not isinstance(file["xxh3_64"], str) or not _HEX.fullmatch(file["xxh3_64"]):
            return f"the checksum of {name} is missing or malformed"
    if fields["format"] > 1 and INDEX not in fields["files"]:
        return f"it does not list {INDEX}"
    if STATE in fields["files"]:
        return None
    return f"it does not list {STATE}"


def is_size(value: Any) -> bool:
    """Whether `value` is a possible number of bytes or elements."""
    return type(value) is int and 0 <= value < 1 << 62


def read_run_state(path: Path) -> RunState:
    """Read the state of the run that wrote the checkpoint.

    Raises:
        CheckpointError: missing, or not a run's.
    """
    return RunState.from_json(read_state(path), f"{printable(path.name)}/{STATE}")


def read_state(path: Path) -> dict[str, Any]:
    """Read the plain numbers and strings that were saved with a checkpoint.

    Raises:
        CheckpointError: missing or not a JSON object.
    """
    state = parse_json(read_file(path / STATE, JSON_LIMIT), path / STATE)
    if not isinstance(state, dict):
        raise CheckpointError(f"{printable(path.name)}/{STATE} is damaged: it is not an object")
    return state
