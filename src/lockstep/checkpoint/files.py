"""Write files once and synced, and trust them only if their checksum matches.

    written = write_file(folder / "state.json", [b"{}"])      {"size": 2, "xxh3_64": "..."}
    problem = file_damage(folder / "state.json", written["size"], written["xxh3_64"])

The files' meaning is in format.py. Text from a file goes through `printable` before a user sees it.
`await_all_ranks` runs an action on every rank and shares its errors.
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

from lockstep.distributed.world import World, outcome, results
from lockstep.errors import CheckpointError, LockstepError
from lockstep.files import create_file, retry_io, storage_error

__all__ = [
    "OnRead",
    "await_all_ranks",
    "await_results",
    "file_damage",
    "parse_json",
    "printable",
    "read_file",
    "refusal_error",
    "remove",
    "write_file",
]


OnRead = Callable[[int], None]

# Bytes per read, few enough to stay in the cache until they are hashed.
_CHUNK = 4 << 20
# Bytes per hash and write. Both release the GIL, but a training loop that launches kernels may have to wait for it
# each time that this thread takes the next chunk.
_WRITE_CHUNK = 64 << 20


def printable(text: str, limit: int = 300) -> str:
    """Escape control characters, which could drive a terminal; cut to `limit` characters."""
    line = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[: limit + 1]
    )
    if len(line) <= limit:
        return line
    return line[: limit - 3] + "..."


def refusal_error(error: OSError) -> LockstepError:
    """Return the error for a refusal of the file system: file, reason, way out."""
    if silent := storage_error(error):
        return silent
    if error.filename:
        file = printable(str(error.filename))
    else:
        file = "the checkpoint's folder"
    return CheckpointError(
        f"{file}: {error.strerror or error}; check the free space and the permissions there, and that every node "
        "sees the same --save-dir"
    )


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


# --- all ranks together

T = TypeVar("T")

# Seconds between two signs of life, or a quarter of the timeout if that is less.
_SIGN = 5.0


def await_all_ranks(
    world: World,
    action: Callable[[], T],
    *,
    progress: Callable[[], int] = lambda: 0,
    on_progress: Callable[[list[int]], None] = lambda counts: None,
    on_wait: Callable[[list[int]], None] = lambda ranks: None,
) -> T:
    """Run `action` on every rank, and return its result once all have succeeded. Collective.

    It may take any time: each rank sends signs of life. No other thread may use the group of `world` meanwhile.

    Args:
        progress: returns how much of the action is done, in any unit; called in another thread.
        on_progress: called with every rank's `progress` at each sign of life, in another thread.
        on_wait: called with the ranks that have not ended, then and there too.

    Raises:
        CheckpointError: the file system refused `action` on this rank.
        StorageError: the storage did not respond on this rank.
        PeerError: it failed on another rank, which is named, or a rank was lost.
    """
    box: list[T] = []
    _gather_outcomes(world, lambda: box.append(action()), progress, on_progress, on_wait)  # collective
    return box[0]


def await_results(
    world: World,
    action: Callable[[], Any],
    *,
    progress: Callable[[], int] = lambda: 0,
    on_progress: Callable[[list[int]], None] = lambda counts: None,
    on_wait: Callable[[list[int]], None] = lambda ranks: None,
) -> list[Any]:
    """Run `action` as `await_all_ranks`, and return all ranks' results, JSON values, in rank order. Collective."""
    return _gather_outcomes(world, action, progress, on_progress, on_wait)  # collective


def _gather_outcomes(
    world: World,
    action: Callable[[], Any],
    progress: Callable[[], int],
    on_progress: Callable[[list[int]], None],
    on_wait: Callable[[list[int]], None],
) -> list[Any]:
    signs = _LifeSigns(world, progress, on_progress, on_wait)
    error: Exception | None = None
    value: Any = None
    try:
        value = action()
    except OSError as caught:
        error = refusal_error(caught)
        error.__cause__ = caught
    except Exception as caught:
        # A bug on one rank must not leave the others waiting.
        error = caught
    except BaseException:
        # Ctrl-C: this rank leaves, and the others notice by the timeout.
        signs.leave()
        raise
    outcomes = signs.wait(outcome(value, error))
    if isinstance(outcomes, LockstepError):
        raise error or outcomes
    return results(outcomes, error)


class _LifeSigns:
    """A thread that sends signs of life until all ranks have an outcome."""

    def __init__(
        self,
        world: World,
        progress: Callable[[], int],
        on_progress: Callable[[list[int]], None],
        on_wait: Callable[[list[int]], None],
    ) -> None:
        self._world = world
        self._progress = progress
        self._on_progress = on_progress
        self._on_wait = on_wait
        self._ended = threading.Event()
        self._is_silent = False
        self._own: list[Any] = []
        self._outcomes: list[list[Any]] | LockstepError = []
        self._thread = threading.Thread(target=self._run, name="lockstep-signs", daemon=True)
        self._thread.start()

    def wait(self, own: list[Any]) -> list[list[Any]] | LockstepError:
        """Wait until every rank has ended.

        Args:
            own: this rank's outcome.

        Returns:
            All outcomes, in rank order, or the error of the exchange.
        """
        self._own = own
        self._ended.set()
        self._thread.join()
        return self._outcomes

    def leave(self) -> None:
        """Stop sending."""
        self._is_silent = True
        self._ended.set()

    def _run(self) -> None:
        pause = min(_SIGN, self._world.timeout / 4)
        try:
            while True:
                ended = self._ended.wait(pause)
                if self._is_silent:
                    return
                reply = self._own if ended else None
                # Each gather is a sign of life. The last one carries the outcome of every rank.
                replies = self._world.gather([self._progress(), reply])
                self._on_progress([count for count, _ in replies])
                waits_for = [rank for rank, (_, result) in enumerate(replies) if not result]
                if not waits_for:
                    self._outcomes = [result for _, result in replies]
                    return
                self._on_wait(waits_for)
        except LockstepError as error:
            self._outcomes = error
