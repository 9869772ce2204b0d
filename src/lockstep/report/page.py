"""Render the report: one self-contained HTML file, at most 300 KB, deterministic in its folders.

    html = page([gather(Path("outputs/a")), gather(Path("outputs/b"))])
    write([Path("outputs/a")], Path("outputs/a/report.html"))

Only this file needs the package Jinja2, which escapes all text of a run's files. The page has no script and makes no
requests, and its Content-Security-Policy enforces this. `compare` compares several runs; `paired` tests whether two
differ in loss.
"""

import functools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template

import lockstep
from lockstep.errors import ConfigError
from lockstep.files import bytes_text, write_whole
from lockstep.report.charts import COLOURS, Figure, bar, figures
from lockstep.report.facts import RunFacts, gather, number, shown
from lockstep.report.goodput import LABELS, duration

__all__ = [
    "LIMIT",
    "Compared",
    "Paired",
    "RunPair",
    "compare",
    "page",
    "paired",
    "write",
]


_LEAST = 16  # windows; fewer make fewer than four blocks


class Paired(NamedTuple):
    """Result of a paired test.

    Attributes:
        mean: of the differences.
        low, high: its 95% interval.
        p: two-sided.
        windows, blocks: windows tested, in so many blocks.
    """

    mean: float
    low: float
    high: float
    p: float
    windows: int
    blocks: int


def paired(differences: Sequence[float]) -> Paired | None:
    """Test whether the mean of the differences is zero, by block means.

    None if there are too few, or one is not finite.
    """
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
    """The probability of |T| >= |t| for Student's t."""
    return _beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _quantile(freedom: int) -> float:
    """The t that |T| exceeds with a probability of 5%."""
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
    """The continued fraction of the incomplete beta function, by Lentz's method."""
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


# If these are equal the runs draw the same samples in the same order, in the same batches.
_ORDER = ("seed", "batch_size", "samples", "dataset_samples", "data", "task")


@dataclass(slots=True)
class RunPair:
    """A run compared with the first, in sentences: agreement, and which is better."""

    name: str
    same: list[str]
    test: str
    found: Paired | None


@dataclass(slots=True)
class Compared:
    """Comparison of several runs.

    Attributes:
        settings: those that differ: (name, the value in each run).
        more: number of settings that are not shown.
    """

    settings: list[tuple[str, list[str]]] = field(default_factory=list)
    more: int = 0
    pairs: list[RunPair] = field(default_factory=list)


def compare(runs: Sequence[RunFacts], most: int = 40) -> Compared:
    """Compare each run with the first, and list up to `most` settings that differ.

    The runs must have been gathered with their digits.
    """
    names = list(dict.fromkeys(name for facts in runs for name in facts.config))
    rows = [(name, [facts.config.get(name, "-") for facts in runs]) for name in names]
    differing = [row for row in rows if len(set(row[1])) > 1 and row[0] not in ("experiment_name", "save_dir")]
    found = Compared(differing[:most], max(0, len(differing) - most))
    for other in runs[1:]:
        pair = RunPair(other.name, [*_records_alike(runs[0], other), *_checkpoints_alike(runs[0], other)], "", None)
        pair.found, pair.test = _tested(runs[0], other)
        found.pairs.append(pair)
    return found


def _twins(a: "array[int]", b: "array[int]") -> Iterator[tuple[int, int]]:
    """Yield the ascending index pairs of equal steps."""
    at = to = 0
    while at < len(a) and to < len(b):
        if a[at] == b[to]:
            yield at, to
            at, to = at + 1, to + 1
        elif a[at] < b[to]:
            at += 1
        else:
            to += 1


def _same(x: float, y: float) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y))


