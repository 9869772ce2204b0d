"""Evidence that the system ran out of memory: how often it has killed a process for that, before and after.

before = kills()
...
if kills() > before: ...    # the kernel killed something in our memory groups for want of memory
"""

import contextlib
from pathlib import Path

__all__ = ["kills"]

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
