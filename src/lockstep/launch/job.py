"""Describe a launcher's job, its log files, and the kernel's out-of-memory kills.

`Job` is what `lockstep launch` starts on this node. `log_folder`, `log_variables` and `create_log_folder` set up NCCL's
logs. `count_oom_kills` distinguishes a lack of memory from other causes of a kill.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config import cli
from lockstep.config.fields import is_url
from lockstep.errors import ConfigError
from lockstep.launch.secret import NO_SECRET, Secret

__all__ = [
    "Job",
    "count_oom_kills",
    "create_log_folder",
    "log_folder",
    "log_variables",
]


# Files of cgroup v2 and v1; each has a line `oom_kill N`.
_EVENTS = ("memory.events", "memory.oom_control")


@dataclass(frozen=True, slots=True)
class Job:
    """The processes to start on this node.

    Attributes:
        command: arguments of `sys.executable` for each process.
        processes: number on this node.
        nodes: fewest and most.
        backend, endpoint, options, run_id: of the rendezvous; `endpoint` is host:port.
        is_host: whether this node serves the meeting point.
        restarts: how often the processes are restarted after a failure.
        environment: variables for the processes; those that the user set win.
        least, losses: with fewer processes, or after more losses within an hour, a loss ends the others too.
        shares: the cores of each process, by local rank; () if they are not bound.
        stderr: folder for a file of each rank's standard error; None: it is the launcher's.
        secret: of the launchers of several nodes; `run_secret` signs what they send each other.
        node_rank: --node-rank, for messages; 0 where none was given.
    """

    command: list[str]
    processes: int
    nodes: tuple[int, int]
    backend: str
    endpoint: str
    options: dict[str, str]
    run_id: str
    is_host: bool
    restarts: int
    environment: dict[str, str]
    least: int = 1
    losses: int = 0
    shares: tuple[frozenset[int], ...] = ()
    stderr: Path | None = None
    secret: Secret = field(default=NO_SECRET, repr=False)
    node_rank: int = 0

    @property
    def run_secret(self) -> Secret:
        """The secret of this --rdzv-id alone.

        Nothing signed in another run with the same secret is accepted.
        """
        if self.secret:
            return self.secret.derive(f"run {self.run_id}")
        return self.secret


def count_oom_kills(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Count the kernel's out-of-memory kills so far, in this process's cgroups and machine-wide.

    Returns:
        0 if the system does not report it (other than Linux, or a container that hides it).
    """
    # A container may hide either count, and one that is missing counts as 0.
    return sum(_count(path) for path in _files(root, own)) + _count(Path("/proc/vmstat"))


def _files(root: Path, own: Path) -> list[Path]:
    """Return the event files of this process's cgroups.

    Version 2 has one tree, version 1 one for each kind of resource.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        number, kinds, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" or "memory" in kinds.split(","):
            for base in (root, root / "memory", root / "unified"):
                folders += [base / path.lstrip("/"), base]
    return [folder / name for folder in dict.fromkeys(folders) for name in _EVENTS]


def _count(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0


# NCCL's choices and their reasons. Collectives would fill the files.
_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"


def log_folder(flag: str, command: list[str]) -> Path:
    """Return the folder of the logs: `flag`, else `logs` in the run's folder.

    Args:
        flag: the value of --nccl-debug, "" for none.
        command: the command that `launch` starts.

    Raises:
        ConfigError: no folder was given, and the command does not name its run.
    """
    if flag:
        return Path(flag).expanduser().absolute()
    if command[0] == "train":
        config = cli.parse(command[1:])
        return (Path(config.local_dir).expanduser() / config.experiment_name).absolute() / "logs"
    if command[0] == "evaluate" and len(command) > 1 and not (command[1].startswith("-") or is_url(command[1])):
        return Path(command[1]).expanduser().absolute() / "logs"
    raise ConfigError(f"--nccl-debug: the run of {command[0]} is not known here; name a folder: --nccl-debug DIR")


def log_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables for NCCL's logs.

    Each file's name has the process's host and number; without a GPU NCCL writes none.
    """
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": _SUBSYSTEMS,
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
    }


@contextlib.contextmanager
def create_log_folder(folder: Path | None) -> Iterator[None]:
    """Create the folder, since NCCL does not; remove new folders that stay empty.

    Raises:
        ConfigError: the folder cannot be created.
    """
    if folder is None:
        yield
        return
    new = []
    for path in (folder, *folder.parents):
        if not path.exists():
            new.append(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--nccl-debug: cannot create {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        for path in new:
            # The folder is not empty, so it stays.
            with contextlib.suppress(OSError):
                path.rmdir()
