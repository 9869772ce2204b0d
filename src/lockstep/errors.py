"""Every error that lockstep raises on purpose. The command prints its one line and exits; a traceback is for bugs.

LockstepError                   exit 1   a failed run
├── UsageError                  exit 2   what was asked for cannot be done; nothing was written
│   ├── ConfigError                      a flag or a config file
│   ├── DataError                        the data: missing, empty, too short, nothing to learn from
│   ├── ResumeError                      the run in this folder was started differently
│   └── CheckpointError                  no checkpoint, or none that is whole
├── DifferenceError             exit 3   a check found a difference
└── PeerError                   exit 1   another rank failed or did not answer in time
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DifferenceError",
    "LockstepError",
    "PeerError",
    "ResumeError",
    "UsageError",
]


class LockstepError(Exception):
    """A failed run. The message is one line: what, where, and the way out.

    Attributes:
        exit_code: of the command.
        relayed: another rank had the error and says it; this one only ends.
    """

    exit_code = 1
    relayed = False


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


class PeerError(LockstepError):
    """Another rank failed, or did not answer within the timeout."""
