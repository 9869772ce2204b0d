"""What a launcher is to start."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import cli
from lockstep.errors import ConfigError

__all__ = [
    "Job",
    "kills",
    "log_folder",
    "log_variables",
    "made",
]


_EVENTS = ("memory.events", "memory.oom_control")  # of cgroup v2 and v1; each has a line `oom_kill N`


def kills(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Kills for want of memory so far, counted in this process's memory groups and in all of the machine.

    0 where the system does not say (another than Linux, or a container that hides it).
    """
    return sum(_count(path) for path in _files(root, own)) + _count(Path("/proc/vmstat"))


def _files(root: Path, own: Path) -> list[Path]:
    """The files that count for the groups of this process: v2 has one tree, v1 one for each kind of resource."""
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


# What it chose and why; without each collective, which would make the files long.
_SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"


def log_folder(given: str, rest: list[str]) -> Path:
    """Where the logs go: `given`; else `logs` in the folder of the run that is started.

    Args:
        given: behind the flag, "" for nothing.
        rest: what `launch` starts.

    Raises:
        ConfigError: which run it is stands in none of the flags, and no folder was given.
    """
    if given:
        return Path(given).expanduser().absolute()
    if rest[0] == "train":
        config = cli.parse(rest[1:])
        return (Path(config.save_dir).expanduser() / config.experiment_name).absolute() / "logs"
    if rest[0] == "evaluate" and len(rest) > 1 and not rest[1].startswith("-"):
        return Path(rest[1]).expanduser().absolute() / "logs"
    raise ConfigError(
        f"--nccl-debug: which run {rest[0]} belongs to is not known here; give a folder, --nccl-debug DIR"
    )


def log_variables(folder: Path) -> dict[str, str]:
    """What NCCL is told. Its file's name has the process's host and number; where there is no GPU it writes none."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": _SUBSYSTEMS,
        "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
    }


@contextlib.contextmanager
def made(folder: Path | None) -> Iterator[None]:
    """Within it the folder is there, since NCCL makes none; what is made for it and stays empty is removed.

    Raises:
        ConfigError: it cannot be made.
    """
    if folder is None:
        yield
        return
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--nccl-debug: cannot make {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be started on this node.

    Attributes:
        command: of each process; `sys.executable` runs it.
        processes: on this node.
        nodes: fewest and most.
        backend, endpoint, options, run_id: of the rendezvous; `endpoint` is host:port.
        is_host: whether this node holds the meeting point.
        restarts: how often the processes are started again after a failure.
        least, losses: with fewer processes, or after more losses within an hour, a lost one ends the others too.
        environment: set for the processes where the user has not set it.
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
