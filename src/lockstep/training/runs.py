"""List the runs in a folder from their own files, without torch.

    rows = list_runs(Path("outputs"))             # a RunRow for each folder, by name
    print_runs(Path("outputs"), as_json=False)    # the table

The runs may be of another machine. A folder that is damaged, or not a run's, is a row with a note.
"""

import contextlib
import dataclasses
import json
import math
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.config.secrets import printable
from lockstep.errors import ConfigError
from lockstep.logging.jsonl import each, plain, tail
from lockstep.run_state import RunState
from lockstep.training.state.run_dir import RunFolder

__all__ = [
    "list_runs",
    "print_runs",
]


_RUN_FILES = ("config.toml", "state.json", "metrics.jsonl", "run.lock", "checkpoints")
_STATUSES = ("finished", "stopped", "abandoned", "interrupted", "preempted", "failed")
# For folders of older versions, which record no status.
_CODES = {130: "interrupted", 75: "preempted"}
_TIME = "time/total"
# Columns, if the output is no terminal.
_WIDTH = 200


@dataclass(slots=True)
class RunRow:
    """A folder in the list. Values that its files do not contain are None.

    Attributes:
        state: running, one of `run.Result.status`, failed, or unknown.
        step: of the newest record or checkpoint.
        steps: length of the plan.
        epoch: passes over the training data at `step`.
        best_step, best_loss: of the best evaluation.
        best_metric, best_value: `--best-metric`, and its value in the best evaluation.
        last_loss: of the newest training record.
        seconds: of all recorded steps over all starts, without evaluations and saves.
        last_record: time of the newest record, in seconds since 1970.
        note: a problem with the folder; "": none.
    """

    name: str
    state: str = "unknown"
    step: int | None = None
    steps: int | None = None
    epoch: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    best_metric: str | None = None
    best_value: float | None = None
    last_loss: float | None = None
    seconds: float | None = None
    last_record: float | None = None
    note: str = ""


def print_runs(folder: Path, *, as_json: bool) -> None:
    """Print the runs in `folder`, or the one run whose folder it is.

    Raises:
        ConfigError: there is no such folder.
    """
    rows = list_runs(folder)
    if as_json:
        values = []
        for row in rows:
            values.append({name: plain(value) for name, value in dataclasses.asdict(row).items()})
        print(json.dumps(values, indent=1, allow_nan=False))
    elif rows:
        _print_table(rows)
    else:
        print(f"no runs in {printable(str(folder))}")


