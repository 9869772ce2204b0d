"""The signals that ask a run to save itself and end: of a scheduler, a person, a terminal. The launcher hands them on.

for number in STOP_SIGNALS: ...     SIGHUP among them, where heeds_hangup()
leave_terminal()                    on SIGHUP
"""

import contextlib
import os
import signal
import stat

__all__ = ["STOP_SIGNALS", "heeds_hangup", "leave_terminal"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def heeds_hangup() -> bool:
    """Whether the end of the terminal (SIGHUP) concerns this process: under nohup it does not."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def leave_terminal() -> None:
    """Has what is written from now on go nowhere where it went to a terminal, which is gone: a write would raise."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
