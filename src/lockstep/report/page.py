"""Render the report: one self-contained HTML file, at most 300 KB, deterministic in its folders.

    html = page([gather(Path("outputs/a")), gather(Path("outputs/b"))])
    write([Path("outputs/a")], Path("outputs/a/report.html"))

Only this file needs Jinja2, which escapes all text of a run's files. The page has no script and makes no requests, and
its Content-Security-Policy enforces this. `compare` compares several runs.
"""

import functools
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

import lockstep
from lockstep.config.secrets import environment_snapshot
from lockstep.errors import ConfigError
from lockstep.files import bytes_text, write_whole
from lockstep.report.charts import COLOURS, Figure, bar, figures
from lockstep.report.facts import RunFacts, format_value, gather, number
from lockstep.report.goodput import LABELS, duration

__all__ = [
    "compare",
    "write",
]


# Two runs with equal values of these draw the same samples in the same order and batches.
_ORDER = ("seed", "batch_size", "samples", "dataset_samples", "data", "task")


@dataclass(slots=True)
class RunPair:
    """A run compared with the first: agreement, and the mean losses."""

    name: str
    same: list[str]
    losses: str


@dataclass(slots=True)
class Compared:
    """Comparison of several runs.

    Attributes:
        settings: differing ones, as (name, the value in each run).
        more: number of differing settings that are not shown.
    """

    settings: list[tuple[str, list[str]]] = field(default_factory=list)
    more: int = 0
    pairs: list[RunPair] = field(default_factory=list)


def compare(runs: Sequence[RunFacts], most: int = 40) -> Compared:
    """Compare each run with the first, and list up to `most` settings that differ.

    The runs must be gathered with `digits=True`.
    """
    names = list(dict.fromkeys(name for facts in runs for name in facts.config))
    rows = []
    for name in names:
        rows.append((name, [facts.config.get(name, "-") for facts in runs]))
    differing = []
    for row in rows:
        if len(set(row[1])) > 1 and row[0] not in ("experiment_name", "save_dir"):
            differing.append(row)
    comparison = Compared(differing[:most], max(0, len(differing) - most))
    for run in runs[1:]:
        same = [*_compare_records(runs[0], run), *_compare_checkpoints(runs[0], run)]
        comparison.pairs.append(RunPair(run.name, same, _compare_losses(runs[0], run)))
    return comparison


def _common_steps(a: "array[int]", b: "array[int]") -> Iterator[tuple[int, int]]:
    """Yield the index pairs of equal steps, ascending."""
    at = to = 0
    while at < len(a) and to < len(b):
        if a[at] == b[to]:
            yield at, to
            at = at + 1
            to = to + 1
        elif a[at] < b[to]:
            at += 1
        else:
            to += 1


def _equal(x: float, y: float) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y))


def _compare_records(a: RunFacts, b: RunFacts) -> list[str]:
    """Describe up to which step losses and norms are equal."""
    records_a = a.records
    records_b = b.records
    equal = 0
    last_equal = 0
    differing_step = None
    for at, to in _common_steps(records_a.steps, records_b.steps):
        if not (
            _equal(records_a.losses[at], records_b.losses[to]) and _equal(records_a.norms[at], records_b.norms[to])
        ):
            differing_step = records_a.steps[at]
            break
        equal = equal + 1
        last_equal = records_a.steps[at]
    if not equal and differing_step is None:
        return ["The runs have no recorded step in common."]
    precision = "mean loss and gradient norm, to the last digit"
    if differing_step is None:
        return [f"All records are equal up to step {last_equal:,} ({equal:,} records: {precision})."]
    if equal:
        begin = f"Records are equal up to step {last_equal:,} ({precision})"
    else:
        begin = "Records differ from the first one"
    return [f"{begin}; the record of step {differing_step:,} differs."]


def _compare_checkpoints(a: RunFacts, b: RunFacts) -> list[str]:
    """Describe at which steps the parameters' fingerprints are equal."""
    fingerprints = {}
    for stored in b.checkpoints:
        if stored.fingerprint.startswith("sha256:"):
            fingerprints[stored.step] = stored.fingerprint
    common = []
    for stored in a.checkpoints:
        if stored.step in fingerprints and stored.fingerprint.startswith("sha256:"):
            common.append((stored.step, stored.fingerprint == fingerprints[stored.step]))
    common.sort()
    if not common:
        return ["The runs have no fingerprinted checkpoint of a common step; their parameters are not compared."]
    alike = [step for step, same in common if same]
    different = [step for step, same in common if not same]
    sentences = []
    if alike:
        steps = ", ".join(f"{step:,}" for step in alike[-6:])
        sentences.append(f"The parameters are bitwise equal in the checkpoints of steps {steps}.")
    if different:
        sentences.append(f"The parameters differ in the checkpoint of step {different[0]:,}.")
    return sentences


