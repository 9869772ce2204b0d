"""Open a dataset in shards, on disk or in a store, and index its samples.

    data = lockstep.shards("s3://bucket/train/*.parquet")           # len(data), data[5], data.shard_sizes
    data = lockstep.shards("data/images-{0000..0063}.tar", transform=decode)

    lockstep train --data.shuffle-shards 4      # permute shards, then samples within groups of four

The number of samples of each shard is counted once, and kept in the cache. A local shard is read in place; one of a
store is fetched whole into a bounded cache when one of its samples is needed. Each shard must be as it was when the run
started: by size and version, and by its checksum where there is one.
"""

import dataclasses
import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from lockstep.config.secrets import mask, printable
from lockstep.data.arrow_shards import ArrowShards
from lockstep.data.found import is_about
from lockstep.data.shard_cache import ShardCache, ShardFile, Store, digest_of, stamp_of
from lockstep.data.shard_formats import (
    OpenShard,
    ShardError,
    ShardFormat,
    ShardSummary,
    TarShards,
    TokenShards,
    read_mds_index,
)
from lockstep.data.shared_memory import shared_zeros
from lockstep.errors import ConfigError, DataError, LockstepError, error_line
from lockstep.files import default_cache, write_whole

__all__ = ["Shards", "index_shards", "shards"]

_LOG = logging.getLogger("lockstep")

# Next to the shards, if somebody wrote it.
INDEX = "lockstep-index.json"
_MDS_INDEX = "index.json"
_BESIDE = (INDEX, _MDS_INDEX, "state.json", "dataset_info.json", "dataset_infos.json", "sizes.json")
_SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "tar", ".bin": "tokens"}
FORMATS = ("arrow", "parquet", "mds", "tar", "tokens")
# Number of shards that a process keeps open.
_OPEN = 128
# Number of threads that count the samples of a store's shards.
_THREADS = 8
# Another process may remove a file from the cache, to make room, before this one has opened it.
_TRIES = 10
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# About how much larger a Parquet file is when it is unpacked.
_UNPACKED = 3

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


# PLR0913: a function for users, who name the arguments that they need.
def shards(  # noqa: PLR0913
    source: Source,
    format: str | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    cache_size: int = 64 << 30,
    transform: Callable[[Any], Any] | None = None,
    seq_len: int = 0,
    dtype: str = "",
    vocab_size: int = 0,
    row_format: str = "torch",
) -> "Shards":
    """Open a dataset in shards.

    Args:
        source: a file, a folder, a pattern with *, ? or {0000..0063}, or a list of these; paths, or URLs of fsspec.
        format: "arrow", "parquet", "mds", "tar" (webdataset) or "tokens" (files of token numbers); None: by the names
            of the files.
        cache: folder for fetched shards, converted ones and indexes; None: `shards` in $LOCKSTEP_CACHE.
        cache_size: maximum bytes of its files.
        transform: sample -> sample. Its random draws are seeded, unless its attribute `draws_random` is False.
        seq_len: tokens of a sample, for "tokens".
        dtype: of the token numbers, for "tokens", such as "uint16"; "": that of `lockstep-index.json`.
        vocab_size: for "tokens": a number that is not below it is an error; 0: unknown.
        row_format: values of Arrow and Parquet: "torch", "numpy" or "python".

    Raises:
        ConfigError: an argument is invalid, or a package is missing.
        DataError: there are no shards, a folder has anything else too, or one is missing, damaged, cut, or of another
            format or schema.
    """
    if format not in (None, *FORMATS):
        raise ConfigError(f"lockstep.shards: format is {format!r}: it must be one of {', '.join(FORMATS)}")
    if cache_size < 1:
        raise ConfigError(f"lockstep.shards: cache_size is {cache_size} bytes: it must be at least 1")
    sources = []
    for path in [source] if isinstance(source, str | os.PathLike) else source:
        sources.append(os.fspath(path))
    if not sources:
        raise ConfigError("lockstep.shards: the source is an empty list")
    store = Store(sources[0])
    if any(Store(path).is_local != store.is_local for path in sources):
        raise ConfigError("lockstep.shards: the source mixes local paths and URLs; copy one of them")
    label = sources[0] if len(sources) == 1 else f"{sources[0]}, ..."
    # E731: a def would need the types of all of its arguments again.
    make_format = lambda name, kind="": _make_format(name, (seq_len, kind or dtype, vocab_size), row_format)  # noqa: E731
    form, files = _list_shards(sources, format, store, make_format)
    if cache:
        folder = Path(cache).expanduser()
    else:
        folder = default_cache() / "shards"
    access = _Access(store, ShardCache(folder, cache_size, label), form)
    return Shards(access, _with_counts(files, access, label), transform)


