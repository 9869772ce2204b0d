"""Run `lockstep scale`; its flags are in commands/diagnose.py."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.diagnose.scale import report
from lockstep.diagnose.scale.report import describe_growth, profile_row, slowest
from lockstep.diagnose.scale.rows import ScaleRow, rows_of
from lockstep.diagnose.scale.runs import (
    Machine,
    RunFailed,
    RunSample,
    ScaleRequest,
    Setting,
    existing,
    machine_for,
    measure,
    micro_batch_of,
    order,
)
from lockstep.errors import ConfigError, LockstepError

__all__ = ["compare", "run"]


def run(request: ScaleRequest, *, as_json: bool) -> int:
    """Measure the request, print the outcome and return 0.

    Raises:
        ConfigError: it cannot be measured here; nothing was started but one short run.
        LockstepError: runs failed; the results of the others are printed first.
    """
    machine = machine_for(request.config.device, request.sizes, exact=request.config.exact)
    with _exit_on_signal():
        size = _micro_batch(request, machine)
        samples, failures = _measure_all(request, machine, size)
        rows = rows_of(request, machine, samples, failures, size)
        outcome = report.Outcome(
            request,
            machine,
            size,
            rows,
            verdict=_verdict(request, machine, size, rows, samples),
        )
    outcome.show(as_json=as_json)
    if failures:
        listing = "; ".join(f"{report.name_setting(setting)}: {line}" for setting, line in failures.items())
        raise LockstepError(f"not every size could be measured: {listing}")
    return 0


def compare(paths: Sequence[Path], *, as_json: bool) -> int:
    """Analyse runs that were made before, print the outcome and return 0.

    Raises:
        ConfigError: they cannot be compared.
    """
    request, machine, samples, sources = existing(paths)
    size = request.config.micro_batch_size
    rows = rows_of(request, machine, samples, {}, size)
    slow = slowest(rows)
    summary = slow and {
        "mode": slow.mode,
        "ranks": slow.ranks,
        "sentence": describe_growth(slow, rows[0], machine, samples),
    }
    verdict = summary | {"profile": None} if summary else None
    report.Outcome(request, machine, size, rows, verdict=verdict, sources=sources).show(as_json=as_json)
    return 0


def _micro_batch(request: ScaleRequest, machine: Machine) -> int:
    """Return the micro-batch size, by a run of two steps.

    A request that `train` refuses is refused here.
    """
    _say(f"a run of 2 steps on {request.base} rank{'s' * (request.base > 1)}, to prepare")
    try:
        size = micro_batch_of(request, machine)
    except RunFailed as error:
        error_class = ConfigError if error.exit_code == ConfigError.exit_code else LockstepError
        raise error_class(f"train on {request.base} rank{'s' * (request.base > 1)}: {error}") from error
    request.check(size)
    return size


def _measure_all(request: ScaleRequest, machine: Machine, size: int) -> tuple[list[RunSample], dict[Setting, str]]:
    """Return the samples of all rounds, and each failed setting's first error.

    A failed setting is not retried.
    """
    samples: list[RunSample] = []
    failures: dict[Setting, str] = {}
    runs = order(request.settings(), request.rounds)
    for index, (number, setting) in enumerate(runs, 1):
        if setting in failures:
            continue
        _say(f"run {index} of {len(runs)}: {report.name_setting(setting)}")
        try:
            samples.append(measure(request, setting, machine, size, number))
        except RunFailed as error:
            failures[setting] = str(error)
            _say(f"failed: {error}")
    return samples, failures


def _verdict(
    request: ScaleRequest, machine: Machine, size: int, rows: list[ScaleRow], samples: list[RunSample]
) -> dict[str, Any] | None:
    """Explain why the first slow size is slow; None if none is."""
    slow = slowest(rows)
    if slow is None:
        return None
    base = next(row for row in rows if row.mode == slow.mode)
    _say(f"{slow.ranks} ranks are below 80 %: looking for the cause")
    profile = profile_row(request, slow, machine, size)
    if profile:
        sentence = profile["sentence"]
    else:
        sentence = describe_growth(slow, base, machine, samples)
    return {"mode": slow.mode, "ranks": slow.ranks, "sentence": sentence, "profile": profile}


def _say(line: str) -> None:
    print(f"scale: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _exit_on_signal() -> Iterator[None]:
    """Context manager in which SIGTERM or SIGHUP acts like Ctrl-C.

    It ends the current run and removes its files.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # SystemExit runs the `finally` blocks, which end the run and remove its folder.
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
