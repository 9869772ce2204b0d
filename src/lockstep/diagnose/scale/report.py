"""Print the outcome of `lockstep scale`: a table for each mode with notes, or JSON."""

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.config import cli
from lockstep.config.secrets import printable
from lockstep.diagnose.scale.rows import GOOD, ScaleRow
from lockstep.diagnose.scale.runs import (
    PROFILE,
    STRONG,
    WINDOWS,
    Machine,
    RunFailed,
    RunSample,
    ScaleRequest,
    Setting,
    run_training,
)

__all__ = [
    "Outcome",
    "describe_growth",
    "name_setting",
    "profile_row",
    "slowest",
]


# Steps to trace.
_TRACED = 10
# Share of a step: parts that grew by less are not named.
_SMALL = 0.02


def slowest(rows: Sequence[ScaleRow]) -> ScaleRow | None:
    """Return the smallest size below 80 % of its ranks' or shared cores' limit."""
    slow = []
    for row in rows:
        if not row.error and row.speedup == row.speedup and row.of_cores < GOOD:
            slow.append(row)
    return min(slow, key=lambda row: (row.ranks, row.of_cores), default=None)


def profile_row(request: ScaleRequest, row: ScaleRow, machine: Machine, micro_batch_size: int) -> dict[str, Any] | None:
    """Profile this size, and return its `verdict.json`; None if there is none."""
    if PROFILE not in cli.option_list():
        return None
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as folder:
        setting = Setting(row.ranks, row.batch_size)
        # The run's start is over by then.
        first_step = request.window + 1
        last_step = first_step + min(_TRACED, (WINDOWS - 1) * request.window) - 1
        flags = [*request.train_flags(setting, folder, micro_batch_size), f"--{PROFILE}", f"{first_step}:{last_step}"]
        try:
            run_training(request, setting, flags, machine, Path(folder))
            paths = sorted((Path(folder) / "run" / PROFILE).glob("*/verdict.json"))
            if paths:
                verdict = json.loads(paths[0].read_text(encoding="utf-8"))
            else:
                verdict = None
        except (RunFailed, OSError, ValueError):
            return None
    if isinstance(verdict, dict) and isinstance(verdict.get("sentence"), str):
        return verdict
    return None


def describe_growth(row: ScaleRow, base: ScaleRow, machine: Machine, samples: Sequence[RunSample]) -> str:
    """Describe the parts of rank 0's step that did not scale; "" for none.

    The parts are those of the time/ records. In strong scaling a part of the smallest size would shrink with the
    rank's micro-batches, in weak scaling stay. On shared cores everything takes longer by the factor of ranks to a
    core's worth of compute.
    """
    parts = _parts(samples, row)
    then = _parts(samples, base)
    crowd = row.ranks / machine.count_concurrent(row.ranks) * machine.count_concurrent(base.ranks) / base.ranks
    shrink = row.work / base.work * crowd
    more = {}
    for name, milliseconds in parts.items():
        more[name] = milliseconds - then.get(name, 0.0) * shrink
    total = sum(parts.values())
    growth = []
    for name, ms in more.items():
        if ms > _SMALL * total:
            growth.append((ms, name))
    growth.sort(reverse=True)
    if not growth:
        return ""
    listing = ", ".join(f"{name} by {ms:.3g} ms" for ms, name in growth)
    if "exchange" not in parts and growth[0][1] == "backward":
        note = "; the backward includes the exchange"
    else:
        note = ""
    return f"of the {total:.3g} ms of a step on rank 0, compared with ideal scaling, grew: {listing}{note}"


def _parts(samples: Sequence[RunSample], row: ScaleRow) -> dict[str, float]:
    """Return {part: milliseconds a step}, medians over the rounds."""
    parts_of_rounds = []
    for sample in samples:
        if sample.setting == Setting(row.ranks, row.batch_size):
            parts_of_rounds.append(sample.parts)
    names = sorted({name for parts in parts_of_rounds for name in parts})
    medians = {}
    for name in names:
        medians[name] = statistics.median(parts.get(name, 0.0) for parts in parts_of_rounds)
    return medians


# Columns without a terminal.
_WIDE = 200
# An efficiency, and a difference between rounds, that are reported as doubtful.
_ABOVE = 1.05
_WIDE_SPREAD = 0.1
_TITLES = {
    STRONG: "strong scaling: the same batch on more ranks",
    "weak": "weak scaling: the batch grows with the ranks, the micro-batch stays",
}


def name_setting(setting: Setting) -> str:
    """Name a setting: `4 ranks, 16 samples a step`."""
    return f"{setting.ranks} rank{'s' * (setting.ranks > 1)}, {setting.batch_size} samples a step"


