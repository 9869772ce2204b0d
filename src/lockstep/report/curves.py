"""Keep a curve of any length in bounded memory, as spans of steps.

    curve = Curve()
    for step, value in ...: curve.add(step, value)
    curve.spans()           # at most 512, in order; a spike among a million values stays its span's highest

The width of a span is a power of two of steps, and doubles if there would be too many spans; so equal values give equal
spans in any order.
"""

import math
from dataclasses import dataclass

__all__ = ["Curve", "CurveSpan"]

# Most spans of a curve.
_MOST = 512


@dataclass(slots=True)
class CurveSpan:
    """Summary of the finite values of steps `first` to `last`."""

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

    def merge(self, span: "CurveSpan") -> None:
        """Merge the values of another span."""
        self.first = min(self.first, span.first)
        self.last = max(self.last, span.last)
        self.count = self.count + span.count
        self.total = self.total + span.total
        self.low = min(self.low, span.low)
        self.high = max(self.high, span.high)


class Curve:
    """Values by step, summarised in spans.

    Attributes:
        count: of all values.
        bad: count of the values that are not finite; the first was at step `first_bad`.
        first, newest: (step, value) of the first and the last finite value added.
        lowest, highest: (step, value).
    """

    def __init__(self, most: int = _MOST) -> None:
        self._limit = most
        self._width = 1
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
        span = self._spans.get(step // self._width)
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
                self.lowest = self.newest
        elif value > span.high:
            span.high = value
            if value > self.highest[1]:
                self.highest = self.newest

    def _begin(self, step: int, value: float) -> None:
        """Start a new span with the newest value."""
        if not self._spans:
            self.first = self.lowest = self.highest = self.newest
        if value < self.lowest[1]:
            self.lowest = self.newest
        if value > self.highest[1]:
            self.highest = self.newest
        self._spans[step // self._width] = CurveSpan(step, step, 1, value, value, value)
        while len(self._spans) > self._limit:
            self._double()

    def spans(self, most: int = _MOST) -> list[CurveSpan]:
        """Return at most `most` spans, in order of steps."""
        merged = dict(self._spans)
        width = 1
        while len(merged) > most:
            width *= 2
            merged = _merge(self._spans, width)
        return [merged[index] for index in sorted(merged)]

    def _double(self) -> None:
        self._spans = _merge(self._spans, 2)
        self._width = self._width * 2


def _merge(spans: dict[int, CurveSpan], width: int) -> dict[int, CurveSpan]:
    spans_by_place: dict[int, CurveSpan] = {}
    for index, span in spans.items():
        copy = CurveSpan(span.first, span.last, span.count, span.total, span.low, span.high)
        if index // width in spans_by_place:
            spans_by_place[index // width].merge(copy)
        else:
            spans_by_place[index // width] = copy
    return spans_by_place