def _compare_losses(a: RunFacts, b: RunFacts) -> str:
    """Describe the mean losses of both runs in the second half of the common records.

    The first half, in which losses fall fast, is left out.
    """
    half = sum(1 for _ in _common_steps(a.records.steps, b.records.steps)) // 2
    start = 0
    losses_a = array("d")
    losses_b = array("d")
    for at, to in islice(_common_steps(a.records.steps, b.records.steps), half, None):
        start = start or a.records.steps[at]
        losses_a.append(a.records.losses[at])
        losses_b.append(b.records.losses[to])
    count = len(losses_a)
    if not count or not all(map(math.isfinite, losses_a)) or not all(map(math.isfinite, losses_b)):
        return "Mean losses are not compared: the second half has no common record, or a loss that is not finite."
    mean_a = math.fsum(losses_a) / count
    mean_b = math.fsum(losses_b) / count
    differing = []
    for name in _ORDER:
        if _plan_value(a, name) != _plan_value(b, name):
            differing.append(name)
    order = f" The runs draw other samples or another order (different {', '.join(differing)})." if differing else ""
    return (
        f"Mean loss from step {start:,} on ({count:,} common records): "
        f"{number(mean_b)}, of {a.name} {number(mean_a)}; difference {number(mean_b - mean_a)}.{order}"
    )


def _plan_value(facts: RunFacts, name: str) -> object:
    return facts.state.plan.get(name)


# Bytes of a page.
LIMIT = 300_000
# Runs on a page, each with a colour.
_MOST_RUNS = 8
# Levels of detail: points of a curve, further charts, samples of a table, rows of a list.
_DETAIL = ((240, 12, 8, 60), (160, 8, 6, 40), (100, 4, 4, 24), (60, 2, 2, 12), (30, 0, 0, 6))
_TEMPLATE = "page.html"


def write(folders: Sequence[Path], path: Path) -> None:
    """Write the report of the runs in `folders` to `path`, atomically.

    Raises:
        ConfigError: a folder is not a run's, or there are too many.
        OSError: the file cannot be written.
    """
    if len(folders) > _MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs exceed the limit of one page; give up to {_MOST_RUNS}")
    runs = [gather(folder, digits=len(folders) > 1) for folder in folders]
    write_whole(path, page(runs), lasting=False)


@environment_snapshot()
def page(runs: Sequence[RunFacts]) -> str:
    """Render the report of one or several runs.

    Detail is reduced until the page fits `LIMIT`.

    Raises:
        ConfigError: the page exceeds the limit even at the lowest detail.
    """
    template = _template()
    for points, more, samples, rows in _DETAIL:
        share = max(2, points // len(runs) if len(runs) > 2 else points)
        html = template.render(_context(runs, share, more, samples, rows))
        if len(html.encode()) <= LIMIT:
            return html
    raise ConfigError("the report exceeds 300 KB even at the lowest detail; give fewer runs")


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
        "runs": [_run_values(facts, rows, index) for index, facts in enumerate(runs)],
        "figures": [_figure_values(figure) for figure in figures(runs, points, more, samples)],
        "compared": compare(runs, most=rows) if several else None,
        "version": lockstep.__version__,
    }


def _figure_values(figure: Figure) -> dict[str, Any]:
    return {
        "title": figure.title,
        "unit": figure.unit,
        "svg": figure.chart.svg,
        "ticks": [(label, f"{percent:.1f}") for label, percent in figure.chart.ticks],
        "ends": figure.chart.ends,
        "log": figure.chart.log,
        "legend": figure.legend,
        "rows": figure.rows,
        "named": len({row[0] for row in figure.rows}) > 1,
        "note": figure.note,
    }


def _run_values(facts: RunFacts, rows: int, place: int) -> dict[str, Any]:
    return {
        "name": facts.name,
        "colour": place,
        "status": facts.status,
        "is_script": facts.is_script,
        "verdict": facts.verdict(),
        "key": (key := _key_figures(facts)),
        "key_columns": next((n for n in (3, 4, 2) if len(key) % n == 0), len(key)),
        "account": _account(facts),
        "time": _step_time(facts),
        "profiles": [_profile(verdict) for verdict in facts.profiles],
        "troubles": facts.troubles,
        "warnings": facts.warnings[-rows:],
        "warned": facts.warned,
        "checkpoints": facts.checkpoints[:rows],
        "certificates": [
            {**certificate, "rows": [_certificate_row(row) for row in certificate["rows"][:rows]]}
            for certificate in facts.certificates
        ],
        "changed": list(facts.changed.items())[: 2 * rows],
        "chosen": list(facts.chosen.items())[: 2 * rows],
        "environment": _environment(facts)[:rows],
        "notes": [format_value(note, 200) for note in facts.notes[:rows]],
    }


def _certificate_row(row: dict[str, Any]) -> tuple[str, str, str]:
    return (
        format_value(row.get("combination", "")),
        format_value(row.get("verdict", ""), 60),
        format_value(row.get("found", ""), 200),
    )


