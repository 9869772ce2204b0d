"""The variables that a launcher sets, and processes that a scheduler started without one.

rank = number_of("RANK", 0)                 # of the environment; 0 where it is not set
check_launched(os.environ)                  # ConfigError under `srun -n8 lockstep train`
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from lockstep.errors import ConfigError

__all__ = ["Unlaunched", "check_launched", "number_of", "unlaunched"]

_STARTERS = (
    # process, processes, nodes of the step, by whom
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "srun"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "", "mpirun"),
    ("PMI_RANK", "PMI_SIZE", "", "mpirun"),
)


class Unlaunched(NamedTuple):
    """Processes of one job that know nothing of each other.

    Attributes:
        problem: who started how many.
        remedy: the command that was meant.
    """

    problem: str
    remedy: str


def number_of(name: str, least: int) -> int:
    """Read a launcher's number; `least` where it is not set. Raises ConfigError for anything else."""
    text = os.environ.get(name, str(least))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(
            f"the environment variable {name} is '{text}'; a launcher (torchrun) sets it to a number from {least}"
        )
    return int(text)


def unlaunched(environ: Mapping[str, str]) -> Unlaunched | None:
    """Find whether a scheduler started several processes that would each train alone.

    The shell of an allocation or of a batch script is one task, whatever SLURM_NTASKS says, so only the tasks of a step
    count.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return None
    for process, size, nodes, starter in _STARTERS:
        count = _count(environ, size)
        if process in environ and count > 1:
            return Unlaunched(
                f"{starter} started {count} processes, and RANK and WORLD_SIZE are not set: each would train alone",
                f"have {starter} start one torchrun or `lockstep launch` a node, "
                f"{_command(count, _count(environ, nodes), starter)}; for separate runs unset {process}",
            )
    return None


def check_launched(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where a scheduler started several processes without a launcher."""
    found = unlaunched(environ)
    if found:
        raise ConfigError(f"{found.problem}; {found.remedy}")


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "1")
    return int(text) if text.isascii() and text.isdigit() else 1


def _command(processes: int, nodes: int, starter: str) -> str:
    if starter != "srun" or nodes == 1:
        return f"as in `{starter} -n1 lockstep launch --nproc-per-node {processes} -- train ...` on one node"
    host = "$(scontrol show hostnames | head -n1)"
    return (
        f"as in `srun -N{nodes} --ntasks-per-node=1 sh -c 'lockstep launch --nnodes {nodes} --node-rank $SLURM_NODEID "
        f"--master-addr {host} --nproc-per-node {max(1, processes // nodes)} -- train ...'`"
    )
