"""Where all the wall time of a run went, over its starts, by its timeline.jsonl.

    found = goodput(folder / "timeline.jsonl")
    found.seconds["training"] / found.wall              # its goodput
    show(folder, as_json=False)                         # the table

The parts add up to the wall time. A process's own parts come from a clock that only goes on; between two processes it
is the difference of the wall's clocks. Steps that a later start did not find in its checkpoint were for nothing: what
was spent on them is "redone", whatever part it was. Of a line that reaches over such a place the time is shared out by
its steps.
"""

import contextlib
import errno
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.config.secrets import printable
from lockstep.errors import ConfigError
from lockstep.report import timeline

__all__ = ["LABELS", "Goodput", "Start", "duration", "goodput", "show"]

LABELS = {
    timeline.TRAINING: "training",
    "redone": "redone: steps that were taken once more",
    timeline.LOADING: "stalls: steps waited for samples",
    timeline.RECOVERY: "stalls: a rank was lost, or taken in",
    timeline.SAVES: "saves: the loop waited for them",
    timeline.EVALUATION: "evaluation",
    timeline.BODY: "the caller's own loop body",
    timeline.START: "start: until the first step",
    timeline.ENDING: "ending: the last save, the summary",
    "lost": "lost: between an end and the next start",
    "unknown": "unknown: a process ended without a word",
}
_STEPS = (timeline.TRAINING, timeline.LOADING, timeline.SAVES, timeline.EVALUATION, timeline.BODY)
_LONGEST = 1e10  # seconds; what no run takes
_LINE = 1 << 16  # bytes of a line, at most
_PIECES = 20_000  # kept apart; beyond, neighbours are taken together


@dataclass(slots=True)
class Start:
    """One start of the run.

    Attributes:
        at: when it was ready, in seconds since 1970.
        first, last: steps taken before it, and at its last word.
        world: ranks at its begin.
        ended: how: as in `run.Result`, "failed", "rolled back"; "" without a word, or where it still goes on.
        lost: seconds from the last word before to its begin.
        losses: how often it went on after ranks were lost or taken in.
    """

    at: float
    first: int
    last: int
    world: int
    ended: str = ""
    lost: float = 0.0
    losses: int = 0


@dataclass(slots=True)
class _Piece:
    """What was spent between two lines of one process, on the steps from `first` to `last`."""

    first: int
    last: int
    spent: dict[str, float]


@dataclass(slots=True)
class Goodput:
    """The wall time of a run by part, in seconds; every part is there, in the order in which it is shown."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    starts: list[Start] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """From the first process's begin to the last word, in seconds."""
        return math.fsum(self.seconds.values())

    @property
    def share(self) -> float:
        """Of the wall time, what went into training steps that were kept; 0 where there is none."""
        return self.seconds[timeline.TRAINING] / self.wall if self.wall else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        starts = [{name: getattr(start, name) for name in Start.__slots__} for start in self.starts]
        plain = {"wall_seconds": self.wall, "goodput": self.share, "seconds": self.seconds}
        return {**plain, "starts": starts, "notes": self.notes}


def show(folder: Path, *, as_json: bool) -> None:
    """Prints where the time of the run in `folder` went. Raises ConfigError where its files do not say."""
    found = goodput(folder.expanduser() / "timeline.jsonl")
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("part", "time", "share"):
        table.add_column(title, justify="left" if title == "part" else "right", no_wrap=True)
    for part, seconds in found.seconds.items():
        if seconds or part == timeline.TRAINING:
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
    """Seconds as a person reads them: 0.4 s, 12:05, 3:12:05, 4 d 03:12:05."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {clock:0>8}" if days else clock


def goodput(path: Path) -> Goodput:
    """What the timeline says; lines that are torn or foreign are passed over, and noted.

    Raises:
        ConfigError: there is none, or nothing of it can be read.
    """
    found, pieces = Goodput(), list[_Piece]()
    before: float | None = None  # the time of the last line
    said, step, bad = False, 0, 0  # whether the process before said that it ended
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
            if before is not None:  # what rank 0 had not written when it was lost
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
    """Between two processes: nothing ran where the first said its end, or the launcher saw it; else nobody knows."""
    if said:
        found.seconds["lost"] += gap
        return
    seen = isinstance(ended, float) and before <= ended <= began
    unknown = ended - before if seen else gap
    found.seconds["unknown"] += unknown
    found.seconds["lost"] += gap - unknown


def _add(found: Goodput, pieces: list[_Piece], first: int, last: int, spent: dict[str, float]) -> None:
    """What belongs to steps waits, since a later start may undo them."""
    for part in spent.keys() - set(_STEPS):
        found.seconds[part if part in found.seconds else "unknown"] += spent[part]
    of_steps = {part: spent[part] for part in _STEPS if part in spent}
    if not of_steps:
        return
    if pieces and pieces[-1].last == first == last and pieces[-1].first == first:
        for part, seconds in of_steps.items():
            pieces[-1].spent[part] = pieces[-1].spent.get(part, 0.0) + seconds
    else:
        pieces.append(_Piece(first, last, of_steps))
    if len(pieces) > _PIECES:
        pieces[:] = [_joined(*pieces[at : at + 2]) for at in range(0, len(pieces), 2)]


def _joined(piece: _Piece, *more: _Piece) -> _Piece:
    spent = dict(piece.spent)
    for part, seconds in (each for other in more for each in other.spent.items()):
        spent[part] = spent.get(part, 0.0) + seconds
    return _Piece(piece.first, max(each.last for each in (piece, *more)), spent)


def _undo(pieces: list[_Piece], step: int, found: Goodput) -> None:
    """What was spent on steps after `step` is redone."""
    while pieces and pieces[-1].last > step:
        piece = pieces.pop()
        kept = max(0, step - piece.first) / (piece.last - piece.first) if piece.last > piece.first else 0.0
        found.seconds["redone"] += (1 - kept) * sum(piece.spent.values())
        if kept:
            pieces.append(_Piece(piece.first, step, {part: kept * each for part, each in piece.spent.items()}))


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines; None for one that is none of a timeline."""
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
