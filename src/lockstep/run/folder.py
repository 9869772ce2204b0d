"""One experiment's folder: `save_dir/experiment_name`.

    outputs/EXPERIMENT/
      config.toml  environment.json  state.json  metrics.jsonl  timeline.jsonl  run.lock  ended.json
      report.html  logs/rank-00000.log
      checkpoints/step-00000500/

Only rank 0 writes here, but for logs and the shards of checkpoints. One process at a time owns the folder.
"""

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.files import retry_io, storage_error, write_whole
from lockstep.run.lock import RunLock
from lockstep.units import bytes_text

__all__ = ["RunFolder"]

_END = "ended.json"
_EVALUATED = "checkpoints/evaluated.json"  # goes where they go
_TRAINED = "checkpoints/trained.json"


class RunFolder:
    """The paths in a run's folder, what must hold before it is written to, and its lock."""

    def __init__(self, save_dir: str, experiment_name: str) -> None:
        self.path = Path(save_dir).expanduser() / experiment_name
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.cleared = ""  # the owner whose lock was found without its process
        self._lock = RunLock(self.path / "run.lock")

    def check_writable(self, least: int) -> None:
        """Raises ConfigError unless the folder can be written to and `least` bytes are free; leaves nothing behind."""
        above = self.nearest()
        try:
            with tempfile.TemporaryFile(dir=above):
                pass
            free = shutil.disk_usage(above).free
        except OSError as error:
            raise storage_error(error) or self.unwritable(above, error) from error
        if free < least:
            raise ConfigError(
                f"--save-dir: {above} has {bytes_text(free)} free and a checkpoint of this run takes "
                f"{bytes_text(least)}; make room, or choose another folder"
            )

    def nearest(self) -> Path:
        """Return the folder, or the nearest one above it that is there."""
        return next(path for path in (self.path, *self.path.absolute().parents) if path.exists())

    @staticmethod
    def unwritable(path: Path, error: OSError) -> ConfigError:
        """Make the error of a folder that cannot be written to."""
        return ConfigError(f"--save-dir: cannot write to {path}: {error.strerror or error}; choose another folder")

    def claim(self) -> None:
        """Makes the folder and takes its lock (see RunLock), which the system gives back whenever this process ends.

        Raises:
            ConfigError: another process holds it, or the folder cannot be written to.
            StorageError: the storage does not answer.
        """
        try:
            retry_io(lambda: self.checkpoints.mkdir(parents=True, exist_ok=True))
            self.cleared = self._lock.take(make=True)
        except OSError as error:
            raise storage_error(error) or ConfigError(
                f"--save-dir: cannot write to {self.path}: {error.strerror or error}"
            ) from error

    def check_free(self) -> None:
        """Raises ConfigError where another process holds the folder now; writes nothing."""
        with self.held():
            pass

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps runs out for a while. Raises ConfigError where one holds the folder; leaves the owner's line alone."""
        with contextlib.suppress(OSError):  # not there yet, or not readable: `claim` will say so
            self._lock.take(make=False)
        try:
            yield
        finally:
            self._lock.release(mine=False)

    @property
    def owner(self) -> tuple[str, bool]:
        """Who took the folder and did not give it back, and whether it has it now; see `RunLock.owner`."""
        return self._lock.owner()

    def release(self) -> None:
        """Gives the lock back; twice does no harm."""
        self._lock.release()

    def write_end(self, code: int, step: int, status: str, losses: str = "") -> None:
        """Leaves word of how this start of the run ended, after `step` steps: `status` as in `run.Result`, or "failed".

        `code` is for who reads it under plain torchrun: 75 or 130 where the run saved itself on a signal, else 0 or 1.
        `losses` names the ranks that this start lost on its way.
        """
        job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        end = {"status": status, "code": code, "step": step, "job": job} | ({"losses": losses} if losses else {})
        self.write(_END, json.dumps(end) + "\n")

    def read_end(self) -> dict[str, Any]:
        """What `write_end` left; {} while the run goes on, or where it was killed."""
        return self._read(_END)

    def forget_end(self) -> None:
        """Removes what `write_end` left in an earlier start."""
        (self.path / _END).unlink(missing_ok=True)

    @property
    def stop_file(self) -> Path:
        """A file of this name asks the run to save and end; it is removed when the run has done so."""
        return self.path / "STOP"

    def write(self, name: str, text: str) -> None:
        """Writes a small file of the folder so that it is there whole or not at all. Raises OSError, StorageError."""
        retry_io(lambda: write_whole(self.path / name, text))

    def write_evaluated(self, step: int, judged: dict[str, Any]) -> None:
        """Notes that the evaluation after `step` steps was made, and what it changed in the state: the checkpoint of
        that step is older. Raises LockstepError where it cannot be written, StorageError."""
        try:
            self.write(_EVALUATED, json.dumps({"step": step, **judged}) + "\n")
        except OSError as error:
            raise LockstepError(
                f"step {step}: {self.path / _EVALUATED}: {error.strerror}; make room or check the permissions of "
                "--save-dir, and start again: it goes on from the newest checkpoint"
            ) from error

    def read_evaluated(self) -> dict[str, Any]:
        """What `write_evaluated` noted last; {} for nothing."""
        return self._read(_EVALUATED)

    def write_trained(self, changes: dict[str, Any]) -> None:
        """Notes, by step, what the body of the loop after that step changed of what is trained."""
        self.write(_TRAINED, json.dumps(changes) + "\n")

    def read_trained(self) -> dict[str, Any]:
        """What `write_trained` noted last; {} for nothing."""
        return self._read(_TRAINED)

    def forget_trained(self, done: int) -> None:
        """Drops what was noted of steps after `done`, which are taken again."""
        before = self.read_trained()
        kept = {step: change for step, change in before.items() if step.isdecimal() and int(step) <= done}
        if kept != before:
            self.write_trained(kept)

    def _read(self, name: str) -> dict[str, Any]:
        """The object in a small file; {} where there is none. Raises StorageError."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(retry_io(lambda: self._text(name)))
            if isinstance(found, dict):
                return found
        return {}

    def _text(self, name: str) -> str:
        file = self.path / name
        return file.read_text(encoding="utf-8") if stat.S_ISREG(file.stat().st_mode) else ""

    def write_state(self, state: dict[str, Any]) -> None:
        """`state.json`: where the run stands, for people and scripts. A resume reads the checkpoint's own."""
        self.write("state.json", json.dumps(state, indent=1) + "\n")
