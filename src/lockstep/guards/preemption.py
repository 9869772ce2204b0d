"""Signals -> a wish in the heartbeat: the ranks agree on the step after which they save and end.

with Preemption(beat): ...
"""

import signal
import threading
from types import FrameType
from typing import Any, Self

from lockstep.heartbeat import INTERRUPT, SAVE_AND_END, Heartbeat

__all__ = ["Preemption"]

_WISHES = {signal.SIGINT: INTERRUPT, signal.SIGTERM: SAVE_AND_END, signal.SIGUSR1: SAVE_AND_END}


class Preemption:
    """Within it SIGTERM and SIGUSR1 (a scheduler's) and Ctrl-C ask all ranks to save and end; a second Ctrl-C ends now.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self, beat: Heartbeat) -> None:
        self._beat = beat
        self._before: dict[signal.Signals, Any] = {}
        self._interrupted = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._wish) for number in _WISHES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _wish(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or number == signal.SIGINT
        self._beat.stop(_WISHES[signal.Signals(number)])
