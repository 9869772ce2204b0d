"""Record a process's progress in a few bytes that outlive it.

    progress = Progress.of(rank)
    progress.at(7, COMPUTING)
    RankProgress.read(path)     # RankProgress(step=7, phase="loading or computing", since=...), or None

The launcher reads them after a kill, a peer in a hang. Under `lockstep launch` the bytes are a memory-mapped file in a
private folder of this machine, so that writing needs no system call; elsewhere they are memory of this process.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

__all__ = [
    "COMPUTING",
    "ENDING",
    "EVALUATING",
    "FOLDER_VARIABLE",
    "IN_BODY",
    "MEETING_VARIABLE",
    "MEMBER_VARIABLE",
    "READING",
    "SAVING",
    "WAITING",
    "Progress",
    "RankProgress",
    "ended_while_running",
    "mark_running",
    "note_end",
    "own_label",
    "rank_label",
    "read_end",
    "renumber",
]


# The launcher's number of each current rank; ranks beyond the list keep theirs.
_AT_START: list[int] = []


def renumber(members: Iterable[str]) -> None:
    """Record the launcher's numbers of the current ranks.

    Args:
        members: names by rank, as in `membership.Generation`; empty: ranks are the launcher's.
    """
    _AT_START[:] = [int(name.partition(".")[0]) for name in members]


def rank_label(rank: int, at_start: int | None = None, host: str = "") -> str:
    """Name a rank in a message.

    Args:
        rank: its current number.
        at_start: the launcher's number; None: as known in this process.
        host: of its node, where a run has several; "": not named.
    """
    if at_start is None:
        at_start = _AT_START[rank] if rank < len(_AT_START) else rank
    before = "" if rank == at_start else f" (rank {at_start} at the start)"
    return f"rank {rank}{before}{f' on {host}' if host else ''}"


def own_label() -> str:
    """Name this process's rank in a message."""
    at_start = os.environ.get("RANK", "0")
    if not at_start.isdigit():
        return f"rank {at_start}"
    number = int(at_start)
    return rank_label(_AT_START.index(number) if number in _AT_START else number, number)


# Set by `lockstep launch` to a folder of its own.
FOLDER_VARIABLE = "LOCKSTEP_PROGRESS"
# Set to host:port of the launcher's meeting point.
MEETING_VARIABLE = "LOCKSTEP_MEETING"
# Set in a process that replaces a lost one, to its name, such as "3.1".
MEMBER_VARIABLE = "LOCKSTEP_MEMBER"

STARTING, WAITING, COMPUTING, EVALUATING, SAVING, ENDING, IN_BODY, READING = range(8)
_PHASES = (
    "starting",
    "waiting for the other ranks",
    "loading or computing",
    "evaluating",
    "saving",
    "ending",
    "in the body of the caller's loop",
    "reading the loss of a step, which every rank has to do",
)
# Phases after the step whose number they have; the others come before its end.
_AFTER_STEP = frozenset(_PHASES[phase] for phase in (EVALUATING, SAVING, ENDING))
_END = "ended"
_UNDER_WAY = ".under-way"
# The last progress of this process.
_CURRENT: "list[Progress]" = []
# Step, phase, seconds since 1970.
_LAYOUT = struct.Struct("<qqd")


def note_end(code: int) -> None:
    """Record for `lockstep launch` that the run saved and ended with `code`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        with contextlib.suppress(OSError):
            (Path(folder) / _END).write_text(str(code), encoding="ascii")


def read_end(folder: Path) -> int:
    """Read the exit code that a process noted in `folder`; 0 if none."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / _END).read_text(encoding="ascii"))
    return 0


