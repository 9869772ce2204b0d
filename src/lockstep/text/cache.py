"""Whether the hub of models and data can be reached, and what of it lies here.

    reach(say)                                  # once, before a package asks the hub for anything

The packages that download retry a connection for the better part of a minute, on each rank. One attempt to connect,
a few seconds at most, decides here instead whether they may try at all.
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
    "alone",
    "default_cache",
    "prepared",
    "reach",
    "snapshot",
    "way_out",
]


@contextlib.contextmanager
def alone(folder: Path, say: Callable[[str], None], what: str) -> Iterator[None]:
    """Within, no other process of this machine prepares `folder`. The system frees the lock when its holder dies.

    Args:
        say: gets a line where another process is waited for.
        what: for that line.

    Raises:
        OSError: the folder above cannot be written to.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for another process that prepares {what}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


_FACTS = "facts.json"  # written last: what the folder holds, and the size of each of its files


def prepared(
    folder: Path, write: Callable[[Path], dict[str, Any]], *, say: Callable[[str], None], what: str
) -> dict[str, Any]:
    """The facts of `folder`, which `write(temporary folder)` fills and describes where it is not there yet.

    Args:
        say: gets a line where another process is waited for.
        what: for that line.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if (found := _facts(folder)) is not None:
        return found
    try:
        with alone(folder, say, what):
            return _facts(folder) or _written(folder, write)
    except OSError as error:
        raise ConfigError(
            f"cannot write the cache {folder.parent}: {error.strerror or error}; point LOCKSTEP_CACHE to a folder "
            "with room"
        ) from error


def default_cache() -> Path:
    """$LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep."""
    if chosen := os.environ.get("LOCKSTEP_CACHE"):
        return Path(os.path.expanduser(chosen))
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "lockstep")
    try:
        return Path.home() / ".cache" / "lockstep"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder to cache data in; point LOCKSTEP_CACHE to a folder") from error


def _facts(folder: Path) -> dict[str, Any] | None:
    """The folder's facts where it is whole, else None."""
    try:
        facts: dict[str, Any] = json.loads((folder / _FACTS).read_bytes())
        whole = all((folder / file).stat().st_size == size for file, size in facts["sizes"].items())
    except (OSError, ValueError, KeyError):
        return None
    return facts if whole else None


def _written(folder: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    # The machine is in the name for file systems whose locks do not reach from one machine to another.
    temporary = folder.with_name(f"{folder.name}.{platform.node()}.tmp")
    for dead in (temporary, folder):  # the lock is held: a process that began one of these is gone
        shutil.rmtree(dead, ignore_errors=True)
    temporary.mkdir()
    try:
        facts = write(temporary)
        files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        facts["sizes"] = {path.relative_to(temporary).as_posix(): path.stat().st_size for path in files}
        (temporary / _FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        for path in (*files, temporary / _FACTS, temporary):
            sync(path)
        try:
            temporary.rename(folder)
        except OSError:
            if _facts(folder) is None:  # unless another machine was first, with the same content
                raise
        sync(folder.parent)
        return facts
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_PROBE = 5.0  # seconds to wait for an answer


def reach(say: Callable[[str], None]) -> bool:
    """Whether the hub answers. Where it does not, the packages are told to use what is in HF_HOME and nothing else.

    Behind a proxy the answer is taken to be yes: an attempt around it would prove nothing.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    if getproxies() or _answers(_endpoint()):
        return True
    say(f"{_endpoint()} does not answer: only what is in HF_HOME ({_home()}) can be used")
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):  # imported before by the caller's own program
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return False


def snapshot(name: str, kind: str, revision: str = "") -> Path | None:
    """The newest files of a hub "model" or "dataset" that a download left in HF_HOME, at a revision; None without."""
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(_home()).expanduser() / "hub")
    held = root / f"{kind}s--{name.replace('/', '--')}"
    try:
        commit = (held / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision
    found = held / "snapshots" / commit
    return found if commit and found.is_dir() else None


def way_out(name: str, kind: str, flag: str) -> str:
    """What to do where the hub's `name` can neither be downloaded nor found here; `kind` is "model" or "dataset"."""
    return (
        f"on a machine with a network run `hf download {name} --repo-type {kind}` and bring its HF_HOME here "
        f"(now {_home()}), or give {flag} a local folder"
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
