"""Record why a process failed; its launcher reports the first failure to the user.

    note(error)                             # in the failing process, for its launcher
    report(error)                           # the same, and print it, once on this node
    print_uncaught()                        # the same for what a script does not catch, in place of a traceback
    ProcessFailure.read(rank, code, path, place, end_time)  # in the launcher, after the process has ended
    first_failure([...])                    # the failure that caused the others

The note goes to torch's own error file (TORCHELASTIC_ERROR_FILE), so plain torchrun shows the message too. The error
files of a node's ranks are neighbours: there the ranks see, without waiting for each other, which one prints an error
that all of them raise.
"""

import contextlib
import hashlib
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
from lockstep.distributed.progress import FOLDER_VARIABLE, Progress, RankProgress, own_label, rank_label
from lockstep.errors import (
    RESERVED_CODES,
    DifferenceError,
    LockstepError,
    PeerError,
    StorageError,
    UsageError,
    error_line,
    passed_here,
    user_location,
    user_traceback,
)

__all__ = [
    "ProcessFailure",
    "add_place",
    "describe_error",
    "first_failure",
    "note",
    "note_interrupt",
    "note_log",
    "print_uncaught",
    "process_code",
    "report",
    "report_interrupt",
]


# Origin of an end with code 0.
_EXIT = "exit"
# Largest number of bytes read from a note.
_LIMIT = 1 << 20
# Prefixes of the files that mark an error as printed by a rank of this node: a cause, or the loss of a rank.
_CAUSE = "lockstep-cause"
_LOST = "lockstep-lost"
# If set, lockstep's errors are printed with their tracebacks.
_DEBUG_VARIABLE = "LOCKSTEP_DEBUG"
# The former excepthook.
_OLD_HOOK: list[Any] = []
# The line for an interrupted run; "": it has been printed.
_INTERRUPT: list[str] = []
# The error of this process that has a note.
_LAST_ERROR: list[BaseException] = []
# The file with the full traceback.
_LOGS: list[Path] = []


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
        goes_back: its code is 3, and another start resumes from before the difference.
        host: of its node, where a run has several; "" on one.
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
    goes_back: bool = False
    host: str = ""

    @classmethod
    def read(
        cls, rank: int, code: int, path: Path, place: RankProgress | None, end_time: float, *, run_code: int = 0
    ) -> "ProcessFailure":
        """Read a process's failure from its exit code and its note, if there is one.

        A reserved code that neither the note nor the run's end has is the user's, and counts as 1.

        Args:
            run_code: the code that the run noted at its end; 0: none.
        """
        note: dict[str, Any] = {}
        # The process may have died while it wrote the note, or a library may have written the file.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            note = dict(json.loads(path.read_bytes()[:_LIMIT])["lockstep"])
        message = str(note.get("line", ""))
        when = note.get("when")
        follows = bool(note.get("follows"))
        # Python ends with this code after a KeyboardInterrupt before the steps. Count it as the signal.
        if code == 128 + signal.SIGINT and not note:
            code = -signal.SIGINT
        # The process crashed on its way out, or did not catch the error: its note has the code that the error asks for.
        ended_by_python = code < 0 or code == 1
        if ended_by_python and isinstance(note.get("code"), int):
            code = note["code"]
        # Schedulers act on reserved codes, so one counts only if lockstep itself chose it.
        if code in RESERVED_CODES and code not in (note.get("code"), run_code):
            message = message or f"its code, or a library, ended the process with code {code}, before the run's end"
            code = 1
        return cls(
            rank,
            code,
            printable(message),
            follows,
            when if isinstance(when, float) else end_time,
            place,
            shared=bool(note.get("shared")),
            origin=str(note.get("origin", "")) or (_EXIT if code == 0 else ""),
            names_nobody=bool(note.get("names_nobody")),
            goes_back=bool(note.get("goes_back")),
        )

    @property
    def is_final(self) -> bool:
        """Whether another start would fail the same way.

        True for bad input, and for a difference without a checkpoint from before it.
        """
        return self.code == UsageError.exit_code or (self.code == DifferenceError.exit_code and not self.goes_back)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code; 3 only if final.

        A scheduler does not start a run that ended with 3 again.
        """
        if self.goes_back:
            return 1
        return max(self.code, 1)

    @property
    def is_error(self) -> bool:
        """Whether an exception ended the process, other than the loss of another rank."""
        return bool(self.origin) and self.origin != _EXIT and not self.follows

    def repeats(self, earlier: "ProcessFailure") -> bool:
        """Whether the same line of code raised both in the same step.

        Then a retry would fail again. Excludes the loss of another rank and storage that did not respond, which are not
        the line's fault.
        """
        if self.follows or self.code == StorageError.exit_code:
            return False
        step, before = (failure.place.step if failure.place else None for failure in (self, earlier))
        return bool(self.origin) and (self.origin, step) == (earlier.origin, before)

    def __str__(self) -> str:
        # A process that recorded no progress failed before its first step.
        at = f"at {self.place}" if self.place else "before step 1"
        label = rank_label(self.rank, self.at_start, self.host)
        if self.message and (self.follows or self.shared):
            if re.search(r"step \d", self.message):
                return self.message
            return f"{at}: {self.message}"
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
    # The launcher prints lockstep's errors as its last line. The traceback of any other error is printed here.
    launcher_prints = isinstance(error, LockstepError) and FOLDER_VARIABLE in os.environ
    if _LAST_ERROR and _LAST_ERROR[0] is error:
        return launcher_prints
    is_typed = isinstance(error, LockstepError)
    bug = f"{error_line(error)}; the traceback is above{f', and in {_LOGS[-1]}' if _LOGS else ''}"
    line = mask(str(error) if is_typed else bug).replace("\n", " ")
    progress = Progress.present()
    # torchrun ends its report with this text.
    text = f"rank {os.environ.get('RANK', '0')}{f' at {progress}' if progress else ''}: {line}"
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    origin = " ".join([type(error).__qualname__, *(f"{frame.filename}:{frame.lineno}" for frame in raised)])
    time_now = time.time()
    code = getattr(error, "exit_code", 1)
    follows = isinstance(error, PeerError)
    # torchrun reports the earliest error as the cause, in whole seconds, and of equal ones the lowest rank's.
    extra_info = {"py_callstack": text, "timestamp": str(int(time_now) + follows)}
    content = {
        "message": {"message": line, "extraInfo": extra_info},
        "lockstep": {
            "line": line,
            "when": time_now,
            "follows": follows,
            "code": code,
            "origin": origin,
            "names_nobody": isinstance(error, PeerError) and error.names_nobody,
            "shared": getattr(error, "shared", False),
            "goes_back": isinstance(error, DifferenceError) and error.goes_back,
        },
    }
    # O_EXCL keeps the first note; O_NOFOLLOW refuses a link that another user may have placed.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with contextlib.suppress(OSError), open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file)
        _LAST_ERROR[:] = [error]
        return launcher_prints
    return False


def report(error: BaseException) -> None:
    """Note an error that ends this process, and print it once.

    Does not print what the launcher or another rank prints.

    One of lockstep's is a line; any other is the user's part of its traceback, then a line with rank and step.
    """
    launcher_prints = note(error)
    if isinstance(error, LockstepError):
        _print_line(error, launcher_prints, "")
        return
    if _is_printed(error):
        return
    # Python creates the list of notes with the first note.
    with contextlib.suppress(AttributeError):
        # The last line names rank and step, so the traceback need not.
        error.__notes__[:] = [entry for entry in error.__notes__ if not isinstance(entry, _FailureNote)]
    print(mask(user_traceback(error)), file=sys.stderr)
    # Under a launcher its last line has this text.
    if FOLDER_VARIABLE not in os.environ:
        print(f"lockstep: error: {_place()}: {mask(error_line(error))}", file=sys.stderr)


def _print_line(error: LockstepError, launcher_prints: bool, location: str) -> None:
    """Print an error's line, unless it is printed elsewhere; with LOCKSTEP_DEBUG its traceback first."""
    debug = bool(os.environ.get(_DEBUG_VARIABLE))
    if error.relayed or (launcher_prints and not debug) or _is_printed(error):
        return
    if debug:
        print(mask("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    if not launcher_prints:
        print(f"lockstep: error: {error}{location}", file=sys.stderr)


def note_interrupt(line: str | None) -> None:
    """Register what to print if Ctrl-C ends this process.

    Args:
        line: reports what was saved; "": it has been printed; None: no run was interrupted.
    """
    _INTERRUPT[:] = [] if line is None else [line]


def report_interrupt() -> None:
    """Print that Ctrl-C ended this process, unless something else prints it.

    That is the launcher, `lockstep trace|profile|...` or another rank.
    """
    attached = any(name in os.environ for name in ("LOCKSTEP_TRACE", "LOCKSTEP_RECORDER"))
    if _INTERRUPT:
        line = _INTERRUPT[-1]
    else:
        line = "" if attached else "interrupted"
    if line and FOLDER_VARIABLE not in os.environ and not _is_printed(KeyboardInterrupt()):
        print(f"lockstep: {line}", file=sys.stderr)


def add_place(error: Exception) -> None:
    """Add rank and step to the traceback of a user's error."""
    if not isinstance(error, LockstepError):
        error.add_note(_place())


def print_uncaught() -> None:
    """Print once on this node what a script does not catch.

    Prints lockstep's errors, and Ctrl-C in a run, as one line.

    Other errors are noted for the launcher, and keep their traceback. One of lockstep's ends the process with its own
    exit code. `import lockstep` calls it; a second call does nothing.
    """
    if _OLD_HOOK:
        return
    before = sys.excepthook
    _OLD_HOOK.append(before)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, LockstepError):
            if error.__cause__ or isinstance(error, PeerError):
                location = ""
            else:
                location = user_location(error)
            _print_line(error, note(error), location)
            # Python would exit with 1. At the prompt of an interactive Python the user continues.
            if not hasattr(sys, "ps1"):
                raise SystemExit(error.exit_code)
            return
        is_launched = FOLDER_VARIABLE in os.environ
        if isinstance(error, KeyboardInterrupt) and (_INTERRUPT or is_launched or passed_here(error)):
            report_interrupt()
            return
        if isinstance(error, Exception):
            note(error)
        if not _is_printed(error):
            before(kind, error, trace)

    sys.excepthook = hook


def process_code(code: int) -> int:
    """Return the exit code for the process of a run that ended with `code`.

    It is 0 under torchrun, which would restart the run or report a failure. The run's folder has the real code;
    `lockstep launch` receives and returns it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    return code


class _FailureNote(str):
    """A note of rank and step, as Python prints it below a traceback."""

    __slots__ = ()


def _place() -> _FailureNote:
    """Return where this process is: "at step 7 (saving)"; among several, with its rank."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        who = f"{own_label()} "
    else:
        who = ""
    return _FailureNote(f"{who}at {Progress.present() or 'the start'}")


def _is_printed(error: BaseException) -> bool:
    """Whether another rank of this node has printed this error or its cause.

    The first rank to create a file for the error prints it, so none waits for another, which may be gone.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    # torch names a rank's folder by its local rank. Any other path is not a folder that the ranks share.
    if not error_file.name or error_file.parent.name != os.environ.get("LOCAL_RANK"):
        return False
    # The loss of a rank is a consequence: print nothing if some rank has printed a cause.
    if isinstance(error, PeerError) and any(error_file.parents[1].glob(f"{_CAUSE}-*")):
        return True
    if isinstance(error, LockstepError):
        line = str(error)
    else:
        line = error_line(error)
    digest = hashlib.sha256(line.encode(errors="replace")).hexdigest()[:16]
    name = f"{_LOST if isinstance(error, PeerError) else _CAUSE}-{digest}"
    try:
        os.close(os.open(error_file.parents[1] / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return True
    except OSError:
        # The folder is gone, or the disk is full: print the error rather than lose it.
        return False
    return False


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
