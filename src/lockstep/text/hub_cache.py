"""A folder that is prepared once: there and whole, or not there.

    folder = prepared(cache / "tokens-KEY", write, say=say, what="tatsu-lab/alpaca")

One process of a machine prepares while others wait for a file lock, which the system frees when its holder dies. What
it writes lies under another name until it is whole and synced, so an interruption leaves nothing that could be taken
for the result: the next start does the work again. Once there, a folder is read without a lock or a right to write.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.files import sync
from lockstep.text.machine_lock import alone

__all__ = ["FACTS", "default_cache", "prepared"]

FACTS = "facts.json"  # written last: what the folder holds, and the size of each of its files


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
        facts: dict[str, Any] = json.loads((folder / FACTS).read_bytes())
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
        (temporary / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        for path in (*files, temporary / FACTS, temporary):
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