@dataclass
class Outcome:
    """The outcome of a measurement.

    Attributes:
        micro_batch_size: samples in one forward.
        verdict: why the first slow size is slow: {"mode", "ranks", "sentence", "profile"}; None if none is.
        sources: remarks on the origin of the numbers; [] if they were measured here.
    """

    request: ScaleRequest
    machine: Machine
    micro_batch_size: int
    rows: list[ScaleRow]
    verdict: dict[str, Any] | None = None
    sources: list[str] = field(default_factory=list)

    def show(self, *, as_json: bool) -> None:
        """Print tables and lines, or one JSON object."""
        if as_json:
            print(json.dumps(self.plain(), indent=1, allow_nan=False))
            return
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _WIDE
        for mode in self.request.modes:
            console.print(Text(_TITLES[mode]))
            console.print(_table([row for row in self.rows if row.mode == mode]))
        for line in self.notes():
            console.print(Text(printable(line)), soft_wrap=True)

    def plain(self) -> dict[str, Any]:
        """Return names and numbers; None for missing measurements."""
        rows = [asdict(row) | {"of_cores": row.of_cores} for row in self.rows]
        document: dict[str, Any] = _finite(
            {
                "world_sizes": self.request.sizes,
                "flags": self.request.flags,
                "rounds": self.request.rounds,
                "steps": self.request.steps,
                "micro_batch_size": self.micro_batch_size,
                "machine": asdict(self.machine),
                "rows": rows,
                "verdict": self.verdict,
                "notes": self.notes(),
            }
        )
        return document

    def notes(self) -> list[str]:
        """Return the remarks that a reader of the tables needs, a line each."""
        lines = [*self.sources, *_of_machine(self.machine, self.rows)]
        lines += _of_spread(self.rows)
        uneven = sorted({row.ranks for row in self.rows if row.full < 1})
        if uneven:
            parts = next(row.micro_batches for row in self.rows if row.full < 1)
            sizes = ", ".join(map(str, uneven))
            lines.append(f"{sizes} ranks do not divide {parts} micro-batches: some wait while others compute one more")
        if self.verdict:
            why = self.verdict["sentence"] or "no part of rank 0's step grew; a trace would show more"
            lines.append(f"{self.verdict['ranks']} ranks ({self.verdict['mode']}) are below 80 %: {why}")
        return lines


def _of_machine(machine: Machine, rows: list[ScaleRow]) -> list[str]:
    if machine.devices:
        return []
    cores = f"{machine.cores:g} core{'s' * (machine.cores != 1)}"
    lines = [
        f"no CUDA device: the ranks use gloo and compute on the {cores} of this machine, {machine.threads} "
        f"thread{'s' * (machine.threads > 1)} each; this does not predict how GPUs scale"
    ]
    shared = [row for row in rows if row.allowed is not None]
    if shared:
        most = max(shared, key=lambda row: row.ranks)
        sizes = ", ".join(str(size) for size in sorted({row.ranks for row in shared}))
        lines.append(
            f"{sizes} ranks share {cores}: {most.ranks} can be {most.allowed:.3g} times as fast as the smallest "
            "size at best, whatever the training does; read the last column"
        )
    return lines


def _of_spread(rows: list[ScaleRow]) -> list[str]:
    """Describe doubts about the numbers themselves."""
    measured = [row for row in rows if row.rounds]
    above = sorted({row.ranks for row in measured if row.efficiency > _ABOVE})
    wide = [(max(row.rounds) / min(row.rounds) - 1, row) for row in measured]
    spread, worst = max(wide, key=lambda pair: pair[0], default=(0.0, None))
    lines = []
    if worst and spread > _WIDE_SPREAD:
        lines.append(
            f"the runs on {worst.ranks} rank{'s' * (worst.ranks > 1)} differ by {spread:.0%}: something else used this "
            "machine; wait until it is quiet, or give more --rounds"
        )
    if above:
        lines.append(
            f"{', '.join(map(str, above))} ranks are above 100 %: unless a cache explains it, the smallest size was "
            "disturbed; give more --rounds"
        )
    return lines


def _table(rows: list[ScaleRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    titles = ["ranks", "batch", "items/s", "step ms", "speed-up", "efficiency", "least to most", "the source expects"]
    shared = any(row.allowed is not None for row in rows)
    for title in [*titles, *["of what the cores allow"] * shared]:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [str(row.ranks), str(row.batch_size)]
        if row.error or math.isnan(row.rate):
            table.add_row(*(Text(printable(cell)) for cell in [*cells, "failed" if row.error else "no base"]))
            continue
        cells += [
            f"{row.rate:,.0f}" if row.rate >= 1000 else f"{row.rate:.4g}",
            f"{row.step_ms:.4g}",
            f"{row.speedup:.2f}",
            f"{row.efficiency:.0%}",
        ]
        cells += [f"{row.low:.0%} to {row.high:.0%}", f"{row.band[0]:.0%} to {row.band[1]:.0%}" if row.band else "-"]
        table.add_row(*(Text(cell) for cell in [*cells, *[f"{row.of_cores:.0%}"] * shared]))
    return table


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by None."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