def index_shards(
    folder: str | os.PathLike[str],
    format: str | None = None,
    **options: Any,
) -> Path:
    """Write `lockstep-index.json` into a local folder of shards: the samples, size and checksum of each.

    A run that reads the folder, or a copy of it in a store, then counts nothing, and checks what it fetches.

    Args:
        folder: of the shards.
        format, options: as of `shards`.

    Returns:
        The path of the index.
    """
    path = Path(folder) / INDEX
    path.unlink(missing_ok=True)
    dataset = shards(folder, format, **options)
    rows = []
    for file in dataset.files:
        rows.append(
            {
                "file": os.path.relpath(file.path, folder),
                "size": file.size,
                "samples": file.samples,
                "checksum": file.checksum or f"xxh3_64:{digest_of(Path(file.path))}",
            }
        )
    dtype = {"dtype": options["dtype"]} if "dtype" in options else {}
    write_whole(path, json.dumps({"format": dataset.format, **dtype, "shards": rows}, indent=1) + "\n")
    return path


# --- which shards there are


def _make_format(name: str, tokens: tuple[int, str, int], row_format: str) -> ShardFormat:
    if name == "tokens":
        return TokenShards(*tokens)
    if name == "tar":
        return TarShards()
    return ArrowShards(name, row_format)


def _list_shards(
    sources: list[str], name: str | None, store: Store, make_format: Callable[..., ShardFormat]
) -> tuple[ShardFormat, list[ShardFile]]:
    """Return the format and the shards of a source, in its order.

    Raises:
        DataError: there are none, or none of a known format.
    """
    if len(sources) == 1 and _suffix(sources[0]) is None and not _is_pattern(sources[0], store):
        folder = sources[0].rstrip("/")
        if name in (None, "mds") and (data := store.read(f"{folder}/{_MDS_INDEX}")) is not None:
            form, listed = read_mds_index(data, f"{folder}/{_MDS_INDEX}")
            _check_listed(folder, [entry.path for entry in listed], ".mds", store)
            return form, [dataclasses.replace(entry, path=f"{folder}/{entry.path}") for entry in listed]
        if name != "mds" and (data := store.read(f"{folder}/{INDEX}")) is not None:
            return _read_index(data, folder, name, store, make_format)
    if name == "mds":
        raise DataError(f"{sources[0]} has no {_MDS_INDEX}, the index of MDS; give its folder")
    files = [file for entry in sources for file in _expand(entry, store)]
    formats = set()
    for file in files:
        if kind := _suffix(file.path):
            formats.add(kind)
    unknown = next((file for file in files if not _suffix(file.path)), None)
    if formats and unknown and not name:
        raise DataError(f"{unknown.label} has no suffix of a shard, unlike others of {sources[0]}; give `format`")
    name = name or min(formats, default=None)
    if name is None:
        raise DataError(
            f"{sources[0]} has no shards: no file of .parquet, .arrow, .tar or .bin, and no {_MDS_INDEX} of MDS; give "
            "the folder or the files, a pattern and `format` if their names do not end so"
        )
    chosen = []
    for file in files:
        if _suffix(file.path) in (None, name):
            chosen.append(file)
    if len(chosen) < len(files):
        raise DataError(f"{sources[0]} has files of several formats; name those to read, such as {sources[0]}/*.{name}")
    return make_format(name), chosen


