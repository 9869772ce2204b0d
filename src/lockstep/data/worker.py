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

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_parent() -> None:
    """Has the system kill this process when the one that started it ends, however that ends. On Linux alone.

    The system means the thread that started it, which is the one that trains.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if multiprocessing.get_start_method() != "forkserver" and os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)  # it was gone before the system was asked
