"""A bar for a person who waits, on stderr where that is a terminal; it is gone when the work is done.

with waiting("evaluating", shown=world.is_main) as progress:
    progress(120, 339)                  # how much is done, and of how much
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lockstep.sinks.terminal import Ticker, terminal

__all__ = ["waiting"]

_TICK = 0.25  # seconds between two drawings


@contextlib.contextmanager
def waiting(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """What to call with how much is done and of how much; it draws nothing itself.

    Args:
        what: is done, in a word.
        shown: False, and where stderr is no terminal, shows nothing.
    """
    screen = terminal(sys.stderr)
    if not (shown and screen.is_terminal):
        yield lambda done, whole: None
        return
    columns = (
        TextColumn(what + " {task.completed:.0f}/{task.total:.0f}", markup=False),
        *(BarColumn(), TimeElapsedColumn(), TextColumn("left", markup=False), TimeRemainingColumn()),
    )
    with Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=1)
        ticker = Ticker(bar.refresh, _TICK)
        try:
            yield lambda done, whole: bar.update(task, completed=done, total=whole)
        finally:
            ticker.stop()
