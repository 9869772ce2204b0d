"""Read samples of a shard by index: MDS, webdataset's tars, and memory-mapped tokens.

    form = TarShards()
    form.prepare(file, path, beside)            # an index of the tar, which is kept in the cache
    form.open(path, beside).read([3, 0])        # [{"__key__": "0003", "jpg": b"...", "cls": b"7"}, ...]

MDS is read by its documented layout: mosaicml-streaming itself needs the SDKs of five clouds and an older transformers.
Columns that are pickled are refused, since reading them runs code.
"""

import bz2
import decimal
import functools
import importlib
import io
import json
import logging
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.config.secrets import printable
from lockstep.data.found import LIMIT, FoundFiles
from lockstep.data.shard_cache import ShardFile
from lockstep.errors import ConfigError, DataError
from lockstep.extras import install_extra

__all__ = [
    "MdsShards",
    "OpenShard",
    "ShardError",
    "ShardFormat",
    "ShardSummary",
    "TarShards",
    "TokenShards",
    "read_mds_index",
]


_LOG = logging.getLogger("lockstep")


class ShardError(ValueError):
    """A fault in a shard's content; its text has the way out."""


class ShardSummary(NamedTuple):
    """The contents of a shard, as known before it is opened.

    Attributes:
        samples: in it; -1: unknown.
        schema: its columns, a line each; "": the format has none.
    """

    samples: int
    schema: str = ""


class OpenShard(ABC):
    """A shard whose samples can be read.

    Attributes:
        samples: in it, by its own content; -1: its size alone decides them.
    """

    samples = -1

    @abstractmethod
    def read(self, rows: list[int]) -> list[Any]:
        """Return these samples, in this order."""


class ShardFormat(ABC):
    """A file format of shards.

    Attributes:
        name: as the user gives it.
        suffix: of a file that `prepare` writes; "": none.
        replaces: that file replaces the shard, such as an uncompressed copy; else both are kept.
        has_header: the first bytes of a shard have the number of its samples.
    """

    name: str
    suffix = ""
    replaces = False
    has_header = False

    def prepared(self, file: ShardFile, path: Path | None) -> bool:
        """Whether this shard must be prepared; `path` is None if it is not here yet."""
        return bool(self.suffix)

    def prepare(self, file: ShardFile, path: Path, target: Path) -> None:
        """Write the file of `suffix`."""
        raise NotImplementedError

    @abstractmethod
    def count(self, path: Path) -> ShardSummary:
        """Count the samples of a prepared shard.

        Raises an error for one that is not complete.
        """

    def count_from_size(self, size: int) -> int:
        """Return the number of samples of a file of `size` bytes.

        -1: the size alone does not decide it.
        """
        return -1

    def peek(self, file: Any) -> ShardSummary:
        """Count the samples of an open file of a store.

        Only if a small part of the file has the number; else -1.
        """
        return ShardSummary(-1)

    @abstractmethod
    def open(self, path: Path, beside: Path | None) -> OpenShard:
        """Open a shard, with the file that `prepare` wrote."""

    def read(self, parts: Sequence[tuple[OpenShard, list[int]]]) -> list[Any]:
        """Return these samples of open shards, those of the first one first."""
        return [sample for shard, rows in parts for sample in shard.read(rows)]

    def options(self) -> dict[str, Any]:
        """Return what decides the number of samples, for the key of an index."""
        return {}


# --- tokens


# Number of tokens at the start of a file that are checked against its type.
_SEEN = 4096
# Above any vocabulary.
_MAX_TOKEN = 1 << 24
# The first bytes of files that are often mistaken for plain numbers.
_MAGIC = {b"\x93NUMPY": "a .npy file", b"\x1f\x8b\x08": "compressed by gzip", b"\x28\xb5\x2f\xfd": "compressed by zstd"}


