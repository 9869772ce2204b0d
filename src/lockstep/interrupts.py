"""Keep Ctrl-C during imports, which C code may lose.

with keep_interrupts():
    import torch
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["keep_interrupts"]


@contextlib.contextmanager
def keep_interrupts() -> Iterator[None]:
    """Raise the KeyboardInterrupt that an import within has lost.

    One that comes while torch imports numpy is cleared in C; one within an extension module becomes an ImportError.
    Another thread than the main one, and a handler of the user's own, are left alone.
    """
    handler = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not handler:
        yield
        return
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        # A handler that the import itself has set stays.
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, handler)
    if interrupts:
        raise KeyboardInterrupt
