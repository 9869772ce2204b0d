"""Read tensors of a stored checkpoint in ranges, and open a run by URL.

    with open_run("s3://bucket/runs/first") as path:        # or a folder's path, which is returned as it is
        select_checkpoint(path, "best")                     # its documents are there; tensors come from the store

The folder of a URL is temporary. It has the run's records, and of each checkpoint the manifest, the index and the
state; `attach` makes a reader take the data of tensors from the store, only those bytes that it needs. The sizes of
files are compared with the manifest, not their checksums, for which whole files would have to be read.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.check import attach, detach
from lockstep.checkpoint.files import parse_json
from lockstep.checkpoint.format import CODES, INDEX, STATE, Manifest, itemsize, step_name, step_of, stored_as
from lockstep.checkpoint.layout import SliceEntry
from lockstep.checkpoint.remote import RemoteRun
from lockstep.checkpoint.store import path_of
from lockstep.config.fields import check_folder, is_url
from lockstep.errors import CheckpointError, LockstepError
from lockstep.files import printable

__all__ = ["DOCUMENTS", "StoredFiles", "open_run", "open_runs", "remote_of"]

# The documents of a checkpoint, without its manifest.
DOCUMENTS = (INDEX, STATE)

# Bytes of a file's first read: most headers are shorter.
_FIRST = 1 << 16
# Bytes of a read, and reads at a time.
_RANGE = 16 << 20
_RANGES = 4
_NAMES = {code: name for name, code in CODES.items()}

# key -> dtype code, shape, first byte.
_Header = dict[str, tuple[str, tuple[int, ...], int]]


class StoredFiles:
    """The data files of a checkpoint in a store."""

    def __init__(self, remote: RemoteRun, step: int, manifest: Manifest) -> None:
        self._remote = remote
        self._step = step
        self._files = manifest.files
        self._headers: dict[str, _Header] = {}
        self.problems = remote.size_problems(step, manifest)

    def read(self, entry: SliceEntry, part: tuple[slice, ...]) -> Tensor:
        """Read a part of a slice.

        The rows of its first dimension that have the part are read, and then cut.

        Raises:
            CheckpointError: the file is missing or damaged.
            StorageError: the store does not answer.
        """
        code, shape = stored_as(entry.dtype, entry.local)
        location = self._header(entry.file).get(entry.key)
        if location is None or location[:2] != (code, shape):
            raise CheckpointError(self._label(entry.file, f"{printable(entry.key, 120)!r} does not match {INDEX}"))
        begin, stop = (part[0].start, part[0].stop) if part else (0, 1)
        row = math.prod(shape[1:]) * itemsize(_NAMES[code])
        data = self._bytes(entry.file, location[2] + begin * row, location[2] + stop * row)
        rows = torch.empty((stop - begin, *shape[1:]) if shape else (), dtype=getattr(torch, _NAMES[code]))
        if data:
            rows.copy_(torch.frombuffer(data, dtype=rows.dtype).view(rows.shape))
        if part:
            return rows[(slice(None), *part[1:])]
        return rows

    def fetch(self, name: str, path: Path) -> None:
        """Download a file to `path`, and compare its checksum. Raises CheckpointError, StorageError, OSError."""
        self._remote.fetch(self._step, name, self._files[name], path)

    def size(self, name: str) -> int:
        """Return the bytes of a file, by the manifest."""
        return int(self._files[name]["size"])

    def verify(self) -> list[str]:
        """Read all files; return what is wrong, a line each."""
        return self._remote.verify(self._step)

    def _header(self, name: str) -> _Header:
        if name not in self._headers:
            self._headers[name] = self._read_header(name)
        return self._headers[name]

    def _read_header(self, name: str) -> _Header:
        size = self.size(name)
        head = bytes(self._bytes(name, 0, min(size, _FIRST)))
        start = 8 + int.from_bytes(head[:8], "little")
        if start > size:
            raise CheckpointError(self._label(name, f"its header claims {start} bytes of {size}"))
        if start <= len(head):
            text = head[8:start]
        else:
            text = bytes(self._bytes(name, 8, start))
        fields = parse_json(text, Path(step_name(self._step), name))
        try:
            fields.pop("__metadata__", None)
            header = {}
            for key, field in fields.items():
                header[key] = (field["dtype"], tuple(field["shape"]), start + field["data_offsets"][0])
            return header
        except (AttributeError, IndexError, KeyError, TypeError):
            raise CheckpointError(self._label(name, "its header is invalid")) from None

    def _bytes(self, name: str, begin: int, end: int) -> bytearray:
        data = bytearray()
        for start in range(begin, end, _RANGE * _RANGES):
            begins = list(range(start, min(start + _RANGE * _RANGES, end), _RANGE))
            ends = [min(position + _RANGE, end) for position in begins]
            for chunk in self._remote.read_ranges(self._step, name, begins, ends):
                data += chunk
        return data

    def _label(self, name: str, problem: str) -> str:
        return f"{step_name(self._step)}/{name} in {self._remote.url} is damaged: {problem}"


def remote_of(url: str, flag: str) -> tuple[RemoteRun, int | None]:
    """Return the run of a URL, and the step of a checkpoint's URL.

    Args:
        flag: the argument to name in errors.

    Raises:
        ConfigError: it is no URL of a store.
    """
    check_folder(url)
    parts = url.rstrip("/").rsplit("/", 2)
    step = step_of(parts[-1])
    if step is not None and parts[-2] == "checkpoints":
        return RemoteRun(parts[0], "", flag), step
    return RemoteRun(url, "", flag), None


@contextmanager
def open_run(name: str | Path, flag: str = "RUN", *, weights: bool = True) -> Iterator[Path]:
    """Open a run, or a checkpoint, by its path or its URL.

    Args:
        flag: the argument to name in errors.
        weights: False: only the run's records are needed.

    Yields:
        The folder: that of a path, or a temporary one with the documents of what is in the store.

    Raises:
        CheckpointError: there is no such run or checkpoint in the store.
        ConfigError: the store refuses, or its package is missing.
        StorageError: it does not answer.
    """
    if not is_url(str(name)):
        yield Path(name).expanduser()
        return
    remote, step = remote_of(str(name), flag)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary, _naming(temporary, remote.url):
        folder = Path(temporary).resolve() / remote.url.rpartition("/")[2]
        if weights:
            steps = []
            for saved_step in remote.steps():
                if step in (None, saved_step):
                    steps.append(saved_step)
        else:
            steps = []
        folder.joinpath("checkpoints").mkdir(parents=True)
        remote.download_records(folder, ["ended.json"])
        if not steps and (weights or not any(path.is_file() for path in folder.rglob("*"))):
            what = "checkpoint" if step is None else step_name(step)
            raise CheckpointError(f"{flag} {remote.url} has no complete {what}; give SAVE_DIR/EXPERIMENT_NAME")
        try:
            for saved_step in steps:
                attach_stored(remote, folder, saved_step)
            yield folder if step is None else path_of(folder, step)
        finally:
            for saved_step in steps:
                detach(path_of(folder, saved_step))


@contextmanager
def open_runs(name: str, flag: str = "DIR") -> Iterator[Path]:
    """Open the records of the run at a URL, or of all runs below it.

    Raises:
        ConfigError, StorageError: as `open_run`.
    """
    remote, _ = remote_of(name, flag)
    if "config.toml" in remote.files():
        with open_run(name, flag, weights=False) as path:
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary, ExitStack() as stack:
        for child in remote.children():
            # The folder may not be a run's.
            with suppress(CheckpointError):
                path = stack.enter_context(open_run(f"{remote.url}/{child}", flag, weights=False))
                Path(temporary, child).symlink_to(path)
        yield Path(temporary)


@contextmanager
def _naming(place: str, url: str) -> Iterator[None]:
    """Name the URL in errors, in place of the temporary folder."""
    folder = str(Path(place).resolve() / url.rpartition("/")[2])
    try:
        yield
    except LockstepError as error:
        error.args = tuple(
            argument.replace(folder, url) if isinstance(argument, str) else argument for argument in error.args
        )
        raise


def attach_stored(remote: RemoteRun, folder: Path, step: int) -> None:
    """Download a checkpoint's documents, and let readers take its data from the store."""
    manifest = remote.manifest(step)
    # Its index needs the headers of all files.
    if manifest.format == 1:
        remote.download(folder, step)
        return
    remote.download(folder, step, names=DOCUMENTS)
    attach(path_of(folder, step), StoredFiles(remote, step, manifest))