@final
class TokenShards(ShardFormat):
    """Files of token numbers alone, little-endian; a sample is a window of them.

    The windows have seq_len + 1 tokens, at a stride of seq_len.

    A sample is {"input_ids": int64 [seq_len], "labels": int64 [seq_len]}. The rest of each file is left out.

    Args:
        seq_len: tokens of a sample.
        dtype: of the numbers, which a file of numbers alone does not contain.
        vocab_size: a number that is not below it is an error; 0: unknown.
    """

    name = "tokens"

    def __init__(self, seq_len: int, dtype: str, vocab_size: int = 0) -> None:
        if seq_len < 1:
            raise ConfigError("lockstep.shards: the format tokens needs seq_len, the tokens of a sample")
        if not dtype:
            raise ConfigError(
                "lockstep.shards: the format tokens needs dtype, the type of the numbers in the files, such as "
                "dtype='uint16' or 'uint32': the files do not say"
            )
        self._seq_len = seq_len
        self._vocab_size = vocab_size
        self._kind = np.dtype(dtype).newbyteorder("<")

    def options(self) -> dict[str, Any]:
        return {"seq_len": self._seq_len, "dtype": self._kind.str}

    def count(self, path: Path) -> ShardSummary:
        _check_tokens(path, self._kind)
        return ShardSummary(self.count_from_size(path.stat().st_size))

    def count_from_size(self, size: int) -> int:
        return max(0, size // self._kind.itemsize - 1) // self._seq_len

    def open(self, path: Path, beside: Path | None) -> OpenShard:
        _check_tokens(path, self._kind)
        return _TokenShard(path, self._seq_len, self._kind, self._vocab_size)


def _check_tokens(path: Path, kind: np.dtype[Any]) -> None:
    """Raise ShardError if a file's beginning shows another content or number type."""
    with path.open("rb") as file:
        begin = file.read(_SEEN * kind.itemsize)
    if what := next((what for magic, what in _MAGIC.items() if begin.startswith(magic)), ""):
        raise ShardError(f"it is {what}, and not the numbers alone: write them with `array.tofile`")
    if path.stat().st_size % kind.itemsize:
        raise ShardError(
            f"its {path.stat().st_size} bytes are no whole numbers of {kind.name}: it is cut, or has another dtype"
        )
    numbers = np.frombuffer(begin, kind)
    if kind.itemsize > 2:
        odd = numbers[(numbers < 0) | (numbers >= _MAX_TOKEN)]
    else:
        odd = numbers[:0]
    if len(odd):
        raise ShardError(f"as {kind.name} it has the token {odd[0]}, which no vocabulary has: give another dtype")
    if kind.itemsize == 2 and len(numbers) >= 16 and not numbers[1::2].any() and numbers[::2].any():
        raise ShardError(f"as {kind.name} every second token is 0: it looks like uint32; give dtype='uint32'")


class _TokenShard(OpenShard):
    def __init__(self, path: Path, seq_len: int, kind: np.dtype[Any], vocab_size: int) -> None:
        self._tokens: NDArray[Any] = np.asarray(np.memmap(path, dtype=kind, mode="r"))
        self._seq_len = seq_len
        self._row = np.arange(seq_len + 1)
        self._vocab_size = vocab_size

    def read(self, rows: list[int]) -> list[Any]:
        token_indices = np.asarray(rows)[:, None] * self._seq_len + self._row
        windows = torch.from_numpy(self._tokens[token_indices].astype(np.int64))
        if self._vocab_size and rows and int(windows.max()) >= self._vocab_size:
            raise ShardError(
                f"it has the token {int(windows.max())}, and vocab_size is {self._vocab_size}: give another dtype"
            )
        samples = []
        for inputs, labels in zip(windows[:, :-1].unbind(), windows[:, 1:].unbind(), strict=True):
            samples.append({"input_ids": inputs, "labels": labels})
        return samples


# --- webdataset


# key.extension, as webdataset splits it.
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)")
# Entries of a tar that webdataset skips too.
_META = re.compile(r"__[^/]*__(?:$|/)")
# The block size of the tar format, in bytes.
_BLOCK = 512
# Bytes that are read at a time behind the last member.
_ZEROS = 1 << 16


