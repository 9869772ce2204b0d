"""The lock that makes a run's folder one process's."""

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
from pathlib import Path
from typing import IO

from lockstep.errors import ConfigError
from lockstep.secrets import printable

__all__ = ["RunLock"]


class RunLock:
    """A file with its owner's line.

    The lock is flock's, which also holds between nodes on NFS where its lock service runs. On a file system that has no
    locks at all the owner's line decides: an owner on another node, or alive on this one, is believed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self, *, make: bool) -> str:
        """Takes the lock; the line of the owner before where it ended without giving it back, else "".

        Args:
            make: make the file, and write our line into it; False: neither.

        Raises:
            ConfigError: another process holds it.
            OSError: the file cannot be opened, or is a link.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
        self._file = os.fdopen(os.open(self._path, flags, 0o644), "r+", encoding="utf-8")
        owner = printable(self._file.readline(300).strip())
        if not self._locked(self._file, owner):
            self.release(mine=False)
            raise ConfigError(
                f"{self._path.parent} is in use by {owner or 'another process'}; wait for it, or choose another "
                "--experiment-name"
            )
        if make:
            self._file.seek(0)
            self._file.truncate()
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
            self._file.flush()
        return owner  # it ended without a word, or its line would be gone

    def release(self, mine: bool = True) -> None:
        """Gives the lock back, with our line taken out where it is ours; twice does no harm."""
        if self._file:
            if mine:
                with contextlib.suppress(OSError):  # a full disk: the next owner says that this one ended silently
                    self._file.seek(0)
                    self._file.truncate()
            self._file.close()
            self._file = None

    def _locked(self, file: IO[str], owner: str) -> bool:
        """Whether the lock is ours now."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            return not _lives(owner)  # no locks here
        return True


def _lives(owner: str) -> bool:
    """Whether the process that a lock's line names may still run: always, for one of another machine."""
    found = re.fullmatch(r"process (\d{1,9}) on (\S+), started .*", owner)
    if not found or found[2] != socket.gethostname():
        return bool(owner)
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
