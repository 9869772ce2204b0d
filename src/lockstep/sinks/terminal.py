"""A terminal that what is redrawn in place is drawn on, and the timer that redraws it.

screen = terminal(sys.stderr)
ticker = Ticker(draw, 0.5)
...
ticker.stop()
"""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TextIO

from rich.console import Console as Terminal

__all__ = ["Ticker", "terminal"]

# Held while a timer draws, and while this process is forked: a loader process must not begin with a half-drawn
# terminal's locks held by a thread that it has not.
_DRAWING = threading.RLock()
os.register_at_fork(before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_DRAWING.release)


class Ticker:
    """Calls `tick` every so often, in a thread of its own, until `stop`. The first error ends it silently.

    Args:
        tick: what to call; it must not wait for the thread that made the ticker.
        seconds: between two calls.
    """

    def __init__(self, tick: Callable[[], None], seconds: float) -> None:
        self._tick, self._seconds, self._over = tick, seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns once no call goes on any more, but for one that a blocked terminal holds up."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a terminal that is gone: the run goes on without its progress
            while not self._over.wait(self._seconds):
                with _DRAWING:
                    if not self._over.is_set():
                        self._tick()


class _Screen(Terminal):
    """rich's console, which for itself would end the process when whoever reads its output is gone (`| head`)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True  # the run goes on; its records and its log are in its folder
        with contextlib.suppress(OSError, ValueError):  # what is still in the stream must not fail at the exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def terminal(stream: TextIO, interactive: bool | None = None) -> Terminal:
    """rich's console on `stream`, which takes text literally.

    Args:
        interactive: whether to redraw in place; None means where the stream is a terminal that can.
    """
    # Not rich's own guess: FORCE_COLOR, which CI services set, would put control sequences into a log.
    able = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    wanted = able if interactive is None else interactive
    return _Screen(
        file=stream,
        force_terminal=wanted,
        color_system="auto" if wanted else None,
        force_jupyter=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
