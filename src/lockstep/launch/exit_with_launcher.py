"""What a launcher that is killed leaves behind: no process for long, and no folder for ever.

folder = private_folder()       in the launcher: held by a lock; those of launchers that are gone are removed
tie()                           in a process that it started: it is sent SIGTERM when the launcher is gone
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["LAUNCHER_VARIABLE", "private_folder", "tie"]

LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"  # set by `lockstep launch` to its process id

_PREFIX = "lockstep-launch-"
_YOUNG = 60.0  # seconds; between its making and its lock a folder is nobody's
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def private_folder() -> Path:
    """A new folder that only this user can look into, locked until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # 0700
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)  # no process started here inherits it
    for other in folder.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or a launcher's that lives
            if other != folder and time.time() - other.lstat().st_mtime > _YOUNG:
                _remove(other)
    return folder


def _remove(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def tie() -> None:
    """Has the system send this process SIGTERM when its launcher ends without a word: it saves, and ends with 75.

    Does nothing where no launcher of lockstep's started this process, or on another system than Linux.
    """
    launcher = os.environ.pop(LAUNCHER_VARIABLE, "")  # not for what this process may start itself
    if sys.platform != "linux" or not launcher.isdigit():
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    try:
        os.kill(int(launcher), 0)
    except ProcessLookupError:  # it was gone before the system was asked
        os.kill(os.getpid(), signal.SIGTERM)
