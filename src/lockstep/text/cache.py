"""Cache prepared data in locked folders, and check whether the hub can be reached.

    reach(say)                                # once, before a package asks the hub for anything

The packages that download retry a connection for the better part of a minute, on each rank. A single attempt, a few
seconds at most, decides here whether they may try at all. `fill_once` fills a folder once, whatever number of processes
ask for it.
"""

import contextlib
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from filelock import FileLock, Timeout

from lockstep.errors import ConfigError
from lockstep.files import sync

__all__ = [
    "fill_once",
    "reach",
    "snapshot",
    "way_out",
]


@contextlib.contextmanager
def alone(folder: Path, say: Callable[[str], None], label: str) -> Iterator[None]:
    """Context manager that locks `folder` against other processes of this machine.

    The system frees the lock when its holder dies.

    Args:
        say: gets a line if another process is waited for.
        label: for that line.

    Raises:
        OSError: the parent folder is not writable.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for another process to prepare {label}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# Written last: facts about the content, and the size of each file.
_FACTS = "facts.json"


def fill_once(
    folder: Path, write: Callable[[Path], dict[str, Any]], *, say: Callable[[str], None], label: str
) -> dict[str, Any]:
    """Return the facts of `folder`, first filling it by `write(temporary folder)` if needed.

    Args:
        write: fills the folder, and returns its facts.
        say: gets a line if another process is waited for.
        label: for that line.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if (facts := _facts(folder)) is not None:
        return facts
    try:
        with alone(folder, say, label):
            return _facts(folder) or _fill(folder, write)
    except OSError as error:
        raise ConfigError(
            f"cannot write the cache {folder.parent}: {error.strerror or error}; set LOCKSTEP_CACHE to a folder "
            "with space"
        ) from error


def _facts(folder: Path) -> dict[str, Any] | None:
    """The folder's facts if it is complete, else None."""
    try:
        facts: dict[str, Any] = json.loads((folder / _FACTS).read_bytes())
        complete = all((folder / file).stat().st_size == size for file, size in facts["sizes"].items())
    except (OSError, ValueError, KeyError):
        return None
    if complete:
        return facts
    return None


def _fill(folder: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    # The name includes the machine, since the locks of some file systems do not extend to other machines.
    temporary = folder.with_name(f"{folder.name}.{platform.node()}.tmp")
    # This process has the lock, so whichever process began these folders has ended.
    for dead in (temporary, folder):
        shutil.rmtree(dead, ignore_errors=True)
    temporary.mkdir()
    try:
        facts = write(temporary)
        files = []
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                files.append(path)
        facts["sizes"] = {path.relative_to(temporary).as_posix(): path.stat().st_size for path in files}
        (temporary / _FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        for path in (*files, temporary / _FACTS, temporary):
            sync(path)
        try:
            temporary.rename(folder)
        except OSError:
            # Another machine may have been first, with the same content.
            if _facts(folder) is None:
                raise
        sync(folder.parent)
        return facts
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# Seconds to wait for an answer.
_PROBE = 5.0


def reach(say: Callable[[str], None]) -> bool:
    """Return whether the hub answers; if not, restrict the packages to HF_HOME.

    Behind a proxy the answer is assumed to be yes: an attempt that bypasses it would prove nothing.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    if getproxies() or _answers(_endpoint()):
        return True
    say(f"{_endpoint()} does not answer; using only HF_HOME ({_home()})")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The caller's program may have imported these already.
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            # They read the environment once, at their import. mypy does not know the constant.
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return False


def snapshot(name: str, kind: str, revision: str = "") -> Path | None:
    """Return the downloaded files of a hub "model" or "dataset" in HF_HOME; None without.

    Args:
        revision: branch, tag or commit; "": the newest.
    """
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(_home()).expanduser() / "hub")
    repository = root / f"{kind}s--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    files = repository / "snapshots" / commit
    if commit and files.is_dir():
        return files
    return None


def way_out(name: str, kind: str, flag: str) -> str:
    """Return the advice for a `name` that can neither be downloaded nor found locally.

    Args:
        kind: "model" or "dataset".
    """
    return (
        f"run `hf download {name} --repo-type {kind}` on a machine with a network and copy its HF_HOME to "
        f"{_home()}, or set {flag} to a local folder"
    )


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _home() -> str:
    return os.environ.get("HF_HOME") or "~/.cache/huggingface"


@cache
def _answers(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    port = parts.port or {"http": 80}.get(parts.scheme, 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_PROBE).close()
    except OSError:
        return False
    return True
