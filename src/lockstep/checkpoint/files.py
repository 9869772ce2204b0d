"""Write files once and synced, and trust them only if their checksum matches.

    written = write_file(folder / "state.json", [b"{}"])      {"size": 2, "xxh3_64": "..."}
    problem = damage(folder / "state.json", written["size"], written["xxh3_64"])

This module does not know what a file means. Text from a file goes through `printable` before a user sees it.
`on_all_ranks` runs an action on every rank and shares its errors.
"""

import contextlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from lockstep.distributed.world import World
from lockstep.errors import CheckpointError, LockstepError
from lockstep.files import created, retry_io, storage_error

__all__ = [
    "Seen",
    "damage",
    "on_all_ranks",
    "parse_json",
    "printable",
    "read_file",
    "refusal_error",
    "remove",
    "write_file",
]


Seen = Callable[[int], None]

_CHUNK = 4 << 20  # bytes per read, few enough to be in the cache when they are hashed
# Bytes per hash and write. Both release the GIL, but a training loop that launches kernels may have to wait for it
# each time that this thread takes the next chunk.
_WRITTEN = 64 << 20


def printable(text: str, limit: int = 300) -> str:
    """Escape control characters, which could drive a terminal, and cut to `limit`.

    The result is one line.
    """
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def refusal_error(error: OSError) -> LockstepError:
    """Make the error for a refusal of the file system: file, reason, way out."""
    if silent := storage_error(error):
        return silent
    where = printable(str(error.filename)) if error.filename else "the checkpoint's folder"
    return CheckpointError(
        f"{where}: {error.strerror or error}; check the free space and the permissions there, and that every node "
        "sees the same --save-dir"
    )


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Create `path`, write `chunks` to it and sync it to the disk.

    The file must not exist: nothing is written through an existing file or link. What a failed write leaves is removed,
    so that it can be retried.

    Returns:
        {"size": bytes, "xxh3_64": checksum as 16 hexadecimal digits}.

    Raises:
        OSError: the file exists, or the disk is full; the error's `filename` is set.
    """
    digest = xxhash.xxh3_64()
    size, exists = 0, False
    try:
        with created(path, buffering=1 << 20) as file:
            exists = True
            for chunk in chunks:
                view = memoryview(chunk)
                size += view.nbytes
                for start in range(0, view.nbytes, _WRITTEN):
                    digest.update(view[start : start + _WRITTEN])
                    file.write(view[start : start + _WRITTEN])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a write's error does not name the file
        if exists:
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    return {"size": size, "xxh3_64": digest.hexdigest()}


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Links are not followed.

    Raises:
        CheckpointError: it is missing, a link, not a regular file, too large, or unreadable.
        StorageError: the storage does not answer.
    """
    try:
        return retry_io(lambda: _content(path, limit))
    except FileNotFoundError:
        raise CheckpointError(f"{_shown(path)} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{_shown(path)} cannot be read: {error.strerror}") from error


def _content(path: Path, limit: int) -> bytes:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{_shown(path)} is not a regular file")
    if found.st_size > limit:
        raise CheckpointError(f"{_shown(path)} has {found.st_size} bytes, more than the {limit} it may have")
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
        raise CheckpointError(f"{_shown(path)} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{_shown(path)} is not valid JSON: {printable(str(error), 120)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def damage(path: Path, size: int, checksum: str | None, seen: Seen = lambda count: None) -> str | None:
    """Return what is wrong with a file; None if it is undamaged.

    It may be missing, a link, or have another size or checksum.

    Args:
        checksum: xxh3_64; None: the content is not read.
        seen: called with the number of bytes of each block read, for progress.

    Raises:
        StorageError: the storage does not answer, which shows nothing about the file.
    """
    try:
        return retry_io(lambda: _difference(path, size, checksum, seen))
    except FileNotFoundError:
        return f"{_shown(path)} is missing"
    except OSError as error:
        return f"{_shown(path)} cannot be read: {error.strerror}"


def _difference(path: Path, size: int, checksum: str | None, seen: Seen) -> str | None:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        return f"{_shown(path)} is not a regular file"
    if found.st_size != size:
        return f"{_shown(path)} has {found.st_size} bytes instead of {size}"
    if checksum is not None and _checksum(path, seen) != checksum:
        return f"{_shown(path)} is damaged: its checksum is not the manifest's"
    return None


def _checksum(path: Path, seen: Seen) -> str:
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_CHUNK))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            seen(count)
    return digest.hexdigest()


def _shown(path: Path) -> str:
    return printable(f"{path.parent.name}/{path.name}")


def remove(path: Path) -> None:
    """Delete a folder with its contents, a file, or a link but not its target.

    What cannot be deleted stays.
    """
    with contextlib.suppress(OSError):  # a leftover is harmless; an error here would hide the one that matters
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


# --- all ranks together

T = TypeVar("T")

_SIGN = 5.0  # seconds between two signs of life, or a quarter of the timeout if that is less


def on_all_ranks(
    world: World,
    action: Callable[[], T],
    *,
    done: Callable[[], int] = lambda: 0,
    heard: Callable[[list[int]], None] = lambda counts: None,
) -> T:
    """Run `action` on every rank, and return its result once all have succeeded. Collective.

    It may take any time. No other thread may use the group of `world` meanwhile.

    Args:
        done: how much of the action is done, in any unit; called in another thread.
        heard: called with every rank's `done` at each sign of life, in another thread.

    Raises:
        CheckpointError: the file system refused `action` on this rank.
        StorageError: the storage did not answer on this rank.
        PeerError: it failed on another rank, which is named, or a rank was lost.
    """
    signs = _Signs(world, done, heard) if world.size > 1 else None
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except OSError as found:
        error = refusal_error(found)
        error.__cause__ = found
    except Exception as found:  # a bug on one rank must not leave the others waiting
        error = found
    except BaseException:  # Ctrl-C: this rank leaves, and the others notice by the timeout
        if signs:
            signs.leave()
        raise
    if signs and (lost := signs.wait()):
        raise error or lost
    world.check(error)  # collective
    return result  # type: ignore[return-value]


class _Signs:
    """Thread that tells the other ranks that this one still works.

    It ends when all have ended.
    """

    def __init__(self, world: World, done: Callable[[], int], heard: Callable[[list[int]], None]) -> None:
        self._world, self._done, self._heard = world, done, heard
        self._ended = threading.Event()
        self._left = False
        self._lost: LockstepError | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-signs", daemon=True)
        self._thread.start()

    def wait(self) -> LockstepError | None:
        """Wait until every rank has ended.

        Returns:
            None, or the error of the exchange itself.
        """
        self._ended.set()
        self._thread.join()
        return self._lost

    def leave(self) -> None:
        """Stop reporting."""
        self._left = True
        self._ended.set()

    def _run(self) -> None:
        pause = min(_SIGN, self._world.timeout / 4)
        try:
            while True:
                ended = self._ended.wait(pause)
                if self._left:
                    return
                found = self._world.gather([ended, self._done()])  # collective
                self._heard([count for _, count in found])
                if all(each for each, _ in found):
                    return
        except LockstepError as error:
            self._lost = error
