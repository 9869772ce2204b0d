"""Who runs the jobs of a proof: processes started here, or the ranks of the torchrun job that this process is in."""

import gc
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, final

from lockstep.config import Config
from lockstep.diagnose.processes import start
from lockstep.diagnose.trial import Job, journal, run
from lockstep.errors import ConfigError
from lockstep.world import World, together

__all__ = ["Executor", "Joined", "Started", "launched"]


class Executor(Protocol):
    """Runs trials; every rank of a job calls each method alike, and reads the same files afterwards.

    Attributes:
        is_main: whether this process prints and writes.
    """

    is_main: bool

    def folder(self, scratch: str) -> Path:
        """A new folder that all ranks see."""

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs jobs of one world size, one after another. Raises RankFailed for the first that fails."""

    def journal(self, job: Job, step: int, name: str) -> None:
        """See `trial.journal`."""

    def close(self) -> None:
        """Removes the processes and leaves the groups."""


def launched() -> bool:
    """Whether a launcher started this process."""
    return "WORLD_SIZE" in os.environ


@final
class Started:
    """Starts the processes of each world size, on this machine, and ends them."""

    is_main = True

    def __init__(self, config: Config) -> None:
        self._config, self._folder = config, Path()

    def folder(self, scratch: str) -> Path:
        return self.use(_new_folder(scratch))

    def use(self, folder: Path) -> Path:
        """Takes a folder that is there; the ranks' output goes there too."""
        self._folder = folder
        return folder

    def run(self, jobs: Sequence[Job]) -> None:
        self._start(run, jobs[0].combination.world_size, (list(jobs),))

    def journal(self, job: Job, step: int, name: str) -> None:
        self._start(journal, 1, (job, step, name))

    def close(self) -> None:
        pass

    def _start(self, function: Any, size: int, args: tuple[Any, ...]) -> None:
        config = self._config
        start(function, size, args, folder=self._folder, device=config.device, patience=config.timeout)


@final
class Joined:
    """Inside a torchrun job: rank 0 alone runs what takes one process, while the others wait."""

    def __init__(self, config: Config) -> None:
        self.world = World.join(config.device, config.timeout)
        self.is_main = self.world.is_main

    def folder(self, scratch: str) -> Path:
        made = together(self.world, lambda: str(_new_folder(scratch)) if self.is_main else None)
        path = Path(self.world.gather(made)[0])
        together(self.world, lambda: _check_seen(path))
        return path

    def run(self, jobs: Sequence[Job]) -> None:
        self._do(lambda world: run(world, _silent, jobs), alone=jobs[0].combination.world_size == 1)

    def journal(self, job: Job, step: int, name: str) -> None:
        self._do(lambda world: journal(world, _silent, job, step, name), alone=True)

    def close(self) -> None:
        self.world.leave()

    def _do(self, action: Any, alone: bool) -> None:
        """An error of one rank alone ends the job: the others may stand in any collective."""
        if alone:
            own = World(device=self.world.device)
            together(self.world, lambda: action(own) if self.is_main else None)
        else:
            action(self.world)
            self.world.barrier()  # collective: the traces of all ranks are there
        gc.collect()


def _silent(*_: Any) -> None:
    pass


def _new_folder(scratch: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="lockstep-verify-", dir=scratch or None))
    except OSError as error:
        raise ConfigError(f"--scratch {scratch}: {error.strerror or error}; choose another folder") from error


def _check_seen(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"this node does not see {path}: give --scratch a folder on a disk that all nodes share")
