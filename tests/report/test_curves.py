"""A curve in bounded memory: nothing is lost of its sums and extremes, whatever comes."""

import math
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.curves import Curve

floats = st.floats(allow_nan=True, allow_infinity=True, width=64)


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.one_of(st.floats(-1e6, 1e6), floats)), max_size=200), st.integers(2, 40)
)
def test_spans_hold_every_value(values, most):
    curve = Curve(most)
    for step, value in values:
        curve.add(step, value)
    finite = [(step, value) for step, value in values if math.isfinite(value)]
    spans = curve.spans()
    assert len(spans) <= most
    assert (curve.count, curve.bad) == (len(values), len(values) - len(finite))
    assert sum(span.count for span in spans) == len(finite)
    assert all(a.last < b.first for a, b in pairwise(spans))
    for span in spans:
        inside = [value for step, value in finite if span.first <= step <= span.last]
        assert (span.low, span.high, span.count) == (min(inside), max(inside), len(inside))
        # A sum that is too large is infinite; fsum raises.
        assert not math.isfinite(span.total) or span.total == pytest.approx(math.fsum(inside), rel=1e-6, abs=1e-3)
    if finite:
        assert (curve.first, curve.newest) == (finite[0], finite[-1])
        assert curve.lowest[1] == min(value for _, value in finite)
        assert curve.highest[1] == max(value for _, value in finite)
    assert len(curve.spans(3)) <= 3
    assert sum(span.count for span in curve.spans(3)) == len(finite)


def test_spike_among_many_stays_highest_and_memory_is_bounded():
    curve = Curve()
    tracemalloc.start()
    for step in range(100_000):
        curve.add(step, 1.0 if step != 77_777 else 50.0)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 2_000_000
    spans = curve.spans(240)
    assert len(spans) > 100
    assert [span.high for span in spans if span.high > 1] == [50.0]
    assert curve.highest == (77_777, 50.0)
