"""Account for all the wall time of a run, over its starts, from its timeline.jsonl.

    found = goodput(folder / "timeline.jsonl")
    found.seconds["training"] / found.wall            # its goodput
    show(folder, as_json=False)                       # the table

`Timeline` writes the file during the run. The parts add up to the wall time. A process's own parts come from a
monotonic clock; the time between two processes is the difference of wall clocks. Steps that a later start did not find
in its checkpoint were wasted: all time spent on them is "redone". If a line covers both kinds of steps, its time is
divided by the number of steps.
"""

import contextlib
import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.config.secrets import printable
from lockstep.errors import SETTINGS, ConfigError

__all__ = [
    "BODY",
    "ENDED_VARIABLE",
    "ENDING",
    "EVALUATION",
    "LABELS",
    "LOADING",
    "RECOVERY",
    "SAVES",
    "START",
    "TRAINING",
    "Goodput",
    "Start",
    "Timeline",
    "duration",
    "goodput",
    "show",
    "waits",
]


TRAINING, LOADING, EVALUATION, SAVES = "training", "loading", "evaluation", "saves"
START, RECOVERY, BODY, ENDING = "start", "recovery", "body", "ending"

ENDED_VARIABLE = (
    "LOCKSTEP_ENDED_AT"  # set by `lockstep launch` on a restart: the time at which it saw the processes end
)
_SHORTEST = 1.0  # seconds between two lines
_GROWTH = 100_000  # bytes of the file that add a second to it
_BEGUN: list[bool] = []  # non-empty once this process has begun one

_LOG = logging.getLogger("lockstep")


class Timeline:
    """The parts of this process's time. Every rank keeps it; the one that opens the file writes.

    Times come from a monotonic clock; the lines' "t" is wall time, and connects the processes of a run.
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
        """Start the account of a run; a command's first starts with its process."""
        self._since = time.perf_counter()
        if not _BEGUN and SETTINGS.flags:
            self._spent[START] = _age()
        _BEGUN.append(True)

    @property
    def is_open(self) -> bool:
        """Whether this process writes."""
        return self._file is not None

    def open(self, path: Path, step: int, world: int, *, recovered: bool = False) -> None:
        """Open the file for a start, or to replace a lost rank that wrote.

        Args:
            step: steps so far that are kept.
            world: number of ranks.
            recovered: the run continues here after the loss.
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
        if recovered:  # the time before is in the lost rank's lines
            self.enter(self._part)
            self._spent = {RECOVERY: self._spent.get(RECOVERY, 0.0)}
        more: dict[str, Any] = {"world": world}
        ended = os.environ.get(ENDED_VARIABLE, "")
        with contextlib.suppress(ValueError):
            more |= {"ended": float(ended)} if ended and not recovered else {}
        self._write("recovered" if recovered else "start", **more)

    def regrouped(self, step: int, world: int) -> None:
        """Record a loss: the run continues from `step` with `world` ranks.

        Every rank calls it.
        """
        self._step = step
        self._write("recovered", world=world)

    def measures(self, waited: Callable[[], float]) -> None:
        """Set the function that returns the total seconds that steps waited for samples: LOADING."""
        self._take_waited()
        self._waited, self._waited_before = waited, waited()

    def enter(self, part: str) -> None:
        """Account the time from now on to `part`."""
        now = time.perf_counter()
        self._spent[self._part] = self._spent.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now
        if now >= self._due and self._file is not None:
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

    def close(self, status: str) -> None:
        """Write the last line of this start. Later time, up to this process's next start, is START."""
        self._write("end", status=status)
        self._part = START
        self.shut()

    def shut(self) -> None:
        """Close the file without a line; a second call does nothing."""
        if self._file is not None:
            handle, self._file = self._file, None
            os.close(handle)

    def _take_waited(self) -> None:
        """Move the time that steps waited for samples from TRAINING to LOADING."""
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
        except OSError as error:  # the time is kept for the next line
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
    """Seconds since this process started; 0 if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


_LEAST = 10.0  # seconds of steps, saves and evaluations; in a shorter run the start dominates
# Normal shares of that time: loaders that keep up leave next to nothing, an exchange takes some of a
# step wherever it is not hidden, and evaluations are wanted.
_NORMAL = {"data": 0.1, "exchange": 0.3, "saves": 0.05, "evaluation": 0.25}


def waits(seconds: Mapping[str, float], *, workers: int, ranks: int) -> str:
    """Return a sentence on the part that most exceeds its normal share, or "".

    Args:
        seconds: `steps` in all, of these `data` waiting for samples and `exchange` for gradients; and outside the steps
            `saves` and `evaluation`. Unknown parts are left out.
        workers: loader processes of a rank.
        ranks: of the run.
    """
    whole = sum(seconds.get(name, 0.0) for name in ("steps", "saves", "evaluation"))
    if whole < _LEAST:
        return ""
    shares = {name: seconds.get(name, 0.0) / whole for name in _NORMAL}
    most = max(shares, key=lambda name: shares[name] - _NORMAL[name])
    if shares[most] <= _NORMAL[most]:
        return ""
    others = " or for another rank" if ranks > 1 else ""
    what, advice = {
        "data": (f"waiting for samples{others}", f"--data.workers {workers + 1} or more loads beside the steps"),
        "exchange": ("exchanging gradients", "a larger --batch-size with the same micro-batches exchanges less often"),
        "saves": ("waiting for checkpoints", "a larger --ckpt-freq, or --checkpoint.mode async, waits less"),
        "evaluation": ("evaluating", "a larger --eval-freq evaluates less often"),
    }[most]
    return f"{shares[most]:.0%} of the time went into {what}: {advice}; `lockstep profile` says what that would gain"


LABELS = {
    TRAINING: "training",
    "redone": "redone: steps that were taken once more",
    LOADING: "stalls: steps waited for samples",
    RECOVERY: "stalls: a rank was lost, or taken in",
    SAVES: "saves: the loop waited for them",
    EVALUATION: "evaluation",
    BODY: "the caller's own loop body",
    START: "start: until the first step",
    ENDING: "ending: the last save, the summary",
    "lost": "lost: between an end and the next start",
    "unknown": "unknown: a process ended without a word",
}
_STEPS = (TRAINING, LOADING, SAVES, EVALUATION, BODY)
_LONGEST = 1e10  # seconds; longer than any run
_LINE = 1 << 16  # bytes of a line, at most
_PIECES = 20_000  # kept separately; beyond, neighbours are merged


@dataclass(slots=True)
class Start:
    """One start of the run.

    Attributes:
        at: when it was ready, in seconds since 1970.
        first, last: steps before it, and at its last line.
        world: ranks at its start.
        ended: how: a status of `run.Result`, "failed" or "rolled back"; "" without a line of its end, or if it still
            runs.
        lost: seconds from the previous line to its start.
        losses: how often it continued after ranks were lost or joined.
    """

    at: float
    first: int
    last: int
    world: int
    ended: str = ""
    lost: float = 0.0
    losses: int = 0


@dataclass(slots=True)
class _Spent:
    """The time between two lines of one process, for the steps from `first` to `last`."""

    first: int
    last: int
    spent: dict[str, float]


@dataclass(slots=True)
class Goodput:
    """The wall time of a run by part, in seconds; all parts, in display order."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    starts: list[Start] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Seconds from the first process's start to the last line."""
        return math.fsum(self.seconds.values())

    @property
    def share(self) -> float:
        """Share of the wall time that went into kept training steps; 0 without any time."""
        return self.seconds[TRAINING] / self.wall if self.wall else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        starts = [{name: getattr(start, name) for name in Start.__slots__} for start in self.starts]
        plain = {"wall_seconds": self.wall, "goodput": self.share, "seconds": self.seconds}
        return {**plain, "starts": starts, "notes": self.notes}


