"""The life of a loader process: it ends with the process that it loads for.

    end_with_parent()           # first thing in the loader process

torch's loader process looks every five seconds whether its parent lives, and not while it loads. Until then it holds
what it was forked with: the connections of a rank that was killed, whose peers do not see it go, and files.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_parent() -> None:
    """Has this process end when the one that it loads for ends, however that ends. On Linux alone.

    Where it was forked or spawned the system kills it; its "parent" is the thread that started it, which trains. Behind
    a forkserver, Python's default from 3.14 on, the parent is the server, which lives as long as this process does:
    there a thread waits until the other's end of a pipe is closed.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    if multiprocessing.get_start_method() == "forkserver":
        threading.Thread(target=_end_after, args=(parent.sentinel,), name="lockstep-parent", daemon=True).start()
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)  # it was gone before the system was asked


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
