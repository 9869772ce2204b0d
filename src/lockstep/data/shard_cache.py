"""Fetch files from a store into a bounded folder that all processes share.

    cache = ShardCache(Path("~/.cache/lockstep/shards"), limit=64 << 30, label="s3://bucket/train")
    path = cache.get("0a1b.tar", size, lambda part: store.fetch(file, part))        # made once, whatever asks for it

A file is written under another name, checked, and renamed, so it is complete once it exists. Its modification time
depends on its name and size, so that one changed later is known, and made again. The least recently used files are
removed before the folder grows past its limit. A process that still reads a removed file keeps it until it
closes it. This file alone fetches shards by fsspec.
"""

import contextlib
import errno
import importlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import xxhash
from filelock import FileLock, Timeout

from lockstep.config.fields import is_url
from lockstep.config.secrets import mask, printable
from lockstep.errors import ConfigError, DataError, LockstepError, StorageError
from lockstep.files import bytes_text, import_fsspec, limit_s3_tries

__all__ = ["ShardCache", "ShardFile", "Store", "digest_of"]

_LOG = logging.getLogger("lockstep")
# Seconds before each retry.
_PAUSES = (1.0, 4.0, 15.0)
# Seconds without a byte from an HTTP server, after which a request fails.
_SILENCE = 60.0
# Bytes that are read at a time: 4 MiB.
_PIECE = 1 << 22
# Seconds between two attempts to get room in the cache.
_POLL = 0.05
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EPERM, errno.EACCES, errno.EROFS})
# Keys of fsspec's `info` that identify a version of a file, by store.
_STAMPS = ("ETag", "etag", "LastModified", "last_modified", "updated", "generation", "mtime")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of a dataset, as it was when the run started.

    Attributes:
        path: of a local file, or its URL.
        size: in bytes.
        samples: in it; -1: not counted yet.
        checksum: "ALGORITHM:HEX" of its content; "": the format has none.
        stamp: its version: a local file's time of modification (nanoseconds), a store's ETag; "": unknown.
        compression: of the whole file, see the format; "": none.
        unpacked: bytes of its uncompressed content; 0: unknown.
    """

    path: str
    size: int
    samples: int = -1
    checksum: str = ""
    stamp: str = ""
    compression: str = ""
    unpacked: int = 0

    @property
    def key(self) -> str:
        """Hex; of this version of the file, for names in the cache."""
        return xxhash.xxh3_128_hexdigest(repr((self.path, self.size, self.checksum, self.stamp)).encode())

    @property
    def label(self) -> str:
        """Its path for messages, without secrets."""
        return printable(mask(self.path))

    def check_size(self, size: int, source: str = "") -> None:
        """Raise DataError for another size than at the start."""
        if size != self.size:
            raise DataError(
                f"the shard {self.label} has {size} bytes{source}, and had {self.size} when it was indexed: it is "
                "truncated or was changed; restore it, or start again with the data as they are now"
            )

    def check_stamp(self, stamp: str) -> None:
        """Raise DataError if the file was written again since the start."""
        if self.stamp and stamp and stamp != self.stamp:
            raise DataError(
                f"the shard {self.label} was changed since it was indexed (version {printable(stamp)}, before "
                f"{printable(self.stamp)}); restore it, or start again with the data as they are now"
            )

    def check_samples(self, count: int) -> None:
        """Raise DataError if the shard's own count differs from that of its index.

        A count of -1 means that the shard has none.
        """
        if count not in (-1, self.samples):
            raise DataError(
                f"the shard {self.label} has {count} samples, but its index has {self.samples}: some would be left "
                "out; write the index again"
            )

    def check_content(self, path: Path) -> None:
        """Raise DataError if the content of `path` has another checksum."""
        algorithm, _, wanted = self.checksum.partition(":")
        if wanted and (digest := digest_of(path, algorithm)) != wanted:
            raise DataError(
                f"the shard {self.label} is damaged: its {algorithm} is {digest} instead of {wanted}; restore it"
            )


def digest_of(path: Path, algorithm: str = "xxh3_64") -> str:
    """Return the hex digest of a file's content.

    Args:
        algorithm: a name of xxhash or hashlib.

    Raises:
        DataError: there is no such algorithm.
    """
    hashlib: Any = importlib.import_module("hashlib")
    if algorithm.startswith("xxh"):
        maker = getattr(xxhash, algorithm, None)
    else:
        maker = getattr(hashlib, algorithm, None)
    if maker is None:
        raise DataError(f"{path}: the checksum {algorithm} is unknown; use xxh3_64, md5 or sha256")
    digest = maker()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return str(digest.hexdigest())


# --- stores


@final
class Store:
    """A file system of fsspec, or the local one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.is_local = not is_url(path) or path.startswith(("file://", "local://"))
        self._system: tuple[int, Any] = (0, None)

    @property
    def system(self) -> Any:
        """The file system of fsspec, made again in each process.

        Connections do not survive a fork.

        Raises:
            ConfigError: fsspec does not know the URL's scheme, or a package is missing.
        """
        if self._system[0] != os.getpid():
            self._system = os.getpid(), self._connect()
        return self._system[1]

    def _connect(self) -> Any:
        fsspec = import_fsspec()
        scheme = "file" if self.is_local else self._path.partition("://")[0]
        options: dict[str, Any] = {"skip_instance_cache": True}
        try:
            if scheme in ("http", "https"):
                aiohttp: Any = importlib.import_module("aiohttp")
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
                options["client_kwargs"] = {"timeout": timeout}
            system = fsspec.filesystem(scheme, **options)
        except ImportError as error:
            raise ConfigError(
                f"lockstep.shards: {scheme}:// needs the package {error.name or 'of its store'}: install the "
                "extra shards of torch-lockstep for HTTP, its extra remote for S3, or the store's own package"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"lockstep.shards: fsspec knows no store {scheme!r} ({mask(self._path)}); give https://, s3:// or gs://"
            ) from error
        limit_s3_tries(system)
        return system

    def info(self, path: str) -> tuple[int, str]:
        """Return a file's size in bytes, and its version as in `ShardFile.stamp`.

        Raises:
            DataError: it is missing.
            StorageError: the store does not answer.
        """
        # Otherwise fsspec would answer from the listing of the start.
        self.system.invalidate_cache()
        info = self.reach(path, lambda: self.system.info(path))
        return int(info.get("size") or 0), stamp_of(info, local=self.is_local)

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None if it is missing."""
        try:
            return bytes(self._answer(lambda: self.system.cat_file(path), path))
        except FileNotFoundError:
            return None

    def fetch(self, file: ShardFile, part: Path) -> None:
        """Copy a file of the store to `part`, and check its size and checksum.

        A copy that is short or damaged is made again, like one that the store refuses for a moment.

        Raises:
            DataError: it is missing, was changed or is damaged.
            StorageError: the store does not answer.
        """
        size, stamp = self.info(file.path)
        # Some servers do not report a size.
        if size:
            file.check_size(size, " there")
        file.check_stamp(stamp)
        for pause in (*_PAUSES, None):
            self.reach(file.path, lambda: self.system.get_file(file.path, str(part)))
            try:
                file.check_size(part.stat().st_size, " as it arrived")
                file.check_content(part)
                return
            except DataError:
                if pause is None:
                    raise
            time.sleep(pause)

    def reach(self, path: str, action: Callable[[], Any]) -> Any:
        """Make a request.

        Raises:
            DataError: the file is missing, or the store refuses.
            StorageError: the store does not answer.
        """
        try:
            return self._answer(action, path)
        except FileNotFoundError as error:
            raise DataError(f"{_label(path)} is missing; restore it, or leave it out of the source") from error

    def _answer(self, action: Callable[[], Any], path: str) -> Any:
        """Make a request, and again after a pause if the store does not answer.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: this disk is full.
            DataError: the store refuses.
            StorageError: it did not answer in any attempt.
        """
        for pause in (*_PAUSES, None):
            try:
                return action()
            except LockstepError:
                raise
            except Exception as error:
                # An error of the cache's own disk; see `ShardCache.get`.
                if isinstance(error, OSError) and error.errno in _FULL:
                    raise
                if _is_final(error):
                    if isinstance(error, FileNotFoundError):
                        raise
                    raise DataError(f"{_describe(path, error, 'refuses')}; start again when it does not") from error
                if pause is None or self.is_local:
                    line = _describe(path, error, "does not answer")
                    raise StorageError(f"{line}; start again when it does") from error
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def _label(path: str) -> str:
    return printable(mask(path))


def _describe(path: str, error: Exception, what: str) -> str:
    reason = (str(error).strip().splitlines() or [""])[0]
    status = _status_of(error)
    error_name = f"{type(error).__name__}{f' {status}' if status else ''}"
    return f"the store of {_label(path)} {what} ({error_name}: {printable(mask(reason))})"


def _is_final(error: BaseException) -> bool:
    """Whether the store has answered, so that asking again changes nothing.

    fsspec's HTTP file system reports any failed question for a file's size as FileNotFoundError; its cause has the
    status. 408 and 429 ask for another try, and S3 answers 400 to a request that came too slowly.
    """
    status = _status_of(error)
    if status and status != 400:
        return 400 < status < 500 and status not in (408, 429)
    if isinstance(error, FileNotFoundError):
        return not isinstance(error.__cause__, Exception) or isinstance(error.__cause__, FileNotFoundError)
    return isinstance(error, PermissionError)


def _status_of(error: BaseException | None) -> int:
    """Return the HTTP status of an error or its cause; 0: none."""
    while error is not None:
        response = getattr(error, "response", None)
        # Errors of botocore have the status in a dict.
        if isinstance(response, dict):
            answer = response.get("ResponseMetadata", {})
        else:
            answer = {}
        for status in (getattr(error, "status", None), answer.get("HTTPStatusCode")):
            if isinstance(status, int):
                return status
        error = error.__cause__
    return 0


def stamp_of(info: dict[str, Any], *, local: bool) -> str:
    """Return a file's version from what fsspec knows of it; "" if that is nothing."""
    if local:
        return str(os.stat(info["name"]).st_mtime_ns)
    for name in _STAMPS:
        if info.get(name):
            return str(info[name])
    return ""


