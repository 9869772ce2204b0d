"""The launcher as the parent of every orphan among its descendants, so that it sees how each of them ends.

with orphans_adopted() as adopted:      # False: this system does not allow it
    reap_orphans(children)              # as often as the processes are looked at
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Child", "orphans_adopted", "reap_orphans"]

_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


class Child(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...


@contextmanager
def orphans_adopted() -> Iterator[bool]:
    """Have the system hand orphans to this process in place of init.

    Yields:
        Whether it does.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, the system drops the codes of all children
    adopted = sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield adopted
    finally:
        if adopted:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def reap_orphans(children: Iterable[Child]) -> None:
    """Collect orphans that have ended, such as the loader processes of a killed rank.

    Args:
        children: processes whose codes somebody asks for, which are left to their own `poll`.
    """
    known = {child.pid: child for child in children if child.returncode is None}
    while (pid := _next_ended()) is not None:
        if pid not in known:
            os.waitpid(pid, os.WNOHANG)
        elif known.pop(pid).poll() is None:
            return  # somebody else waits for it just now


def _next_ended() -> int | None:
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are no children
        return None
    return ended.si_pid if ended else None
