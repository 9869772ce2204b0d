"""A gradient's norm far above what is usual for the run.

spike = Spike()
if spike.sees(norm): ...        # above median + 8 robust deviations, and above three times the median
spike.limit                     # what the next step's norm must stay below; infinite while too little is known
"""

import math
from collections import deque

__all__ = ["Spike"]

_WINDOW, _LEAST, _EVERY = 128, 32, 16
_DEVIATIONS, _TIMES = 8.0, 3.0
_NORMAL = 1.4826  # median absolute deviation -> standard deviation of a normal distribution


class Spike:
    """A running estimate that one value cannot move: the median and the median deviation of the last 128 norms.

    Attributes:
        limit: above it a norm is a spike.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._count = 0
        self.limit = math.inf

    def sees(self, norm: float) -> bool:
        """Whether `norm` is a spike; only what is not is learnt from. Costs a microsecond; every 16th step ten."""
        if norm > self.limit:
            return True
        if math.isfinite(norm) and norm > 0:
            self._norms.append(norm)
            self._count += 1
            if self._count >= _LEAST and self._count % _EVERY == 0:
                self.limit = self._estimate()
        return False

    def _estimate(self) -> float:
        ordered = sorted(self._norms)
        median = ordered[len(ordered) // 2]
        deviation = sorted(abs(norm - median) for norm in ordered)[len(ordered) // 2]
        return max(_TIMES * median, median + _DEVIATIONS * _NORMAL * deviation)
