"""Read the rank of a process that srun started, or refuse unnumbered processes.

read_starter(os.environ)                    # `srun -n8 lockstep train`: sets RANK, WORLD_SIZE, MASTER_ADDR, ...
task = SlurmTask.read(os.environ)           # rank, size, local rank, first host, port; None: not one of several tasks

`find_launch_mistake` describes processes that a starter did not number, with the command to use instead.
"""

import contextlib
import re
import socket
import subprocess
import zlib
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from lockstep.distributed.cpus import CORES_VARIABLE, cores
from lockstep.distributed.launcher import OPENCV_THREADS
from lockstep.errors import ConfigError

__all__ = ["SlurmTask", "find_launch_mistake", "node_address", "read_starter"]


_STARTERS = (
    # Variables of the process's number, the number of processes, the step's nodes; then the starter.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "srun"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "", "mpirun"),
    ("PMI_RANK", "PMI_SIZE", "", "mpirun"),
    # Kubeflow Trainer and lockstep's own JobSet set these.
    ("PET_NODE_RANK", "PET_NNODES", "PET_NNODES", "Kubernetes"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_NODES", "SkyPilot"),
)

_ONE_A_NODE = {
    # `lockstep launch` reads the PET_ variables.
    "Kubernetes": "lockstep launch",
    "SkyPilot": "lockstep launch --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK --master-addr ...",
}


class LaunchMistake(NamedTuple):
    """Processes of one job that would each train alone.

    Attributes:
        problem: the starter and the number of processes.
        remedy: the command to use instead.
    """

    problem: str
    remedy: str


class SlurmTask(NamedTuple):
    """This process among the tasks that srun started.

    Attributes:
        rank, size: of the task, over all nodes of the step.
        local_rank, local_size: the same on this node.
        nodes: number of nodes of the step.
        host: name of the first node, where task 0 runs.
        port: derived from job, step and requeue, so that neighbours on a node differ.
        step: "JOB.STEP.REQUEUES", unique over time.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: int
    host: str
    port: int
    step: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "SlurmTask | None":
        """Read srun's variables; None for a step of one task, or if some are missing.

        The shell of an allocation and a batch script are one task for any SLURM_NTASKS.
        """
        if _count(environ, "SLURM_STEP_NUM_TASKS") < 2 or _count(environ, "SLURM_HET_SIZE") > 1:
            return None
        try:
            numbers = [int(environ[f"SLURM_{name}"]) for name in _TASK_NUMBERS]
            rank, size, local_rank, node, nodes = numbers
            counts = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
            host = _first_host(environ["SLURM_STEP_NODELIST"])
            step = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}.{environ.get('SLURM_RESTART_COUNT') or 0}"
            port = _PORTS[zlib.crc32(step.encode()) % len(_PORTS)]
            return cls(rank, size, local_rank, counts[node], nodes, host, port, step)
        except (KeyError, ValueError, IndexError):
            return None


_TASK_NUMBERS = ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID", "STEP_NUM_NODES")
# Ports below those that the system gives to outgoing connections.
_PORTS = range(10000, 30000)
_SCONTROL_SECONDS = 20.0


def _tasks_per_node(text: str) -> list[int]:
    """Expand "2(x3),1" to [2, 2, 2, 1]."""
    counts: list[int] = []
    for entry in text.split(","):
        count, _, times = entry.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def _first_host(nodes: str) -> str:
    """Return the first host of a list such as "gpu[003-004,7],login1"."""
    # Split at the first comma outside brackets; then keep the first number inside them.
    name = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", name)


def node_address(host: str) -> str:
    """Return a name or address under which a Slurm node can be reached.

    Where the node's name does not resolve (clouds), it is the address that Slurm itself uses.
    """
    with contextlib.suppress(OSError):
        socket.getaddrinfo(host, None)
        return host
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "node", "--oneliner", host]
        output = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True).stdout
        if match := re.search(r"\bNodeAddr=(\S+)", output):
            return match[1]
    return host


def read_starter(environ: MutableMapping[str, str]) -> None:
    """Set a launcher's variables from srun's, if srun started the ranks themselves.

    Does nothing for a single process, or under a launcher. MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS stay if set.

    Raises:
        ConfigError: another starter started several processes, or srun did without its usual variables.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    task = SlurmTask.read(environ)
    if task is None:
        mistake = find_launch_mistake(environ)
        if mistake:
            raise ConfigError(f"{mistake.problem}; {mistake.remedy}")
        return
    environ.setdefault("MASTER_ADDR", node_address(task.host))
    environ.setdefault("MASTER_PORT", str(task.port))
    environ.setdefault("OMP_NUM_THREADS", str(_threads(environ, task)))
    environ.setdefault(OPENCV_THREADS, "1")
    environ.update(
        RANK=str(task.rank),
        WORLD_SIZE=str(task.size),
        LOCAL_RANK=str(task.local_rank),
        LOCAL_WORLD_SIZE=str(task.local_size),
    )
    if node := _count(environ, "SLURM_CPUS_ON_NODE"):
        # Slurm may have bound this task to a share of these cores.
        environ.setdefault(CORES_VARIABLE, str(node))


def _threads(environ: Mapping[str, str], task: SlurmTask) -> int:
    """Return the threads of a task: its cores, at most its share of the node's."""
    share = _count(environ, "SLURM_CPUS_ON_NODE") // task.local_size
    return max(1, min(cores(), share))


def find_launch_mistake(environ: Mapping[str, str]) -> LaunchMistake | None:
    """Detect several processes, started by a scheduler, that would each train alone."""
    if "RANK" in environ or "WORLD_SIZE" in environ or SlurmTask.read(environ):
        return None
    for process, size, nodes, starter in _STARTERS:
        count = _count(environ, size)
        if process in environ and count > 1:
            return LaunchMistake(
                f"{starter} started {count} processes, and RANK and WORLD_SIZE are not set: each would train alone",
                f"have {starter} start one torchrun or `lockstep launch` per node, "
                f"{_command(count, _count(environ, nodes), starter)}; for separate runs unset {process}",
            )
    return None


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "1")
    if text.isascii() and text.isdigit():
        return int(text)
    return 1


def _command(processes: int, nodes: int, starter: str) -> str:
    if starter in _ONE_A_NODE:
        return f"as in `{_ONE_A_NODE[starter]} -- train ...` in each"
    if starter != "srun" or nodes == 1:
        return f"as in `{starter} -n1 lockstep launch --nproc-per-node {processes} -- train ...` on one node"
    per_node = max(1, processes // nodes)
    return f"as in `srun -N{nodes} --ntasks-per-node=1 lockstep launch --nproc-per-node {per_node} -- train ...`"
