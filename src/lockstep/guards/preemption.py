"""Signals -> a request in the step exchange: the ranks agree on the step after which they save and end.

with Preemption(exchange): ...
"""

import signal
import threading
from types import FrameType
from typing import Any, Protocol, Self

from lockstep.distributed.exchange import INTERRUPT, SAVE_AND_END
from lockstep.distributed.membership import STOP_SIGNALS, heeds_hangup, leave_terminal
from lockstep.errors import LockstepError, error_line

__all__ = ["Preemption"]


class StopListener(Protocol):
    """Who is told what a signal asks for: the exchange."""

    def stop(self, stop_request: int) -> None:
        """As `StepExchange.stop`."""


class _Interrupted(KeyboardInterrupt):
    """The second Ctrl-C."""


class Preemption:
    """Within it a scheduler's signals and Ctrl-C ask all ranks to save and end; a second Ctrl-C ends now.

    So does the end of the terminal, but under nohup. Outside the main thread, where Python allows no handlers, it does
    nothing.
    """

    def __init__(self, exchange: StopListener) -> None:
        self._exchange = exchange
        self._before: dict[signal.Signals, Any] = {}
        self._interrupted = self._again = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != signal.SIGHUP or heeds_hangup():
                    self._before[number] = signal.signal(number, self._stop_request)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise LockstepError for a KeyboardInterrupt that no Ctrl-C raised: it is an error of the user's code."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before and isinstance(error, KeyboardInterrupt) and not isinstance(error, _Interrupted):
            raise LockstepError(f"{error_line(error)} was raised by the code itself, and no Ctrl-C came") from error

    @property
    def ends_now(self) -> bool:
        """Whether a second Ctrl-C came, which waits for nothing."""
        return self._again

    def _stop_request(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            self._again = True
            raise _Interrupted
        if number == signal.SIGHUP:
            leave_terminal()
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._exchange.stop(INTERRUPT if number == signal.SIGINT else SAVE_AND_END)
