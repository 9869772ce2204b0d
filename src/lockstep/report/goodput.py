"""Account for a run's wall time over all its starts, from its timeline.jsonl.

    found = goodput(folder / "timeline.jsonl")
    found.seconds["training"] / found.wall            # its goodput
    show(folder, as_json=False)                       # the table

`lockstep.timeline` writes the file during the run. The parts add up to the wall time. A process's own parts come from a
monotonic clock; the time between two processes is the difference of wall clocks. The time between a finished run and
its extension does not count. Steps missing from the checkpoint of a later start ran again: all time spent on them is
"redone". The time of a line that covers both kinds of steps is divided by the number of steps.
"""

import contextlib
import errno
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.secrets import printable
from lockstep.errors import ConfigError
from lockstep.timeline import BODY, ENDING, EVALUATION, LOADING, RECOVERY, SAVES, START, TRAINING

__all__ = [
    "LABELS",
    "Goodput",
    "advise_workers",
    "duration",
    "goodput",
    "show",
    "waits",
]


# Seconds of steps, saves and evaluations. In a shorter run nothing can be gained, and the start dominates.
_MIN_SECONDS = 60.0
# Normal shares of that time: fast loaders cost next to nothing, an exchange that is not hidden takes part of a step,
# and users want evaluations.
_NORMAL_SHARES = {"data": 0.1, "exchange": 0.3, "saves": 0.05, "evaluation": 0.25}


def waits(seconds: Mapping[str, float], *, workers: int, ranks: int, wall: float = 0.0) -> str:
    """Return a sentence on the part that most exceeds its normal share, or "".

    Args:
        seconds: `steps` in total, in them `data` waits for samples and `exchange` for gradients; outside the steps
            `saves` and `evaluation`. Unknown parts are omitted.
        workers: loader processes per rank.
        ranks: number of ranks.
        wall: seconds that the printed share is of; 0: of `steps`, `saves` and `evaluation`, as the normal shares are.
    """
    total = sum(seconds.get(name, 0.0) for name in ("steps", "saves", "evaluation"))
    if total < _MIN_SECONDS:
        return ""
    shares = {name: seconds.get(name, 0.0) / total for name in _NORMAL_SHARES}
    most = max(shares, key=lambda name: shares[name] - _NORMAL_SHARES[name])
    if shares[most] <= _NORMAL_SHARES[most]:
        return ""
    suffix = " or for another rank" if ranks > 1 else ""
    activity, advice = {
        "data": (f"waiting for samples{suffix}", f"set --data.workers to {workers + 1} or more"),
        "exchange": ("exchanging gradients", "raise --batch-size with the same micro-batches to exchange less often"),
        "saves": ("waiting for checkpoints", "raise --ckpt-freq, or set --checkpoint.mode async"),
        "evaluation": ("evaluating", "raise --eval-freq to evaluate less often"),
    }[most]
    share, whole = (
        (seconds[most] / wall, "wall time") if wall else (shares[most], "time in steps, saves and evaluations")
    )
    return f"{share:.1%} of the {whole} was spent {activity}: {advice}; `lockstep profile` predicts the gain"


# Share of a step, and milliseconds, from which loading samples is worth a line.
_SLOW_LOADING = 0.25
_MIN_LOADING = 5.0
_MOST_WORKERS = 8


def advise_workers(laps: Mapping[str, float], cores: int) -> str:
    """Return a line if a run without loader processes waits for its samples; else "".

    Args:
        laps: milliseconds of a step by part, see `Clock.read`.
        cores: for each rank of this node.
    """
    loading = laps.get("data", 0.0)
    share = loading / max(sum(laps.values()), 1e-9)
    if loading < _MIN_LOADING or share <= _SLOW_LOADING:
        return ""
    return f"loading samples takes {share:.0%} of a step: try --data.workers {max(1, min(cores, _MOST_WORKERS))}"


LABELS = {
    TRAINING: "training",
    "redone": "redone: steps that ran again",
    LOADING: "stalls: steps waited for samples",
    RECOVERY: "stalls: a rank failed or joined",
    SAVES: "saves: the loop waited for checkpoints",
    EVALUATION: "evaluation",
    BODY: "the caller's own loop body",
    START: "start: until the first step",
    ENDING: "ending: the last save, the summary",
    "lost": "lost: between an end and the next start",
    "unknown": "unknown: a process ended without a record",
}
_STEPS = (TRAINING, LOADING, SAVES, EVALUATION, BODY)
# Longer than any run: a larger number is damage.
_MAX_SECONDS = 1e10
# Most bytes of a line.
_LINE = 1 << 16
# More pieces are merged with their neighbours.
_MAX_PIECES = 20_000


