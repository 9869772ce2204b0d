"""One experiment's folder: `save_dir/experiment_name`.

    outputs/EXPERIMENT/
      config.toml  environment.json  state.json  metrics.jsonl  logs/rank-00000.log  run.lock
      checkpoints/step-00000500/

Only rank 0 writes here, but for logs and the shards of checkpoints. One process at a time owns the folder.
"""

import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from lockstep.errors import ConfigError

__all__ = ["RunFolder"]


class RunFolder:
    """The paths in a run's folder, what must hold before it is written to, and its lock."""

    def __init__(self, save_dir: str, experiment_name: str) -> None:
        self.path = Path(save_dir).expanduser() / experiment_name
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
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

        Raises ConfigError where another process holds it.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "run.lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--save-dir: cannot write to {self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            owner = self._lock.readline().strip() or "another process"
            self.release()
            raise ConfigError(
                f"{self.path} is in use by {owner}; wait for it, or choose another --experiment-name"
            ) from error
        self._lock.truncate(0)
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
        self._lock.flush()

    def release(self) -> None:
        """Gives the lock back; twice does no harm."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def write(self, name: str, text: str) -> None:
        """Writes a small file of the folder so that it is there whole or not at all."""
        with tempfile.NamedTemporaryFile("w", dir=self.path, prefix=f".{name}.", delete=False) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self.path / name)

    def write_state(self, state: dict[str, Any]) -> None:
        """`state.json`: where the run stands, for people and scripts. A resume reads the checkpoint's own."""
        self.write("state.json", json.dumps(state, indent=1) + "\n")
