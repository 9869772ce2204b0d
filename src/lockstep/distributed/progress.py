"""Where this process stands, in a few bytes that outlive it: the launcher reads them after a kill, a peer in a hang.

    progress = Progress.of(rank)
    progress.at(7, COMPUTING)
    Place.read(path)            # Place(step=7, phase="computing", since=...), or None

Under `lockstep launch` the bytes are a memory-mapped file in a private folder of this machine, so that writing them is
no system call; elsewhere they are memory of this process alone.
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
    "STARTING",
    "WAITING",
    "Progress",
    "RankProgress",
    "is_under_way",
    "note_end",
    "rank_label",
    "read_end",
    "renumber",
    "under_way",
]


_AT_START: list[int] = []  # the launcher's number of each present rank; shorter: ranks keep theirs


def renumber(members: Iterable[str]) -> None:
    """Note which processes the present ranks are.

    Args:
        members: their names by rank, as in `members.Generation`; none: the launcher's numbers hold.
    """
    _AT_START[:] = [int(name.partition(".")[0]) for name in members]


def rank_label(rank: int, at_start: int | None = None) -> str:
    """Name a rank in a message.

    Args:
        rank: its number now.
        at_start: the launcher's number of it; None: the one that this process knows.
    """
    if at_start is None:
        at_start = _AT_START[rank] if rank < len(_AT_START) else rank
    return f"rank {rank}" if rank == at_start else f"rank {rank} (rank {at_start} at the start)"


FOLDER_VARIABLE = "LOCKSTEP_PROGRESS"  # set by `lockstep launch` to a folder of its own
MEETING_VARIABLE = "LOCKSTEP_MEETING"  # and to host:port of the meeting point that it holds
MEMBER_VARIABLE = "LOCKSTEP_MEMBER"  # and, in a process that replaces a lost one, to its name: "3.1"

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
_END, _UNDER_WAY = "ended", ".under-way"
_PRESENT: "list[Progress]" = []  # of this process, the last that was made
_LAYOUT = struct.Struct("<qqd")  # step, phase, seconds since 1970


def note_end(code: int) -> None:
    """Tells `lockstep launch`, where it started this process, that the run saved itself and ended with `code`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        with contextlib.suppress(OSError):
            (Path(folder) / _END).write_text(str(code), encoding="ascii")


def read_end(folder: Path) -> int:
    """What a process of this machine noted in `folder` at its end; 0 for nothing."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / _END).read_text(encoding="ascii"))
    return 0


@contextlib.contextmanager
def under_way(stays: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Have `lockstep launch` count an end of this process within it as a loss, whatever the exit code.

    Args:
        stays: asked at the end: whether an end of the process is a loss from then on too.
    """
    folder, rank = os.environ.get(FOLDER_VARIABLE), os.environ.get("RANK")
    mark = Path(folder) / f"{rank}{_UNDER_WAY}" if folder and rank else None
    _PRESENT.clear()
    with contextlib.suppress(OSError):
        if mark:
            mark.touch()
    try:
        yield
        _PRESENT.clear()  # an error that comes now is of no step
    finally:
        with contextlib.suppress(OSError):
            if mark and not stays():
                mark.unlink()


def is_under_way(folder: Path, rank: int | str, *, forget: bool = False) -> bool:
    """Whether a process of `folder` that has ended did so in the middle of a run.

    Args:
        rank: that the launcher gave it.
        forget: the mark is taken away, since a new process begins in its place.
    """
    mark = folder / f"{rank}{_UNDER_WAY}"
    found = mark.exists()
    if forget:
        mark.unlink(missing_ok=True)
    return found


class RankProgress(NamedTuple):
    """A 0-based step, what the process does in it, and since when (seconds since 1970)."""

    step: int
    phase: str
    since: float

    @classmethod
    def read(cls, path: Path) -> "RankProgress | None":
        """The place in the file `path`; None where there is none."""
        try:
            step, phase, since = _LAYOUT.unpack_from(path.read_bytes())
        except (OSError, struct.error):
            return None
        return cls(step, _PHASES[phase], since) if 0 <= phase < len(_PHASES) and since else None

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.phase != _PHASES[STARTING] else "its start, before step 0"


class Progress:
    """Written by the main thread at every step; read by any thread.

    Attributes:
        step, phase: as last given to `at`.
        since: seconds on the monotonic clock of the last `at`.
    """

    __slots__ = ("_memory", "_pack", "_time", "phase", "since", "step")

    def __init__(self, memory: "mmap.mmap | bytearray | None" = None) -> None:
        self._memory = bytearray(_LAYOUT.size) if memory is None else memory
        self._pack, self._time = _LAYOUT.pack_into, time.time
        self.at(0, STARTING)
        _PRESENT[:] = [self]

    @staticmethod
    def present() -> "RankProgress | None":
        """Return where this process's run stands, or stood last; None before its steps."""
        return _PRESENT[-1].place if _PRESENT else None

    @classmethod
    def of(cls, rank: int) -> Self:
        """The progress of this process: in the launcher's folder where it made one, else in memory.

        In the folder its name is the rank that the launcher gave the process, which it keeps where ranks change.
        """
        folder, rank = os.environ.get(FOLDER_VARIABLE), int(os.environ.get("RANK", rank))
        if not folder:
            return cls()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # it only helps to explain a failure
            handle = os.open(Path(folder) / str(rank), flags, 0o600)
            try:
                os.ftruncate(handle, _LAYOUT.size)
                return cls(mmap.mmap(handle, _LAYOUT.size))
            finally:
                os.close(handle)
        return cls()

    def at(self, step: int, phase: int) -> None:
        """This process now stands in `phase` of `step`. Costs about a microsecond."""
        self.step, self.phase, self.since = step, phase, time.monotonic()
        self._pack(self._memory, 0, step, phase, self._time())

    @property
    def place(self) -> RankProgress:
        """The same, for people."""
        return RankProgress(self.step, _PHASES[self.phase], time.time() - (time.monotonic() - self.since))
