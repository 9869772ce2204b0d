"""Why a process of a run failed: written by the process, read by what launched it, the first one told to the person.

    note(error)                             in the failing process, where a launcher gave it a file for that; True
                                            where `lockstep launch` itself says this error
    Failure.read(rank, code, path, place, seen)     in the launcher, of a process that has ended
    first([...])                            the one that the others followed from

The file is torch's own error file (TORCHELASTIC_ERROR_FILE), so that plain torchrun shows the message too.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.config.secrets import mask, printable
from lockstep.distributed.progress import FOLDER_VARIABLE, Progress, RankProgress, rank_label
from lockstep.errors import LockstepError, PeerError, StorageError, UsageError, error_line

__all__ = [
    "ProcessFailure",
    "described",
    "first",
    "note",
    "note_log",
    "note_uncaught",
]


_LIMIT = 1 << 20  # bytes of a note that are believed
_HOOKED: list[Any] = []  # what showed the errors of this program that nobody caught
_NOTED: list[BaseException] = []  # the error of this process that was noted


_LOGS: list[Path] = []  # the file that has the whole traceback


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """One process's end.

    Attributes:
        rank: of the process, among those that train together.
        code: its exit code; negative: the signal that killed it.
        message: its own last word; "" where it could not say any.
        follows: it only lost the others, or relays what another rank says.
        when: seconds since 1970.
        place: where it last stood.
        shared: all ranks found the same together.
        origin: the class of its error and the line of code that raised it; "" where it could not say.
        names_nobody: it lost the others and does not say which.
        at_start: its rank when the launcher started it; None: the same.
    """

    rank: int
    code: int
    message: str = ""
    follows: bool = False
    when: float = 0.0
    place: RankProgress | None = None
    shared: bool = False
    origin: str = ""
    names_nobody: bool = False
    at_start: int | None = None

    @classmethod
    def read(cls, rank: int, code: int, path: Path, place: RankProgress | None, seen: float) -> "ProcessFailure":
        """The failure of a process that ended with `code`, from the note that it may have left at `path`."""
        note: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            note = dict(json.loads(path.read_bytes()[:_LIMIT])["lockstep"])
        message, when = str(note.get("line", "")), note.get("when")
        follows = bool(note.get("follows"))
        if code < 0 and isinstance(note.get("code"), int):  # it had said why, and crashed or was ended on its way out
            code = note["code"]
        return cls(
            rank,
            code,
            printable(message),
            follows,
            when if isinstance(when, float) else seen,
            place,
            origin=str(note.get("origin", "")) or ("exit" if code == 0 else ""),
            names_nobody=bool(note.get("names_nobody")),
        )

    def repeats(self, other: "ProcessFailure") -> bool:
        """Whether the same line of code raised both in the same step: another try would end alike.

        The loss of another rank, and a storage that did not answer, are not the line's fault.
        """
        if self.follows or self.code == StorageError.exit_code:
            return False
        step, before = (each.place.step if each.place else None for each in (self, other))
        return bool(self.origin) and (self.origin, step) == (other.origin, before)

    def __str__(self) -> str:
        at = f"at {self.place}" if self.place else "before step 0"  # where it never told its place
        who = rank_label(self.rank, self.at_start)
        if self.message and (self.follows or self.shared):
            return self.message if re.search(r"step \d", self.message) else f"{at}: {self.message}"
        if self.message:
            return f"{who} failed first {at}: {self.message}"
        if self.code < 0:
            return f"{who} was the first to end, killed by {_signal(-self.code)}, {at}"
        if self.code == 0:
            early = f"{who} ended with code 0 before the run's end, {at}"
            return f"{early}: its code, or a library, called exit, or it left its loop alone"
        return f"{who} ended first, with code {self.code} and no word, {at}"


def first(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """The failure from which the others followed: the earliest that is not itself the loss of another rank."""
    return min(failures, key=lambda failure: (failure.follows, failure.when))


def described(error: BaseException) -> str:
    """Describe an error on its own rank: one of lockstep's by its line, any other by place, class and text."""
    if isinstance(error, LockstepError):
        return str(error)
    return f"at {Progress.present() or 'the start'}: {error_line(error)}"


def note_log(path: Path) -> None:
    """Note the file to which the traceback of this process's error was written."""
    _LOGS[:] = [path]


def note(error: BaseException) -> bool:
    """Leaves word of `error` for the launcher; does nothing where none asked for it, or where it cannot be written.

    Returns:
        Whether this is bad input that `lockstep launch` now says, once for all processes, which then need not.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    told_already = isinstance(error, UsageError) and FOLDER_VARIABLE in os.environ
    if _NOTED and _NOTED[0] is error:
        return told_already
    ours = isinstance(error, LockstepError)
    bug = f"{error_line(error)}; the traceback is above{f', and in {_LOGS[-1]}' if _LOGS else ''}"
    line = mask(str(error) if ours else bug).replace("\n", " ")
    place = Progress.present()
    text = f"rank {os.environ.get('RANK', '0')}{f' at {place}' if place else ''}: {line}"  # ends torchrun's own report
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    origin = " ".join([type(error).__qualname__, *(f"{frame.filename}:{frame.lineno}" for frame in raised)])
    now, code, follows = time.time(), getattr(error, "exit_code", 1), isinstance(error, PeerError)
    # torchrun calls the earliest the cause, in whole seconds, and of equal ones the lowest rank's
    told = {"py_callstack": text, "timestamp": str(int(now) + follows)}
    content = {
        "message": {"message": line, "extraInfo": told},
        "lockstep": {
            "line": line,
            "when": now,
            "follows": follows,
            "code": code,
            "origin": origin,
            "names_nobody": isinstance(error, PeerError) and error.names_nobody,
        },
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with contextlib.suppress(OSError), open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file)
        _NOTED[:] = [error]
        return told_already
    return False


def note_uncaught() -> None:
    """Leave word of an error that leaves the program, too; one that another rank caused is one line, no traceback."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ or _HOOKED:
        return
    before = sys.excepthook
    _HOOKED.append(before)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            note(error)
        if isinstance(error, PeerError):
            print(f"lockstep: error: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
