"""Record where a process's time goes, in the run's timeline.jsonl.

    timeline = Timeline()
    timeline.open(folder / "timeline.jsonl", step=0, world=2)
    with timeline.during(EVALUATION):
        ...

Times come from a monotonic clock. `lockstep.report.goodput` reads the file.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import SETTINGS

__all__ = [
    "BODY",
    "ENDED_VARIABLE",
    "ENDING",
    "EVALUATION",
    "LOADING",
    "RECOVERY",
    "SAVES",
    "START",
    "TRAINING",
    "Timeline",
]


TRAINING = "training"
LOADING = "loading"
EVALUATION = "evaluation"
SAVES = "saves"
START = "start"
RECOVERY = "recovery"
BODY = "body"
ENDING = "ending"

# Set by `lockstep launch` on a restart, to the time at which it saw the processes end.
ENDED_VARIABLE = "LOCKSTEP_ENDED_AT"
# Seconds between two lines.
_LINE_INTERVAL = 1.0
# Each so many bytes of the file add a second between two lines.
_GROWTH = 100_000
# Not empty once this process has started a run.
_STARTED: list[bool] = []

_LOG = logging.getLogger("lockstep")


class Timeline:
    """Recorder of this process's time by part.

    Every rank has one; the rank that opens the file writes.

    Times come from a monotonic clock; the lines' "t" is wall time, and connects the processes of a run.
    """

    def __init__(self) -> None:
        self._part = START
        self._since = time.perf_counter()
        self._spent: dict[str, float] = {}
        self._step = 0
        self._size = 0
        self._due = 0.0
        self._file: int | None = None
        self._begins = b""
        self._failed = False
        self._read_waited: Callable[[], float] = float
        self._waited_before = 0.0

    def begin(self, *, of_process: bool = False) -> None:
        """Start accounting for a run; a command's first run starts with its process.

        Args:
            of_process: the run is the process's, which is no command of lockstep.
        """
        self._since = time.perf_counter()
        if of_process or (not _STARTED and SETTINGS.flags):
            self._spent[START] = _process_age()
        if not of_process:
            _STARTED.append(True)

    @property
    def is_open(self) -> bool:
        """Whether this process writes."""
        return self._file is not None

    def open(self, path: Path, step: int, world: int, *, recovered: bool = False) -> None:
        """Open the file at a start, or to replace a lost writer.

        Args:
            step: steps trained and kept.
            world: number of ranks.
            recovered: this rank replaces a lost writer.
        """
        self.shut()
        try:
            # O_NOFOLLOW refuses a link that another user may have placed.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o666)
            self._size = os.fstat(self._file).st_size
            torn = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"
            # A kill left half a line: end it, so that the next line is valid.
            self._begins = b"\n" if torn else b""
        except OSError as error:
            self._warn(error)
            return
        self._step = step
        # The time before is in the lost rank's lines.
        if recovered:
            self.enter(self._part)
            self._spent = {RECOVERY: self._spent.get(RECOVERY, 0.0)}
        more: dict[str, Any] = {"world": world}
        ended = os.environ.get(ENDED_VARIABLE, "")
        with contextlib.suppress(ValueError):
            more |= {"ended": float(ended)} if ended and not recovered else {}
        self._write("recovered" if recovered else "start", **more)

    def record_regroup(self, step: int, world: int) -> None:
        """Record a loss: the run continues from `step` with `world` ranks.

        Every rank calls it.
        """
        self._step = step
        self._write("recovered", world=world)

    def measures(self, seconds_waited: Callable[[], float]) -> None:
        """Set the function that returns the total seconds that steps waited for samples: LOADING."""
        self._move_waiting_time()
        self._read_waited = seconds_waited
        self._waited_before = seconds_waited()

    def enter(self, part: str) -> None:
        """Account the time from now on to `part`."""
        time_now = time.perf_counter()
        self._spent[self._part] = self._spent.get(self._part, 0.0) + time_now - self._since
        self._part = part
        self._since = time_now
        if time_now >= self._due and self._file is not None:
            self._write("at")

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Context manager that accounts its time to `part`."""
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def at(self, step: int) -> None:
        """Record that `step` steps are done."""
        self._step = step
        if self._file is not None and time.perf_counter() >= self._due:
            self.enter(self._part)

    def reassign(self, part: str) -> None:
        """Account the time since the last `enter` or line, and later time, to `part`."""
        self._part = part

    def close(self, status: str) -> None:
        """Write the last line of this start.

        Later time, up to this process's next start, is START.
        """
        self._write("end", status=status)
        self._part = START
        self.shut()

    def shut(self) -> None:
        """Close the file without writing; a second call does nothing."""
        if self._file is not None:
            handle = self._file
            self._file = None
            os.close(handle)

    def _move_waiting_time(self) -> None:
        """Move the time that steps waited for samples from TRAINING to LOADING."""
        total = self._read_waited()
        waited = min(max(0.0, total - self._waited_before), self._spent.get(TRAINING, 0.0))
        self._waited_before = total
        if waited:
            self._spent[TRAINING] -= waited
            self._spent[LOADING] = self._spent.get(LOADING, 0.0) + waited

    def _write(self, event: str, **more: Any) -> None:
        time_now = time.perf_counter()
        self._spent[self._part] = self._spent.get(self._part, 0.0) + time_now - self._since
        self._since = time_now
        # The lines become rarer as the file grows, so that a long run's file stays small.
        self._due = time_now + max(_LINE_INTERVAL, self._size / _GROWTH)
        if self._file is None:
            self._spent = {}
            return
        self._move_waiting_time()
        seconds_by_part = {}
        for name, seconds in self._spent.items():
            # Less than the precision below.
            if seconds >= 5e-7:
                seconds_by_part[name] = round(seconds, 6)
        line = {"t": round(time.time(), 3), "what": event, "step": self._step, **more, "spent": seconds_by_part}
        data = self._begins + json.dumps(line).encode() + b"\n"
        try:
            count = os.write(self._file, data)
        except OSError as error:
            # The time stays for the next line.
            self._warn(error)
            return
        self._begins = b"" if count == len(data) else b"\n"
        self._size += count
        self._spent = {} if count == len(data) else self._spent

    def _warn(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _LOG.warning("cannot write timeline.jsonl: %s; training continues", error.strerror or error)


def _process_age() -> float:
    """Return the seconds since this process started; 0 if unknown."""
    try:
        # Field 22 of the file is the start in clock ticks after boot; the name before it may contain blanks.
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
