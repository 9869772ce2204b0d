"""One process of a machine prepares data; the others wait for it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["alone"]


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