# --- cache


@final
class ShardCache:
    """A folder of files that can be made again, of a bounded size.

    Any number of processes of a machine may use it at a time.

    Args:
        folder: made if needed.
        limit: bytes.
        label: the source, for messages.
    """

    def __init__(self, folder: Path, limit: int, label: str) -> None:
        self.folder = folder
        self._limit = limit
        self._label = label

    def get(self, name: str, size: int, make: Callable[[Path], None], made: Callable[[], None] | None = None) -> Path:
        """Return the path of a file, which is made first if needed.

        Args:
            name: of the file.
            size: about its bytes, for which room is made.
            make: writes it to another path.
            made: called after that, by one process at a time.

        Raises:
            ConfigError: the cache cannot be written, or is too small for the file.
        """
        path = self.folder / name
        if _use(path):
            return path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Many processes may need the file at once: one makes it, and the others wait for the lock.
            with _hold(self.folder / f".{name}.making"):
                if not _use(path):
                    if path.exists():
                        _LOG.warning("%s was changed or damaged in the cache; it is made again", path)
                    self._fill(path, size, make, made)
        except OSError as error:
            raise ConfigError(
                f"lockstep.shards: cannot write the cache {self.folder}: {error.strerror or error}; give another "
                "`cache`, or make room"
            ) from error
        return path

    def _fill(self, path: Path, size: int, make: Callable[[Path], None], made: Callable[[], None] | None) -> None:
        unfinished = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
        try:
            with self._room(path.name, size):
                make(unfinished)
                actual = unfinished.stat().st_size
                if actual <= size:
                    self._publish(unfinished, path, made)
            # Give the first room back before: two processes that both need more would wait for each other.
            if actual > size:
                with self._room(path.name, actual):
                    self._publish(unfinished, path, made)
        finally:
            unfinished.unlink(missing_ok=True)

    def _publish(self, part: Path, path: Path, made: Callable[[], None] | None) -> None:
        os.utime(part, (time.time(), _sealed_time(path.name, part.stat().st_size)))
        os.replace(part, path)
        if made:
            # Under the lock, since `made` adds to a count that processes share.
            with self._lock():
                made()

    def _lock(self) -> FileLock:
        return FileLock(self.folder / ".lock")

    @contextlib.contextmanager
    def _room(self, name: str, size: int) -> Iterator[None]:
        """Hold `size` bytes for a file; remove the least recently used files until they fit.

        Waits for room that others hold for files in the making. A waiting process holds none, so nobody waits for ever.

        Raises:
            ConfigError: the limit is below `size`.
        """
        if size > self._limit:
            raise ConfigError(
                f"lockstep.shards: the cache of {self._label} may have {bytes_text(self._limit)}, and a shard takes "
                f"{bytes_text(size)}; raise `cache_size`"
            )
        # The system frees the lock if its holder dies.
        claim = FileLock(self.folder / f".{name}.{size}.claim", timeout=0)
        while not self._claim(claim, name, size):
            time.sleep(_POLL)
        try:
            yield
        finally:
            # Under the lock: a process that examines the claims would otherwise take this one for dead.
            with self._lock():
                Path(claim.lock_file).unlink(missing_ok=True)
                claim.release()

    def _claim(self, claim: FileLock, name: str, size: int) -> bool:
        """Make room and lock the claim on it; False if others hold too much."""
        with self._lock():
            files = sorted(self._files())
            free = self._limit - sum(bytes_of for _, bytes_of, _ in files) - sum(self._claims(name))
            for _, bytes_of, path in files:
                if size <= free:
                    break
                path.unlink(missing_ok=True)
                free += bytes_of
            if size <= free:
                with contextlib.suppress(Timeout):
                    claim.acquire()
            return claim.is_locked

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield (time of the last use, bytes, path) of each file."""
        for entry in os.scandir(self.folder):
            if not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    yield status.st_atime_ns, status.st_size, Path(entry.path)

    def _claims(self, own: str) -> Iterator[int]:
        """Yield the bytes that other processes have claimed; clear up after those that died."""
        for entry in list(os.scandir(self.folder)):
            name, _, size = entry.name.removesuffix(".claim").rpartition(".")
            if not entry.name.endswith(".claim") or name == f".{own}":
                continue
            try:
                # A claim that can be locked has lost its process.
                with FileLock(entry.path, timeout=0):
                    for leftover in self.folder.glob(f"{name}.tmp-*"):
                        leftover.unlink(missing_ok=True)
                    Path(entry.path).unlink(missing_ok=True)
            except Timeout:
                yield int(size)


@contextlib.contextmanager
def _hold(path: Path) -> Iterator[None]:
    """Hold a lock file, and remove it at the end."""
    with FileLock(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _sealed_time(name: str, size: int) -> int:
    """Return the modification time, in seconds, that marks a complete file of the cache.

    Any later write changes it.
    """
    # Even, since some file systems store times in units of two seconds.
    return xxhash.xxh3_64_intdigest(f"{name} {size}".encode()) % (1 << 29) * 2


def _use(path: Path) -> bool:
    """Mark a file as used now; return whether it is there and unchanged."""
    try:
        status = os.stat(path)
    except OSError:
        # A path that is no folder is reported where the file is written.
        return False
    if status.st_mtime_ns != _sealed_time(path.name, status.st_size) * 1_000_000_000:
        return False
    try:
        os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
    except OSError as error:
        # Another user's cache, or a file system that is mounted read-only.
        if error.errno not in _READ_ONLY:
            return False
    return True
