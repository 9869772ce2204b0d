"""The life of a loader process: it frees nothing of the process that it was forked from, and ends with it.

    with collections_paused() as collecting:    # where loader processes are forked
        ...
    keep_inherited(collecting)                  # first thing in each of them
    end_with_parent()

A forked process has copies of all objects of its parent, and of the garbage that the parent had not collected yet.
CUDA does not work in it: to free a tensor that several streams used, or a pinned one that was copied from, records CUDA
events, which aborts the process. Objects with a `__del__` would act a second time, on files and sockets of the parent.
So the loader process leaves all of it out of its garbage collections. (What its own code drops, it still frees.)

torch's loader process looks every five seconds whether its parent lives, and not while it loads. Until then it holds
what it was forked with: the connections of a rank that was killed, whose peers do not see it go, and files.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait

__all__ = ["collections_paused", "end_with_parent", "keep_inherited"]

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@contextlib.contextmanager
def collections_paused() -> Iterator[bool]:
    """Pause garbage collection in this process and, until `keep_inherited`, in those that it forks.

    A process that was just forked runs Python of many modules before it gets to any code of ours.

    Yields:
        Whether garbage collection was on.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield collecting
    finally:
        if collecting:
            gc.enable()


def keep_inherited(collecting: bool) -> None:
    """Exempt all objects that this process was forked with from garbage collection.

    Collections then leave their memory alone too, which stays shared with the parent.

    Args:
        collecting: collect garbage that is made from here on; see `collections_paused`.
    """
    gc.freeze()
    if collecting:
        gc.enable()


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