@dataclass(slots=True)
class Start:
    """One start of the run.

    Attributes:
        at: when it was ready, in seconds since 1970.
        first, last: steps before it, and at its last line.
        world: ranks at its start.
        ended: a status of `run.Result`, "failed" or "rolled back"; "" without a record of its end, or while it runs.
        lost: seconds from the previous line to its start; 0 if the run was finished before.
        losses: how often it continued after a rank was lost or joined.
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
    """Time between two lines of one process, for steps `first` to `last`."""

    first: int
    last: int
    spent: dict[str, float]


@dataclass(slots=True)
class Goodput:
    """Wall time of a run by part, in seconds and display order."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    starts: list[Start] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Seconds from the first process's start to the last line, except between a finished run and its extension."""
        return math.fsum(self.seconds.values())

    @property
    def share(self) -> float:
        """Share of the wall time that went into kept training steps; 0 without any time."""
        if self.wall:
            return self.seconds[TRAINING] / self.wall
        return 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        starts = []
        for start in self.starts:
            starts.append({name: getattr(start, name) for name in Start.__slots__})
        plain = {"wall_seconds": self.wall, "goodput": self.share, "seconds": self.seconds}
        return {**plain, "starts": starts, "notes": self.notes}


def show(folder: Path, *, as_json: bool) -> None:
    """Print the wall time of the run in `folder` by part.

    Raises:
        ConfigError: the folder has no readable timeline.
    """
    account = goodput(folder.expanduser() / "timeline.jsonl")
    if as_json:
        print(json.dumps(account.as_json(), indent=1))
        return
    # Imported here, since the recorder of `goodput -- COMMAND` loads this file where there may be no rich.
    console = importlib.import_module("rich.console").Console(highlight=False)
    table = importlib.import_module("rich.table").Table(box=None, pad_edge=False)
    for title in ("part", "time", "share"):
        table.add_column(title, justify="left" if title == "part" else "right", no_wrap=True)
    for name, seconds in account.seconds.items():
        if seconds or name == TRAINING:
            table.add_row(LABELS[name], duration(seconds), f"{seconds / (account.wall or 1):.1%}")
    table.add_row("wall time", duration(account.wall), "100.0%")
    console.print(table)
    losses = sum(start.losses for start in account.starts)
    more = f", {losses} changes of the world size" if losses else ""
    count = len(account.starts)
    print(f"goodput {account.share:.1%}: training steps that were kept; {count} start{'s' * (count != 1)}{more}")
    for start in account.starts if count > 1 else ():
        ended = start.ended or "no end recorded"
        if start.last > start.first:
            span = f"steps {start.first + 1} to {start.last}"
        else:
            span = "no step"
        line = f"  {span}, {start.world} rank{'s' * (start.world != 1)}: {ended}"
        console.print(printable(line), markup=False)
    for note in account.notes:
        print(f"note: {note}")


