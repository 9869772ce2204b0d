"""Count the cores that processes of this node may use, and share them out.

cores()                     # of this process: its affinity, Slurm's count, the container's quota
usable_cores(os.environ)    # of all ranks of this node, also where each is bound to its own
share_cores({0, 1, 2}, 2)   # [{0, 1}, {2}]; neighbours stay together

`bind` pins a process, with its threads, to its share.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping
from itertools import chain, pairwise
from pathlib import Path

__all__ = [
    "CORES_VARIABLE",
    "affinity_cores",
    "bind",
    "cgroup_folders",
    "cores",
    "cpu_quota",
    "node_cores",
    "numa_nodes",
    "share_cores",
    "usable_cores",
]

# Cores of this node's ranks together, set where each rank is bound to its share.
CORES_VARIABLE = "LOCKSTEP_CORES"


def cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may run on.

    A Slurm without a task plugin binds nothing, so its count for this node is a limit too, as a container's quota is.

    Args:
        root: parent of /proc and /sys.
    """
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    # Slurm without a task plugin grants cores but binds nothing, so the affinity alone would count all cores.
    if granted.isdecimal() and int(granted):
        count = min(affinity_cores(), int(granted))
    else:
        count = affinity_cores()
    return _within_quota(count, root)


def node_cores(environ: Mapping[str, str]) -> int:
    """Count the cores that the ranks of this node may use, whatever a container's quota."""
    text = environ.get(CORES_VARIABLE, "")
    if text.isdecimal() and int(text):
        return int(text)
    return affinity_cores()


def affinity_cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores(environ: Mapping[str, str]) -> int:
    """Count the cores of all ranks of this node, within a container's quota."""
    return _within_quota(node_cores(environ), Path("/"))


def _within_quota(count: int, root: Path) -> int:
    quota = cpu_quota(root)
    if quota:
        return max(1, min(count, int(quota)))
    return count


def cpu_quota(root: Path) -> float:
    """Return the container's CPU quota in cores, by cgroup v2 or v1; 0: none."""
    lowest = 0.0
    for folder in cgroup_folders(root, "cpu"):
        pair = _words(folder / "cpu.max")
        if len(pair) < 2:
            # cgroup v1 has the quota and its period in two files. An unlimited quota is "max" or -1.
            pair = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() and int(pair[1]):
            quota = int(pair[0]) / int(pair[1])
            lowest = min(lowest or quota, quota)
    return lowest


def cgroup_folders(root: Path, kind: str) -> list[Path]:
    """Return the folders of this process's cgroups, innermost first.

    v2 has one tree, v1 one for each kind.

    Args:
        root: parent of /proc and /sys.
        kind: such as "cpu" or "memory".
    """
    base = root / "sys/fs/cgroup"
    folders = []
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # A container may show only the root of the tree, so look there too.
    for line in [*lines, f"0:{kind}:/"]:
        number, kinds, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and kind not in kinds.split(","):
            continue
        for tree in (base, base / kind, base / "cpu,cpuacct", base / "unified"):
            inner = tree / path.lstrip("/")
            folders += [inner, *(above for above in inner.parents if above.is_relative_to(tree))]
    return list(dict.fromkeys(folders))


def share_cores(cpus: Iterable[int], shares: int, root: Path = Path("/")) -> list[set[int]]:
    """Divide logical CPUs into shares of neighbours that differ by at most one core.

    Returns:
        [] if there are fewer CPUs than shares.

    The order is NUMA node, socket, core; hyperthreads of a core stay together unless there are more shares than cores.
    """
    places = sorted((_place(cpu, root), cpu) for cpu in cpus)
    together: dict[tuple[int, ...], list[int]] = {}
    for position, cpu in places:
        together.setdefault(position, []).append(cpu)
    # Keep the hyperthreads of a core together if there are cores enough.
    if len(together) >= shares:
        groups = list(together.values())
    else:
        groups = [[cpu] for _, cpu in places]
    if len(groups) < shares:
        return []
    ends = [round(len(groups) * (share + 1) / shares) for share in range(shares)]
    # Neighbouring groups, so that a share stays on few caches.
    return [set(chain.from_iterable(groups[begin:end])) for begin, end in pairwise([0, *ends])]


def numa_nodes(cpus: Iterable[int], root: Path = Path("/")) -> set[int]:
    """Return the numbers of the NUMA nodes that these CPUs belong to."""
    return {_place(cpu, root)[0] for cpu in cpus}


def _place(cpu: int, root: Path) -> tuple[int, ...]:
    """Return a logical CPU's NUMA node, socket and core.

    A CPU that the system does not describe counts as a core of its own.
    """
    folder = root / f"sys/devices/system/cpu/cpu{cpu}"
    node = next((int(path.name[4:]) for path in folder.glob("node[0-9]*")), 0)
    socket, core = (_words(folder / "topology" / name) for name in ("physical_package_id", "core_id"))
    if socket and core:
        return (node, *(int(words[0]) for words in (socket, core)))
    return (node, 0, cpu)


def bind(pid: int, cpus: Iterable[int]) -> None:
    """Pin a process and its present threads to these CPUs; its children inherit them."""
    # The process or a thread of it has ended.
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cpus)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []
