"""The report for a person, and as JSON.

show_table(report.ranks, Console())         # rank, host, device, memory, versions
print(as_json(report))
"""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.config.secrets import mask, printable
from lockstep.diagnose.doctor.examine import Line, Report
from lockstep.diagnose.doctor.finding import FAIL, OK, WARN
from lockstep.run.devices import ranges
from lockstep.units import bytes_text

__all__ = ["as_json", "colored", "show_table", "summed_up"]

_WIDE = 100  # columns at least
_COLORS = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def colored(line: Line, console: Console) -> None:
    """Prints a line, its level in colour where there are colours; on one line however long, so that grep finds it."""
    text = Text(mask(printable(str(line))))
    text.stylize(_COLORS[line.level], 0, len(line.level))
    console.print(text, soft_wrap=True, highlight=False)


def show_table(rows: list[dict[str, Any]], console: Console) -> None:
    """A row for each rank; alike ones that follow each other are one."""
    table = Table("rank", "host", "device", "memory", "python", "torch", "lockstep", "NCCL", box=None, pad_edge=False)
    groups: list[tuple[list[int], tuple[str, ...]]] = []
    for row in rows:
        told = row["versions"]
        device = f"{row['device'].partition(':')[0]} {row['name']}"
        cells: tuple[str, ...] = (row["host"], device, bytes_text(row["memory"]))
        cells += tuple(told[name] for name in ("python", "torch", "lockstep", "nccl"))
        if groups and groups[-1][1] == cells:
            groups[-1][0].append(row["rank"])
        else:
            groups.append(([row["rank"]], cells))
    for ranks, cells in groups:
        table.add_row(ranges(ranks), *(printable(cell) for cell in cells))
    console.width = max(console.width, _WIDE)
    console.print(table)


def summed_up(report: Report) -> str:
    """The last line."""
    counts = {level: sum(line.level == level for line in report.lines) for level in (OK, WARN, FAIL)}
    return f"{counts[OK]} ok, {counts[WARN]} warn, {counts[FAIL]} FAIL, in {report.seconds:.1f} s"


def as_json(report: Report) -> str:
    """One object: `ok`, `findings` (check, level, text, mend, ranks, where), `ranks`, `seconds`."""
    found = {
        "ok": not report.failed,
        "findings": [{name: _masked(value) for name, value in asdict(line).items()} for line in report.lines],
        "ranks": report.ranks,
        "seconds": round(report.seconds, 3),
    }
    return json.dumps(found, indent=1)


def _masked(value: Any) -> Any:
    return mask(printable(value)) if isinstance(value, str) else value