def duration(seconds: float) -> str:
    """Format seconds for users: 0.4 s, 12:05, 3:12:05, 4 d 03:12:05."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if hours or days:
        clock = f"{hours}:{minutes:02}:{second:02}"
    else:
        clock = f"{minutes}:{second:02}"
    if days:
        return f"{days} d {clock:0>8}"
    return clock


def goodput(path: Path) -> Goodput:
    """Read a timeline; invalid lines are skipped, and noted.

    Raises:
        ConfigError: the file is missing, or no line is valid.
    """
    account = Goodput()
    pieces = list[_Piece]()
    # The time of the last line.
    before: float | None = None
    # Whether the previous process recorded its end, and whether the run was finished then.
    end_recorded = False
    finished = False
    step = 0
    bad = 0
    for line in _lines(path):
        if line is None:
            bad += 1
            continue
        seconds_by_part = line["spent"]
        # The file may have lost its first line, so any first line counts as a start.
        if line["what"] == "start" or not account.starts:
            began = line["t"] - sum(seconds_by_part.values())
            # A finished run waits for nothing: the time until `--extend-to` continues it is not part of the run.
            gap = max(0.0, began - before) if before is not None and not finished else 0.0
            if before is not None and not finished:
                _split_gap(account, before, began, gap, end_recorded, line.get("ended"))
            _mark_redone(pieces, line["step"], account)
            account.starts.append(Start(line["t"], line["step"], line["step"], line.get("world", 1), lost=gap))
            if len(account.starts) == 1 and line["step"]:
                account.notes.append(f"the timeline begins after step {line['step']}; earlier time is missing")
            step = line["step"]
        elif line["what"] == "recovered":
            # The lost rank 0 had not written this time yet.
            if before is not None:
                account.seconds["unknown"] += max(0.0, line["t"] - sum(seconds_by_part.values()) - before)
            account.starts[-1].losses += 1
            _mark_redone(pieces, line["step"], account)
            step = min(step, line["step"])
        _add(account, pieces, step, line["step"], seconds_by_part)
        step = line["step"]
        before = line["t"]
        end_recorded = line["what"] == "end"
        finished = end_recorded and line.get("status") == "finished"
        account.starts[-1].last = step
        account.starts[-1].ended = line.get("status", "ended") if end_recorded else ""
    if not account.starts:
        raise ConfigError(f"{path} has no timeline records: it is damaged, or from another program")
    if bad:
        account.notes.append(f"{bad} line{'s' * (bad > 1)} of the timeline could not be read")
    for piece in pieces:
        for name, seconds in piece.spent.items():
            account.seconds[name] += seconds
    return account


def _split_gap(account: Goodput, before: float, began: float, gap: float, end_recorded: bool, ended: Any) -> None:
    """Split the time between two processes into "lost" and "unknown".

    Time after a recorded end, or after the launcher saw the exit, is lost; the rest is unknown.
    """
    if end_recorded:
        account.seconds["lost"] += gap
        return
    exit_seen = isinstance(ended, float) and before <= ended <= began
    unknown = ended - before if exit_seen else gap
    account.seconds["unknown"] += unknown
    account.seconds["lost"] += gap - unknown


def _add(account: Goodput, pieces: list[_Piece], first: int, last: int, spent: dict[str, float]) -> None:
    """Add a line's time; a later start may undo the time of its steps."""
    for name in spent.keys() - set(_STEPS):
        account.seconds[name if name in account.seconds else "unknown"] += spent[name]
    of_steps = {}
    for name in _STEPS:
        if name in spent:
            of_steps[name] = spent[name]
    if not of_steps:
        return
    # Evaluations and saves after the same step: add them to its piece.
    if pieces and pieces[-1].last == first == last and pieces[-1].first == first:
        for name, seconds in of_steps.items():
            pieces[-1].spent[name] = pieces[-1].spent.get(name, 0.0) + seconds
    else:
        pieces.append(_Piece(first, last, of_steps))
    if len(pieces) > _MAX_PIECES:
        pieces[:] = [_merge_pieces(*pieces[at : at + 2]) for at in range(0, len(pieces), 2)]


def _merge_pieces(piece: _Piece, *more: _Piece) -> _Piece:
    spent = dict(piece.spent)
    for name, seconds in (item for each_piece in more for item in each_piece.spent.items()):
        spent[name] = spent.get(name, 0.0) + seconds
    return _Piece(piece.first, max(item.last for item in (piece, *more)), spent)


def _mark_redone(pieces: list[_Piece], step: int, account: Goodput) -> None:
    """Account the time spent on steps after `step` as redone."""
    # The later start resumes from `step`: what was trained after it runs again.
    while pieces and pieces[-1].last > step:
        piece = pieces.pop()
        if piece.last > piece.first:
            kept_share = max(0, step - piece.first) / (piece.last - piece.first)
        else:
            kept_share = 0.0
        account.seconds["redone"] += (1 - kept_share) * sum(piece.spent.values())
        if kept_share:
            pieces.append(
                _Piece(piece.first, step, {name: kept_share * seconds for name, seconds in piece.spent.items()})
            )


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the lines; None for an invalid one."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        with open(path, "rb") as file:
            while data := file.readline(_LINE):
                yield _parse_line(data)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            why = "timeline.jsonl is missing: not a run's folder, or trained by an older lockstep"
        else:
            why = f"timeline.jsonl: {error.strerror or error}"
        raise ConfigError(f"{path.parent}: {why}") from error


def _parse_line(data: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        line = json.loads(data)
        when = line["t"]
        step = line["step"]
        seconds_by_part = line["spent"]
        numbers = [when, *seconds_by_part.values()]
        times_valid = all(type(number) in (int, float) and 0 <= number < _MAX_SECONDS for number in numbers)
        event_valid = line["what"] in ("start", "at", "recovered", "end") and type(step) is int and 0 <= step < 1 << 60
        if times_valid and event_valid and type(line.get("world", 1)) is int and type(line.get("status", "")) is str:
            return {**line, "spent": {str(name): float(number) for name, number in seconds_by_part.items()}}
    return None
