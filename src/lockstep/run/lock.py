"""The lock that makes a run's folder one process's."""

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
import weakref
from pathlib import Path

from lockstep.config.secrets import printable
from lockstep.errors import ConfigError
from lockstep.files import retry_io

__all__ = ["RunLock"]

_LINGER = 10.0  # seconds that the children of a dead owner may need to end
_LOOK = 0.05


class RunLock:
    """A file with its owner's line.

    The lock is flock's, which also holds between nodes on NFS where its lock service runs. On a file system that has no
    locks at all the owner's line decides: an owner on another node, or alive on this one, is believed. A process forked
    from the owner does not keep the file, or the lock would outlive the owner.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def take(self, *, make: bool) -> str:
        """Takes the lock; the line of the owner before where it ended without giving it back, else "".

        Where the owner is dead and its lock is not, what it started still ends: that is waited for, some seconds.

        Args:
            make: make the file, and write our line into it; False: neither.

        Raises:
            ConfigError: another process holds it.
            OSError: the file cannot be opened, or is a link.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
        self._handle = retry_io(lambda: os.open(self._path, flags, 0o644))
        _HELD.add(self)
        got, owner, has_locks = self._locked(self._handle)
        if not got and not has_locks and not _is_here(owner):
            self.release(mine=False)
            raise ConfigError(
                f"{self._path.parent} is in use by {owner}, as its lock says; the file system has no locks, so nobody "
                f"else can tell whether that still runs: if it does not, remove {self._path}"
            )
        if not got:
            self.release(mine=False)
            left = "what is left of " if owner and not _lives(owner) else ""
            raise ConfigError(
                f"{self._path.parent} is in use by {left}{owner or 'another process'}; wait for it, or choose another "
                "--experiment-name"
            )
        if make:
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}, started {started}\n".encode(), 0)
        return owner  # it ended without a word, or its line would be gone

    def owner(self) -> tuple[str, bool]:
        """The owner's line, and whether it holds the lock now; ("", False) where it was given back, or never taken.

        A lock that was given back is not touched, so that looking never stands in the way of a start.
        """
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return "", False
        owner = ""
        try:
            owner = _line(handle)
            if owner:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return owner, error.errno in (errno.EWOULDBLOCK, errno.EACCES) or _lives(owner)  # else no locks here
        finally:
            os.close(handle)
        return owner, False

    def release(self, mine: bool = True) -> None:
        """Gives the lock back, with our line taken out where it is ours; twice does no harm."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # a full disk: the next owner says that this one ended silently
            if mine:
                os.ftruncate(self._handle, 0)
        with contextlib.suppress(OSError):
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # whoever else still has the file open
        self.forget()

    def forget(self) -> None:
        """Closes the file, and leaves the lock to the process that took it: what a forked child does."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)

    __del__ = forget

    def _locked(self, handle: int) -> tuple[bool, str, bool]:
        """Whether the lock is ours now, the line of whoever has or had it, and whether the file system has locks."""
        deadline = time.monotonic() + _LINGER
        while True:
            owner = _line(handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return not _lives(owner), owner, False
                if not owner or _lives(owner) or time.monotonic() > deadline:
                    return False, owner, True
                time.sleep(_LOOK)
            else:
                return True, owner, True


_HELD: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


def _line(handle: int) -> str:
    """The owner's line; "" where the lock was given back."""
    lines = os.pread(handle, 300, 0).decode("utf-8", "replace").splitlines()
    return printable(lines[0].strip()) if lines else ""


_OWNER = re.compile(r"process (\d{1,9}) on (\S+), started .*")


def _is_here(owner: str) -> bool:
    """Whether the process that a lock's line names is, or was, one of this machine."""
    found = _OWNER.fullmatch(owner)
    return found is not None and found[2] == socket.gethostname()


def _lives(owner: str) -> bool:
    """Whether the process that a lock's line names may still run: always, for one of another machine."""
    found = _OWNER.fullmatch(owner)
    if not found or found[2] != socket.gethostname():
        return bool(owner)
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
