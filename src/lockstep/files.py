"""Write files atomically, follow no planted links, and retry failing storage.

    write_whole(folder / "state.json", "{}\n")              # a reader gets the old content or the new
    with replace_file(folder / "metrics.jsonl") as file:    # the same, written in pieces
        file.write(b"...")
    sync(folder)                                            # its entries survive a power cut
    text = retry_io(lambda: path.read_text())               # retries if the storage fails for a moment

A killed write leaves a file named `.NAME.tmp-...`; `clean` removes it.
"""

import contextlib
import errno
import importlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lockstep.errors import CheckpointError, ConfigError, LockstepError, StorageError

__all__ = [
    "bytes_text",
    "cache_folder",
    "clean",
    "create_file",
    "default_cache",
    "import_fsspec",
    "limit_s3_tries",
    "printable",
    "refusal_error",
    "replace_file",
    "retry_io",
    "storage_error",
    "sync",
    "write_whole",
]


def bytes_text(count: float) -> str:
    """Format bytes in units of 1024: 812 MiB, 1.25 GiB."""
    power = 0
    while count >= 999.5 and power < 5:
        count = count / 1024
        power = power + 1
    if count >= 100 or power == 0:
        number = f"{count:.0f}"
    else:
        number = f"{count:.3g}"
    return f"{number} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


T = TypeVar("T")

# Seconds before each retry.
_PAUSES = (0.5, 2.0, 5.0)
# Errors of the storage, not of one file.
_TRANSIENT = frozenset({errno.ESTALE, errno.EIO, errno.ETIMEDOUT})
# Number of tries of one request.
_S3_TRIES = 3
_LEFTOVER = re.compile(r"\..+\.tmp-[0-9a-f]{16}")


def storage_error(error: OSError) -> StorageError | None:
    """Convert an error of storage that does not answer, by its errno; None for others."""
    if error.errno not in _TRANSIENT:
        return None
    prefix = f"{error.filename}: " if error.filename else ""
    return StorageError(f"{prefix}{error.strerror}: the storage does not answer; start again when it does")


def retry_io(action: Callable[[], T]) -> T:
    """Read or write, and retry after a pause if the storage does not answer.

    Args:
        action: safe to repeat after an error.

    Raises:
        StorageError: it did not answer in any attempt.
        OSError: any other error, at once.
    """
    for pause in (*_PAUSES, None):
        try:
            return action()
        except OSError as error:
            failure = storage_error(error)
            if failure is None:
                raise
            if pause is None:
                raise failure from error
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def import_fsspec() -> Any:
    """Import fsspec, through which object stores are reached: this file alone names the package."""
    return importlib.import_module("fsspec")


def limit_s3_tries(system: Any) -> None:
    """Limit the tries of a request to S3 within one of lockstep's.

    s3fs and botocore would make 25, with pauses.

    Args:
        system: a file system of fsspec, of any kind, before its first request.
    """
    if "s3" not in system.protocol:
        return
    # s3fs retries around botocore's own retries.
    system.retries = 1
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        system.config_kwargs = {"retries": {"total_max_attempts": _S3_TRIES}} | system.config_kwargs


def cache_folder(chosen: str) -> Path:
    """Return the folder of prepared data: `chosen` of --data.cache, else the default."""
    if chosen:
        return Path(chosen).expanduser()
    return default_cache()


def default_cache() -> Path:
    """Return $LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep.

    Raises:
        ConfigError: none is set, and the user has no home folder.
    """
    if chosen := os.environ.get("LOCKSTEP_CACHE"):
        return Path(os.path.expanduser(chosen))
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "lockstep")
    try:
        return Path.home() / ".cache" / "lockstep"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder for the cache; set LOCKSTEP_CACHE to a folder") from error


def clean(folder: Path) -> None:
    """Remove files of killed writes from `folder`. Do not call it during a write."""
    # A leftover that cannot be removed does no harm.
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)]:
            if path.is_symlink() or not path.is_dir():
                path.unlink()


def create_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Create a file and open it for writing; never open an existing file or link.

    Raises:
        FileExistsError: the path exists.
        OSError: the file system refuses.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "wb", buffering=buffering)


@contextlib.contextmanager
def replace_file(path: Path, lasting: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces `path` if the block succeeds.

    Otherwise `path` stays as it was. An existing file's permissions are kept.

    Args:
        path: in a folder that exists. A link there is replaced, not followed.
        lasting: sync before renaming, so that a power cut leaves no empty file.

    Raises:
        OSError: with `path` as its `filename`.
    """
    unfinished = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        with create_file(unfinished) as file:
            yield file
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if stat.S_ISREG(mode):
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
            if lasting:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # The error of a write does not name the file.
            error.filename = str(path)
        raise


def write_whole(path: Path, content: str | bytes, lasting: bool = True) -> None:
    """Write a file atomically; text as UTF-8. See `replace_file`."""
    with replace_file(path, lasting) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