@final
class TarShards(ShardFormat):
    """Tars as webdataset writes them: consecutive files with one key are a sample.

    A sample is {"__key__": key, EXTENSION: bytes, ...}.
    """

    name = "tar"
    suffix = ".tar-index.npz"

    def prepare(self, file: ShardFile, path: Path, target: Path) -> None:
        """Write each sample's key, and the extension, offset and size of its files.

        Raises:
            DataError: the tar is compressed, cut or damaged; a file is in it twice, or far from its sample's others.
        """
        keys = list[str]()
        extensions = dict[str, int]()
        starts = list[int]()
        members: list[tuple[int, int, int]] = []
        # All keys of the tar so far, and the extensions of its last sample.
        seen = set[str]()
        extensions_of_sample = set[str]()
        accounted = FoundFiles(f"the shard {file.label}", flag="", kind="members")
        for name, offset, size in _members(path, file.label):
            match = _NAME.fullmatch(name)
            if _META.match(name):
                continue
            if not match:
                if not os.path.basename(name).startswith("."):
                    accounted.leave_out(name, size, "without an extension")
                continue
            key = match[1]
            extension = match[2].lower()
            if not keys or keys[-1] != key:
                if key in seen:
                    raise DataError(
                        f"the shard {file.label} has {printable(name)} twice, or apart from the other files of its "
                        "sample; write each sample's files one after the other, once"
                    )
                keys.append(key)
                seen.add(key)
                extensions_of_sample.clear()
                starts.append(len(members))
            if extension in extensions_of_sample:
                raise DataError(f"the shard {file.label} has {printable(name)} twice; remove one of the two")
            extensions_of_sample.add(extension)
            accounted.add(size)
            members.append((extensions.setdefault(extension, len(extensions)), offset, size))
        accounted.check(LIMIT, _LOG.warning)
        with target.open("wb") as out:
            np.savez(
                out,
                keys=np.frombuffer("\n".join(keys).encode(), np.uint8),
                extensions=np.array(list(extensions), dtype=np.str_),
                members=np.array(members, dtype=np.int64).reshape(-1, 3),
                starts=np.array([*starts, len(members)], dtype=np.int64),
            )

    def count(self, path: Path) -> ShardSummary:
        with np.load(path) as index:
            return ShardSummary(len(index["starts"]) - 1)

    def open(self, path: Path, beside: Path | None) -> OpenShard:
        assert beside is not None
        return _TarShard(path, beside)


