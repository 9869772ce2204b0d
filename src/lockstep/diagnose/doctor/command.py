"""Run `lockstep doctor` and print its report; the flags are in commands/diagnose.py."""

import argparse
import contextlib
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.config.secrets import mask, printable
from lockstep.diagnose.doctor.differences import numbers
from lockstep.diagnose.doctor.examine import DoctorReport, Line, examine
from lockstep.diagnose.doctor.finding import FAIL, OK, SKIP, WARN, CheckContext
from lockstep.distributed import failures
from lockstep.distributed.starters import read_starter
from lockstep.errors import ConfigError, DifferenceError
from lockstep.files import bytes_text
from lockstep.training.step.guards import format_ranges

__all__ = [
    "as_json",
    "run",
]


# Least columns of the table.
_WIDE = 100
_COLORS = {OK: "green", SKIP: "dim", WARN: "yellow", FAIL: "bold red"}


def _print_line(line: Line, console: Console) -> None:
    """Print a line with its level in colour, without wrapping, so that grep finds it."""
    text = Text(mask(printable(str(line))))
    text.stylize(_COLORS[line.level], 0, len(line.level))
    console.print(text, soft_wrap=True, highlight=False)


def _show_table(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each rank; equal rows of consecutive ranks are merged."""
    table = Table("rank", "host", "device", "memory", "python", "torch", "lockstep", "NCCL", box=None, pad_edge=False)
    groups: list[tuple[list[int], tuple[str, ...]]] = []
    for row in rows:
        versions = row["versions"]
        device = f"{row['device'].partition(':')[0]} {row['name']}"
        cells: tuple[str, ...] = (row["host"], device, bytes_text(row["memory"]))
        cells += tuple(versions[name] for name in ("python", "torch", "lockstep", "nccl"))
        if groups and groups[-1][1] == cells:
            groups[-1][0].append(row["rank"])
        else:
            groups.append(([row["rank"]], cells))
    for ranks, cells in groups:
        table.add_row(format_ranges(ranks), *(printable(cell) for cell in cells))
    console.width = max(console.width, _WIDE)
    console.print(table)


def _summary(report: DoctorReport) -> str:
    """Return the last line of the report."""
    counts = {}
    for level in (OK, SKIP, WARN, FAIL):
        counts[level] = sum(line.level == level for line in report.lines)
    return f"{counts[OK]} ok, {counts[SKIP]} skip, {counts[WARN]} warn, {counts[FAIL]} FAIL, in {report.seconds:.1f} s"


def as_json(report: DoctorReport) -> str:
    """Format the report as an object: `ok`, `findings`, `ranks`, `seconds`.

    A finding has check, level, text, mend, ranks, where.
    """
    document = {
        "ok": not report.failed,
        "findings": [{name: _mask_text(value) for name, value in asdict(line).items()} for line in report.lines],
        "ranks": report.ranks,
        "seconds": round(report.seconds, 3),
    }
    return json.dumps(document, indent=1)


def _mask_text(value: Any) -> Any:
    if isinstance(value, str):
        return mask(printable(value))
    return value


# Seconds, so that the whole stays within a minute.
_WAIT_RANGE = (1.0, 50.0)
# With one of these options set, the task is tried too.
_TASK_OPTIONS = ("task", "model_name", "dataset_name")


def run(own: argparse.Namespace) -> int:
    """Run the checks, print the report and return 0.

    Raises:
        DifferenceError: a check reports FAIL.
        ConfigError: an invalid flag.
    """
    if not _WAIT_RANGE[0] <= own.wait <= _WAIT_RANGE[1]:
        raise ConfigError(f"--wait is {own.wait:g}: it must be from {_WAIT_RANGE[0]:g} to {_WAIT_RANGE[1]:g} seconds")
    values = cli.collect_options(vars(own))
    config = cli.build(cli.apply_preset(values))
    context = place_of(config, with_task=any(values.get(name) for name in _TASK_OPTIONS), patience=own.wait)
    context.told = values
    console = Console()
    silent = own.json and context.rank == 0
    redirect = contextlib.redirect_stdout(sys.stderr) if own.json else contextlib.nullcontext()
    # The task's own output goes to stderr.
    with redirect:
        report = examine(context, lambda line: None if silent else _print_finding(line, context, console))
    if context.rank == 0:
        _show(report, console, as_object=own.json)
    code = _exit_code(report, context)
    # A thread that hangs would keep the process alive.
    if report.hung:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0


def place_of(config: Config, *, with_task: bool, patience: float) -> CheckContext:
    """Return this process's context from the launcher's variables; alone if they are invalid."""
    # The check of the variables reports the error.
    with contextlib.suppress(ConfigError):
        read_starter(os.environ)
    parsed = numbers(os.environ)
    rank, local_rank, size, local_size = parsed or (0, 0, 1, 1)
    if config.device != "cpu" and torch.cuda.is_available():
        devices = torch.cuda.device_count()
    else:
        devices = 0
    return CheckContext(
        *(config, with_task, rank, local_rank, size, local_size),
        host=platform.node(),
        environ=os.environ,
        patience=patience,
        devices=devices,
        lost=parsed is None,
    )


def _print_finding(line: Line, place: CheckContext, console: Console) -> None:
    if place.rank == 0:
        _print_line(line, console)
    else:
        # The rank is alone: rank 0 does not receive this line.
        print(f"rank {place.rank} on {place.host}: {line}", file=sys.stderr, flush=True)


def _show(report: DoctorReport, console: Console, *, as_object: bool) -> None:
    if as_object:
        print(as_json(report), flush=True)
        return
    if report.ranks:
        console.print()
        _show_table(report.ranks, console)
        console.print()
    print(_summary(report), flush=True)


def _exit_code(report: DoctorReport, place: CheckContext) -> int:
    """Return the exit code, or raise DifferenceError if a check failed.

    A process that must exit at once prints the error instead.
    """
    failed = report.failed
    if not failed:
        return 0
    problem = DifferenceError(f"doctor: FAIL in {', '.join(failed)}; see the remedy on each FAIL line")
    problem.relayed = place.rank != 0 and not report.alone
    if not report.hung:
        raise problem
    # A launcher trusts a reserved code only with a note.
    failures.report(problem)
    return problem.exit_code
