"""The launcher's end, seen by every process that it started, whoever forked them.

    end_with_launcher()     first thing in such a process
    launcher_is_gone()      from then on

The launcher alone holds the writing end of a named pipe. The system closes it however the launcher ends, and not while
the launcher is only stopped. Nobody inherits that end: the launcher starts programs, which forget it, and forks none.
"""

import os
import signal
import threading

__all__ = ["LAUNCHER_VARIABLE", "end_with_launcher", "launcher_is_gone"]

LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"  # set by `lockstep launch` to the path of its pipe

_GONE = threading.Event()


def end_with_launcher() -> None:
    """Send this process SIGTERM once its launcher is gone: in its steps it saves itself.

    Does nothing where `lockstep launch` did not start this process, nor when it is called again.
    """
    path = os.environ.pop(LAUNCHER_VARIABLE, "")  # not for what this process may start itself
    if not path:
        return
    try:
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without O_NONBLOCK it would wait for a launcher
    except FileNotFoundError:  # another launcher has cleaned up after ours
        _end()
        return
    os.set_blocking(pipe, True)
    threading.Thread(target=_wait, args=(pipe,), name="lockstep-launcher", daemon=True).start()


def launcher_is_gone() -> bool:
    """Whether the launcher that started this process has ended."""
    return _GONE.is_set()


def _wait(pipe: int) -> None:
    os.read(pipe, 1)  # nobody writes: it returns when the launcher's end is closed
    _end()


def _end() -> None:
    _GONE.set()
    os.kill(os.getpid(), signal.SIGTERM)
