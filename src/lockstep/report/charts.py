"""Draw the charts of one run or of several overlaid ones, with tables.

for figure in figures([facts], points=240): figure.chart.svg, figure.rows
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from lockstep.report.curves import Curve, CurveSpan
from lockstep.report.facts import RunFacts, number, shown

__all__ = [
    "COLOURS",
    "Chart",
    "Figure",
    "Series",
    "bar",
    "figures",
    "plot",
]


COLOURS = 8
_SIDE = 1000  # size of the drawing, in its own units
_DECADES = 3.0  # powers of ten above which the axis is logarithmic


@dataclass(frozen=True, slots=True)
class Series:
    """A curve to draw.

    Attributes:
        spans: in order.
        dots: mark each value, if there are few.
        colour: its number.
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


def plot(series: Sequence[Series], title: str, text: str = "") -> Chart | None:
    """Draw the series in one chart; None if none of them has a value.

    Args:
        text: the description for screen readers.
    """
    spans = [span for each in series for span in each.spans]
    if not spans:
        return None
    low, high = min(span.low for span in spans), max(span.high for span in spans)
    left, right = min(span.first for span in spans), max(span.last for span in spans)
    log = low > 0 and math.log10(high / low) > _DECADES
    marks = _decades(low, high) if log else _round(low, high)
    scale = _Scale(left, right, *((math.log10(marks[0]), math.log10(marks[-1])) if log else (marks[0], marks[-1])), log)
    lines = "".join(f'<path class="grid" d="M0 {scale.y(mark)}H{_SIDE}"/>' for mark in marks)
    drawn = "".join(_drawn(each, scale) for each in series)
    svg = (
        f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(text)}</desc>{lines}{drawn}</svg>"
    )
    ticks = [(_label(mark), 100 * scale.y(mark) / _SIDE) for mark in marks]
    return Chart(svg, ticks, (f"{left:,}", f"{right:,}"), log)


@dataclass(frozen=True, slots=True)
class _Scale:
    left: float
    right: float
    low: float
    high: float
    log: bool

    def x(self, step: float) -> int:
        """The distance from the left."""
        wide = self.right - self.left
        return round((step - self.left) / wide * _SIDE) if wide else _SIDE // 2

    def y(self, value: float) -> int:
        """The distance from the top."""
        place = math.log10(value) if self.log else value
        return round(_SIDE * (1 - (place / 2 - self.low / 2) / ((self.high / 2 - self.low / 2) or 1)))


def _drawn(series: Series, scale: _Scale) -> str:
    colour = f"s{series.colour % COLOURS}"
    if not series.spans:
        return ""
    points = [(scale.x(span.step), scale.y(_inside(span))) for span in series.spans]
    line = "M" + "L".join(f"{x} {y}" for x, y in points)
    drawn = f'<path class="line {colour}{" dash" * series.dashed}" d="{line}"/>'
    if series.dots or len(points) == 1:  # a line of zero length with round caps stays round at any scale
        marks = "".join(f"M{x} {y}h0" for x, y in points)
        drawn += f'<path class="dot {colour}" d="{marks}"/>'
    if any(span.high > span.low for span in series.spans):
        tops = [f"{scale.x(span.step)} {scale.y(span.high)}" for span in series.spans]
        bottoms = [f"{scale.x(span.step)} {scale.y(span.low)}" for span in reversed(series.spans)]
        drawn = f'<path class="area {colour}" d="M{"L".join(tops + bottoms)}Z"/>' + drawn
    return drawn


def _inside(span: CurveSpan) -> float:
    """The mean, clamped to the range: a sum of huge values is not finite."""
    mean = span.mean
    return min(max(mean, span.low), span.high) if math.isfinite(mean) else span.high


def bar(parts: Sequence[tuple[str, float]], title: str) -> str:
    """Draw shares of a whole as one bar, without numbers."""
    whole = math.fsum(size for _, size in parts)
    if not whole:
        return ""
    drawn, at = "", 0.0
    for place, (name, size) in enumerate(parts):
        wide = size / whole * _SIDE
        drawn += (
            f'<rect class="b{place % COLOURS}" x="{at:.1f}" y="0" width="{max(0.0, wide):.1f}" height="10">'
            f"<title>{escape(name)}: {size / whole:.1%}</title></rect>"
        )
        at += wide
    return (
        f'<svg class="bar" viewBox="0 0 {_SIDE} 10" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{drawn}</svg>"
    )


def _round(low: float, high: float) -> list[float]:
    """Three to six marks around the range.

    They are round numbers: 1, 2, 5 times a power of ten.
    """
    if not high / 2 - low / 2 > 1e-12 * max(abs(low), abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high / 4 - low / 4) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    wide = next((power * each for each in (1, 2, 5) if power * each >= rough), power * 10)
    first, last = math.floor(low / wide), math.ceil(high / wide)
    marks = [place * wide for place in range(int(first), int(last) + 1)]
    return marks if all(map(math.isfinite, marks)) else [low, high]


