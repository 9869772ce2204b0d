"""Find slow ranks, and the work that slows them down.

    straggler = Straggler(ratio=1.2)
    line = straggler.after(step, exchange)      # "rank 3 is slow: 41 ms per step of computing, the others 31 ms", or ""

Each rank's busy seconds are sent in the step exchange: loading data, computing (the forward, which under ddp waits for
nobody; under fsdp it gathers weights, which hides a slow rank), and writing. A rank is reported if it is slow in three
windows in a row of five steps or more.
"""

from collections.abc import Callable
from statistics import median

from lockstep.distributed.exchange import BusySeconds, StepExchange
from lockstep.distributed.progress import rank_label

__all__ = ["Straggler"]

# Fewest steps of a comparison.
_STEPS = 5
# Comparisons in a row that must find the same rank slow.
_STRIKES = 3
# Seconds per step; a smaller difference is noise, whatever the ratio.
_LEAST = 2e-3
# These grow with a rank's share of the micro-batches.
_SHARED = ("data", "computing")
_KINDS = {"data": "loading data", "computing": "computing", "writing": "writing"}


class Straggler:
    """Detector of slow ranks, by busy seconds. All ranks reach the same result.

    Args:
        ratio: how many times the others' median counts as slow; 0 disables it.
        relieved: (rank, step) -> whether --shares auto is about to reduce its share: slow loading or computing is then
            not reported.
    """

    def __init__(self, ratio: float, relieved: Callable[[int, int], bool] = lambda rank, step: False) -> None:
        self._ratio = ratio
        self._relieved = relieved
        self._windows: list[list[BusySeconds]] = []
        self._count = 0
        self._since = 0
        self._strikes = 0
        self._suspect: tuple[int, str] | None = None
        self._reported: set[tuple[int, str]] = set()

    def after(self, step: int, exchange: StepExchange) -> str:
        """Return a line when a rank is found slow, once per rank and kind.

        "" otherwise.
        """
        if exchange.count == self._count or not self._ratio:
            return ""
        self._count = exchange.count
        # The first exchanges measure the start.
        if exchange.count > 2:
            self._windows.append(exchange.busy_by_rank)
        if step - self._since < _STEPS or not self._windows:
            return ""
        heard = self._windows
        self._windows = []
        self._since = step
        return self._find_slow_rank(heard, step)

    def repeat(self) -> None:
        """Report again what has been reported, if it is still found."""
        self._reported.clear()

    def _find_slow_rank(self, heard: list[list[BusySeconds]], step: int) -> str:
        slowest = None
        for activity in _KINDS:
            seconds = []
            for rank in range(len(heard[0])):
                seconds.append(median(getattr(vitals[rank], activity) for vitals in heard))
            slow = max(range(len(seconds)), key=seconds.__getitem__)
            # The median of the others, so that one more slow rank does not hide this one.
            others_median = median(value for rank, value in enumerate(seconds) if rank != slow)
            if activity in _SHARED and self._relieved(slow, step):
                continue
            if seconds[slow] > max(self._ratio * others_median, others_median + _LEAST) and slowest is None:
                slowest = (slow, activity, seconds[slow], others_median)
        suspect = slowest[:2] if slowest else None
        if suspect and suspect == self._suspect:
            self._strikes = self._strikes + 1
        else:
            self._strikes = int(suspect is not None)
        self._suspect = suspect
        if slowest is None or self._strikes < _STRIKES or suspect in self._reported:
            return ""
        self._reported.add((slowest[0], slowest[1]))
        return (
            f"{rank_label(slowest[0])} is slow: {1e3 * slowest[2]:.1f} ms per step of {_KINDS[slowest[1]]}, the others "
            f"{1e3 * slowest[3]:.1f} ms; all ranks wait for it"
        )