def _suffix(path: str) -> str | None:
    """Return the format of a file by its name; None: unknown."""
    return _SUFFIXES.get(os.path.splitext(path.partition("?")[0])[1].lower())


def _is_pattern(path: str, store: Store) -> bool:
    """Whether a path has the signs of a pattern.

    "?" begins the query of a web address.
    """
    signs = "*{" if path.startswith(("http://", "https://")) else "*{?["
    return any(sign in path for sign in signs) and not (store.is_local and os.path.exists(path))


def _expand(path: str, store: Store) -> Iterator[ShardFile]:
    """Yield the files of a path, a pattern or a folder, by name.

    Raises:
        DataError: a folder, or a pattern, has more than shards; or a pattern has none.
    """
    is_pattern = _is_pattern(path, store)
    if is_pattern and (match := _RANGE.search(path)):
        first_number, last_number = match.groups()
        for number in range(int(first_number), int(last_number) + 1):
            yield from _expand(f"{path[: match.start()]}{number:0{len(first_number)}d}{path[match.end() :]}", store)
        return
    if is_pattern:
        entries = list(store.reach(path, lambda: store.system.glob(path, detail=True)).values())
        if not entries:
            raise DataError(f"{printable(mask(path))} fits no file; correct the pattern, or leave it out")
        others = [each for each in entries if each["type"] != "file" and "**" not in path]
    else:
        info = store.reach(path, lambda: store.system.info(path))
        is_folder = info["type"] == "directory"
        if is_folder:
            entries = store.reach(path, lambda: store.system.ls(path, detail=True))
        else:
            entries = [info]
        entries = [each for each in entries if not is_folder or not _is_beside(each["name"])]
        others = [each for each in entries if is_folder and (each["type"] != "file" or not _suffix(each["name"]))]
    # A folder with other files besides shards is an error: a part of the data would silently be left out.
    if others and len(others) < len(entries):
        listing = ", ".join(sorted(printable(os.path.basename(each["name"].rstrip("/"))) for each in others)[:3])
        shard = next((each["name"] for each in entries if _suffix(each["name"])), "")
        pattern = f"{printable(mask(path.rstrip('/*')))}/*{os.path.splitext(shard)[1]}"
        raise DataError(
            f"{printable(mask(path))} has {len(others)} entries that are no shards ({listing}); move, unpack or "
            f"convert them, or name the shards by a pattern such as {pattern}"
        )
    for each in sorted(entries, key=lambda each: str(each["name"])):
        if each["type"] == "file" and each not in others:
            if store.is_local:
                name = each["name"]
            else:
                name = store.system.unstrip_protocol(each["name"])
            yield ShardFile(name, int(each.get("size") or 0), stamp=stamp_of(each, local=store.is_local))


def _is_beside(path: str) -> bool:
    """Whether a file of a folder only describes shards.

    An index, a README, or a hidden file.
    """
    name = os.path.basename(path.rstrip("/"))
    return name.startswith((".", "_")) or name in _BESIDE or is_about(name)


def _check_listed(folder: str, listed: list[str], suffix: str, store: Store) -> None:
    """Raise DataError if a local folder has a shard that its index lacks.

    Such a shard was written later.

    Args:
        listed: file names of the index.
        suffix: of shards whose names go on, as those of compressed ones do; "": any that is known.
    """
    known = set()
    for name in listed:
        known.add(name.partition(suffix)[0] if suffix else name)
    if store.is_local and os.path.isdir(folder):
        names = sorted(os.listdir(folder))
    else:
        names = []
    for name in names:
        is_shard = suffix in name if suffix else _suffix(name) is not None
        stem = name.partition(suffix)[0] if suffix else name
        if is_shard and not name.startswith(".") and stem not in known:
            raise DataError(
                f"{printable(os.path.join(folder, name))} is not in the index of its folder; write that again"
            )


