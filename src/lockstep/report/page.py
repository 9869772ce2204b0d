"""The page: one file of HTML with everything in it, the same bytes for the same folders, at most 300 KB.

    html = page([gather(Path("outputs/a")), gather(Path("outputs/b"))])
    write([Path("outputs/a")], Path("outputs/a/report.html"))

The only file that needs the package Jinja2, which escapes whatever stands in a run's files; the page has no script,
asks for nothing, and says so to the browser (Content-Security-Policy).
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

import lockstep
from lockstep.errors import ConfigError
from lockstep.files import write_whole
from lockstep.report.charts import Figure, figures
from lockstep.report.compare import compare
from lockstep.report.facts import Facts, gather
from lockstep.report.goodput import LABELS, duration
from lockstep.report.reading import shown
from lockstep.report.svg import COLOURS, bar
from lockstep.units import bytes_text

__all__ = ["LIMIT", "MOST_RUNS", "page", "write"]

LIMIT = 300_000  # bytes
MOST_RUNS = 8  # beside each other: there are as many colours
_DETAIL = ((240, 12, 8, 60), (160, 8, 6, 40), (100, 4, 4, 24), (60, 2, 2, 12), (30, 0, 0, 6))
_TEMPLATE = "page.html"


def write(folders: Sequence[Path], path: Path) -> None:
    """Writes the report of the runs in `folders` as `path`, in one move.

    Raises:
        ConfigError: no run's folder, or too many.
        OSError: the file cannot be written.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs are too many for one page; give up to {MOST_RUNS}")
    runs = [gather(folder, digits=len(folders) > 1) for folder in folders]
    write_whole(path, page(runs), lasting=False)


def page(runs: Sequence[Facts]) -> str:
    """The report of one run, or of several beside each other. With less detail where it would be too large.

    Raises:
        ConfigError: names so long that no page of the size holds them.
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


def _context(runs: Sequence[Facts], points: int, more: int, samples: int, rows: int) -> dict[str, Any]:
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


def _run(facts: Facts, rows: int, place: int) -> dict[str, Any]:
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


def _key(facts: Facts) -> list[tuple[str, str]]:
    """The few numbers on top."""
    found = [(f"steps of {facts.steps:,}" if facts.steps else "steps", f"{facts.step:,}")]
    if facts.best:
        found.append((f"best {facts.best[0]}", f"{facts.best[1]:.5g}"))
    newest = facts.records.newest("running_loss")
    if newest is not None:
        found.append(("training loss", f"{newest:.5g}"))
    if facts.account:
        found.append(("wall time", duration(facts.account.wall)))
        found.append(("goodput", f"{facts.account.share:.1%}"))
    world = facts.state.get("world_size")
    if isinstance(world, int):
        found.append(("ranks", f"{world:,}"))
    return found


def _account(facts: Facts) -> dict[str, Any] | None:
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


def _time(facts: Facts) -> dict[str, Any] | None:
    """A step's time by part, the mean over all records."""
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


def _environment(facts: Facts) -> list[tuple[str, str]]:
    """Versions, machine, devices, the commit and the command; of the variables those that were kept."""
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
