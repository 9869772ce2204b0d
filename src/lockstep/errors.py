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
    └── RankLost                         the same, in a run that continues with the others

Messages name settings by flag. If the configuration was made in Python, `name_settings` replaces them by fields:

    name_settings("--engine.prefetch is not an option")      # engine_options.prefetch is not an option
"""

import importlib.util
import re
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "FINAL_CODES",
    "RESERVED_CODES",
    "SETTINGS",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DifferenceError",
    "LockstepError",
    "PeerError",
    "RankLost",
    "ResumeError",
    "SampleError",
    "StorageError",
    "UsageError",
    "error_line",
    "error_origin",
    "name_settings",
    "passed_here",
    "user_location",
    "user_traceback",
]


_PACKAGE = str(Path(__file__).parent) + "/"
_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
# Finding the package does not import it.
_torch_spec = importlib.util.find_spec("torch")
_TORCH = tuple(f"{path}/" for path in (_torch_spec.submodule_search_locations or ())) if _torch_spec else ()


class _SettingNames:
    """The names of settings in the messages of this process.

    Attributes:
        flags: name them by flag; set once the process parses flags, in a command or `Config.from_args`.
        fields: each flag -> the field in Python; modules with settings add theirs.
        typed: what the command line of this process set, by dotted name.
        defaults: dotted names that the script gives to `Config.from_args`, because it reads them itself.
    """

    def __init__(self) -> None:
        self.flags = False
        self.typed: Mapping[str, Any] = {}
        self.defaults: Collection[str] = ()
        self.fields: dict[str, str] = {}


SETTINGS = _SettingNames()
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")


def name_settings(line: str) -> str:
    """Replace flags of settings by fields if the configuration was made in Python.

    Other flags stay.
    """
    if SETTINGS.flags:
        return line
    return _FLAG.sub(lambda match: SETTINGS.fields.get(match[0], match[0]), line)


def error_origin(error: BaseException) -> str:
    """Return the module and function that raised `error`: "torch.utils.checkpoint:backward", or "".

    Libraries raise a plain RuntimeError for many things; its origin distinguishes them, whatever the wording.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames:
        return f"{frames[-1].f_globals.get('__name__', '')}:{frames[-1].f_code.co_name}"
    return ""


def error_line(error: BaseException) -> str:
    """Describe an error in one line: "ValueError: bad sample 17 (cnn.py:20)".

    The line of code is the user's, if there is one.
    """
    error = _own(error)
    location = user_location(error)
    try:
        text = (str(error).strip().splitlines() or [""])[0]
    except Exception as failed:
        # The user's own `__str__` has failed.
        text = f"its message cannot be formatted ({type(failed).__name__})"
    if isinstance(error, BaseExceptionGroup):
        text += ": " + "; ".join(error_line(member) for member in error.exceptions)
    return f"{type(error).__name__}{': ' if text else ''}{text}{location}"


def user_location(error: BaseException) -> str:
    """Return the user's last line of code in the traceback: " (cnn.py:20)".

    Without such a line, the last line of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # A dataclass's generated method has no line of its own.
    generated = ("<string>", "__init__")
    user_frames = []
    for frame in frames:
        if not _is_library(frame.filename) and (frame.filename, frame.name) != generated:
            user_frames.append(frame)
    last_frame = (user_frames or frames)[-1:]
    if last_frame:
        return f" ({Path(last_frame[0].filename).name}:{last_frame[0].lineno})"
    return ""


def passed_here(error: BaseException) -> bool:
    """Whether the error passed through lockstep's code."""
    return any(frame.f_code.co_filename.startswith(_PACKAGE) for frame, _ in traceback.walk_tb(error.__traceback__))


def user_traceback(error: BaseException) -> str:
    """Format the traceback of `error` from the user's first frame on.

    All of it, if there is no frame of the user's.
    """
    formatted = traceback.TracebackException.from_exception(_own(error))
    for part_of_chain in _chain(formatted):
        files = [frame.filename for frame in part_of_chain.stack]
        entry = 0
        for k, name in enumerate(files):
            if name.startswith(_PACKAGE):
                entry = k
                break
        first_user_frame = 0
        for k, name in enumerate(files):
            if k >= entry and not _is_library(name):
                first_user_frame = k
                break
        part_of_chain.stack[:] = part_of_chain.stack[first_user_frame:]
    return "".join(formatted.format()).rstrip()


def _own(error: BaseException) -> BaseException:
    """Return the user's StopIteration behind Python's RuntimeError.

    Python replaces a StopIteration that leaves a generator, here one of ours.
    """
    if type(error) is RuntimeError and isinstance(error.__cause__, StopIteration):
        return error.__cause__
    return error


def _chain(first: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    link: traceback.TracebackException | None = first
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _is_library(name: str) -> bool:
    """Whether a source file is lockstep's, torch's or Python's own."""
    standard = name.startswith(_STANDARD) and "site-packages" not in name
    return standard or name.startswith(("<frozen ", _PACKAGE, *_TORCH))


class LockstepError(Exception):
    """A failed run. The message is one line: what, where, and the way out.

    Attributes:
        exit_code: of the command.
        relayed: another rank raised the error and reports it; this one exits silently.
        shared: every rank raises the same error, so no rank alone is at fault.
        follows: a consequence of a failure elsewhere, which has a line of its own.
        smaller: micro-batch size with which to build the run again (`--on-oom smaller`); 0: the run fails.
    """

    exit_code = 1
    relayed = False
    shared = False
    follows = False
    smaller = 0

    def __str__(self) -> str:
        return name_settings(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints in a notebook, in place of a traceback."""
        return [f"lockstep: error: {self}{user_location(self)}"]


class UsageError(LockstepError):
    """A request that cannot be carried out; raised before anything is written."""

    exit_code = 2


class ConfigError(UsageError):
    """An invalid flag, field or config file."""


class DataError(UsageError):
    """Data that is missing, empty, too short, or has nothing to learn from."""


class SampleError(DataError):
    """Samples that cannot be loaded: one fails, or the loader processes die."""


class ResumeError(UsageError):
    """The run in this folder was started with another model, data or plan."""


class CheckpointError(UsageError):
    """A checkpoint that is missing or incomplete."""


class DifferenceError(LockstepError):
    """A difference that a check found.

    Attributes:
        goes_back: it is one of a run's replicas: another start resumes from before it.
    """

    exit_code = 3
    goes_back = False


class StorageError(LockstepError):
    """A disk or a network file system that does not answer.

    No file is known to be damaged.
    """

    exit_code = 75


# Exit codes of a command after which another start would fail in the same way.
FINAL_CODES = (UsageError.exit_code, DifferenceError.exit_code)

# Codes with a meaning for launchers and schedulers: they count only if lockstep itself noted them.
RESERVED_CODES = frozenset({UsageError.exit_code, DifferenceError.exit_code, StorageError.exit_code})


class PeerError(LockstepError):
    """A failure of another rank, or its silence for longer than the timeout.

    Attributes:
        names_nobody: the message does not name that rank.
    """

    names_nobody = False
    follows = True


class RankLost(PeerError):
    """A rank that failed, or is joining.

    The others rebuild the process group and continue.
    """