def _read_index(
    data: bytes, folder: str, name: str | None, store: Store, make_format: Callable[..., ShardFormat]
) -> tuple[ShardFormat, list[ShardFile]]:
    """Read `lockstep-index.json`. Raises DataError if it is damaged."""
    try:
        content = json.loads(data)
        rows = []
        for entry in content["shards"]:
            rows.append((entry["file"], entry["size"], entry["samples"], entry["checksum"]))
        form = make_format(name or content["format"], content.get("dtype", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}/{INDEX} is damaged ({type(error).__name__}: {error}); write it again") from error
    _check_listed(folder, [file for file, _, _, _ in rows], "", store)
    counts = (form.count_from_size(size) for _, size, _, _ in rows)
    return form, [
        ShardFile(f"{folder}/{file}", size, samples if count < 0 else count, checksum)
        for (file, size, samples, checksum), count in zip(rows, counts, strict=True)
    ]


# --- where a shard is


@final
class _Access:
    """Gives each shard a local path.

    Attributes:
        fetches: shards fetched by this rank so far, including its loader processes.
    """

    def __init__(self, store: Store, cache: ShardCache, form: ShardFormat) -> None:
        self.store = store
        self.cache = cache
        self.form = form
        self.fetches: Tensor = shared_zeros(1)

    def local(self, file: ShardFile) -> tuple[Path, Path | None]:
        """Return the paths of a shard, ready to be opened, and of its extra file.

        Raises:
            DataError: the shard is missing, was changed or is damaged.
            StorageError: its store does not answer.
        """
        with self.explain(file):
            return self._local(file)

    def _local(self, file: ShardFile) -> tuple[Path, Path | None]:
        form = self.form
        if self.store.is_local:
            path = self._check_local(file)
        else:
            path = self._fetch(file)
        if self.store.is_local and form.replaces and form.prepared(file, path):
            source = path
            size = file.unpacked or _UNPACKED * file.size
            path = self.cache.get(f"{file.key}{form.suffix}", size, lambda part: form.prepare(file, source, part))
        if not form.suffix or form.replaces:
            return path, None
        return path, self.cache.get(f"{file.key}{form.suffix}", 1, lambda part: form.prepare(file, path, part))

    def check(self, file: ShardFile) -> None:
        """Raise DataError if a local shard has changed.

        A mapped shard must not become shorter.
        """
        try:
            status = os.stat(file.path)
        except FileNotFoundError as error:
            raise DataError(f"the shard {file.label} is missing; restore it, and start again") from error
        file.check_size(status.st_size)
        file.check_stamp(str(status.st_mtime_ns))

    def _check_local(self, file: ShardFile) -> Path:
        self.check(file)
        path = Path(file.path)
        # Verified once on this machine; a file in the cache records it.
        if file.checksum:
            key = xxhash.xxh3_128_hexdigest(f"{path.absolute()} {file.key} {path.stat().st_mtime_ns}".encode())

            def verify(part: Path) -> None:
                file.check_content(path)
                part.touch()

            self.cache.get(f"{key}.verified", 0, verify)
        return path

    def _fetch(self, file: ShardFile) -> Path:
        form = self.form

        def make(part: Path) -> None:
            self.store.fetch(file, part)
            if form.replaces and form.prepared(file, part):
                packed = part.with_name(f"{part.name}.packed")
                os.rename(part, packed)
                try:
                    form.prepare(file, packed, part)
                finally:
                    packed.unlink(missing_ok=True)

        return self.cache.get(f"{file.key}.shard", max(file.size, file.unpacked), make, self._count)

    def _count(self) -> None:
        self.fetches += 1

    def count(self, file: ShardFile) -> ShardSummary:
        """Count the samples of a shard.

        A local shard is opened for it, and so is checked for completeness.
        """
        if not self.store.is_local:
            if (samples := self.form.count_from_size(file.size)) >= 0:
                return ShardSummary(samples)
            with self.explain(file), self.store.system.open(file.path, "rb") as remote:
                summary = self.form.peek(remote)
            if summary.samples >= 0:
                return summary
        for _ in range(_TRIES):
            path, beside = self.local(file)
            with self.explain(file), suppress(FileNotFoundError):
                return self.form.count(beside or path)
        raise self._build_eviction_error(f"the shard {file.label}")

    def open(self, file: ShardFile) -> OpenShard:
        """Open a shard. Raises DataError, in one line, for any that cannot be read."""
        for _ in range(_TRIES):
            path, beside = self.local(file)
            with self.explain(file):
                try:
                    shard = self.form.open(path, beside)
                except FileNotFoundError:
                    continue
                file.check_samples(shard.samples)
                return shard
        raise self._build_eviction_error(f"the shard {file.label}")

    def read(self, name: str, make: Callable[[Path], None]) -> bytes:
        """Return the content of a small file in the cache; arguments as of `ShardCache.get`."""
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                return self.cache.get(name, 0, make).read_bytes()
        raise self._build_eviction_error(name)

    def _build_eviction_error(self, label: str) -> DataError:
        return DataError(
            f"{label} was removed from the cache {self.cache.folder} {_TRIES} times before it could be read; raise "
            "`cache_size`"
        )

    def explain(self, *files: ShardFile) -> "_Explained":
        """Context manager that names the shards in any error."""
        return _Explained(files, self.form.name)


class _Explained:
    def __init__(self, files: Sequence[ShardFile], form: str) -> None:
        self._files = files
        self._form = form

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, LockstepError):
            names = " or ".join(file.label for file in self._files)
            is_described = isinstance(error, ShardError)
            if is_described:
                reason = str(error)
            else:
                reason = f"{error_line(error)}; restore it, or leave it out"
            raise DataError(f"the shard {names} cannot be read as {self._form}: {reason}") from error