def _records_alike(a: RunFacts, b: RunFacts) -> list[str]:
    """Describe up to which step losses and norms agree to the last digit."""
    mine, theirs = a.records, b.records
    equal, last, first = 0, 0, None
    for at, to in _twins(mine.steps, theirs.steps):
        if not (_same(mine.losses[at], theirs.losses[to]) and _same(mine.norms[at], theirs.norms[to])):
            first = mine.steps[at]
            break
        equal, last = equal + 1, mine.steps[at]
    if not equal and first is None:
        return ["No step has a record in both."]
    what = "mean loss and gradient norm, to the last digit"
    if first is None:
        return [f"The same in every record up to step {last:,} ({equal:,} records: {what})."]
    begin = f"The same in the records up to step {last:,} ({what})" if equal else "Different from the first record on"
    return [f"{begin}; the record of step {first:,} differs."]


def _checkpoints_alike(a: RunFacts, b: RunFacts) -> list[str]:
    """Describe at which steps both have the same fingerprint of parameters."""
    theirs = {each.step: each.fingerprint for each in b.checkpoints if each.fingerprint.startswith("sha256:")}
    both = sorted(
        (each.step, each.fingerprint == theirs[each.step])
        for each in a.checkpoints
        if each.step in theirs and each.fingerprint.startswith("sha256:")
    )
    if not both:
        return ["No step has a checkpoint with a fingerprint in both, so nothing is said of the parameters' bits."]
    alike = [step for step, same in both if same]
    other = [step for step, same in both if not same]
    said = []
    if alike:
        steps = ", ".join(f"{step:,}" for step in alike[-6:])
        said.append(f"The parameters are the same, bit for bit, in the checkpoints of steps {steps}.")
    if other:
        said.append(f"They differ in the checkpoint of step {other[0]:,}.")
    return said


def _tested(a: RunFacts, b: RunFacts) -> tuple[Paired | None, str]:
    """Test the second half of the common records.

    Both runs must have seen the same samples in the same order.
    """
    apart = [name for name in _ORDER if _said(a, name) != _said(b, name)]
    if apart:
        return None, f"No paired test: they do not draw the same samples in the same order ({', '.join(apart)} differ)."
    if _said(a, "seed") is None:
        return None, "No paired test: a run does not say in which order it draws its samples."
    if a.config.get("log_freq") != b.config.get("log_freq"):
        return None, "No paired test: their records are of windows of different length (log_freq)."
    half = sum(1 for _ in _twins(a.records.steps, b.records.steps)) // 2
    first, differences = 0, array("d")
    for at, to in islice(_twins(a.records.steps, b.records.steps), half, None):
        first = first or a.records.steps[at]
        differences.append(b.records.losses[to] - a.records.losses[at])
    if differences and not any(differences):
        return None, "No paired test: the losses are equal."
    found = paired(differences)
    if found is None:
        return None, f"No paired test: {len(differences)} finite windows in the second half of the run are too few."
    low, high = number(found.low), number(found.high)
    if found.low <= 0 <= found.high:
        judged = "no difference that could not be chance"
    else:
        judged = f"its loss is {'higher' if found.mean > 0 else 'lower'} than that of {a.name}"
    p = f"p = {found.p:.2g}" if found.p >= 1e-12 else "p < 1e-12"
    return found, (
        f"Same samples in the same order from step {first:,} on: {judged}. Mean difference {number(found.mean)}, "
        f"95% interval {low} to {high}, {p} ({found.windows:,} windows in {found.blocks} blocks). It says whether "
        "these two runs differ, not whether other seeds would."
    )


def _said(facts: RunFacts, name: str) -> object:
    return facts.state.plan.get(name)


LIMIT = 300_000  # bytes
_MOST_RUNS = 8  # runs on a page: there are as many colours
_DETAIL = ((240, 12, 8, 60), (160, 8, 6, 40), (100, 4, 4, 24), (60, 2, 2, 12), (30, 0, 0, 6))
_TEMPLATE = "page.html"


