"""What `lockstep doctor` does with its flags, which are in commands/doctor.py."""

import argparse
import contextlib
import os
import platform
import sys

import torch
from rich.console import Console

from lockstep.config import options, presets
from lockstep.config.config import Config
from lockstep.diagnose.doctor.examine import Line, Report, examine
from lockstep.diagnose.doctor.finding import Place
from lockstep.diagnose.doctor.show import as_json, colored, show_table, summed_up
from lockstep.diagnose.doctor.variables import numbers
from lockstep.errors import ConfigError, DifferenceError

__all__ = ["place_of", "run"]

_WAITS = (1.0, 50.0)  # seconds, so that the whole stays within a minute
_ASKED = ("task", "model_name", "dataset_name")  # one of these given: that task is tried too


def run(own: argparse.Namespace) -> int:
    """Examines, prints and returns 0.

    Raises:
        DifferenceError: a check says FAIL.
        ConfigError: a flag that does not hold.
    """
    if not _WAITS[0] <= own.wait <= _WAITS[1]:
        raise ConfigError(f"--wait is {own.wait:g}: it must be from {_WAITS[0]:g} to {_WAITS[1]:g} seconds")
    values = options.told(vars(own))
    config = options.build(presets.applied(values))
    place = place_of(config, with_task=any(values.get(name) for name in _ASKED), patience=own.wait)
    place.told = values
    console = Console()
    silent = own.json and place.rank == 0
    aside = contextlib.redirect_stdout(sys.stderr) if own.json else contextlib.nullcontext()
    with aside:  # what the task prints
        report = examine(place, lambda line: None if silent else _say(line, place, console))
    if place.rank == 0:
        _show(report, console, as_object=own.json)
    code = _ended(report, place)
    if report.hung:  # a thread that hangs would keep the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0


def place_of(config: Config, *, with_task: bool, patience: float) -> Place:
    """Where this process stands, by the launcher's variables; alone where they do not hold."""
    known = numbers(os.environ)
    rank, local_rank, size, local_size = known or (0, 0, 1, 1)
    devices = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    return Place(
        *(config, with_task, rank, local_rank, size, local_size),
        host=platform.node(),
        environ=os.environ,
        patience=patience,
        devices=devices,
        lost=known is None,
    )


def _say(line: Line, place: Place, console: Console) -> None:
    if place.rank == 0:
        colored(line, console)
    else:  # it is alone: rank 0 does not hear of this
        print(f"rank {place.rank} on {place.host}: {line}", file=sys.stderr, flush=True)


def _show(report: Report, console: Console, *, as_object: bool) -> None:
    if as_object:
        print(as_json(report), flush=True)
        return
    if report.ranks:
        console.print()
        show_table(report.ranks, console)
        console.print()
    print(summed_up(report), flush=True)


def _ended(report: Report, place: Place) -> int:
    """0; raises DifferenceError where a check failed, or says it, where the process has to be left at once."""
    failed = report.failed
    if not failed:
        return 0
    problem = DifferenceError(f"doctor: FAIL in {', '.join(failed)}; its lines say what to do")
    problem.relayed = place.rank != 0 and not report.alone
    if not report.hung:
        raise problem
    if not problem.relayed:
        print(f"lockstep: error: {problem}", file=sys.stderr)
    return problem.exit_code
