"""Every error that lockstep raises on purpose. The command prints its one line and exits; a traceback is for bugs.

LockstepError                   exit 1   a failed run
├── UsageError                  exit 2   what was asked for cannot be done; nothing was written
│   ├── ConfigError                      a flag or a config file
│   ├── DataError                        the data: missing, empty, too short, nothing to learn from
│   ├── ResumeError                      the run in this folder was started differently
│   └── CheckpointError                  no checkpoint, or none that is whole
├── DifferenceError             exit 3   a check found a difference
├── StorageError                exit 75  a disk or a network file system does not answer: the same command goes on
└── PeerError                   exit 1   another rank failed or did not answer in time
    └── RankLost                         the same, in a run that goes on with the other ranks

Lines are written with flags, as the command has them. A person who makes the configuration in Python reads fields:

    said("--engine.prefetch 2 is no option of --engine ddp")      # engine_options.prefetch 2 is no option of engine ddp
"""

import re
import traceback

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
    "raised_in",
    "said",
]


class _Settings:
    """How this process names settings to the person; every line and error of it asks here.

    Attributes:
        flags: as flags. A process does so from when it first reads some: under a command, or with `Config.from_args`.
        fields: each setting's flag -> what it is in Python. Who has settings adds theirs.
    """

    def __init__(self) -> None:
        self.flags = False
        self.fields: dict[str, str] = {}


SETTINGS = _Settings()
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")


def said(line: str) -> str:
    """`line`, written with flags, as this process says it; what is no flag of a setting stays."""
    if SETTINGS.flags:
        return line
    return _FLAG.sub(lambda found: SETTINGS.fields.get(found[0], found[0]), line)


def raised_in(error: BaseException) -> str:
    """Name the module and the function that raised `error`: "torch.utils.checkpoint:backward"; "" for none.

    Libraries raise a plain RuntimeError or ValueError for much; the place tells them apart, whatever their words.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return f"{frames[-1].f_globals.get('__name__', '')}:{frames[-1].f_code.co_name}" if frames else ""


class LockstepError(Exception):
    """A failed run. The message is one line: what, where, and the way out.

    Attributes:
        exit_code: of the command.
        relayed: another rank had the error and says it; this one only ends.
    """

    exit_code = 1
    relayed = False

    def __str__(self) -> str:
        return said(super().__str__())


class UsageError(LockstepError):
    """What was asked for cannot be done. Raised before anything is written."""

    exit_code = 2


class ConfigError(UsageError):
    """A flag or a config file that does not hold."""


class DataError(UsageError):
    """Data that is missing, empty, too short, or has nothing to learn from."""


class ResumeError(UsageError):
    """The run in this folder was started with another model, other data or another plan."""


class CheckpointError(UsageError):
    """A checkpoint that is missing or not whole."""


class DifferenceError(LockstepError):
    """A check found a difference."""

    exit_code = 3


class StorageError(LockstepError):
    """A disk or a network file system does not answer. No file is damaged by what is known: start again later."""

    exit_code = 75


class PeerError(LockstepError):
    """Another rank failed, or did not answer within the timeout.

    Attributes:
        names_nobody: it does not say which rank that is.
    """

    names_nobody = False


class RankLost(PeerError):
    """Another rank is gone, or one is to be taken in: the ranks that are there form their groups anew and go on."""
