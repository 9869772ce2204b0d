"""Write files once and synced, and trust them only if their checksum matches.

    written = write_file(folder / "state.json", [b"{}"])      {"size": 2, "xxh3_64": "..."}
    problem = file_damage(folder / "state.json", written["size"], written["xxh3_64"])

The files' meaning is in format.py. Text from a file goes through `printable` before a user sees it.
"""

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash

from lockstep.errors import CheckpointError
from lockstep.files import create_file, printable, retry_io

__all__ = [
    "OnRead",
    "file_damage",
    "parse_json",
    "read_file",
    "remove",
    "write_file",
]


OnRead = Callable[[int], None]

# Bytes per read, few enough to stay in the cache until they are hashed.
_CHUNK = 4 << 20
# Bytes per hash and write. Both release the GIL, but a training loop that launches kernels may have to wait for it
# each time that this thread takes the next chunk.
_WRITE_CHUNK = 64 << 20


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Create `path`, write `chunks` to it and sync it to the disk.

    The file must not exist: nothing is written through an existing file or link. The file of a failed write is removed,
    so that it can be retried.

    Returns:
        {"size": bytes, "xxh3_64": checksum as 16 hexadecimal digits}.

    Raises:
        OSError: the file exists, or the disk is full; the error's `filename` is set.
    """
    digest = xxhash.xxh3_64()
    size = 0
    exists = False
    try:
        with create_file(path, buffering=1 << 20) as file:
            exists = True
            for chunk in chunks:
                view = memoryview(chunk)
                size += view.nbytes
                for start in range(0, view.nbytes, _WRITE_CHUNK):
                    digest.update(view[start : start + _WRITE_CHUNK])
                    file.write(view[start : start + _WRITE_CHUNK])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # The error of a write does not name the file.
        error.filename = error.filename or str(path)
        if exists:
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    return {"size": size, "xxh3_64": digest.hexdigest()}


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Links are not followed.

    Raises:
        CheckpointError: it is missing, a link, not a regular file, too large, or unreadable.
        StorageError: the storage does not respond.
    """
    try:
        return retry_io(lambda: _content(path, limit))
    except FileNotFoundError:
        raise CheckpointError(f"{_label(path)} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{_label(path)} cannot be read: {error.strerror}") from error


def _content(path: Path, limit: int) -> bytes:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{_label(path)} is not a regular file")
    if status.st_size > limit:
        raise CheckpointError(f"{_label(path)} has {status.st_size} bytes, more than the {limit} it may have")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(limit)


def parse_json(data: bytes, path: Path) -> Any:
    """Parse JSON that came from `path`, refusing repeated keys and deep nesting.

    Raises:
        CheckpointError: it is not such JSON.
    """
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(f"{_label(path)} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{_label(path)} is not valid JSON: {printable(str(error), 120)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key occurs twice")
    return values


def file_damage(path: Path, size: int, checksum: str | None, on_read: OnRead = lambda count: None) -> str | None:
    """Return how a file is damaged; None if it is not.

    It may be missing, a link, or have another size or checksum.

    Args:
        checksum: xxh3_64; None: the content is not read.
        on_read: called with the number of bytes of each block read, for progress.

    Raises:
        StorageError: the storage does not respond, so nothing is known of the file.
    """
    try:
        return retry_io(lambda: _difference(path, size, checksum, on_read))
    except FileNotFoundError:
        return f"{_label(path)} is missing"
    except OSError as error:
        return f"{_label(path)} cannot be read: {error.strerror}"


def _difference(path: Path, size: int, checksum: str | None, on_read: OnRead) -> str | None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return f"{_label(path)} is not a regular file"
    if status.st_size != size:
        return f"{_label(path)} has {status.st_size} bytes instead of {size}"
    if checksum is not None and _checksum(path, on_read) != checksum:
        return f"{_label(path)} is damaged: its checksum is not the manifest's"
    return None


def _checksum(path: Path, on_read: OnRead) -> str:
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_CHUNK))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            on_read(count)
    return digest.hexdigest()


def _label(path: Path) -> str:
    return printable(f"{path.parent.name}/{path.name}")


def remove(path: Path) -> None:
    """Delete a folder, a file, or a link but not its target, where possible."""
    # A leftover is harmless, and an error here would hide the real one.
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
