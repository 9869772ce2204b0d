"""Detect gradient norms far above what is usual for the run.

spike = Spike()
limit = spike.limit(step)           # what the step's norm must stay below; infinite while too little is known
if spike.sees(step, norm): ...      # above median + 8 robust deviations, three medians, and 2.5 of the last steps'
"""

import math
from collections import deque

from lockstep.run_state import SpikeState

__all__ = ["Spike"]

# Norms in the estimate.
_WINDOW = 128
# Fewest norms for an estimate: before, no step is a spike.
_LEAST = 32
# Steps between two estimates.
_EVERY = 16
# A spike exceeds the median by more than this many standard deviations.
_DEVIATIONS = 8.0
# A spike also exceeds this many medians.
_TIMES = 3.0
# Latest norms, for a rise of all norms.
_LATELY = 8
# A spike also exceeds this many medians of the latest norms.
_RISEN = 2.5
# Factor from the median absolute deviation to the standard deviation of a normal distribution.
_NORMAL = 1.4826
# Steps until an estimate applies: a device delivers a step's norm during the next step.
_LATE = 2


class Spike:
    """Robust running estimate of the usual norm: median and median deviation.

    It covers the last 128 norms, so that one value cannot move it. If norms rise, as in healthy runs after the warm-up
    of the rate, that median is out of date. So a spike must also exceed two and a half times the median of the last 8
    norms, which matters if these have risen by a fifth.

    A step's limit depends only on the norms up to the last but one, so that it is the same whether norms are read at
    once or a step late. The state belongs into checkpoints: it decides which steps are applied.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        # The last few of them.
        self._latest: deque[float] = deque(maxlen=_LATELY)
        self._count = 0
        # The limit by the last 128 norms, as last estimated.
        self._usual = math.inf
        # (first step, limit) of the current limit and of the next one.
        self._limits: deque[tuple[int, float]] = deque(maxlen=2)
        # The first step whose norm is used.
        self._first = 0

    def limit(self, step: int) -> float:
        """Return the norm above which `step` is a spike."""
        for first_step, limit in reversed(self._limits):
            if step >= first_step:
                return limit
        return math.inf

    def sees(self, step: int, norm: float) -> bool:
        """Return whether the norm of `step` is a spike, and learn from it if not.

        Steps come in order. Takes two microseconds; every 16th step ten.
        """
        if not norm < self.limit(step):
            return True
        if norm > 0 and step >= self._first:
            self._norms.append(norm)
            self._latest.append(norm)
            self._count += 1
            if self._count >= _LEAST:
                if self._count % _EVERY == 0:
                    self._usual = self._estimate()
                self._limits.append((step + _LATE, max(self._usual, _RISEN * self._lately())))
        return False

    def forget(self, step: int) -> None:
        """Start learning again at `step`, because another set of parameters is trained.

        Earlier steps, whose norms may still come, keep their limit.
        """
        earlier = [pair for pair in self._limits if pair[0] < step]
        self._limits.clear()
        self._limits.extend([*earlier[-1:], (step, math.inf)])
        self._norms.clear()
        self._latest.clear()
        self._count = 0
        self._usual = math.inf
        self._first = step

    def state(self, trained: int) -> SpikeState:
        """Return the state, in numbers that JSON stores exactly.

        Every step before it must have been seen.

        Args:
            trained: hash of the trained set.
        """
        limits: list[tuple[int, float]] = []
        for first_step, limit in self._limits:
            limits = [*limits, (first_step, limit)] if math.isfinite(limit) else []
        return SpikeState(
            list(self._norms), self._count, limits, None if math.isinf(self._usual) else self._usual, trained
        )

    def load(self, state: SpikeState) -> None:
        """Restore what `state` returned."""
        self._norms.clear()
        self._norms.extend(state.norms)
        self._latest.clear()
        self._latest.extend(self._norms)
        self._count = state.count
        self._limits.clear()
        self._limits.extend(state.limits)
        last_limit = self._limits[-1][1] if self._limits else math.inf
        self._usual = last_limit if state.usual is None else state.usual

    def _lately(self) -> float:
        """Return the median of the last 8 norms."""
        lately = sorted(self._latest)
        return lately[len(lately) // 2]

    def _estimate(self) -> float:
        ordered = sorted(self._norms)
        median = ordered[len(ordered) // 2]
        deviation = sorted(abs(norm - median) for norm in ordered)[len(ordered) // 2]
        return max(_TIMES * median, median + _DEVIATIONS * _NORMAL * deviation)