def _decades(low: float, high: float) -> list[float]:
    """At most six powers of ten around the range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = -(-(last - first) // 5)
    marks = [10.0**place for place in range(first, last, every)] + [10.0 ** min(last, 308)]
    return marks if marks[-1] >= high else [*marks[:-1], high]


def _label(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{name}"
    return "0" if value == 0 else f"{value:.3g}"


# (title, unit, curves that are drawn together, with their names in the legend)
_KNOWN = (
    ("Loss", "", {"running_loss": "training", "evaluation/loss": "evaluation"}),
    ("Learning rate", "", {"lr": "rate"}),
    ("Gradient norm", "before clipping", {"grad_norm": "norm"}),
    ("Throughput", "items a second", {"items_per_second": "items/s"}),
    ("Memory", "peak bytes", {"memory": "memory"}),
    ("Padding", "share of the items", {"padding": "padding"}),
)
_PLACES = ("epoch", "epoch_progress", "num_batches_remaining", "evaluation/items", "time/total")
_MORE = 12  # further charts
_SAMPLES = 8  # rows of a table between the first and the last


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


def figures(runs: Sequence[RunFacts], points: int, more: int = _MORE, samples: int = _SAMPLES) -> list[Figure]:
    """Return the charts of the runs, in order.

    Args:
        points: maximum spans of a curve.
        more: charts in addition to the known ones.
        samples: rows of a table between the first and the last.
    """
    found = [_figure(runs, title, unit, names, points, samples) for title, unit, names in _KNOWN]
    names = list(dict.fromkeys(name for facts in runs for name in facts.records.curves))
    known = {name for _, _, drawn in _KNOWN for name in drawn}
    times = {name: shown(name.removeprefix("time/"), 40) for name in names if name.startswith("time/")}
    times.pop("time/total", None)
    if len(runs) == 1 and times:
        found.append(_figure(runs, "Time of a step", "milliseconds", times, points // 2, samples))
        known |= times.keys()
    else:
        found.append(_figure(runs, "Time of a step", "milliseconds", {"time/total": "in all"}, points, samples))
        known |= times.keys()
    blocks = {name: shown(name.removeprefix("gradients/"), 40) for name in names if name.startswith("gradients/")}
    if len(runs) == 1 and blocks:
        found.append(_figure(runs, "Gradient norms by block", "before clipping", blocks, points // 2, samples))
        known |= blocks.keys()
    for name in [name.removeprefix("train/") for name in names if name.startswith("train/")][:more]:
        both = {f"train/{name}": "training", f"evaluation/{name}": "evaluation"}
        found.append(_figure(runs, shown(name, 60), "", both, points, samples))
        known |= both.keys()
    rest = [name for name in names if name not in known and name not in _PLACES and not name.endswith("/items")]
    rest.sort(key=lambda name: not name.startswith("evaluation/"))
    found += [_figure(runs, shown(name, 60), "", {name: shown(name, 40)}, points, samples) for name in rest[:more]]
    return [figure for figure in found if figure]


def _figure(
    runs: Sequence[RunFacts], title: str, unit: str, names: dict[str, str], points: int, samples: int
) -> Figure | None:
    series: list[Series] = []
    legend: list[tuple[str, int]] = []
    rows: list[tuple[str, str, str, str]] = []
    bad = 0
    for place, facts in enumerate(runs):
        for among, (name, label) in enumerate(names.items()):
            curve = facts.records.curves.get(name)
            if curve is None or curve.count == curve.bad:
                bad += curve.bad if curve else 0
                continue
            bad += curve.bad
            spans = curve.spans(points)
            colour = place if len(runs) > 1 else among
            few = name.startswith("evaluation/") and len(spans) <= 32
            dashed = len(runs) > 1 and among > 0
            series.append(Series(label, spans, few and not dashed, colour, dashed))
            said = label if len(runs) == 1 else f"{facts.name} · {label}" if len(names) > 1 else facts.name
            shown_as = f"{facts.name} · {label}, dashed" if dashed else said
            legend.append((shown_as, colour % COLOURS))
            rows += [(said, *row) for row in _rows(curve, samples)]
    text = "; ".join(f"{said}: {what} {value} at step {step}" for said, what, step, value in rows if what != "")
    chart = plot(series, title, text[:600])
    if chart is None:
        return None
    note = f"{bad:,} values that are not finite are not drawn" if bad else ""
    return Figure(title, unit, chart, legend if len(legend) > 1 else [], rows, note)


def _rows(curve: Curve, samples: int) -> list[tuple[str, str, str]]:
    """The rows (kind, step, value) of a table.

    They are the first, lowest, highest and last, and some in between.
    """
    show: Callable[[tuple[int, float]], tuple[str, str]] = lambda at: (f"{at[0]:,}", number(at[1]))  # noqa: E731
    found = [("first", *show(curve.first))]
    spans = curve.spans()
    if samples and len(spans) > 2:
        chosen = sorted({round(each * (len(spans) - 1) / (samples + 1)) for each in range(1, samples + 1)})
        found += [("", f"{spans[at].last:,}", number(spans[at].mean)) for at in chosen if 0 < at < len(spans) - 1]
    found += [("last", *show(curve.newest)), ("lowest", *show(curve.lowest)), ("highest", *show(curve.highest))]
    return found