def _with_counts(files: list[ShardFile], access: _Access, label: str) -> list[ShardFile]:
    """Return the shards with their numbers of samples.

    From the index in the cache, if there is one.

    Raises:
        DataError: there are no samples.
    """
    if any(file.samples < 0 for file in files):
        options = [access.form.name, sorted(access.form.options().items()), [file.key for file in files]]
        key = xxhash.xxh3_128_hexdigest(json.dumps(options).encode())

        def make(part: Path) -> None:
            _LOG.info("counting the samples of %d shards of %s", len(files), label)
            with ThreadPoolExecutor(1 if access.store.is_local else _THREADS) as pool:
                counted = list(pool.map(access.count, files))
            _check_schemas(files, counted)
            part.write_text(json.dumps([summary.samples for summary in counted]))

        counts = json.loads(access.read(f"{key}.index.json", make))
        files = [dataclasses.replace(file, samples=count) for file, count in zip(files, counts, strict=True)]
    elif access.store.is_local and access.form.has_header:
        # The numbers came from an index, and may not belong to these files.
        for file in files:
            if not access.form.prepared(file, None):
                with access.explain(file):
                    file.check_samples(access.form.count(Path(file.path)).samples)
    if not any(file.samples for file in files):
        raise DataError(f"{label} has {len(files)} shards, and no sample in any of them")
    return files


