"""Draw the charts of one or several runs, with tables.

for figure in figures([facts], points=240): figure.chart.svg, figure.rows
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from lockstep.files import bytes_text
from lockstep.report.curves import Curve, CurveSpan
from lockstep.report.facts import RunFacts, format_value, number

__all__ = [
    "COLOURS",
    "Figure",
    "bar",
    "figures",
]


COLOURS = 8
# Width and height of the drawing, in its own units.
_SIDE = 1000
# Powers of ten above which the axis is logarithmic.
_DECADES = 3.0


@dataclass(frozen=True, slots=True)
class Series:
    """A curve to draw.

    Attributes:
        spans: in order.
        dots: mark each value, if there are few.
        colour: index into the palette.
        dashed: to distinguish two curves of one colour.
    """

    name: str
    spans: Sequence[CurveSpan]
    dots: bool = False
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing and its labels.

    Attributes:
        svg: escaped, safe to embed in a page.
        ticks: (label, distance from the top in percent) of the vertical axis.
        ends: the first and the last step.
        log: whether the vertical axis is logarithmic.
    """

    svg: str
    ticks: list[tuple[str, float]]
    ends: tuple[str, str]
    log: bool


def plot(series: Sequence[Series], title: str, text: str = "", *, sizes: bool = False) -> Chart | None:
    """Draw the series in one chart; None if none of them has a value.

    Args:
        text: the description for screen readers.
        sizes: the values are bytes: the axis begins at 0 and has binary units.
    """
    spans = [span for line in series for span in line.spans]
    if not spans:
        return None
    low = min(span.low for span in spans)
    high = max(span.high for span in spans)
    first_step = min(span.first for span in spans)
    last_step = max(span.last for span in spans)
    log = not sizes and low > 0 and math.log10(high / low) > _DECADES
    if sizes:
        marks = _byte_marks(high)
    else:
        marks = _decade_marks(low, high) if log else _round_marks(low, high)
    scale = _Scale(
        first_step, last_step, *((math.log10(marks[0]), math.log10(marks[-1])) if log else (marks[0], marks[-1])), log
    )
    lines = "".join(f'<path class="grid" d="M0 {scale.y(mark)}H{_SIDE}"/>' for mark in marks)
    paths = "".join(_draw_series(line, scale) for line in series)
    svg = (
        f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(text)}</desc>{lines}{paths}</svg>"
    )
    label = bytes_text if sizes else _label
    ticks = [(label(mark), 100 * scale.y(mark) / _SIDE) for mark in marks]
    return Chart(svg, ticks, (f"{first_step:,}", f"{last_step:,}"), log)


@dataclass(frozen=True, slots=True)
class _Scale:
    left: float
    right: float
    low: float
    high: float
    log: bool

    def x(self, step: float) -> int:
        """Return the distance from the left."""
        wide = self.right - self.left
        if wide:
            return round((step - self.left) / wide * _SIDE)
        return _SIDE // 2

    def y(self, value: float) -> int:
        """Return the distance from the top."""
        height = math.log10(value) if self.log else value
        # Halves, since the difference of two huge values may overflow.
        return round(_SIDE * (1 - (height / 2 - self.low / 2) / ((self.high / 2 - self.low / 2) or 1)))


def _draw_series(series: Series, scale: _Scale) -> str:
    colour = f"s{series.colour % COLOURS}"
    if not series.spans:
        return ""
    points = []
    for span in series.spans:
        points.append((scale.x(span.step), scale.y(_clamped_mean(span))))
    line = "M" + "L".join(f"{x} {y}" for x, y in points)
    paths = f'<path class="line {colour}{" dash" * series.dashed}" d="{line}"/>'
    # A line of zero length with round caps stays round at any scale, unlike a circle.
    if series.dots or len(points) == 1:
        marks = "".join(f"M{x} {y}h0" for x, y in points)
        paths += f'<path class="dot {colour}" d="{marks}"/>'
    if any(span.high > span.low for span in series.spans):
        tops = [f"{scale.x(span.step)} {scale.y(span.high)}" for span in series.spans]
        bottoms = []
        for span in reversed(series.spans):
            bottoms.append(f"{scale.x(span.step)} {scale.y(span.low)}")
        paths = f'<path class="area {colour}" d="M{"L".join(tops + bottoms)}Z"/>' + paths
    return paths


