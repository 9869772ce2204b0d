"""One run of one setting: `train`, or `launch -- train`, in a folder of its own, and what its records say.

    sample = measure(request, Setting(2, 16), machine, micro_batch_size=4)

A run is what a person would start. Its first record is its start (kernels chosen, caches warm) and is left out.
"""

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import options
from lockstep.diagnose.scale.machine import Machine
from lockstep.diagnose.scale.request import Request, Setting
from lockstep.errors import LockstepError
from lockstep.sinks import jsonl

__all__ = ["RunFailed", "Sample", "measure", "micro_batch_of", "parts_of", "started"]

_RATE, _TOTAL, _PARTS = "items_per_second", "time/total", "time/"
_ERROR = re.compile(r"^(?:lockstep|\S+\.py): error: (.*)$")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 15.0  # seconds for a run that is told to end
_OF_LAUNCHERS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|LOCKSTEP_LAUNCHER)"
)


class RunFailed(LockstepError):
    """A run of a measurement ended badly; the message is its own first error."""


@dataclass(frozen=True)
class Sample:
    """What one run's records say.

    Attributes:
        rates: items a second over all ranks, a record each; `rate` is their median.
        total: milliseconds of a step on rank 0, median of the records.
        parts: the same by part: data, forward, backward, update...
    """

    setting: Setting
    round: int
    rates: list[float]
    total: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def measure(request: Request, setting: Setting, machine: Machine, micro_batch_size: int, number: int = 0) -> Sample:
    """Runs one setting to the end and reads its records.

    Args:
        number: of the round.

    Raises:
        RunFailed: the run failed, or wrote fewer records than it should have.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as folder:
        flags = request.train_flags(setting, folder, micro_batch_size)
        started(request, setting, flags, machine, Path(folder))
        records = windows_of(jsonl.read(Path(folder) / "run" / "metrics.jsonl"), after=request.window)
    if not records:
        raise RunFailed(f"the run wrote no records after step {request.window}")
    found = parts_of(records)
    return Sample(setting, number, [record[_RATE] for record in records], found.pop("total"), found)


def windows_of(records: Sequence[dict[str, Any]], after: int) -> list[dict[str, Any]]:
    """The training records of steps after `after`."""
    return [record for record in records if record.get("global_step", 0) > after and record.get(_RATE, 0) > 0]


def parts_of(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """{part: milliseconds a step}, medians over the records; "total" among them."""
    names = sorted({name for record in records for name in record if name.startswith(_PARTS)} | {_TOTAL})
    return {
        name.removeprefix(_PARTS): statistics.median([float(record.get(name, 0.0)) for record in records])
        for name in names
    }


def micro_batch_of(request: Request, machine: Machine) -> int:
    """Samples in one forward, as a short run of the smallest size settles it; that run also prepares the data.

    Raises:
        RunFailed: `train` refuses what was asked for, or fails; its exit code is the run's.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as folder:
        setting, given = Setting(request.base, request.config.batch_size), request.config.micro_batch_size
        started(request, setting, request.train_flags(setting, folder, given, windows=0), machine, Path(folder))
        return int(options.read(Path(folder) / "run" / "config.toml")["micro_batch_size"])


def command_of(engine: str, ranks: int, flags: Sequence[str]) -> list[str]:
    """The command of a run; one rank runs without a launcher, unless its engine, named by --engine, needs one."""
    launch = ["launch", "--nproc-per-node", str(ranks), "--max-losses", "0", "--"]
    alone = ranks == 1 and engine == "auto"
    return [sys.executable, "-m", "lockstep", *([] if alone else launch), "train", *flags]


def started(request: Request, setting: Setting, flags: Sequence[str], machine: Machine, folder: Path) -> None:
    """Starts a run and waits for its end; what it says goes to a file in `folder`.

    Raises:
        RunFailed: it ended with another code than 0.
    """
    command = command_of(request.config.engine, setting.ranks, flags)
    log = folder / "output.txt"
    environment = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    environment["OMP_NUM_THREADS"] = str(machine.threads)
    run: subprocess.Popen[bytes] | None = None
    with open(log, "wb") as output:
        try:
            with _unbroken():
                run = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,  # as a launcher starts its ranks: schedulers share by session
                )
            code = run.wait()
        finally:
            if run is not None:
                _end(run)
    if code:
        error = RunFailed(first_error(log.read_text(encoding="utf-8", errors="replace"), code))
        error.exit_code = code if code in (2, 130) else 1
        raise error


@contextlib.contextmanager
def _unbroken() -> Iterator[None]:
    """Signals that come within it are heeded at its end: a process that is just being started would be left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda which, _: came.append(which)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _end(run: "subprocess.Popen[bytes]") -> None:
    """Ends a run that still goes on: it saves itself, and is waited for a while."""
    if run.poll() is None:
        run.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(_PATIENCE)
        run.kill()
        run.wait()


def first_error(said: str, code: int) -> str:
    """The line that says why a run failed: its first error, else the last thing that it said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    return errors[0] if errors else lines[-1] if lines else f"it ended with code {code} and said nothing"
