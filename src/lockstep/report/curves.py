"""Keep a curve of any length in bounded memory, as spans of steps.

    curve = Curve()
    for step, value in ...: curve.add(step, value)
    curve.spans()           # at most 512, in order; a single spike among a million values is still its span's highest

The width of a span is a power of two of steps, and doubles if there would be too many; so the same values give the
same spans, in whatever order they came.
"""

import math
from dataclasses import dataclass

__all__ = ["Curve", "CurveSpan"]

_MOST = 512


@dataclass(slots=True)
class CurveSpan:
    """The finite values of the steps from `first` to `last`: count, total, lowest and highest."""

    first: int
    last: int
    count: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        """Mean of the values; not finite only if their sum overflows."""
        return self.total / self.count

    @property
    def step(self) -> float:
        """The middle step."""
        return (self.first + self.last) / 2

    def take(self, other: "CurveSpan") -> None:
        """Merge the values of another span."""
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.count, self.total = self.count + other.count, self.total + other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


class Curve:
    """Values by step.

    Attributes:
        count: of all values.
        bad: of the values that are not finite; the first was at step `first_bad`.
        first, newest: (step, value) of the first and the last finite value added.
        lowest, highest: (step, value).
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most, self._wide = most, 1
        self._spans: dict[int, CurveSpan] = {}
        self.count = self.bad = 0
        self.first_bad: int | None = None
        self.first = self.newest = self.lowest = self.highest = (0, math.nan)

    def add(self, step: int, value: float) -> None:
        """Add a value."""
        self.count += 1
        if not math.isfinite(value):
            self.bad += 1
            self.first_bad = step if self.first_bad is None else self.first_bad
            return
        self.newest = (step, value)
        span = self._spans.get(step // self._wide)
        if span is None:
            self._begin(step, value)
            return
        span.count += 1
        span.total += value
        if step > span.last:
            span.last = step
        elif step < span.first:
            span.first = step
        if value < span.low:
            span.low = value
            if value < self.lowest[1]:
                self.lowest = (step, value)
        elif value > span.high:
            span.high = value
            if value > self.highest[1]:
                self.highest = (step, value)

    def _begin(self, step: int, value: float) -> None:
        """Start a new span."""
        if not self._spans:
            self.first = self.lowest = self.highest = (step, value)
        if value < self.lowest[1]:
            self.lowest = (step, value)
        if value > self.highest[1]:
            self.highest = (step, value)
        self._spans[step // self._wide] = CurveSpan(step, step, 1, value, value, value)
        while len(self._spans) > self._most:
            self._double()

    def spans(self, most: int = _MOST) -> list[CurveSpan]:
        """Return at most `most` spans, in order of steps."""
        found, wide = dict(self._spans), 1
        while len(found) > most:
            wide *= 2
            found = _merged(self._spans, wide)
        return [found[place] for place in sorted(found)]

    def _double(self) -> None:
        self._spans, self._wide = _merged(self._spans, 2), self._wide * 2


def _merged(spans: dict[int, CurveSpan], wide: int) -> dict[int, CurveSpan]:
    found: dict[int, CurveSpan] = {}
    for place, span in spans.items():
        own = CurveSpan(span.first, span.last, span.count, span.total, span.low, span.high)
        if place // wide in found:
            found[place // wide].take(own)
        else:
            found[place // wide] = own
    return found
