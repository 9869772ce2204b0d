"""The launcher's temporary folder, which does not outlive it for ever, and the pipe by which its processes know it.

folder = private_folder()       held by a lock; those of launchers that are gone are removed
path = life_pipe(folder)        closed by the system when this process ends
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from lockstep.errors import LockstepError

__all__ = ["life_pipe", "private_folder"]

_PREFIX = "lockstep-launch-"
_YOUNG = 60.0  # seconds; between its making and its lock a folder is nobody's


def private_folder() -> Path:
    """A new folder that only this user can look into, locked until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # 0700
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)  # no process started here inherits it
    for other in folder.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or a launcher's that lives
            if other != folder and time.time() - other.lstat().st_mtime > _YOUNG:
                _remove(other)
    return folder


def life_pipe(folder: Path) -> Path:
    """Make the pipe that `distributed.launcher_watch` waits on; its writing end is open until this process ends.

    Raises:
        LockstepError: the folder's file system has no named pipes.
    """
    path = folder / "launcher"
    try:
        os.mkfifo(path, 0o600)
        os.open(path, os.O_RDWR)  # no process started here inherits it; O_WRONLY would wait for a reader
    except OSError as error:
        raise LockstepError(f"cannot make a named pipe in {folder}: {error}; set TMPDIR to a local folder") from error
    return path


def _remove(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
