"""One experiment's folder: `save_dir/experiment_name`.

    outputs/EXPERIMENT/
      config.toml  environment.json  state.json  metrics.jsonl  logs/rank-00000.log  run.lock  ended.json
      checkpoints/step-00000500/

Only rank 0 writes here, but for logs and the shards of checkpoints. One process at a time owns the folder.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from lockstep.errors import ConfigError
from lockstep.secrets import printable

__all__ = ["RunFolder"]

_END = "ended.json"


class RunFolder:
    """The paths in a run's folder, what must hold before it is written to, and its lock."""

    def __init__(self, save_dir: str, experiment_name: str) -> None:
        self.path = Path(save_dir).expanduser() / experiment_name
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.cleared = ""  # the owner whose lock was found without its process
        self._lock: IO[str] | None = None

    def check_writable(self, least: int) -> None:
        """Raises ConfigError unless the folder can be written to and `least` bytes are free; leaves nothing behind."""
        above = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=above):
                pass
            free = shutil.disk_usage(above).free
        except OSError as error:
            raise ConfigError(
                f"--save-dir: cannot write to {above}: {error.strerror or error}; choose another folder"
            ) from error
        if free < least:
            raise ConfigError(
                f"--save-dir: {above} has {free / 1e6:.0f} MB free and a checkpoint of this run takes "
                f"{least / 1e6:.0f} MB; make room, or choose another folder"
            )

    def claim(self) -> None:
        """Makes the folder and takes its lock, which the system gives back whenever this process ends.

        The lock is flock's, which also holds between nodes on NFS where its lock service runs. On a file system that
        has no locks at all the owner's line decides: an owner on another node, or alive on this one, is believed.

        Raises:
            ConfigError: another process holds it, or the folder cannot be written to.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(os.open(self.path / "run.lock", flags, 0o644), "r+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--save-dir: cannot write to {self.path}: {error.strerror or error}") from error
        self.cleared = self._take()  # it ended without a word, or its line would be gone
        self._lock.seek(0)
        self._lock.truncate()
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
        self._lock.flush()

    def check_free(self) -> None:
        """Raises ConfigError where another process holds the folder now; writes nothing."""
        with contextlib.suppress(OSError):  # not there yet, or not readable: `claim` will say so
            descriptor = os.open(self.path / "run.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._lock = os.fdopen(descriptor, "r+", encoding="utf-8")
            self._take()
            self.release(mine=False)

    def _take(self) -> str:
        """Takes the lock of the opened file; the line of the owner before, which ended without giving it back."""
        assert self._lock is not None
        owner = printable(self._lock.readline(300).strip())
        if not self._locked(owner):
            self.release(mine=False)
            raise ConfigError(
                f"{self.path} is in use by {owner or 'another process'}; wait for it, or choose another "
                "--experiment-name"
            )
        return owner

    def _locked(self, owner: str) -> bool:
        """Whether the lock is ours now."""
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            return not _lives(owner)  # no locks here
        return True

    def release(self, mine: bool = True) -> None:
        """Gives the lock back; twice does no harm."""
        if self._lock:
            if mine:
                with contextlib.suppress(OSError):  # a full disk: the next owner says that this one ended silently
                    self._lock.seek(0)
                    self._lock.truncate()
            self._lock.close()
            self._lock = None

    def write_end(self, code: int, step: int) -> None:
        """Leaves word for the launcher that the run saved itself after `step` steps, and ended with `code`."""
        job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        self.write(_END, json.dumps({"code": code, "step": step, "job": job}) + "\n")

    def read_end(self, job: str) -> int | None:
        """The code that the run of this job ended with; None where it left no word."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found = json.loads((self.path / _END).read_text(encoding="utf-8"))
            if found.get("job") == job and isinstance(found.get("code"), int):
                return int(found["code"])
        return None

    def forget_end(self) -> None:
        """Removes what `write_end` left in an earlier start."""
        (self.path / _END).unlink(missing_ok=True)

    @property
    def stop_file(self) -> Path:
        """A file of this name asks the run to save and end; it is removed when the run has done so."""
        return self.path / "STOP"

    def write(self, name: str, text: str) -> None:
        """Writes a small file of the folder so that it is there whole or not at all."""
        with tempfile.NamedTemporaryFile("w", dir=self.path, prefix=f".{name}.", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, self.path / name)
            except OSError as error:
                Path(file.name).unlink(missing_ok=True)
                error.filename = str(self.path / name)  # a write's own error does not say which file
                raise

    def write_state(self, state: dict[str, Any]) -> None:
        """`state.json`: where the run stands, for people and scripts. A resume reads the checkpoint's own."""
        self.write("state.json", json.dumps(state, indent=1) + "\n")


def _lives(owner: str) -> bool:
    """Whether the process that a lock's line names may still run: always, for one of another machine."""
    found = re.fullmatch(r"process (\d{1,9}) on (\S+), started .*", owner)
    if not found or found[2] != socket.gethostname():
        return bool(owner)
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
