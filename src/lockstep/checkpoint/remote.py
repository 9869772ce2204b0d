"""Keep a run's checkpoints and records in an object store.

That is S3, GCS, Azure, or any store that fsspec writes to.

    remote = RemoteRun("s3://bucket/runs", "first")
    remote.check()                                  # package, bucket and permissions, before anything is written
    remote.upload(folder, 500); remote.steps()      # [500]
    remote.download(folder, 500)

The store has the files of the run's local folder under the same names. A checkpoint's manifest is uploaded last and
removed first: one that has a manifest is whole. Files are read in ranges; sizes and checksums are the manifest's.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from lockstep.checkpoint.files import remove, write_file
from lockstep.checkpoint.format import JSON_LIMIT, MANIFEST, Manifest, dump, read_manifest, step_name, step_of
from lockstep.checkpoint.store import path_of
from lockstep.config.secrets import mask
from lockstep.errors import CheckpointError, ConfigError, LockstepError, StorageError
from lockstep.files import bytes_text, import_fsspec, limit_s3_tries, printable, refusal_error, sync, write_whole

__all__ = ["RECORDS", "RemoteRun", "Say"]

# With these files and the checkpoints a run can resume on another machine.
RECORDS = (
    *("config.toml", "environment.json", "state.json", "metrics.jsonl", "metrics.csv", "timeline.jsonl"),
    *("checkpoints/evaluated.json", "checkpoints/run.json"),
)

Say = Callable[[str], None]
T = TypeVar("T")

# Bytes of one read.
_RANGE = 16 << 20
# Reads at a time.
_RANGES = 4
# Seconds before each retry.
_PAUSES = (1.0, 4.0, 15.0)
# Seconds between two lines about a long download.
_REPORT_SECONDS = 30.0

# The store's own code of an error -> reason and way out. A retry does not help.
_DENIED = "no permission (403); the credentials in use must list, read, write and delete there"
_MISSING = "the bucket does not exist; create it, or correct the URL"
_CLOCK = "this machine's clock differs too much from the store's; synchronise it (NTP), and start again"
_REFUSED = "the store refuses the credentials; renew or correct them in the environment or in its own file"
_FINAL = {
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AuthorizationFailure", "Forbidden", "403"), _DENIED),
    **dict.fromkeys(("AuthorizationPermissionMismatch", "InsufficientAccountPermissions"), _DENIED),
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound"), _MISSING),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), _CLOCK),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"), _REFUSED),
    **dict.fromkeys(("TokenRefreshRequired", "AuthenticationFailed", "InvalidClientTokenId", "401"), _REFUSED),
}
# Error classes by name, since their packages may be missing: no credentials; no answer.
_NO_CREDENTIALS = {
    "botocore.exceptions.NoCredentialsError",
    "botocore.exceptions.PartialCredentialsError",
    "google.auth.exceptions.DefaultCredentialsError",
}
_NO_ANSWER = {
    "aiohttp.client_exceptions.ClientError",
    "azure.core.exceptions.ServiceRequestError",
    "azure.core.exceptions.ServiceResponseError",
    "botocore.exceptions.ConnectionError",
    "botocore.exceptions.HTTPClientError",
    "requests.exceptions.ConnectionError",
}


class RemoteRun:
    """A run's folder in an object store.

    Args:
        save_dir: URL of the parent of all runs.
        experiment_name: of the run.
        flag: the setting to name in errors.

    Attributes:
        url: of the run's folder.
        heard: `time.monotonic()` when the store last took a file of an upload, or a part of it.
    """

    def __init__(self, save_dir: str, experiment_name: str, flag: str = "--save-dir") -> None:
        if experiment_name:
            self.url = f"{save_dir.rstrip('/')}/{experiment_name}"
        else:
            self.url = save_dir.rstrip("/")
        self._flag = flag
        self._pauses: tuple[float, ...] = _PAUSES
        self._abandoned = threading.Event()
        self.heard = time.monotonic()

    @cached_property
    def _store(self) -> tuple[Any, str]:
        """The file system of fsspec, and the run's path in it.

        Raises:
            ConfigError: fsspec does not know the URL's scheme, or a package is missing.
        """
        fsspec = import_fsspec()
        scheme = self.url.partition("://")[0]
        # A program may add stores of its own to the registry.
        if scheme not in {*fsspec.available_protocols(), *fsspec.registry}:
            raise self._error(f"fsspec knows no store {scheme!r}; give s3://BUCKET/PATH, gs:// or az://")
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if scheme in ("file", "local"):
            options["auto_mkdir"] = True
        try:
            system, path = fsspec.url_to_fs(self.url, **options)
        except ImportError as error:
            # The attribute `registry` of fsspec hides the module of that name.
            known: Any = sys.modules["fsspec.registry"].known_implementations
            module = str(known[scheme]["class"]).partition(".")[0]
            raise self._error(f"the package {module} is not installed; pip install {module}") from error
        except Exception as error:
            raise self._explain(error) from error
        limit_s3_tries(system)
        return system, path

    @property
    def is_folder(self) -> bool:
        """Whether the store is a folder of this machine."""
        return self.url.startswith(("file://", "local://"))

    def abandon(self) -> None:
        """Make no further request: from now on, each raises StorageError."""
        self._abandoned.set()

    def check(self) -> None:
        """Check that the store can be written, read, listed and cleared; leaves nothing there.

        Raises:
            ConfigError: a package, the bucket, credentials or permissions are missing; or clocks differ too much.
            StorageError: the store does not answer.
        """
        # Somebody waits for the answer, so retry only once.
        name = f".probe-{secrets.token_hex(8)}"
        self._pauses = _PAUSES[:1]
        self.write(name, b"lockstep")
        try:
            if self.read(name) != b"lockstep":
                raise self._error("what was written there reads back differently; give a store that keeps files")
            self._sizes("")
        finally:
            self.discard_files([name])
            self._pauses = _PAUSES

    # --- small files

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file of the run; None if it is missing."""
        system, root = self._store
        try:
            if self._reach(lambda: system.info(f"{root}/{name}"))["size"] > JSON_LIMIT:
                raise self._error(f"{name} has more than {JSON_LIMIT} bytes; remove it")
            return bytes(self._reach(lambda: system.cat_file(f"{root}/{name}")))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file of the run, at once and whole."""
        system, root = self._store
        self._reach(lambda: system.pipe_file(f"{root}/{name}", data))

    def put(self, path: Path, name: str) -> None:
        """Upload a local file, and note the progress in `heard`. Raises FileNotFoundError."""
        system, root = self._store
        path.stat()

        def hear(size: int, sent: int, **_: object) -> None:
            # fsspec calls it before the first part too.
            if sent:
                self.heard = time.monotonic()

        callback = import_fsspec().Callback(hooks={"hear": hear})
        self._reach(lambda: system.put_file(str(path), f"{root}/{name}", callback=callback))
        self.heard = time.monotonic()

    def files(self) -> list[str]:
        """Return the names of the files in this folder."""
        return self._inside("file")

    def children(self) -> list[str]:
        """Return the names of the folders in this one."""
        return self._inside("directory")

    def _inside(self, kind: str) -> list[str]:
        system, root = self._store
        try:
            entries = self._reach(lambda: system.ls(root, detail=True))
        except FileNotFoundError:
            return []
        return sorted(str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == kind)

    def download_records(self, folder: Path, more: Collection[str] = ()) -> None:
        """Download the run's records, and `more`, over older ones in its folder."""
        system, root = self._store
        for name in (*RECORDS, *more):
            path = folder / name
            temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
            try:
                # The default arguments bind this round's values; mypy cannot infer their types.
                self._reach(lambda name=name, to=temporary: system.get_file(f"{root}/{name}", str(to)))  # type: ignore[misc]
                os.replace(temporary, path)
            except FileNotFoundError:
                # The run has no such file yet.
                path.unlink(missing_ok=True)
            except OSError as error:
                raise refusal_error(error) from error
            finally:
                remove(temporary)

    # --- checkpoints

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        return sorted(step for step, sizes in self._listing().items() if MANIFEST in sizes)

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        data = self.read(f"checkpoints/{step_name(step)}/{MANIFEST}")
        if data is None:
            raise CheckpointError(f"{self.url}/checkpoints/{step_name(step)} has no {MANIFEST}: its upload did not end")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, step_name(step))
            path.mkdir()
            write_whole(path / MANIFEST, data, lasting=False)
            return read_manifest(path)

    def upload(self, folder: Path, step: int) -> int:
        """Upload a complete checkpoint of the run's local folder, unless the store has it.

        Returns:
            The number of bytes uploaded.

        Raises:
            FileNotFoundError: the local checkpoint is gone.
            LockstepError: the store refuses, or does not answer.
        """
        path = path_of(folder, step)
        name = f"checkpoints/{step_name(step)}"
        content = (path / MANIFEST).read_bytes()
        manifest = read_manifest(path)
        there = self._sizes(name)
        if MANIFEST in there and self.read(f"{name}/{MANIFEST}") == content:
            return 0
        self.discard_files([f"{name}/{each}" for each in sorted(there, key=lambda each: each != MANIFEST)])
        for each in sorted(manifest.files):
            self.put(path / each, f"{name}/{each}")
        wanted = {each: int(file["size"]) for each, file in manifest.files.items()}
        if (there := self._sizes(name)) != wanted:
            wrong = sorted(each for each in wanted | there if wanted.get(each) != there.get(each))
            raise self._error(f"{name}/{wrong[0]} has {there.get(wrong[0])} bytes there, {wanted.get(wrong[0])} here")
        self.write(f"{name}/{MANIFEST}", content)
        return manifest.size

    def upload_part(self, folder: Path, step: int, part: str, *, last: bool) -> int | None:
        """Upload this node's files of a checkpoint of several nodes.

        Each node has a local folder for its own ranks.

        A node whose files are there notes it in `uploads/STEP/PART.json`. The manifest follows once all have.

        Args:
            part: name of the node, such as that of its first rank.
            last: this node, rank 0's, uploads the manifest and the documents.

        Returns:
            The number of bytes uploaded; None if the checkpoint waits for another node.

        Raises:
            FileNotFoundError: the local checkpoint is gone.
            LockstepError: the store refuses, or does not answer.
        """
        path = path_of(folder, step)
        name = f"checkpoints/{step_name(step)}"
        notes = f"uploads/{step_name(step)}"
        content = (path / MANIFEST).read_bytes()
        manifest = read_manifest(path)
        there = self._sizes(name)
        if MANIFEST in there:
            if self.read(f"{name}/{MANIFEST}") == content:
                return 0
            if not last:
                # Rank 0's node removes it before any of its files changes.
                return None
            self.discard_files([f"{name}/{MANIFEST}"])
        here = [file for file in sorted(manifest.files) if (path / file).is_file()]
        if last:
            files = here
        else:
            files = [file for file in here if file.endswith(".safetensors")]
        note = dump({"manifest": manifest.checksum, "files": files})
        sent = 0
        if self.read(f"{notes}/{part}.json") != note:
            self.discard_files([f"{notes}/{part}.json"])
            for file in files:
                self.put(path / file, f"{name}/{file}")
            self.write(f"{notes}/{part}.json", note)
            # Rank 0's node may have finished since the first look, and removed the notes before this one came.
            if not last and self.read(f"{name}/{MANIFEST}") == content:
                self.discard_files([f"{notes}/{part}.json"])
            sent = sum(int(manifest.files[file]["size"]) for file in files)
        if not last:
            return sent
        if self._find_noted(notes, manifest) < manifest.files.keys():
            return None
        return self._finish(name, notes, manifest)

    def _find_noted(self, notes: str, manifest: Manifest) -> set[str]:
        """Return the files of this manifest that the nodes have noted as uploaded."""
        files: set[str] = set()
        for note in self._sizes(notes):
            fields = json.loads(self.read(f"{notes}/{note}") or b"{}")
            if fields.get("manifest") == manifest.checksum:
                files |= set(fields["files"])
        return files & manifest.files.keys()

    def _finish(self, name: str, notes: str, manifest: Manifest) -> int:
        """Compare the sizes of a checkpoint's files, and upload its manifest.

        If a size differs, all nodes upload again.
        """
        there = self._sizes(name)
        self.discard_files([f"{name}/{file_name}" for file_name in sorted(there.keys() - manifest.files.keys())])
        wanted = _sizes_of(manifest)
        wrong = sorted(file_name for file_name in wanted if wanted[file_name] != there.get(file_name))
        if not wrong:
            self.write(f"{name}/{MANIFEST}", manifest.dump())
        self.discard_files([f"{notes}/{file_name}" for file_name in self._sizes(notes)])
        if wrong:
            raise self._error(f"{name}/{wrong[0]} has {there.get(wrong[0])} bytes there, not {wanted[wrong[0]]}")
        return manifest.size

    def download(
        self, folder: Path, step: int, say: Say = lambda line: None, names: Collection[str] | None = None
    ) -> None:
        """Download a checkpoint into the run's local folder, in place of a damaged one there.

        Args:
            names: only these files, and the manifest; None: all.
            say: called with a line at the beginning and during a long download.

        Raises:
            CheckpointError: it is incomplete or damaged in the store, or the local disk refused.
            StorageError: the store does not answer.
        """
        final = path_of(folder, step)
        manifest = self.manifest(step)
        files = {}
        for file_name, file in manifest.files.items():
            if names is None or file_name in names:
                files[file_name] = file
        size = sum(int(file["size"]) for file in files.values())
        if names is None:
            say(f"downloading {final.name} ({bytes_text(size)}) from {self.url}")
        temporary = final.with_name(f".{final.name}.tmp-{secrets.token_hex(8)}")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(final.parent).free) < size:
                raise CheckpointError(
                    f"{folder} has {bytes_text(free)} free and {final.name} of {self.url} takes "
                    f"{bytes_text(size)}; make room, or choose another --checkpoint.local-dir"
                )
            temporary.mkdir(mode=0o700)
            for file_name, file in sorted(files.items()):
                write_file(temporary / file_name, self._chunks(step, file_name, file, say))
            write_file(temporary / MANIFEST, [manifest.dump()])
            os.chmod(temporary, final.parent.stat().st_mode & 0o2777)
            if final.is_symlink() or final.exists():  # a damaged one
                aside = final.with_name(f".{final.name}.old-{secrets.token_hex(8)}")
                os.rename(final, aside)
                remove(aside)
            os.rename(temporary, final)
            sync(final.parent)
        except OSError as error:
            raise refusal_error(error) from error
        finally:
            remove(temporary)

    def verify(self, step: int, names: Collection[str] | None = None) -> list[str]:
        """Read a checkpoint in the store in ranges, and return what is wrong.

        The result has a line for each problem; [] if the checkpoint is complete.

        Args:
            names: read only these files; None: all.
        """
        try:
            manifest = self.manifest(step)
        except CheckpointError as error:
            return [str(error)]
        problems = self.size_problems(step, manifest)
        for file_name, file in sorted(manifest.files.items()) if not problems else ():
            if names is not None and file_name not in names:
                continue
            try:
                for _ in self._chunks(step, file_name, file, lambda line: None):
                    pass
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    def size_problems(self, step: int, manifest: Manifest) -> list[str]:
        """Return which files of a checkpoint are missing, stray or of another size.

        The result has a line for each file. No file is read.
        """
        there = self._sizes(f"checkpoints/{step_name(step)}")
        wanted = _sizes_of(manifest)
        problems = []
        for file_name in sorted(there.keys() | wanted.keys() - {MANIFEST}):
            label = f"{step_name(step)}/{printable(file_name)}"
            if file_name not in there:
                problems.append(f"{label} is missing in {self.url}")
            elif file_name not in wanted and file_name != MANIFEST:
                problems.append(f"{label} does not belong there")
            elif file_name in wanted and there[file_name] != wanted[file_name]:
                problems.append(f"{label} in {self.url} has {there[file_name]} bytes instead of {wanted[file_name]}")
        return problems

    def read_ranges(self, step: int, name: str, begins: list[int], ends: list[int]) -> list[bytes]:
        """Read byte ranges of a file of a checkpoint.

        Raises:
            CheckpointError: it is missing, or shorter.
        """
        system, root = self._store
        path = f"{root}/checkpoints/{step_name(step)}/{name}"
        label = f"{step_name(step)}/{name}"
        parts = self._ranges(system, path, begins, ends, label)
        if any(len(chunk) != end - begin for chunk, begin, end in zip(parts, begins, ends, strict=True)):
            raise CheckpointError(f"{label} in {self.url} is shorter than its manifest says")
        return parts

    def fetch(self, step: int, name: str, file: dict[str, Any], path: Path) -> None:
        """Download a file of a checkpoint, and compare it with its entry in the manifest.

        Raises:
            CheckpointError: it is missing or damaged.
            OSError: `path` exists, or the disk refuses.
        """
        write_file(path, self._chunks(step, name, file, lambda line: None))

    def discard(self, steps: list[int]) -> None:
        """Remove the checkpoints of these steps, each manifest first."""
        listing = self._listing() if steps else {}
        for step in steps:
            names = sorted(listing.get(step, {}), key=lambda each: each != MANIFEST)
            self.discard_files([f"checkpoints/{step_name(step)}/{each}" for each in names])
            notes = f"uploads/{step_name(step)}"
            self.discard_files([f"{notes}/{each}" for each in self._sizes(notes)])
            # Of all stores only a folder keeps empty folders.
            if self.is_folder:
                system, root = self._store
                for each in ("checkpoints", "uploads"):
                    with contextlib.suppress(OSError):
                        system.rmdir(f"{root}/{each}/{step_name(step)}")

    def leftovers(self) -> list[int]:
        """Return the steps of checkpoints whose upload or removal did not end."""
        listing = self._listing()
        noted = {step_of(name.partition("/")[0]) for name in self._sizes("uploads")}
        begun = set()
        for step in noted:
            if step is not None and step not in listing:
                begun.add(step)
        return sorted(begun | {step for step, sizes in listing.items() if MANIFEST not in sizes})

    # --- requests

    def _chunks(self, step: int, name: str, file: dict[str, Any], say: Say) -> Iterator[bytes]:
        """Yield a file's content in ranges.

        Raises:
            CheckpointError: after the last one, if its size or checksum is not the manifest's.
        """
        system, root = self._store
        remote = f"{root}/checkpoints/{step_name(step)}/{name}"
        label = f"{step_name(step)}/{name}"
        size = file["size"]
        digest = xxhash.xxh3_64()
        count = 0
        reported = time.monotonic()
        starts = range(0, size, _RANGE)
        for start in range(0, len(starts), _RANGES):
            begins = [*starts[start : start + _RANGES]]
            ends = [min(begin + _RANGE, size) for begin in begins]
            for chunk in self._ranges(system, remote, begins, ends, label):
                digest.update(chunk)
                count += len(chunk)
                yield chunk
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                say(f"downloading {label}: {bytes_text(count)} of {bytes_text(size)}")
        if count != size:
            raise CheckpointError(f"{label} in {self.url} has {count} bytes instead of {size}")
        if digest.hexdigest() != file["xxh3_64"]:
            raise CheckpointError(f"{label} in {self.url} is damaged: its checksum is not the manifest's")

    def _ranges(self, system: Any, remote: str, begins: list[int], ends: list[int], label: str) -> list[bytes]:
        paths = [remote] * len(begins)
        try:
            return list(self._reach(lambda: system.cat_ranges(paths, begins, ends, on_error="raise")))
        except FileNotFoundError:
            raise CheckpointError(f"{label} is missing in {self.url}") from None

    def _listing(self) -> dict[int, dict[str, int]]:
        """Return {step: {file name: bytes}} of all checkpoints, complete or not."""
        steps: dict[int, dict[str, int]] = {}
        for name, size in self._sizes("checkpoints").items():
            parent, _, file = name.partition("/")
            step = step_of(parent)
            if step is not None and file:
                steps.setdefault(step, {})[file] = size
        return steps

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return {name: bytes} of all files below a folder of the run; {} without one."""
        system, root = self._store
        prefix = f"{root}/{folder}".rstrip("/")
        try:
            listing = self._reach(lambda: system.find(prefix, detail=True))
        except FileNotFoundError:
            return {}
        files = {str(name): int(info.get("size") or 0) for name, info in listing.items()}
        sizes = {}
        for name, size in files.items():
            if name.startswith(f"{prefix}/"):
                sizes[name[len(prefix) + 1 :]] = size
        return sizes

    def discard_files(self, names: list[str]) -> None:
        """Delete files, one after the other, in this order; missing ones are fine."""
        system, root = self._store
        for name in names:
            try:
                # The default argument binds this round's name; mypy cannot infer its type.
                self._reach(lambda name=name: system.rm_file(f"{root}/{name}"))  # type: ignore[misc]
            except FileNotFoundError:
                continue

    def _reach(self, action: Callable[[], T]) -> T:
        """Make a request, and retry after a pause if the store does not answer.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: the store refuses.
            StorageError: it did not answer in any attempt.
        """
        if self._abandoned.is_set():
            raise StorageError(f"{self._flag} {self.url}: the store was given up")
        for pause in (*self._pauses, None):
            try:
                return action()
            except Exception as error:
                if isinstance(error, FileNotFoundError) and _code_of(error) not in _FINAL:
                    raise
                failure = self._explain(error)
                if pause is None or isinstance(failure, ConfigError) or self._abandoned.wait(pause):
                    raise failure from error
        raise AssertionError("the last attempt returns or raises")

    def _explain(self, error: Exception) -> LockstepError:
        """Return the error for a failed request: by the store's code, or by class."""
        chain = [error, *_causes(error)]
        classes = set()
        for cause in chain:
            for error_class in type(cause).__mro__:
                classes.add(f"{error_class.__module__}.{error_class.__name__}")
        code = _code_of(error)
        if code in _FINAL:
            return self._error(_FINAL[code])
        if classes & _NO_CREDENTIALS:
            return self._error("no credentials were found; set them in the environment, or in the store's own file")
        if isinstance(error, PermissionError):
            return self._error(_DENIED)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR):
            return self._error(f"{error.strerror}; make room there, or choose another URL")
        reason = printable(mask((str(error).strip().splitlines() or [""])[0]), 200)
        if classes & _NO_ANSWER or isinstance(error, OSError):
            # With a code the store did answer: a server fails, or its disk is full.
            if code:
                what = f"fails ({code}: {reason})"
            else:
                what = f"does not answer ({type(error).__name__}: {reason})"
            return StorageError(f"{self._flag} {self.url}: the store {what}; start again when it works")
        return self._error(f"{type(error).__name__}: {reason}")

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"{self._flag} {self.url}: {why}")


def _sizes_of(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of each file in a manifest."""
    sizes = {}
    for name, file in manifest.files.items():
        sizes[name] = int(file["size"])
    return sizes


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


_CODE = re.compile(r"\w+", re.ASCII)


def _code_of(error: BaseException) -> str:
    """Return the store's own code of an error, such as "AccessDenied"; "" without one."""
    for cause in (error, *_causes(error)):
        response = getattr(cause, "response", None)
        # Errors of botocore have a response.
        fields = response.get("Error") if isinstance(response, dict) else None
        code = fields.get("Code") if isinstance(fields, dict) else None
        # Errors of Azure and GCS have the code as an attribute.
        for value in (code, getattr(cause, "error_code", None), getattr(cause, "code", None)):
            if value is not None and _CODE.fullmatch(text := str(getattr(value, "value", value))):
                return text
    return ""