def write(folders: Sequence[Path], path: Path) -> None:
    """Write the report of the runs in `folders` to `path`, atomically.

    Raises:
        ConfigError: no run's folder, or too many.
        OSError: the file cannot be written.
    """
    if len(folders) > _MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs are too many for one page; give up to {_MOST_RUNS}")
    runs = [gather(folder, digits=len(folders) > 1) for folder in folders]
    write_whole(path, page(runs), lasting=False)


def page(runs: Sequence[RunFacts]) -> str:
    """Render the report of one run, or of several.

    It has less detail if it would be too large.

    Raises:
        ConfigError: names so long that no page within the limit can show them.
    """
    template = _template()
    for points, more, samples, rows in _DETAIL:
        share = max(2, points // len(runs) if len(runs) > 2 else points)
        html = template.render(_context(runs, share, more, samples, rows))
        if len(html.encode()) <= LIMIT:
            return html
    raise ConfigError("the report would be larger than 300 KB however little it says; give fewer runs")


@functools.cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": bytes_text, "duration": duration}
    return environment.from_string((Path(__file__).parent / _TEMPLATE).read_text(encoding="utf-8"))


def _context(runs: Sequence[RunFacts], points: int, more: int, samples: int, rows: int) -> dict[str, Any]:
    several = len(runs) > 1
    return {
        "title": " and ".join(facts.name for facts in runs[:3]) + (" and more" if len(runs) > 3 else ""),
        "several": several,
        "runs": [_run(facts, rows, place) for place, facts in enumerate(runs)],
        "figures": [_drawn(figure) for figure in figures(runs, points, more, samples)],
        "compared": compare(runs, most=rows) if several else None,
        "version": lockstep.__version__,
    }


def _drawn(figure: Figure) -> dict[str, Any]:
    return {
        "title": figure.title,
        "unit": figure.unit,
        "svg": figure.chart.svg,
        "ticks": [(label, f"{place:.1f}") for label, place in figure.chart.ticks],
        "ends": figure.chart.ends,
        "log": figure.chart.log,
        "legend": figure.legend,
        "rows": figure.rows,
        "named": len({row[0] for row in figure.rows}) > 1,
        "note": figure.note,
    }


def _run(facts: RunFacts, rows: int, place: int) -> dict[str, Any]:
    return {
        "name": facts.name,
        "colour": place,
        "status": facts.status,
        "verdict": facts.verdict(),
        "key": _key(facts),
        "account": _account(facts),
        "time": _time(facts),
        "profiles": [_profile(verdict) for verdict in facts.profiles],
        "troubles": facts.troubles,
        "warnings": facts.warnings[-rows:],
        "warned": facts.warned,
        "checkpoints": facts.checkpoints[:rows],
        "certificates": [
            {**each, "rows": [_judged(row) for row in each["rows"][:rows]]} for each in facts.certificates
        ],
        "changed": list(facts.changed.items())[: 2 * rows],
        "chosen": list(facts.chosen.items())[: 2 * rows],
        "environment": _environment(facts)[:rows],
        "notes": [shown(note, 200) for note in facts.notes[:rows]],
    }


def _judged(row: dict[str, Any]) -> tuple[str, str, str]:
    return shown(row.get("combination", "")), shown(row.get("verdict", ""), 60), shown(row.get("found", ""), 200)


def _key(facts: RunFacts) -> list[tuple[str, str]]:
    """The few numbers at the top."""
    found = [(f"steps of {facts.steps:,}" if facts.steps else "steps", f"{facts.step:,}")]
    if facts.best:
        found.append((f"best {facts.best[0]}", f"{facts.best[1]:.5g}"))
    newest = facts.records.newest("running_loss")
    if newest is not None:
        found.append(("training loss", f"{newest:.5g}"))
    if facts.account:
        found.append(("wall time", duration(facts.account.wall)))
        found.append(("goodput", f"{facts.account.share:.1%}"))
    if facts.state.world_size is not None:
        found.append(("ranks", f"{facts.state.world_size:,}"))
    return found


def _account(facts: RunFacts) -> dict[str, Any] | None:
    if facts.account is None:
        return None
    wall = facts.account.wall or 1.0
    parts = [(LABELS[name], seconds) for name, seconds in facts.account.seconds.items() if seconds > 0]
    return {
        "bar": bar(parts, "Where the wall time went"),
        "rows": [(text, duration(each), f"{each / wall:.1%}", at % COLOURS) for at, (text, each) in enumerate(parts)],
        "wall": duration(facts.account.wall),
        "starts": [
            (f"{at.first:,}", f"{at.last:,}", at.world, shown(at.ended, 40) or "no word of its end", duration(at.lost))
            for at in facts.account.starts[-24:]
        ],
        "earlier": max(0, len(facts.account.starts) - 24),
    }


def _time(facts: RunFacts) -> dict[str, Any] | None:
    """A step's mean time by part, over all records."""
    found = []
    for name, curve in facts.records.curves.items():
        if name.startswith("time/") and name != "time/total" and curve.count > curve.bad:
            spans = curve.spans()
            count = sum(span.count for span in spans)
            found.append((shown(name.removeprefix("time/"), 40), sum(span.mean * span.count / count for span in spans)))
    whole = sum(mean for _, mean in found)
    if not whole:
        return None
    return {
        "bar": bar(found, "Time of a step by part"),
        "rows": [
            (name, f"{mean:,.2f} ms", f"{mean / whole:.1%}", at % COLOURS) for at, (name, mean) in enumerate(found)
        ],
        "whole": f"{whole:,.2f} ms",
    }


def _profile(verdict: dict[str, Any]) -> dict[str, Any]:
    numbers = {
        shown(name, 40): float(value)
        for name, value in list(verdict["parts"].items())[:16]
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12
    }
    whole = verdict.get("step_ms")
    whole = float(whole) if isinstance(whole, int | float) and not isinstance(whole, bool) and whole > 0 else None
    following = verdict.get("next")
    following = following if isinstance(following, dict) else {}
    gain = following.get("gain")
    steps = verdict.get("steps")
    summed = [name for name in numbers if name != "hidden_communication"]
    return {
        "steps": " to ".join(shown(each, 20) for each in steps[:2]) if isinstance(steps, list) else "?",
        "sentence": shown(verdict.get("sentence", ""), 400),
        "bar": bar([(name.replace("_", " "), numbers[name]) for name in summed], "Profile"),
        "rows": [
            (*_in_words(name, value, whole), summed.index(name) % COLOURS if name in summed else None)
            for name, value in numbers.items()
        ],
        "whole": f"{whole:,.2f} ms" if whole else "",
        "next": shown(following.get("what", ""), 200),
        "gain": f"{gain:.2f}" if isinstance(gain, int | float) and not isinstance(gain, bool) else "",
    }


def _in_words(name: str, value: float, whole: float | None) -> tuple[str, str, str]:
    return name.replace("_", " "), f"{value:,.2f} ms", f"{value / whole:.1%}" if whole else ""


def _environment(facts: RunFacts) -> list[tuple[str, str]]:
    """Versions, machine, devices, commit, command, and the recorded environment variables."""
    found: list[tuple[str, str]] = []
    for group in ("versions", "machine", "git", "environment"):
        table = facts.environment.get(group)
        for name, value in table.items() if isinstance(table, dict) else ():
            if value is not None:
                text = (
                    bytes_text(value) if (group, name) == ("machine", "memory") and type(value) is int else shown(value)
                )
                found.append((shown(name.replace("_", " ") if group != "environment" else name, 60), text))
    devices = facts.environment.get("devices")
    if isinstance(devices, list) and devices:
        found.append(("devices", shown(devices, 300)))
    command = facts.environment.get("command")
    if isinstance(command, list):
        found.append(("command", shown(" ".join(map(str, command)), 400)))
    return found