def _members(path: Path, label: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset of the content, bytes) of each file in a tar.

    Also of several tars that were concatenated.

    Raises:
        DataError: it is compressed, cut, damaged or no tar, or has links or sparse files.
    """
    try:
        with path.open("rb") as file:
            begin = 0
            size = os.fstat(file.fileno()).st_size
            while begin < size:
                file.seek(begin)
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    for member in tar:
                        if member.issym() or member.islnk() or member.issparse():
                            member_type = "a sparse file" if member.issparse() else "a link"
                            raise DataError(
                                f"the shard {label}: {printable(member.name)} is {member_type}; write it as a file"
                            )
                        if member.isreg():
                            yield member.name, member.offset_data, member.size
                        # tarfile would keep all members in memory otherwise. Its types lack the attribute.
                        tar.members = []  # type: ignore[attr-defined]
                    # Where the data behind the last member begin.
                    end = tar.offset
                begin = _after_zeros(file, end)
                # Neither the zeros that end a tar nor the header of another member.
                if begin == end:
                    what = "it is cut" if end >= size else f"it is damaged at byte {end}"
                    raise DataError(f"the shard {label} has no end mark of a tar: {what}; restore it")
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"the shard {label} cannot be read as an uncompressed tar ({type(error).__name__}: {error}); restore or "
            "unpack it"
        ) from error


def _after_zeros(file: Any, begin: int) -> int:
    """Return where the blocks of zeros end that begin at `begin`."""
    file.seek(begin)
    while piece := file.read(_ZEROS):
        rest = piece.lstrip(b"\0")
        if rest:
            return int(begin + (len(piece) - len(rest)) // _BLOCK * _BLOCK)
        begin += len(piece)
    return int(begin)


class _TarShard(OpenShard):
    def __init__(self, path: Path, index: Path) -> None:
        with np.load(index) as arrays:
            self._keys = bytes(arrays["keys"]).decode().split("\n")
            self._extensions: list[str] = arrays["extensions"].tolist()
            self._members: NDArray[np.int64] = arrays["members"]
            self._starts: NDArray[np.int64] = arrays["starts"]
        self.samples = len(self._starts) - 1
        self._file = path.open("rb", buffering=0)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def read(self, rows: list[int]) -> list[Any]:
        # `pread` has no offset of its own, so forked processes do not disturb each other.
        handle = self._file.fileno()
        samples = []
        for row in rows:
            sample: dict[str, Any] = {"__key__": self._keys[row]}
            begin, end = self._starts[row : row + 2].tolist()
            for extension, offset, size in self._members[begin:end].tolist():
                sample[self._extensions[extension]] = content = os.pread(handle, size, offset)
                if len(content) != size:
                    where = f"within the sample {self._keys[row]}"
                    raise DataError(f"{self._file.name} ends {where}: it was truncated; restore it")
            samples.append(sample)
        return samples


# --- MDS


_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_VALUES = {name: np.dtype(name) for name in _NUMBERS}
# By their numbers in MDS.
_ARRAY_TYPES = dict(zip((8, 16, 32, 64, 9, 17, 33, 65, 18, 34, 66), _NUMBERS, strict=True))
# pyarrow's names of the compressions.
_COMPRESSIONS = {"gz": "gzip", "br": "brotli", "zstd": "zstd", "snappy": "snappy"}

Decode = Callable[[bytes], Any]


@final
class MdsShards(ShardFormat):
    """MDS of mosaicml-streaming, version 2.

    A sample is a dict of its columns, decoded as that package does.

    Args:
        columns: (name, encoding, bytes or None) of each, as in index.json.
        label: the source, for messages.
    """

    name = "mds"
    suffix = ".mds"
    replaces = True
    has_header = True

    def __init__(self, columns: Sequence[tuple[str, str, int | None]], label: str) -> None:
        self._columns = [(name, _decoder(name, encoding, label), size or 0) for name, encoding, size in columns]

    def prepared(self, file: ShardFile, path: Path | None) -> bool:
        return bool(file.compression)

    def prepare(self, file: ShardFile, path: Path, target: Path) -> None:
        """Write the uncompressed shard."""
        name = file.compression.partition(":")[0]
        data = path.read_bytes()
        if name == "bz2":
            plain = bz2.decompress(data)
        elif name in _COMPRESSIONS:
            plain = _arrow().decompress(data, file.unpacked, codec=_COMPRESSIONS[name], asbytes=True)
        else:
            raise DataError(f"the shard {file.label} is compressed by {name}, which is unknown; use zstd")
        if len(plain) != file.unpacked:
            raise DataError(
                f"the shard {file.label} unpacks to {len(plain)} bytes instead of {file.unpacked}; restore it"
            )
        target.write_bytes(plain)

    def count(self, path: Path) -> ShardSummary:
        with path.open("rb") as file:
            return ShardSummary(int(np.frombuffer(file.read(4), "<u4")[0]))

    def open(self, path: Path, beside: Path | None) -> OpenShard:
        return _MdsShard(path, self._columns)


def read_mds_index(data: bytes, label: str) -> tuple[MdsShards, list[ShardFile]]:
    """Read index.json of an MDS folder; paths of the shards are relative to it.

    Raises:
        DataError: it is damaged, or of another version.
    """
    files = []
    try:
        shards = json.loads(data)["shards"]
        first_shard = shards[0]
        columns = list(
            zip(first_shard["column_names"], first_shard["column_encodings"], first_shard["column_sizes"], strict=True)
        )
        for shard in shards:
            same = list(zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True))
            if (shard["format"], shard["version"]) != ("mds", 2) or same != columns:
                raise DataError(f"{label}: its shards differ in columns, format or version; only MDS version 2 is read")
            raw = shard["raw_data"]
            packed = shard.get("zip_data")
            stored = packed or raw
            hashes = stored["hashes"]
            algorithm = ""
            for name in ("xxh3_64", *hashes):
                if name in hashes:
                    algorithm = name
                    break
            files.append(
                ShardFile(
                    stored["basename"],
                    stored["bytes"],
                    shard["samples"],
                    f"{algorithm}:{hashes[algorithm]}" if algorithm else "",
                    compression=shard["compression"] or "" if packed else "",
                    unpacked=raw["bytes"],
                )
            )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{label}: it is no index of MDS ({type(error).__name__}: {error})") from error
    return MdsShards(columns, label), files


class _MdsShard(OpenShard):
    def __init__(self, path: Path, columns: list[tuple[str, Decode, int]]) -> None:
        self._data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r")).data
        # The layout of MDS: the number of samples, their offsets, then the samples.
        self.samples = int.from_bytes(self._data[:4], "little")
        self._offsets: NDArray[Any] = np.frombuffer(self._data, "<u4", self.samples + 1, 4)
        self._columns = columns
        self._free = sum(not size for _, _, size in columns)

    def read(self, rows: list[int]) -> list[Any]:
        return [self._decode(*self._offsets[row : row + 2].tolist()) for row in rows]

    def _decode(self, begin: int, end: int) -> dict[str, Any]:
        """Decode a sample: the sizes of columns without a fixed one, then all columns."""
        data = self._data[begin:end].tobytes()
        offset = 4 * self._free
        size_offset = 0
        sample = dict[str, Any]()
        for name, decode, size in self._columns:
            if not size:
                size = int.from_bytes(data[size_offset : size_offset + 4], "little")
                size_offset += 4
            sample[name] = decode(data[offset : offset + size])
            offset += size
        return sample


def _decoder(column: str, encoding: str, label: str) -> Decode:
    """Return the function that decodes a column.

    Raises DataError for an encoding that is not supported.
    """
    plain: dict[str, Decode] = {
        "bytes": bytes,
        "str": bytes.decode,
        "int": lambda data: int.from_bytes(data, "little", signed=True),
        "str_int": lambda data: int(data.decode()),
        "str_float": lambda data: float(data.decode()),
        "str_decimal": lambda data: decimal.Decimal(data.decode()),
        "json": json.loads,
        "pil": _raw_image,
        "jpeg": _coded_image,
        "png": _coded_image,
    }
    if encoding in plain:
        return plain[encoding]
    if encoding in _VALUES:
        dtype = _VALUES[encoding]
        return lambda data: np.frombuffer(data, dtype)[0]
    name, _, rest = encoding.partition(":")
    if name == "ndarray":
        kind_name, _, shape = rest.partition(":")
        fixed = tuple(map(int, shape.split(","))) if shape else None
        return functools.partial(_array, kind_name, fixed)
    if encoding == "pkl":
        why = "is pickled, and reading it would run code"
    else:
        why = "has an encoding that is not read"
    raise DataError(f"{label}: the column '{column}' {why} ({encoding}); write it as one of {', '.join(plain)}")


def _array(kind: str, shape: tuple[int, ...] | None, data: bytes) -> NDArray[Any]:
    """Decode an array; its type and shape come first unless they are fixed."""
    offset = 0
    if not kind:
        kind = _ARRAY_TYPES[data[0]]
        offset = 1
    if shape is None:
        # The first byte has the number of dimensions and, in its lowest two bits, the width of each size.
        dims = data[offset] >> 2
        width = 1 << data[offset] % 4
        numbers = np.frombuffer(data, f"<u{width}", dims, offset + 1)
        shape = tuple(numbers.tolist())
        offset = offset + 1 + dims * width
    return np.frombuffer(data, kind, offset=offset).reshape(shape).copy()


def _raw_image(data: bytes) -> Any:
    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    return _images().frombytes(data[12 : 12 + length].decode(), (width, height), data[12 + length :])


def _coded_image(data: bytes) -> Any:
    return _images().open(io.BytesIO(data))


@functools.cache
def _images() -> Any:
    return _package("PIL.Image", "images")


@functools.cache
def _arrow() -> Any:
    return _package("pyarrow", "shards")


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"lockstep.shards: these shards need the package {error.name}: {install_extra(extra)}"
        ) from error
