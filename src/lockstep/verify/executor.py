"""Who makes the runs of a verification: processes started here, or the ranks of the torchrun job of this process."""

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, final

from lockstep.config.config import Config
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import ConfigError
from lockstep.verify.processes import start
from lockstep.verify.request import RunSpec
from lockstep.verify.worker import log_operations, run

__all__ = ["Executor", "LocalExecutor", "TorchrunExecutor", "executor_for", "new_folder"]


class Executor(Protocol):
    """Makes runs; every rank of a job calls each method alike, and reads the same files afterwards.

    Attributes:
        folder: a new one that all ranks see.
        is_main: whether this process prints and writes.
        world_size: the one that it has beside 1; 0: it has any.
    """

    folder: Path
    is_main: bool
    world_size: int

    def run(self, specs: Sequence[RunSpec]) -> None:
        """Makes runs of one world size, one after another. Raises RankFailed for the first that fails."""

    def log_operations(self, spec: RunSpec, step: int, name: str) -> None:
        """See `worker.log_operations`."""

    def close(self) -> None:
        """Leaves the groups."""


def executor_for(config: Config, scratch: str) -> Executor:
    """The ranks of the job, where a launcher started this process; else processes of its own."""
    if "WORLD_SIZE" in os.environ:
        return TorchrunExecutor(config, scratch)
    return LocalExecutor(config, new_folder(scratch))


@final
class LocalExecutor:
    """Starts the processes of each world size, on this machine, and ends them. Their output goes to `folder` too."""

    is_main, world_size = True, 0

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder, self._config = folder, config

    def run(self, specs: Sequence[RunSpec]) -> None:
        self._start(run, specs[0].combination.world_size, list(specs))

    def log_operations(self, spec: RunSpec, step: int, name: str) -> None:
        self._start(log_operations, 1, spec, step, name)

    def close(self) -> None:
        pass

    def _start(self, function: Callable[..., None], size: int, *args: Any) -> None:
        config = self._config
        start(function, size, args, folder=self.folder, device=config.device, patience=config.timeout)


@final
class TorchrunExecutor:
    """Inside a torchrun job: rank 0 alone runs what takes one process, while the others wait."""

    def __init__(self, config: Config, scratch: str) -> None:
        self._world = world = World.join(config.device, config.timeout)
        self.is_main, self.world_size = world.is_main, world.size
        made = on_all_ranks(world, lambda: str(new_folder(scratch)) if world.is_main else "")
        self.folder = Path(world.gather(made)[0])
        on_all_ranks(world, lambda: _check_seen(self.folder))

    def run(self, specs: Sequence[RunSpec]) -> None:
        self._do(lambda world: run(world, _silent, specs), one_process=specs[0].combination.world_size == 1)

    def log_operations(self, spec: RunSpec, step: int, name: str) -> None:
        self._do(lambda world: log_operations(world, _silent, spec, step, name), one_process=True)

    def close(self) -> None:
        self._world.leave()

    def _do(self, action: Callable[[World], None], one_process: bool) -> None:
        """An error of one rank alone ends the job: the others may stand in any collective."""
        if one_process:
            own = World(device=self._world.device)
            on_all_ranks(self._world, lambda: action(own) if self.is_main else None)
        else:
            action(self._world)
            self._world.barrier()  # collective: the traces of all ranks are there
        gc.collect()


def _silent(*_: Any) -> None:
    pass


def new_folder(scratch: str) -> Path:
    """A new folder below `scratch`, or the system's where that is "". Raises ConfigError where it cannot be made."""
    try:
        return Path(tempfile.mkdtemp(prefix="lockstep-verify-", dir=scratch or None))
    except OSError as error:
        raise ConfigError(f"--scratch {scratch}: {error.strerror or error}; choose another folder") from error


def _check_seen(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"this node does not see {path}: give --scratch a folder on a disk that all nodes share")