def _check_schemas(files: list[ShardFile], counted: list[ShardSummary]) -> None:
    """Raise DataError unless all shards with samples have one schema."""
    with_samples = []
    for file, summary in zip(files, counted, strict=True):
        if summary.samples:
            with_samples.append((file, summary.schema))
    for file, schema in with_samples[1:]:
        first_file, wanted = with_samples[0]
        if schema != wanted:
            theirs, own_lines = (schema_text.split("\n") for schema_text in (wanted, schema))
            ours = ", ".join(line for line in own_lines if line not in theirs) or "the same in another order"
            lacking = ", ".join(line for line in theirs if line not in own_lines) or "the same in another order"
            raise DataError(
                f"the shards have several schemas: {file.label} has the columns {ours}, and {first_file.label} has "
                f"{lacking}; convert them to one"
            )


# --- the dataset


@final
class Shards:
    """Samples of all shards, one shard after the other.

    Attributes:
        files: the shards.
        format: of the files.
        shard_sizes: samples of each. int64 [shards]
        draws_random: whether a sample must be seeded.
    """

    def __init__(self, access: _Access, files: list[ShardFile], transform: Callable[[Any], Any] | None) -> None:
        self.files = files
        self._access = access
        self._transform = transform
        self.format = access.form.name
        self.shard_sizes: NDArray[np.int64] = np.array([file.samples for file in files], dtype=np.int64)
        self._ends: NDArray[np.int64] = np.cumsum(self.shard_sizes)
        self._count = int(self._ends[-1])
        self.draws_random = transform is not None and bool(getattr(transform, "draws_random", True))
        # In the order of use: the most recently used shard is last.
        self._open: dict[int, OpenShard] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Open files are not sent to another process.
        return self.__dict__ | {"_open": {}}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        shard = bisect_right(self._ends, index)
        row = index - int(self._ends[shard]) + int(self.shard_sizes[shard])
        return self._read({shard: [row]})[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples of a batch in order, those of each shard at once."""
        if indices and not (min(indices) >= 0 and max(indices) < self._count):
            raise IndexError(f"samples {min(indices)} to {max(indices)} of {self._count}")
        samples_wanted = np.asarray(indices, dtype=np.int64)
        which = np.searchsorted(self._ends, samples_wanted, side="right")
        rows = (samples_wanted - self._ends[which] + self.shard_sizes[which]).tolist()
        by_shard: dict[int, list[int]] = {}
        for index, shard in enumerate(which.tolist()):
            by_shard.setdefault(shard, []).append(index)
        samples: list[Any] = [None] * len(rows)
        read = self._read({shard: [rows[index] for index in members] for shard, members in by_shard.items()})
        for index, sample in zip(chain.from_iterable(by_shard.values()), read, strict=True):
            samples[index] = sample
        return samples

    def _read(self, rows: dict[int, list[int]]) -> list[Any]:
        """Return these rows of shards, those of the first shard first."""
        rows_by_shard = []
        for shard, rows_of_shard in rows.items():
            rows_by_shard.append((self._open_shard(shard), rows_of_shard))
        with self._access.explain(*(self.files[shard] for shard in rows)):
            samples = self._access.form.read(rows_by_shard)
        if self._transform is None:
            return samples
        return [self._transform(sample) for sample in samples]

    def _open_shard(self, shard: int) -> OpenShard:
        file = self.files[shard]
        opened = self._open.pop(shard, None)
        if opened is None:
            opened = self._access.open(file)
            while len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open)))
        elif self._access.store.is_local:
            self._access.check(file)
        self._open[shard] = opened
        return opened

    @property
    def fetches(self) -> int:
        """Shards that this rank has fetched from a store so far, including its loader processes."""
        return int(self._access.fetches)

    @property
    def is_remote(self) -> bool:
        """Whether the shards are in a store."""
        return not self._access.store.is_local

    @property
    def fingerprint(self) -> str:
        """Hex; of the shards' names, sizes, samples and checksums, for a resume."""
        rows = []
        for file in self.files:
            rows.append((os.path.basename(file.path), file.size, file.samples, file.checksum))
        return xxhash.xxh3_64_hexdigest(json.dumps([self.format, rows]).encode())