def show(folder: Path, *, as_json: bool) -> None:
    """Print the wall time of the run in `folder` by part.

    Raises:
        ConfigError: its files do not record it.
    """
    found = goodput(folder.expanduser() / "timeline.jsonl")
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("part", "time", "share"):
        table.add_column(title, justify="left" if title == "part" else "right", no_wrap=True)
    for part, seconds in found.seconds.items():
        if seconds or part == TRAINING:
            table.add_row(LABELS[part], duration(seconds), f"{seconds / (found.wall or 1):.1%}")
    table.add_row("wall time", duration(found.wall), "100.0%")
    console.print(table)
    losses = sum(start.losses for start in found.starts)
    more = f", {losses} changes of the ranks on the way" if losses else ""
    count = len(found.starts)
    print(f"goodput {found.share:.1%}: training steps that were kept; {count} start{'s' * (count != 1)}{more}")
    for start in found.starts if count > 1 else ():
        ended = start.ended or "no word of its end"
        line = f"  steps {start.first} to {start.last}, {start.world} rank{'s' * (start.world != 1)}: {ended}"
        console.print(Text(printable(line)))
    for note in found.notes:
        print(f"note: {note}")


def duration(seconds: float) -> str:
    """Format seconds for users: 0.4 s, 12:05, 3:12:05, 4 d 03:12:05."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {clock:0>8}" if days else clock


def goodput(path: Path) -> Goodput:
    """Read a timeline; torn or foreign lines are skipped, and noted.

    Raises:
        ConfigError: there is none, or no line of it can be read.
    """
    found, pieces = Goodput(), list[_Spent]()
    before: float | None = None  # the time of the last line
    said, step, bad = False, 0, 0  # whether the previous process recorded its end
    for line in _lines(path):
        if line is None:
            bad += 1
            continue
        spent = line["spent"]
        if line["what"] == "start" or not found.starts:
            began = line["t"] - sum(spent.values())
            gap = max(0.0, began - before) if before is not None else 0.0
            if before is not None:
                _share_gap(found, before, began, gap, said, line.get("ended"))
            _undo(pieces, line["step"], found)
            found.starts.append(Start(line["t"], line["step"], line["step"], line.get("world", 1), lost=gap))
            if len(found.starts) == 1 and line["step"]:
                found.notes.append(f"the timeline begins at step {line['step']}: what came before is not in it")
            step = line["step"]
        elif line["what"] == "recovered":
            if before is not None:  # time that rank 0 had not yet written when it was lost
                found.seconds["unknown"] += max(0.0, line["t"] - sum(spent.values()) - before)
            found.starts[-1].losses += 1
            _undo(pieces, line["step"], found)
            step = min(step, line["step"])
        _add(found, pieces, step, line["step"], spent)
        step, before, said = line["step"], line["t"], line["what"] == "end"
        found.starts[-1].last = step
        found.starts[-1].ended = line.get("status", "ended") if said else ""
    if not found.starts:
        raise ConfigError(f"{path} holds no line of a run's timeline; it is damaged, or another program's")
    if bad:
        found.notes.append(f"{bad} line{'s' * (bad > 1)} of the timeline could not be read")
    for piece in pieces:
        for part, seconds in piece.spent.items():
            found.seconds[part] += seconds
    return found


def _share_gap(found: Goodput, before: float, began: float, gap: float, said: bool, ended: Any) -> None:
    """Split the time between two processes into "lost" and "unknown".

    Nothing ran if the first recorded its end, or from when the launcher saw it; the rest is unknown.
    """
    if said:
        found.seconds["lost"] += gap
        return
    seen = isinstance(ended, float) and before <= ended <= began
    unknown = ended - before if seen else gap
    found.seconds["unknown"] += unknown
    found.seconds["lost"] += gap - unknown


def _add(found: Goodput, pieces: list[_Spent], first: int, last: int, spent: dict[str, float]) -> None:
    """Add a line's time; the steps' share waits, since a later start may undo them."""
    for part in spent.keys() - set(_STEPS):
        found.seconds[part if part in found.seconds else "unknown"] += spent[part]
    of_steps = {part: spent[part] for part in _STEPS if part in spent}
    if not of_steps:
        return
    if pieces and pieces[-1].last == first == last and pieces[-1].first == first:
        for part, seconds in of_steps.items():
            pieces[-1].spent[part] = pieces[-1].spent.get(part, 0.0) + seconds
    else:
        pieces.append(_Spent(first, last, of_steps))
    if len(pieces) > _PIECES:
        pieces[:] = [_joined(*pieces[at : at + 2]) for at in range(0, len(pieces), 2)]


def _joined(piece: _Spent, *more: _Spent) -> _Spent:
    spent = dict(piece.spent)
    for part, seconds in (each for other in more for each in other.spent.items()):
        spent[part] = spent.get(part, 0.0) + seconds
    return _Spent(piece.first, max(each.last for each in (piece, *more)), spent)


def _undo(pieces: list[_Spent], step: int, found: Goodput) -> None:
    """Account the time spent on steps after `step` as redone."""
    while pieces and pieces[-1].last > step:
        piece = pieces.pop()
        kept = max(0, step - piece.first) / (piece.last - piece.first) if piece.last > piece.first else 0.0
        found.seconds["redone"] += (1 - kept) * sum(piece.spent.values())
        if kept:
            pieces.append(_Spent(piece.first, step, {part: kept * each for part, each in piece.spent.items()}))


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the lines; None for one that is no timeline's."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "no plain file")
        with open(path, "rb") as file:
            while data := file.readline(_LINE):
                yield _parsed(data)
    except OSError as error:
        why = (
            "this run has no timeline.jsonl: it was trained by an older lockstep, or is no run's folder"
            if isinstance(error, FileNotFoundError)
            else f"timeline.jsonl: {error.strerror or error}"
        )
        raise ConfigError(f"{path.parent}: {why}") from error


def _parsed(data: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        line = json.loads(data)
        when, step, spent = line["t"], line["step"], line["spent"]
        numbers = [when, *spent.values()]
        fit = all(type(each) in (int, float) and 0 <= each < _LONGEST for each in numbers)
        known = line["what"] in ("start", "at", "recovered", "end") and type(step) is int and 0 <= step < 1 << 60
        if fit and known and type(line.get("world", 1)) is int and type(line.get("status", "")) is str:
            return {**line, "spent": {str(part): float(each) for part, each in spent.items()}}
    return None
