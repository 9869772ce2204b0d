"""timeline.jsonl: what a run's wall time went into, over all its starts. Rank 0 appends; a resume removes nothing.

    timeline = Timeline()
    timeline.begin()                                # from here on each second has a part
    timeline.open(folder / "timeline.jsonl", step=0, world=2)
    timeline.enter(TRAINING); timeline.at(1); ...   # after each step
    with timeline.during(EVALUATION): ...
    timeline.close("finished")

A line is {"t": seconds since 1970, "what": "start" | "at" | "recovered" | "end", "step": steps taken,
"spent": {part: seconds}}: what this process spent since its line before. A start also has "world", and "ended" where
the launcher saw the processes before it end; an end has "status". Lines come at most once a second, and the rarer the
longer the file is, so that it grows with the square root of the run's time: 0.3 MB after an hour, 8 MB after a month. A
kill loses what was not written yet, and no more.
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

TRAINING, LOADING, EVALUATION, SAVES = "training", "loading", "evaluation", "saves"
START, RECOVERY, BODY, ENDING = "start", "recovery", "body", "ending"

ENDED_VARIABLE = "LOCKSTEP_ENDED_AT"  # set by `lockstep launch`, on a restart, to when it saw the processes end
_SHORTEST = 1.0  # seconds between two lines
_GROWTH = 100_000  # bytes of the file that make it one second more
_BEGUN: list[bool] = []  # whether this process has made one

_LOG = logging.getLogger("lockstep")


class Timeline:
    """The parts that this process's time goes into. Every rank keeps count; the one that opens the file writes.

    Time comes from a clock that only goes on; the lines' "t" is the wall's, and joins the processes of a run.
    """

    def __init__(self) -> None:
        self._part, self._since = START, time.perf_counter()
        self._spent: dict[str, float] = {}
        self._step, self._size, self._due = 0, 0, 0.0
        self._file: int | None = None
        self._begins, self._failed = b"", False
        self._waited: Callable[[], float] = float
        self._waited_before = 0.0

    def begin(self) -> None:
        """The run begins now; the first one of a command began with its process."""
        self._since = time.perf_counter()
        if not _BEGUN and SETTINGS.flags:
            self._spent[START] = _age()
        _BEGUN.append(True)

    @property
    def is_open(self) -> bool:
        """Whether this process writes."""
        return self._file is not None

    def open(self, path: Path, step: int, world: int, *, recovered: bool = False) -> None:
        """Begins to write: a start, or a run that goes on here after the loss of the rank that wrote.

        Args:
            step: steps taken before, of what is kept.
            world: how many ranks.
        """
        self.shut()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o666)
            self._size = os.fstat(self._file).st_size
            torn = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"
            self._begins = b"\n" if torn else b""  # a kill left half a line
        except OSError as error:
            self._warn(error)
            return
        self._step = step
        if recovered:  # what came before is in the lines of the one that was lost
            self.enter(self._part)
            self._spent = {RECOVERY: self._spent.get(RECOVERY, 0.0)}
        more: dict[str, Any] = {"world": world}
        ended = os.environ.get(ENDED_VARIABLE, "")
        with contextlib.suppress(ValueError):
            more |= {"ended": float(ended)} if ended and not recovered else {}
        self._write("recovered" if recovered else "start", **more)

    def regrouped(self, step: int, world: int) -> None:
        """The run goes on after the loss of a rank, from `step`, with `world` ranks. On every rank."""
        self._step = step
        self._write("recovered", world=world)

    def measures(self, waited: Callable[[], float]) -> None:
        """Who tells from now on how many seconds steps waited for their samples, in all: they are LOADING."""
        self._take_waited()
        self._waited, self._waited_before = waited, waited()

    def enter(self, part: str) -> None:
        """What comes from now on goes into `part`."""
        now = time.perf_counter()
        self._spent[self._part] = self._spent.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now
        if now >= self._due and self._file is not None:
            self._write("at")

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """What happens within goes into `part`."""
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def at(self, step: int) -> None:
        """`step` steps are taken."""
        self._step = step
        if self._file is not None and time.perf_counter() >= self._due:
            self.enter(self._part)

    def close(self, status: str) -> None:
        """The last line of this start. The time after it, up to the next start of this process, is START."""
        self._write("end", status=status)
        self._part = START
        self.shut()

    def shut(self) -> None:
        """Closes the file without a word; twice does no harm."""
        if self._file is not None:
            handle, self._file = self._file, None
            os.close(handle)

    def _take_waited(self) -> None:
        """Moves what the steps waited for samples from TRAINING to LOADING."""
        waited = self._waited()
        part = min(max(0.0, waited - self._waited_before), self._spent.get(TRAINING, 0.0))
        self._waited_before = waited
        if part:
            self._spent[TRAINING] -= part
            self._spent[LOADING] = self._spent.get(LOADING, 0.0) + part

    def _write(self, what: str, **more: Any) -> None:
        now = time.perf_counter()
        self._spent[self._part] = self._spent.get(self._part, 0.0) + now - self._since
        self._since = now
        self._due = now + max(_SHORTEST, self._size / _GROWTH)
        if self._file is None:
            self._spent = {}
            return
        self._take_waited()
        spent = {part: round(seconds, 6) for part, seconds in self._spent.items() if seconds >= 5e-7}
        line = {"t": round(time.time(), 3), "what": what, "step": self._step, **more, "spent": spent}
        data = self._begins + json.dumps(line).encode() + b"\n"
        try:
            written = os.write(self._file, data)
        except OSError as error:  # what was spent stays, and is in the next line
            self._warn(error)
            return
        self._begins = b"" if written == len(data) else b"\n"
        self._size += written
        self._spent = {} if written == len(data) else self._spent

    def _warn(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _LOG.warning("timeline.jsonl cannot be written: %s; training goes on", error.strerror or error)


def _age() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
