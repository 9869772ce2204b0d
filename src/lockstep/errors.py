"""Define every error that lockstep raises on purpose.

The command prints its one line and exits; a traceback means a bug.

LockstepError                   exit 1   a failed run
├── UsageError                  exit 2   the request cannot be carried out; nothing was written
│   ├── ConfigError                      a flag or a config file
│   ├── DataError                        the data: missing, empty, too short, nothing to learn from
│   ├── ResumeError                      the run in this folder was started differently
│   └── CheckpointError                  no checkpoint, or no complete one
├── DifferenceError             exit 3   a check found a difference
├── StorageError                exit 75  a disk or a network file system does not answer: the same command resumes
└── PeerError                   exit 1   another rank failed or did not answer in time
    └── RankLost                         the same, in a run that goes on with the other ranks

Messages are written with flags, as the command has them. A user who makes the configuration in Python reads fields:

    said("--engine.prefetch 2 is no option of --engine ddp")      # engine_options.prefetch 2 is no option of engine ddp
"""

import importlib.util
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "SETTINGS",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DifferenceError",
    "LockstepError",
    "PeerError",
    "RankLost",
    "ResumeError",
    "StorageError",
    "UsageError",
    "error_line",
    "raised_in",
    "said",
    "user_traceback",
]


_PACKAGE = str(Path(__file__).parent) + "/"
_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
_found = importlib.util.find_spec("torch")  # does not import it
_TORCH = tuple(f"{path}/" for path in (_found.submodule_search_locations or ())) if _found else ()


class _SettingNames:
    """How this process names settings in every message.

    Attributes:
        flags: as flags: once the process parses some, under a command or with `Config.from_args`.
        fields: each setting's flag -> its name in Python. Modules with settings add theirs.
    """

    def __init__(self) -> None:
        self.flags = False
        self.fields: dict[str, str] = {}


SETTINGS = _SettingNames()
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")


def said(line: str) -> str:
    """Rewrite the flags in `line` as this process names settings.

    Flags that belong to no setting stay.
    """
    if SETTINGS.flags:
        return line
    return _FLAG.sub(lambda found: SETTINGS.fields.get(found[0], found[0]), line)


def raised_in(error: BaseException) -> str:
    """Return the module and function that raised `error`: "torch.utils.checkpoint:backward"; "" for none.

    Libraries raise a plain RuntimeError or ValueError for many things; the place tells them apart, whatever their
    wording.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return f"{frames[-1].f_globals.get('__name__', '')}:{frames[-1].f_code.co_name}" if frames else ""


def error_line(error: BaseException) -> str:
    """Describe an error in one line: class, message, and the user's line of code.

    Returns:
        "ValueError: bad sample 17 (cnn.py:20)".
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if not _is_library(frame.filename)] or frames)[-1:]
    where = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    try:
        text = (str(error).strip().splitlines() or [""])[0]
    except Exception as failed:  # the user's own __str__
        text = f"its message cannot be made, {type(failed).__name__}"
    if isinstance(error, BaseExceptionGroup):
        text += ": " + "; ".join(error_line(each) for each in error.exceptions)
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def user_traceback(error: BaseException) -> str:
    """Format the traceback of `error` from the user's first frame on.

    It is complete if no frame is the user's.
    """
    found = traceback.TracebackException.from_exception(error)
    for each in _chain(found):
        files = [frame.filename for frame in each.stack]
        ours = next((k for k, name in enumerate(files) if name.startswith(_PACKAGE)), 0)
        users = next((k for k, name in enumerate(files) if k >= ours and not _is_library(name)), 0)
        each.stack[:] = each.stack[users:]
    return "".join(found.format()).rstrip()


def _chain(first: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    each: traceback.TracebackException | None = first
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def _is_library(name: str) -> bool:
    """Whether a source file is lockstep's, torch's or Python's own."""
    standard = name.startswith(_STANDARD) and "site-packages" not in name
    return standard or name.startswith(("<frozen ", _PACKAGE, *_TORCH))


class LockstepError(Exception):
    """A failed run. The message is one line: what, where, and the way out.

    Attributes:
        exit_code: of the command.
        relayed: another rank had the error and reports it; this one only ends.
    """

    exit_code = 1
    relayed = False

    def __str__(self) -> str:
        return said(super().__str__())


class UsageError(LockstepError):
    """The request cannot be carried out. Raised before anything is written."""

    exit_code = 2


class ConfigError(UsageError):
    """An invalid flag, field or config file."""


class DataError(UsageError):
    """Data that is missing, empty, too short, or has nothing to learn from."""


class ResumeError(UsageError):
    """The run in this folder was started with another model, data or plan."""


class CheckpointError(UsageError):
    """A checkpoint that is missing or incomplete."""


class DifferenceError(LockstepError):
    """A check found a difference."""

    exit_code = 3


class StorageError(LockstepError):
    """A disk or a network file system that does not answer.

    As far as is known no file is damaged: start again later.
    """

    exit_code = 75


class PeerError(LockstepError):
    """Another rank failed, or did not answer within the timeout.

    Attributes:
        names_nobody: the message does not name that rank.
    """

    names_nobody = False


class RankLost(PeerError):
    """A rank was lost or is joining: the survivors rebuild the process group and continue."""
