"""The machine: cores and the container's share of them, memory, shared memory, open files.

found = cores(place)                        # Found([warn("cores", "8 threads on 2 cores ...")])
"""

import os
import resource
import shutil
from pathlib import Path

import torch

from lockstep.diagnose.doctor.finding import Finding, Found, Place, fail, ok, warn
from lockstep.units import bytes_text

__all__ = ["cores", "memory", "open_files", "quota_of", "shared_memory"]

_GIB = 1 << 30
_DOCKER = 64 << 20  # bytes: what a container's /dev/shm has where nobody asks for more
_LEAST_SHARED = 256 << 20
_LEAST_MEMORY = _GIB // 2  # bytes a rank: torch, a group and a small model
_FILES = 128  # Python, torch, the run's own
_PER_PEER = 8  # sockets of a rank to each other one, over all groups
_PER_WORKER = 32


def cores(place: Place) -> Found:
    """Threads of all ranks on this node, and their loader processes, against the cores that the container gives."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Found([judge_cores(usable, quota_of(place.root), torch.get_num_threads(), place)])


def judge_cores(usable: int, quota: float, threads: int, place: Place) -> Finding:
    """What is to be said of `threads` a rank.

    Args:
        usable: cores that this process may run on.
        quota: cores whose time the container may take; 0: no limit.
    """
    share, ranks = min(usable, quota or usable), place.local_size
    each = max(1, int(share // ranks))
    if threads > 1 and threads * ranks > share + 0.5:
        limit = f"{quota:g} cores' time that the container may take" if quota and quota < usable else f"{usable} cores"
        text = f"{ranks} x {threads} threads on {limit}"
        return warn("cores", text, f"set OMP_NUM_THREADS={each}, or start with `lockstep launch`, which does")
    if ranks > share + 0.5:
        text = f"{ranks} ranks on {share:g} cores: they compute one after another"
        return warn("cores", text, "start fewer on this node, or give the container more --cpus")
    workers = place.config.data.workers * ranks
    if workers and workers + ranks > 2 * share + 0.5:
        text = f"{ranks} ranks with {place.config.data.workers} loader processes each on {share:g} cores"
        return warn("cores", text, f"--data.workers {max(0, int(2 * share // ranks) - 1)} is enough here")
    return ok(
        "cores", f"{share:g} cores for {ranks} x {threads} thread{'s' * (threads > 1)}, {workers} loader processes"
    )


def quota_of(root: Path) -> float:
    """Cores whose time this container may take, by cgroup v2 or v1; 0: no limit, or none that is told."""
    lowest = 0.0
    for folder in _groups(root, "cpu"):
        pair = _words(folder / "cpu.max")
        if len(pair) < 2:
            pair = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() and int(pair[1]):
            found = int(pair[0]) / int(pair[1])
            lowest = min(lowest or found, found)
    return lowest


def _groups(root: Path, kind: str) -> list[Path]:
    """The folders of this process's groups: v2 has one tree, v1 one for each kind; from the innermost up."""
    base, folders = root / "sys/fs/cgroup", []
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in [*lines, f"0:{kind}:/"]:
        number, kinds, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and kind not in kinds.split(","):
            continue
        for tree in (base, base / kind, base / "cpu,cpuacct", base / "unified"):
            inner = tree / path.lstrip("/")
            folders += [inner, *(above for above in inner.parents if above.is_relative_to(tree))]
    return list(dict.fromkeys(folders))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def memory(place: Place) -> Found:
    """What is free on this node, by the machine and by the container's limit, against what its ranks need at least."""
    free, whole, by = _free(place)
    if not whole:
        return Found([ok("memory", "the system does not say how much there is")])
    least = _LEAST_MEMORY * place.local_size
    text = f"{bytes_text(free)} of {bytes_text(whole)} are free, by {by}"
    if free < least:
        mend = (
            f"{place.local_size} ranks need {bytes_text(least)} and their model; end what else runs, or raise the limit"
        )
        return Found([fail("memory", text, mend)])
    return Found([ok("memory", text)], {"free": free, "whole": whole})


def _free(place: Place) -> tuple[int, int, str]:
    """Bytes free, bytes in all, and who says so: the container, where its limit leaves less."""
    lines = dict(line.split(":", 1) for line in place.text("proc/meminfo").splitlines() if ":" in line)
    sizes = {name: int(text.split()[0]) * 1024 for name, text in lines.items() if text.split()[0].isdigit()}
    free, whole, by = sizes.get("MemAvailable") or sizes.get("MemFree", 0), sizes.get("MemTotal", 0), "the machine"
    for folder in _groups(place.root, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, now = _words(folder / limit), _words(folder / used)
            if not most or not now or not most[0].isdigit() or not now[0].isdigit() or int(most[0]) >= whole > 0:
                continue
            left = int(most[0]) - int(now[0]) + _reclaimable(folder)
            if left < free:
                free, whole, by = max(0, left), int(most[0]), "the container's limit"
    return free, whole, by


def _reclaimable(folder: Path) -> int:
    """Bytes of files that the group holds in memory, and would give back."""
    words = _words(folder / "memory.stat")
    found = dict(zip(words[::2], words[1::2], strict=False))
    return int(found.get("inactive_file", found.get("total_inactive_file", "0")))


def shared_memory(place: Place) -> Found:
    """/dev/shm, through which loader processes hand over batches, and NCCL what it sends on one node."""
    folder = place.root / "dev/shm"
    try:
        whole, _, free = shutil.disk_usage(folder)
    except OSError:
        return Found([ok("shared memory", "there is no /dev/shm here")])
    return Found([judge_shared(whole, free, place)])


def judge_shared(whole: int, free: int, place: Place) -> Finding:
    """What is to be said of `free` bytes of `whole`."""
    used_by = [f"{place.config.data.workers} loader processes a rank"] * bool(place.config.data.workers)
    used_by += ["NCCL between the ranks of a node"] * (place.devices > 0 and place.local_size > 1)
    text = f"/dev/shm has {bytes_text(free)} free of {bytes_text(whole)}"
    if free >= _LEAST_SHARED:
        return ok("shared memory", text)
    mend = (
        "start the container with --shm-size=8g or --ipc=host" if whole <= _DOCKER else "remove what lies in /dev/shm"
    )
    if not used_by:
        return ok("shared memory", f"{text}; little, and nothing here uses it (loader processes and NCCL would)")
    say = fail if whole <= _DOCKER else warn
    return say("shared memory", f"{text}, for {' and '.join(used_by)}", mend)


def open_files(place: Place) -> Found:
    """The limit of open files against this world: sockets to every other rank, in every group, and loader processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _PER_PEER * (place.size - 1) + _PER_WORKER * place.config.data.workers
    if 0 <= soft < needed:
        room = (
            "" if hard in (resource.RLIM_INFINITY, -1) or hard >= needed else f" (the hard limit, {hard}, needs root)"
        )
        text = f"{soft} open files are allowed, and {place.size} ranks need about {needed} each"
        return Found([fail("open files", text, f"`ulimit -n 65536` before the start{room}")])
    return Found([ok("open files", f"{soft} are allowed, about {needed} needed")])
