"""Record why a process failed; its launcher reports the first failure to the user.

    note(error)                             # in the failing process; True if `lockstep launch` reports this error
    ProcessFailure.read(rank, code, path, place, end_time)  # in the launcher, after the process has ended
    first_failure([...])                    # the failure that caused the others

The note goes to torch's own error file (TORCHELASTIC_ERROR_FILE), so plain torchrun shows the message too.
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
from lockstep.errors import LockstepError, PeerError, StorageError, error_line

__all__ = [
    "ProcessFailure",
    "describe_error",
    "first_failure",
    "note",
    "note_log",
    "note_uncaught",
]


_LIMIT = 1 << 20  # bytes to read from a note, at most
_OLD_HOOK: list[Any] = []  # the former excepthook
_LAST_ERROR: list[BaseException] = []  # the error of this process that has a note
_LOGS: list[Path] = []  # the file with the full traceback


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """The end of one process.

    Attributes:
        rank: of the process, among those that train together.
        code: its exit code; negative: the signal that killed it.
        message: of its note; "" if none.
        follows: a consequence: it only lost the others, or relays another rank's error.
        when: seconds since 1970.
        place: its last known progress.
        shared: all ranks raised this error.
        origin: the class of its error and the line of code that raised it; "" if unknown.
        names_nobody: it lost other ranks and does not know which.
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
    def read(cls, rank: int, code: int, path: Path, place: RankProgress | None, end_time: float) -> "ProcessFailure":
        """Read a process's failure from its exit code and its note, if there is one."""
        note: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            note = dict(json.loads(path.read_bytes()[:_LIMIT])["lockstep"])
        message, when = str(note.get("line", "")), note.get("when")
        follows = bool(note.get("follows"))
        if code < 0 and isinstance(note.get("code"), int):  # it wrote a note, then crashed or was killed on its way out
            code = note["code"]
        return cls(
            rank,
            code,
            printable(message),
            follows,
            when if isinstance(when, float) else end_time,
            place,
            origin=str(note.get("origin", "")) or ("exit" if code == 0 else ""),
            names_nobody=bool(note.get("names_nobody")),
        )

    def repeats(self, earlier: "ProcessFailure") -> bool:
        """Whether the same line of code raised both in the same step.

        Then a retry would fail again. Excludes the loss of another rank and storage that did not respond, which are not
        the line's fault.
        """
        if self.follows or self.code == StorageError.exit_code:
            return False
        step, before = (each.place.step if each.place else None for each in (self, earlier))
        return bool(self.origin) and (self.origin, step) == (earlier.origin, before)

    def __str__(self) -> str:
        at = f"at {self.place}" if self.place else "before step 0"  # if it recorded no progress
        label = rank_label(self.rank, self.at_start)
        if self.message and (self.follows or self.shared):
            return self.message if re.search(r"step \d", self.message) else f"{at}: {self.message}"
        if self.message:
            return f"{label} failed first {at}: {self.message}"
        if self.code < 0:
            return f"{label} was the first to end, killed by {_signal(-self.code)}, {at}"
        if self.code == 0:
            early = f"{label} ended with code 0 before the run's end, {at}"
            return f"{early}: its code, or a library, called exit, or it left its loop alone"
        return f"{label} ended first, with code {self.code} and no message, {at}"


def first_failure(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """Return the cause: the earliest failure that is not the loss of another rank."""
    return min(failures, key=lambda failure: (failure.follows, failure.when))


def describe_error(error: BaseException) -> str:
    """Describe an error: lockstep's by its line, others by place, class and text."""
    if isinstance(error, LockstepError):
        return str(error)
    return f"at {Progress.present() or 'the start'}: {error_line(error)}"


def note_log(path: Path) -> None:
    """Register the file that has the traceback of this process's error."""
    _LOGS[:] = [path]


def note(error: BaseException) -> bool:
    """Write a note of `error` for the launcher.

    Does nothing without a launcher that requests it, or if it cannot be written.

    Returns:
        Whether `lockstep launch` prints this error's line once for all processes, so that this one need not.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    launcher_prints = isinstance(error, LockstepError) and FOLDER_VARIABLE in os.environ
    if _LAST_ERROR and _LAST_ERROR[0] is error:
        return launcher_prints
    is_typed = isinstance(error, LockstepError)
    bug = f"{error_line(error)}; the traceback is above{f', and in {_LOGS[-1]}' if _LOGS else ''}"
    line = mask(str(error) if is_typed else bug).replace("\n", " ")
    place = Progress.present()
    text = f"rank {os.environ.get('RANK', '0')}{f' at {place}' if place else ''}: {line}"  # ends torchrun's report
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    origin = " ".join([type(error).__qualname__, *(f"{frame.filename}:{frame.lineno}" for frame in raised)])
    now, code, follows = time.time(), getattr(error, "exit_code", 1), isinstance(error, PeerError)
    # torchrun reports the earliest as the cause, in whole seconds, and of equal ones the lowest rank's
    extra_info = {"py_callstack": text, "timestamp": str(int(now) + follows)}
    content = {
        "message": {"message": line, "extraInfo": extra_info},
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
        _LAST_ERROR[:] = [error]
        return launcher_prints
    return False


def note_uncaught() -> None:
    """Write notes of uncaught errors too; one caused by another rank prints a line, not a traceback."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ or _OLD_HOOK:
        return
    before = sys.excepthook
    _OLD_HOOK.append(before)

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
