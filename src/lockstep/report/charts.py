"""Which curves of one run, or of several laid over each other, make which charts, and the table of numbers under each.

for figure in figures([facts], points=240): figure.chart.svg, figure.rows
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.report.curves import Curve
from lockstep.report.facts import Facts, number
from lockstep.report.reading import shown
from lockstep.report.svg import COLOURS, Chart, Series, plot

__all__ = ["Figure", "figures"]

# (title, unit, names that are drawn together, with their names in the legend)
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
    """A chart with its title, legend [(name, colour)], and rows (name, what, step, value) as text."""

    title: str
    unit: str
    chart: Chart
    legend: list[tuple[str, int]]
    rows: list[tuple[str, str, str, str]]
    note: str


def figures(runs: Sequence[Facts], points: int, more: int = _MORE, samples: int = _SAMPLES) -> list[Figure]:
    """The charts, in order. `points`: spans a curve, at most; `more`: charts besides the known ones."""
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
    runs: Sequence[Facts], title: str, unit: str, names: dict[str, str], points: int, samples: int
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
    """(what, step, value): first, lowest, highest, last, and some in between."""
    show: Callable[[tuple[int, float]], tuple[str, str]] = lambda at: (f"{at[0]:,}", number(at[1]))  # noqa: E731
    found = [("first", *show(curve.first))]
    spans = curve.spans()
    if samples and len(spans) > 2:
        chosen = sorted({round(each * (len(spans) - 1) / (samples + 1)) for each in range(1, samples + 1)})
        found += [("", f"{spans[at].last:,}", number(spans[at].mean)) for at in chosen if 0 < at < len(spans) - 1]
    found += [("last", *show(curve.newest)), ("lowest", *show(curve.lowest)), ("highest", *show(curve.highest))]
    return found
