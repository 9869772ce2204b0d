"""Two runs that saw the same samples in the same order: is one's loss lower, or is it noise?

    found = paired(differences)         # of the losses of equal windows, in their order
    found.mean, found.low, found.high, found.p

Each window of one run has its twin in the other, so the samples' own difficulty cancels in the difference. Neighbouring
differences are not independent: the two models drift apart slowly. So blocks of about sqrt(n) windows are averaged, and
the blocks' means are compared with zero by Student's t: the method of batch means (Flegal and Jones, Annals of
Statistics 38(2), 2010, section 3). p is two-sided; the t distribution by the incomplete beta function (DLMF 8.17.5 and
8.17.22).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Paired", "paired"]

_LEAST = 16  # windows; with fewer there are fewer than four blocks


class Paired(NamedTuple):
    """The mean difference, its 95% interval, the two-sided p, and from how many windows in how many blocks."""

    mean: float
    low: float
    high: float
    p: float
    windows: int
    blocks: int


def paired(differences: Sequence[float]) -> Paired | None:
    """None where there are too few to say anything, or one is not finite."""
    count = len(differences)
    if count < _LEAST or not all(map(math.isfinite, differences)):
        return None
    size = math.isqrt(count)
    blocks = count // size
    kept = differences[count - blocks * size :]
    means = [math.fsum(kept[at * size : (at + 1) * size]) / size for at in range(blocks)]
    mean = math.fsum(means) / blocks
    error = math.sqrt(math.fsum((each - mean) ** 2 for each in means) / (blocks - 1) / blocks)
    if error == 0:
        return Paired(mean, mean, mean, 0.0 if mean else 1.0, blocks * size, blocks)
    reach = _quantile(blocks - 1) * error
    return Paired(mean, mean - reach, mean + reach, _two_sided(mean / error, blocks - 1), blocks * size, blocks)


def _two_sided(t: float, freedom: int) -> float:
    """The chance of |T| >= |t| for Student's t."""
    return _beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _quantile(freedom: int) -> float:
    """t with a chance of 5% that |T| is above it."""
    low, high = 0.0, 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, freedom) > 0.05 else (low, middle)
    return high


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, 0 <= x <= 1."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front / a / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of it, by Lentz's method."""
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for place in range(1, 500):
        half = place // 2
        if place % 2:
            step = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            step = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        d = 1 / ((1 + step * d) or tiny)
        c = (1 + step / c) or tiny
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