def list_runs(folder: Path) -> list[RunRow]:
    """Return a row for each folder in `folder`, or for a run's own folder.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = folder.expanduser()
    if _is_run(folder):
        return [_read_run(folder.resolve())]
    try:
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())
    except OSError as error:
        name = printable(str(folder))
        raise ConfigError(f"{name}: {error.strerror or error}; give the folder of train --save-dir") from error
    return [_read_run(path) for path in inside]


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in _RUN_FILES)


def _read_run(path: Path) -> RunRow:
    row = RunRow(path.name)
    try:
        if not _is_run(path):
            row.note = "not a run's folder"
            return row
        folder = RunFolder(str(path.parent), path.name)
        state = _read_state(path, row)
        _fill_position(row, path, state)
        _fill_steps(row, path, state)
        _fill_best(row, folder, state)
        row.state = _read_status(row, folder)
    except OSError as error:
        # No permission.
        row.note = f"cannot be read: {error.strerror or error}"
    return row


def _read_state(path: Path, row: RunRow) -> RunState:
    """Read what is readable of state.json, and note damage in the row."""
    file = path / "state.json"
    if not file.exists():
        return RunState()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if file.is_file():
            values = json.loads(file.read_text(encoding="utf-8"))
        else:
            values = None
        if isinstance(values, dict):
            return RunState.from_json(values, lenient=True)
    row.note = "state.json is damaged"
    return RunState()


def _fill_position(row: RunRow, path: Path, state: RunState) -> None:
    """Fill in the position from the newest record or the state."""
    metrics = path / "metrics.jsonl"
    records = tail(metrics)
    if metrics.is_file():
        row.last_record = metrics.stat().st_mtime
        row.seconds = _sum_seconds(metrics)
        if not records and metrics.stat().st_size:
            row.note = row.note or "metrics.jsonl is damaged"
    losses = []
    for record in records:
        if "running_loss" in record:
            losses.append(record["running_loss"])
    row.last_loss = _number(losses[-1]) if losses else None
    for position in [*records, dataclasses.asdict(state.place) if state.place else {}]:
        step = _integer(position.get("global_step"))
        if step is None or (row.step is not None and step < row.step):
            continue
        row.step = step
        epoch = _number(position.get("epoch"))
        progress = _number(position.get("epoch_progress"))
        if epoch is not None and progress is not None:
            row.epoch = epoch + progress


def _sum_seconds(metrics: Path) -> float | None:
    """Sum the seconds of all steps; each record has their mean in milliseconds."""
    seconds = 0.0
    before = 0
    for record in each(metrics, having=_TIME):
        step = _integer(record.get("global_step"))
        mean = _number(record.get(_TIME))
        if step is not None and mean is not None and math.isfinite(mean) and step > before:
            seconds = seconds + (step - before) * mean / 1e3
            before = step
    if before:
        return seconds
    return None


def _fill_steps(row: RunRow, path: Path, state: RunState) -> None:
    """Fill in the plan's length from the configuration, else from the newest checkpoint."""
    file = path / "config.toml"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if file.is_file():
            config = tomllib.loads(file.read_text(encoding="utf-8"))
        else:
            config = {}
        row.steps = _integer(config.get("max_steps")) or None
    if row.steps is None:
        row.steps = _integer(state.plan.get("steps"))


def _fill_best(row: RunRow, folder: RunFolder, state: RunState) -> None:
    _, selection = folder.read_evaluated()
    if best := selection.best or state.selection.best:
        row.best_step = best.step
        row.best_loss = float(best.loss)
        row.best_metric = best.metric
        row.best_value = float(best.metric_value)


def _read_status(row: RunRow, folder: RunFolder) -> str:
    """Return "running" if the lock is held, otherwise the recorded end."""
    owner, holds = folder.owner
    if holds:
        return "running"
    end = folder.read_end()
    losses = end.get("losses")
    if isinstance(losses, str):
        row.note = row.note or losses
    status = end.get("status") or _CODES.get(_integer(end.get("code")) or 0)
    if status in _STATUSES:
        return str(status)
    if owner:
        row.note = row.note or f"{owner} ended without a record of its end"
        return "failed"
    return "unknown"


def _number(value: Any) -> float | None:
    # JSON integers may be too large for a float.
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return None
    return None


def _integer(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


def _format_duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{remainder:02}"


def _print_table(rows: list[RunRow]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "step", "epoch", "best", "loss", "time", "last record"):
        table.add_column(title, justify="left" if title in ("run", "state") else "right", no_wrap=True)
    has_notes = any(row.note for row in rows)
    if has_notes:
        table.add_column("note", overflow="fold")
    for row in rows:
        cells = (*_cells(row), *([row.note] if has_notes else []))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)


def _cells(row: RunRow) -> tuple[str, ...]:
    if row.best_value is None:
        best = "-"
    else:
        best = f"{row.best_metric or '?'} {row.best_value:.5g}"
    return (
        row.name,
        row.state,
        "-" if row.step is None else f"{row.step}/{'?' if row.steps is None else row.steps}",
        "-" if row.epoch is None else f"{row.epoch:.2f}",
        best if row.best_step is None else f"{best} at {row.best_step}",
        "-" if row.last_loss is None else f"{row.last_loss:.5g}",
        "-" if row.seconds is None else _format_duration(row.seconds),
        "-" if row.last_record is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.last_record)),
    )