def _key_figures(facts: RunFacts) -> list[tuple[str, str]]:
    """Return the key figures at the top of the page."""
    entries = [(f"steps of {facts.steps:,}" if facts.steps else "steps", f"{facts.step:,}")]
    if facts.best:
        entries.append((f"best {facts.best[0]}", f"{facts.best[1]:.5g}"))
    newest = facts.records.newest("running_loss")
    if newest is not None:
        entries.append(("training loss", f"{newest:.5g}"))
    if facts.account:
        entries.append(("wall time", duration(facts.account.wall)))
        entries.append(("goodput", f"{facts.account.share:.1%}"))
    if facts.state.world_size is not None:
        entries.append(("ranks", f"{facts.state.world_size:,}{_replicas(facts)}"))
    return entries


def _replicas(facts: RunFacts) -> str:
    """Return how many replicas the ranks are; "" if each rank has a complete model."""
    degree = facts.config.get("parallel.tensor", "1")
    # The file may have been edited.
    if not re.fullmatch(r"\d{1,4}", degree) or int(degree) < 2:
        return ""
    return f" in replicas of {int(degree)}"


def _account(facts: RunFacts) -> dict[str, Any] | None:
    if facts.account is None:
        return None
    wall = facts.account.wall or 1.0
    parts = []
    for name, seconds in facts.account.seconds.items():
        if seconds > 0:
            parts.append((LABELS[name], seconds))
    return {
        "bar": bar(parts, "Where the wall time went"),
        "rows": [
            (text, duration(seconds_of_part), f"{seconds_of_part / wall:.1%}", at % COLOURS)
            for at, (text, seconds_of_part) in enumerate(parts)
        ],
        "wall": duration(facts.account.wall),
        "starts": [
            (
                f"{at.first:,}",
                f"{at.last:,}",
                at.world,
                format_value(at.ended, 40) or "no end recorded",
                duration(at.lost),
            )
            for at in facts.account.starts[-24:]
        ],
        "earlier": max(0, len(facts.account.starts) - 24),
    }


def _step_time(facts: RunFacts) -> dict[str, Any] | None:
    """Return a step's mean time by part, over all records."""
    means = []
    for name, curve in facts.records.curves.items():
        if name.startswith("time/") and name != "time/total" and curve.count > curve.bad:
            spans = curve.spans()
            count = sum(span.count for span in spans)
            means.append(
                (format_value(name.removeprefix("time/"), 40), sum(span.mean * span.count / count for span in spans))
            )
    total = sum(mean for _, mean in means)
    if not total:
        return None
    return {
        "bar": bar(means, "Time of a step by part"),
        "rows": [
            (name, f"{mean:,.2f} ms", f"{mean / total:.1%}", at % COLOURS) for at, (name, mean) in enumerate(means)
        ],
        "whole": f"{total:,.2f} ms",
    }


def _profile(verdict: dict[str, Any]) -> dict[str, Any]:
    numbers = {}
    for name, value in list(verdict["parts"].items())[:16]:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12:
            numbers[format_value(name, 40)] = float(value)
    step_ms = verdict.get("step_ms")
    if isinstance(step_ms, int | float) and not isinstance(step_ms, bool) and step_ms > 0:
        step_ms = float(step_ms)
    else:
        step_ms = None
    following = verdict.get("next")
    following = following if isinstance(following, dict) else {}
    gain = following.get("gain")
    steps = verdict.get("steps")
    exposed = []
    for name in numbers:
        if name != "hidden_communication":
            exposed.append(name)
    return {
        "steps": " to ".join(format_value(step, 20) for step in steps[:2]) if isinstance(steps, list) else "?",
        "sentence": format_value(verdict.get("sentence", ""), 400),
        "bar": bar([(name.replace("_", " "), numbers[name]) for name in exposed], "Profile"),
        "rows": [
            (*_part_row(name, value, step_ms), exposed.index(name) % COLOURS if name in exposed else None)
            for name, value in numbers.items()
        ],
        "whole": f"{step_ms:,.2f} ms" if step_ms else "",
        "next": format_value(following.get("what", ""), 200),
        "gain": f"{gain:.2f}" if isinstance(gain, int | float) and not isinstance(gain, bool) else "",
    }


def _part_row(name: str, value: float, step_ms: float | None) -> tuple[str, str, str]:
    return name.replace("_", " "), f"{value:,.2f} ms", f"{value / step_ms:.1%}" if step_ms else ""


def _environment(facts: RunFacts) -> list[tuple[str, str]]:
    """List versions, machine, devices, commit, command and recorded environment variables."""
    entries: list[tuple[str, str]] = []
    for group in ("versions", "machine", "git", "environment"):
        table = facts.environment.get(group)
        for name, value in table.items() if isinstance(table, dict) else ():
            if value is not None:
                if (group, name) == ("machine", "memory") and type(value) is int:
                    text = bytes_text(value)
                else:
                    text = format_value(value)
                entries.append((format_value(name.replace("_", " ") if group != "environment" else name, 60), text))
    devices = facts.environment.get("devices")
    if isinstance(devices, list) and devices:
        entries.append(("devices", format_value(devices, 300)))
    command = facts.environment.get("command")
    if isinstance(command, list):
        entries.append(("command", format_value(" ".join(map(str, command)), 400)))
    return entries