def _clamped_mean(span: CurveSpan) -> float:
    """Return the mean within the range, since a sum of huge values may overflow."""
    mean = span.mean
    if math.isfinite(mean):
        return min(max(mean, span.low), span.high)
    return span.high


def bar(parts: Sequence[tuple[str, float]], title: str) -> str:
    """Draw shares of a whole as one bar, without numbers."""
    total = math.fsum(size for _, size in parts)
    if not total:
        return ""
    rects = ""
    at = 0.0
    for index, (name, size) in enumerate(parts):
        wide = size / total * _SIDE
        rects += (
            f'<rect class="b{index % COLOURS}" x="{at:.1f}" y="0" width="{max(0.0, wide):.1f}" height="10">'
            f"<title>{escape(name)}: {size / total:.1%}</title></rect>"
        )
        at += wide
    return (
        f'<svg class="bar" viewBox="0 0 {_SIDE} 10" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{rects}</svg>"
    )


def _round_marks(low: float, high: float) -> list[float]:
    """Return three to six marks around the range, on round numbers.

    Marks are multiples of 1, 2 or 5 times a power of ten.
    """
    # Halves, since the difference of two huge values may overflow. A flat curve gets some room.
    if not high / 2 - low / 2 > 1e-12 * max(abs(low), abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low = low - pad
        high = high + pad
    rough = (high / 4 - low / 4) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    wide = power * 10
    for factor in (1, 2, 5):
        if power * factor >= rough:
            wide = power * factor
            break
    first_index = math.floor(low / wide)
    last_index = math.ceil(high / wide)
    marks = [index * wide for index in range(int(first_index), int(last_index) + 1)]
    if all(map(math.isfinite, marks)):
        return marks
    return [low, high]


def _byte_marks(high: float) -> list[float]:
    """Return marks from 0 to `high` bytes, on round numbers of a binary unit."""
    unit = 1024.0 ** min(max(0, math.floor(math.log(high, 1000))) if high >= 1 else 0, 5)
    return [unit * mark for mark in _round_marks(0.0, high / unit)]


def _decade_marks(low: float, high: float) -> list[float]:
    """Return at most six powers of ten around the range."""
    first_power = math.floor(math.log10(low))
    last_power = math.ceil(math.log10(high))
    every = -(-(last_power - first_power) // 5)
    # 1e308 is the largest power of ten of float64.
    marks = [10.0**power for power in range(first_power, last_power, every)] + [10.0 ** min(last_power, 308)]
    if marks[-1] >= high:
        return marks
    return [*marks[:-1], high]


def _label(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{name}"
    if value == 0:
        return "0"
    return f"{value:.3g}"


# Marks a chart of bytes, whose unit is shown in its labels.
_BYTES = "peak"
# (title, unit, curves drawn together: name -> label in the legend)
_STANDARD_CHARTS = (
    ("Loss", "", {"running_loss": "training", "evaluation/loss": "evaluation"}),
    ("Learning rate", "", {"lr": "rate"}),
    ("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    ("Throughput", "items a second", {"items_per_second": "items/s"}),
    ("Memory", _BYTES, {"memory": "memory"}),
    ("Padding", "share of the items", {"padding": "padding"}),
)
_POSITION_NAMES = ("epoch", "epoch_progress", "num_batches_remaining", "evaluation/items", "time/total")
# Most charts in addition to the standard ones.
_EXTRA_CHARTS = 12
# Rows of a table between the first and the last.
_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title.

    Attributes:
        legend: (name, colour) of each curve.
        rows: (name, kind, step, value) as text.
    """

    title: str
    unit: str
    chart: Chart
    legend: list[tuple[str, int]]
    rows: list[tuple[str, str, str, str]]
    note: str


def figures(runs: Sequence[RunFacts], points: int, more: int = _EXTRA_CHARTS, samples: int = _SAMPLES) -> list[Figure]:
    """Draw the charts of the runs, in display order.

    Args:
        points: maximum spans of a curve.
        more: charts in addition to the standard ones.
        samples: rows of a table between the first and the last.
    """
    candidates = [_figure(runs, title, unit, names, points, samples) for title, unit, names in _STANDARD_CHARTS]
    names = list(dict.fromkeys(name for facts in runs for name in facts.records.curves))
    drawn_names = {name for _, _, drawn in _STANDARD_CHARTS for name in drawn}
    times = {}
    for name in names:
        if name.startswith("time/"):
            times[name] = format_value(name.removeprefix("time/"), 40)
    times.pop("time/total", None)
    if len(runs) == 1 and times:
        candidates.append(_figure(runs, "Time of a step", "milliseconds", times, points // 2, samples))
        drawn_names |= times.keys()
    else:
        candidates.append(_figure(runs, "Time of a step", "milliseconds", {"time/total": "total"}, points, samples))
        drawn_names |= times.keys()
    blocks = {}
    for name in names:
        if name.startswith("gradients/"):
            blocks[name] = format_value(name.removeprefix("gradients/"), 40)
    if len(runs) == 1 and blocks:
        candidates.append(_figure(runs, "Gradient norms by block", "before clipping", blocks, points // 2, samples))
        drawn_names |= blocks.keys()
    for name in [name.removeprefix("train/") for name in names if name.startswith("train/")][:more]:
        both = {f"train/{name}": "training", f"evaluation/{name}": "evaluation"}
        candidates.append(_figure(runs, format_value(name, 60), "", both, points, samples))
        drawn_names |= both.keys()
    remaining = []
    for name in names:
        if name not in drawn_names and name not in _POSITION_NAMES and not name.endswith("/items"):
            remaining.append(name)
    remaining.sort(key=lambda name: not name.startswith("evaluation/"))
    for name in remaining[:more]:
        candidates.append(_figure(runs, format_value(name, 60), "", {name: format_value(name, 40)}, points, samples))
    return [figure for figure in candidates if figure]


def _figure(
    runs: Sequence[RunFacts], title: str, unit: str, names: dict[str, str], points: int, samples: int
) -> Figure | None:
    series: list[Series] = []
    legend: list[tuple[str, int]] = []
    rows: list[tuple[str, str, str, str]] = []
    bad = 0
    for run_index, facts in enumerate(runs):
        for index, (name, label) in enumerate(names.items()):
            curve = facts.records.curves.get(name)
            if curve is None or curve.count == curve.bad:
                bad += curve.bad if curve else 0
                continue
            bad += curve.bad
            spans = curve.spans(points)
            colour = run_index if len(runs) > 1 else index
            few = name.startswith("evaluation/") and len(spans) <= 32
            dashed = len(runs) > 1 and index > 0
            series.append(Series(label, spans, few and not dashed, colour, dashed))
            if len(runs) == 1:
                caption = label
            else:
                caption = f"{facts.name} · {label}" if len(names) > 1 else facts.name
            entry = f"{facts.name} · {label}, dashed" if dashed else caption
            legend.append((entry, colour % COLOURS))
            for row in _table_rows(curve, samples, bytes_text if unit == _BYTES else number):
                rows.append((caption, *row))
    text = "; ".join(
        f"{caption}: {label_of_row} {value} at step {step}"
        for caption, label_of_row, step, value in rows
        if label_of_row != ""
    )
    chart = plot(series, title, text[:600], sizes=unit == _BYTES)
    if chart is None:
        return None
    note = f"{bad:,} non-finite values are not drawn" if bad else ""
    return Figure(title, unit, chart, legend if len(legend) > 1 else [], rows, note)


def _table_rows(curve: Curve, samples: int, write: Callable[[float], str]) -> list[tuple[str, str, str]]:
    """Return the rows (kind, step, value) of a curve's table.

    They are the first, last, lowest, highest, and samples in between.
    """
    # A def would take three lines for one expression.
    show: Callable[[tuple[int, float]], tuple[str, str]] = lambda at: (f"{at[0]:,}", write(at[1]))  # noqa: E731
    rows = [("first", *show(curve.first))]
    spans = curve.spans()
    if samples and len(spans) > 2:
        chosen = sorted({round(index * (len(spans) - 1) / (samples + 1)) for index in range(1, samples + 1)})
        for at in chosen:
            if 0 < at < len(spans) - 1:
                rows.append(("", f"{spans[at].last:,}", write(spans[at].mean)))
    rows += [("last", *show(curve.newest)), ("lowest", *show(curve.lowest)), ("highest", *show(curve.highest))]
    return rows