@contextlib.contextmanager
def mark_running(stays: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Make `lockstep launch` count an end of this process in the context as a loss.

    This holds for any exit code.

    Args:
        stays: called at the end of the context; if True, a later end of the process still counts as a loss.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    rank = os.environ.get("RANK")
    mark = Path(folder) / f"{rank}{_UNDER_WAY}" if folder and rank else None
    _CURRENT.clear()
    with contextlib.suppress(OSError):
        if mark:
            mark.touch()
    try:
        yield
        # An error after the run belongs to no step.
        _CURRENT.clear()
    finally:
        with contextlib.suppress(OSError):
            if mark and not stays():
                mark.unlink()


def ended_while_running(folder: Path, rank: int | str, *, forget: bool = False) -> bool:
    """Whether a process ended in the middle of a run (see `mark_running`).

    Args:
        folder: of the launcher.
        rank: the launcher's number of the process.
        forget: remove the mark, since a new process starts in its place.
    """
    mark = folder / f"{rank}{_UNDER_WAY}"
    exists = mark.exists()
    if forget:
        mark.unlink(missing_ok=True)
    return exists


class RankProgress(NamedTuple):
    """The activity of a process, its step, and when it began.

    Attributes:
        step: steps done before the activity: the 0-based step at work, or the count that is saved or evaluated.
        phase: a description.
        since: start of the activity, in seconds since 1970.
    """

    step: int
    phase: str
    since: float

    @classmethod
    def read(cls, path: Path) -> "RankProgress | None":
        """Read the progress from the file `path`; None if there is none."""
        try:
            step, phase, since = _LAYOUT.unpack_from(path.read_bytes())
        except (OSError, struct.error):
            return None
        if 0 <= phase < len(_PHASES) and since:
            return cls(step, _PHASES[phase], since)
        return None

    @property
    def number(self) -> int:
        """The step's number in messages, from 1, as in records and names of checkpoints."""
        if self.phase in _AFTER_STEP:
            return self.step
        return self.step + 1

    def __str__(self) -> str:
        if self.phase != _PHASES[STARTING]:
            return f"step {self.number} ({self.phase})"
        return "its start, before step 1"


class Progress:
    """This process's progress.

    The main thread writes it at every step; any thread may read it.

    Attributes:
        step, phase: arguments of the last `at`.
        since: time of the last `at`, in seconds on the monotonic clock.
    """

    __slots__ = ("_memory", "_pack", "_time", "phase", "since", "step")

    def __init__(self, memory: "mmap.mmap | bytearray | None" = None) -> None:
        self._memory = bytearray(_LAYOUT.size) if memory is None else memory
        self._pack = _LAYOUT.pack_into
        self._time = time.time
        self.at(0, STARTING)
        _CURRENT[:] = [self]

    @staticmethod
    def present() -> "RankProgress | None":
        """Return the current or last progress of this process's run; None before its steps."""
        if _CURRENT:
            return _CURRENT[-1].place
        return None

    @classmethod
    def of(cls, rank: int) -> Self:
        """Open this process's progress: a file in the launcher's folder, or memory without one.

        The file has the rank at the start as its name, which stays when ranks change.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        rank = int(os.environ.get("RANK", rank))
        if not folder:
            return cls()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        # Progress only helps to explain a failure, so a folder that cannot be written does not stop the run.
        with contextlib.suppress(OSError):
            handle = os.open(Path(folder) / str(rank), flags, 0o600)
            try:
                os.ftruncate(handle, _LAYOUT.size)
                return cls(mmap.mmap(handle, _LAYOUT.size))
            finally:
                os.close(handle)
        return cls()

    def at(self, step: int, phase: int) -> None:
        """Record that this process is in `phase` of `step`. Takes about a microsecond."""
        self.step = step
        self.phase = phase
        self.since = time.monotonic()
        # A memory-mapped file: no system call, and the kernel keeps the bytes if the process is killed.
        self._pack(self._memory, 0, step, phase, self._time())

    @property
    def place(self) -> RankProgress:
        """The progress in readable form."""
        return RankProgress(self.step, _PHASES[self.phase], time.time() - (time.monotonic() - self.since))
