"""Turn signals into stop requests, so that all ranks save and end after one step.

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
    """Receiver of stop requests, such as the exchange."""

    def stop(self, stop_request: int) -> None:
        """Request a stop, as `StepExchange.stop`."""


class _Interrupted(KeyboardInterrupt):
    """Raised by the second Ctrl-C."""


class Preemption:
    """Context in which signals and Ctrl-C ask all ranks to save and end.

    A second Ctrl-C ends at once. A closed terminal counts as a signal too, except under nohup. Outside the main thread,
    where Python allows no handlers, it does nothing.
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
        """Turn a KeyboardInterrupt without a Ctrl-C into a LockstepError: the user's code raised it."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before and isinstance(error, KeyboardInterrupt) and not isinstance(error, _Interrupted):
            raise LockstepError(f"{error_line(error)} was raised by the code, not by Ctrl-C") from error

    @property
    def ends_now(self) -> bool:
        """Whether a second Ctrl-C came: end without waiting."""
        return self._again

    def _stop_request(self, number: int, _: FrameType | None) -> None:
        # A second Ctrl-C: raise at once, instead of waiting for the end of the step.
        if number == signal.SIGINT and self._interrupted:
            self._again = True
            raise _Interrupted
        # Writing to a terminal that was closed would fail.
        if number == signal.SIGHUP:
            leave_terminal()
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._exchange.stop(INTERRUPT if number == signal.SIGINT else SAVE_AND_END)
