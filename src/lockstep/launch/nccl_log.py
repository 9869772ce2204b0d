"""`launch --nccl-debug [DIR]`: NCCL's own log, a file a process, in the run's folder.

variables = log_variables(log_folder("", ["train", "--experiment-name", "a"]))      # NCCL_DEBUG=INFO, its file, ...
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lockstep.config import options
from lockstep.errors import ConfigError

__all__ = ["log_folder", "log_variables", "made"]

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
        config = options.parse(rest[1:])
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
