"""Check the machine: the run's folder, cores and the container's share, memory, open files.

result = cores(place)                      # CheckResult([warn("cores", "8 threads on 2 cores ...")])

`within` runs any check with a time limit.
"""

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lockstep.config.fields import is_url
from lockstep.diagnose.doctor.finding import OK, Check, CheckContext, CheckResult, Finding, fail, ok, skip, warn
from lockstep.distributed.cpus import cgroup_folders, cpu_quota, node_cores
from lockstep.errors import LockstepError
from lockstep.files import bytes_text
from lockstep.training.state.run_dir import RunFolder

__all__ = [
    "STUCK",
    "clock",
    "cores",
    "disk",
    "judge_shared_folder",
    "locks",
    "memory",
    "open_files",
    "shared_folder",
    "shared_memory",
    "within",
]


# Bytes to write in a measurement, and at a time.
_SIZE = 16 << 20
_PIECE = 1 << 20
# Bytes a second, written and synced: at this rate a checkpoint of 1 GB takes minutes.
_SLOW = 5e6
# Bytes to be free if the model is not known.
_LEAST = 1 << 30
# Seconds that two clocks may differ.
_MAX_OFFSET = 2.0
STUCK = "the server of a network folder may be down (`df` hangs too); give another --save-dir"


def above(place: CheckContext) -> Path:
    """Return the nearest existing folder, at the run's folder or above it."""
    path = RunFolder(place.config.local_dir, place.config.experiment_name).path.absolute()
    return next(path_above for path_above in (path, *path.parents) if path_above.is_dir())


@contextlib.contextmanager
def _file(place: CheckContext) -> Iterator[int]:
    """Context manager for an open, nameless file in that folder."""
    with tempfile.TemporaryFile(dir=above(place)) as file:
        yield file.fileno()


def disk(place: CheckContext) -> CheckResult:
    """Check that the run's folder is writable, has room, and is fast enough."""
    folder = above(place)
    # Once for each node is enough.
    if place.local_rank:
        return CheckResult()
    try:
        rate = statistics.median(_rates(place))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"cannot write to {folder}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = "free some space"
        else:
            mend = "give another --save-dir, or write access"
        return CheckResult([fail("disk", text, mend)])
    return CheckResult(list(judge_disk(folder, rate, free)))


def judge_disk(folder: Path, rate: float, free: int, required: int = _LEAST) -> Iterator[Finding]:
    """Judge a disk that syncs `rate` bytes a second and has `free` bytes."""
    rate_text = f"writes and syncs {bytes_text(rate)} a second"
    if free < required:
        text = f"{folder} has {bytes_text(free)} free, and the run needs {bytes_text(required)}"
        yield fail("disk", text, "free some space, or give another --save-dir")
    if rate < _SLOW:
        mend = "use a local disk for --save-dir; checkpoints are written in the background, but no faster than this"
        yield warn("disk", f"{folder} {rate_text}", mend)
    elif free >= required:
        yield ok("disk", f"{folder} {rate_text}, {bytes_text(free)} free")


def _rates(place: CheckContext) -> Iterator[float]:
    """Yield bytes a second, three times; fewer if it is slow."""
    piece = os.urandom(_PIECE)
    deadline = time.monotonic() + 4.0
    for _ in range(3):
        with _file(place) as file:
            began = time.perf_counter()
            size = 0
            while size < _SIZE and time.monotonic() < deadline:
                size += os.write(file, piece)
            os.fsync(file)
            yield size / (time.perf_counter() - began)
        if time.monotonic() > deadline:
            return


def locks(place: CheckContext) -> CheckResult:
    """Check that file locks work.

    A lock that two owners can hold does not protect a run.
    """
    if place.local_rank:
        return CheckResult()
    try:
        with tempfile.NamedTemporaryFile(dir=above(place), prefix=".lockstep-doctor-") as file:
            second = os.open(file.name, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return CheckResult([_second_lock(second)])
            finally:
                os.close(second)
    except OSError as error:
        text = f"cannot lock files in {above(place)}: {error.strerror or error}"
        mend = "mount it with locking (NFS: without nolock, lockd running), or never start a run twice in one folder"
        return CheckResult([warn("locks", text, mend)])


def _second_lock(second: int) -> Finding:
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return ok("locks", "file locks work in the run's folder")
    mend = "mount it with locking, or never start a run twice in one folder: nothing would stop the second"
    return warn("locks", "a locked file in the run's folder can be locked again", mend)


def clock(place: CheckContext) -> CheckResult:
    """Compare the clock of the folder's file system with this machine's."""
    if place.local_rank:
        return CheckResult()
    try:
        with _file(place) as file:
            before = time.time()
            os.write(file, b"now")
            os.fsync(file)
            return CheckResult([judge_clock(os.fstat(file).st_mtime, before, time.time())])
    except OSError as error:
        return CheckResult([skip("folder's clock", f"{error.strerror or error}")])


def judge_clock(mtime: float, before: float, after: float) -> Finding:
    """Judge the `mtime` time of a file written between `before` and `after` by our clock."""
    offset = max(0.0, before - mtime, mtime - after)
    if offset <= _MAX_OFFSET:
        return ok("folder's clock", "it agrees with this machine's clock")
    text = f"file times in the run's folder are {offset:.1f} s off this machine's clock"
    return warn("folder's clock", text, "synchronise the clocks of the file server and the nodes (chronyc tracking)")


def shared_folder(place: CheckContext) -> CheckResult:
    """Check that all ranks see a file of rank 0.

    Every rank writes its part of a checkpoint there.
    """
    board = place.board
    if board is None or place.size == 1:
        return CheckResult()
    if place.rank:
        # With "" rank 0 could not write, which another check reports.
        name = board.of("folder", 0, 4.0)
        sees = not name or (above(place) / name).exists()
        board.put("folder seen", sees)
        return CheckResult([], {"sees": sees, "folder": str(above(place))})
    with contextlib.ExitStack() as stack:
        name = ""
        with contextlib.suppress(OSError):
            # The exit stack closes it. It may stay open for longer than this block.
            file = tempfile.NamedTemporaryFile(dir=above(place), prefix=".lockstep-doctor-")  # noqa: SIM115
            name = Path(stack.enter_context(file).name).name
        board.put("folder", name)
        # The file stays until all ranks have looked.
        for rank in range(1, place.size):
            board.of("folder seen", rank, 0.0 if rank in board.missing else 3.0)
    return CheckResult([], {"sees": True, "folder": str(above(place))})


def judge_shared_folder(facts: list[Any], place: CheckContext) -> list[Finding]:
    """Report the ranks that see another folder."""
    blind = []
    for rank, fact in enumerate(facts):
        if fact is not None and not fact["sees"]:
            blind.append(rank)
    if blind and is_url(place.config.save_dir):
        who = place.who(blind[0])
        url = place.config.save_dir
        text = f"{who} has a local folder of its own; each node uploads its part to {url}"
        return [ok("shared folder", text)]
    if not blind:
        if place.several_nodes and facts[0]:
            return [ok("shared folder", f"all ranks see {facts[0]['folder']}")]
        return []
    findings = []
    for rank in blind:
        findings.append(
            fail(
                "shared folder",
                f"{place.who(rank)} does not see rank 0's file: its {facts[rank]['folder']} is another folder",
                "give the absolute path of a --save-dir that all nodes share, or the URL of an object store",
            )
        )
    return findings


# The package's folder, to find its own lines in a stack.
_PACKAGE = str(Path(__file__).parents[2])


def within(check: Check, place: CheckContext, seconds: float) -> tuple[CheckResult, bool]:
    """Run `check` with a time limit, and return its result and whether it hung.

    A hung check's thread keeps running, and the finding names its place. An error inside a check is a finding too, so
    that the other checks still run.
    """
    box: list[CheckResult] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            box.append(check.run(place))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"lockstep-doctor-{check.name}", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        # A hung thread cannot be ended; its stack shows where it is.
        location = _place(sys._current_frames().get(thread.ident or 0))
        text = f"timed out after {time.monotonic() - began:.0f} s" + (f", stuck at {location}" if location else "")
        return CheckResult([fail(check.name, text, check.stuck)]), True
    if errors:
        return CheckResult([_failure(check, errors[0])]), False
    return box[0], False


def _failure(check: Check, error: BaseException) -> Finding:
    line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, LockstepError):
        text, _, mend = line.partition("; ")
        return fail(check.name, text, mend or "see the text")
    return fail(check.name, f"failed with {type(error).__name__}: {line}", "fix that first, then run the doctor again")


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of lockstep in a thread's stack.

    Such as `network.py:81 (_connected)`.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            return f"{Path(path).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


_GIB = 1 << 30
# Bytes of a container's default /dev/shm.
_DOCKER = 64 << 20
# Bytes of /dev/shm that suffice for loader processes and NCCL.
_LEAST_SHARED = 256 << 20
# Bytes a rank: torch, a group and a small model.
_LEAST_MEMORY = _GIB // 2
# Open files of Python, torch and the run itself.
_FILES = 128
# Sockets of a rank to each other one, over all groups.
_PER_PEER = 8
# Open files for each loader process.
_PER_WORKER = 32
# Load of a quiet machine.
_IDLE_LOAD = 0.5
# Share of the time that other machines may take.
_STOLEN = 0.05
# Seconds between two readings of /proc/stat.
_STEAL_SECONDS = 0.5
# Column of its first line with the stolen time.
_STEAL_COLUMN = 7


def cores(place: CheckContext) -> CheckResult:
    """Compare the ranks' threads and loader processes with the cores they may use.

    Also measures what else runs.
    """
    usable = node_cores(place.environ)
    threads = torch.get_num_threads()
    finding = judge_cores(usable, cpu_quota(place.root), threads, place)
    load, stolen = _load(place)
    if place.local_rank or load is None:
        return CheckResult([finding])
    if busy := judge_load(load, stolen, usable, threads, place):
        return CheckResult([finding, busy])
    if finding.level == OK:
        finding = ok("cores", f"{finding.text}; load {load:.1f}, {stolen:.0%} of the time stolen")
    return CheckResult([finding])


def judge_load(load: float, stolen: float, usable: int, threads: int, place: CheckContext) -> Finding | None:
    """Judge what else runs on the cores; None if it would not disturb timings.

    Args:
        load: processes that ran or waited for the disk, an average of the last minute.
        stolen: share of the cores' time that the hypervisor gave to other machines.
        usable: cores that the ranks of this node may run on.
        threads: of a rank.
    """
    if load > _IDLE_LOAD and load + threads * place.local_size > usable + _IDLE_LOAD:
        text = f"load {load:.1f} on {usable} cores: other processes compute too, and times will be too long"
        return warn("cores", text, "end them before you measure; the load is an average of the last minute")
    if stolen > _STOLEN:
        text = f"the hypervisor takes {stolen:.0%} of the cores' time: times will vary"
        return warn("cores", text, "compare interleaved runs only, or use a machine with cores of its own")
    return None


def _load(place: CheckContext) -> tuple[float | None, float]:
    """Read the load average, and measure the share of stolen time.

    The load is None if it is unknown.
    """
    words = place.text("proc/loadavg").split()
    before = _cpu_times(place)
    if not words or not before:
        return None, 0.0
    time.sleep(_STEAL_SECONDS)
    ticks = []
    for after, then in zip(_cpu_times(place), before, strict=False):
        ticks.append(after - then)
    return float(words[0]), ticks[_STEAL_COLUMN] / sum(ticks) if sum(ticks) > 0 else 0.0


def _cpu_times(place: CheckContext) -> list[int]:
    """Read the times of all cores, in ticks; [] if unknown.

    In order: user, nice, system, idle, iowait, irq, softirq and steal.
    """
    words = place.text("proc/stat").partition("\n")[0].split()[1 : _STEAL_COLUMN + 2]
    if len(words) > _STEAL_COLUMN:
        return [int(word) for word in words]
    return []


def judge_cores(usable: int, quota: float, threads: int, place: CheckContext) -> Finding:
    """Judge `threads` threads a rank.

    Args:
        usable: cores that the ranks of this node may run on.
        quota: cores whose time the container may use; 0: no limit.
    """
    share = min(usable, quota or usable)
    ranks = place.local_size
    per_rank = max(1, int(share // ranks))
    if threads > 1 and threads * ranks > share + 0.5:
        if quota and quota < usable:
            limit = f"the container's quota of {quota:g} cores"
        else:
            limit = f"{usable} cores"
        text = f"{ranks} x {threads} threads on {limit}"
        return warn("cores", text, f"set OMP_NUM_THREADS={per_rank}, or start with `lockstep launch`, which does")
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


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def memory(place: CheckContext) -> CheckResult:
    """Compare the node's free memory, by machine and container limit, with its ranks' minimum."""
    free, total, by = _free(place)
    if not total:
        return CheckResult([skip("memory", "the system does not report it")])
    least = _LEAST_MEMORY * place.local_size
    text = f"{bytes_text(free)} of {bytes_text(total)} free ({by})"
    if free < least:
        mend = (
            f"{place.local_size} ranks need {bytes_text(least)} and their model; end other processes or raise the limit"
        )
        return CheckResult([fail("memory", text, mend)])
    return CheckResult([ok("memory", text)], {"free": free, "whole": total})


def _free(place: CheckContext) -> tuple[int, int, str]:
    """Return bytes free, bytes in all, and whether machine or container limits them."""
    lines = dict(line.split(":", 1) for line in place.text("proc/meminfo").splitlines() if ":" in line)
    sizes = {}
    for name, text in lines.items():
        if text.split()[0].isdigit():
            sizes[name] = int(text.split()[0]) * 1024
    free = sizes.get("MemAvailable") or sizes.get("MemFree", 0)
    total = sizes.get("MemTotal", 0)
    by = "machine"
    for folder in cgroup_folders(place.root, "memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = _words(folder / limit)
            usage_words = _words(folder / usage)
            # A container without a limit reports "max", or more than the machine has.
            if (
                not most
                or not usage_words
                or not most[0].isdigit()
                or not usage_words[0].isdigit()
                or int(most[0]) >= total > 0
            ):
                continue
            available = int(most[0]) - int(usage_words[0]) + _reclaimable(folder)
            if available < free:
                free = max(0, available)
                total = int(most[0])
                by = "container limit"
    return free, total, by


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached files that the group would release."""
    words = _words(folder / "memory.stat")
    values = dict(zip(words[::2], words[1::2], strict=False))
    return int(values.get("inactive_file", values.get("total_inactive_file", "0")))


def shared_memory(place: CheckContext) -> CheckResult:
    """Check /dev/shm, which loader processes and NCCL on one node use."""
    folder = place.root / "dev/shm"
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError:
        return CheckResult([skip("shared memory", "there is no /dev/shm here")])
    return CheckResult([judge_shared(total, free, place)])


def judge_shared(total: int, free: int, place: CheckContext) -> Finding:
    """Judge `free` bytes of `total`."""
    used_by = [f"{place.config.data.workers} loader processes a rank"] * bool(place.config.data.workers)
    used_by += ["NCCL between the ranks of a node"] * (place.devices > 0 and place.local_size > 1)
    text = f"/dev/shm has {bytes_text(free)} free of {bytes_text(total)}"
    if free >= _LEAST_SHARED:
        return ok("shared memory", text)
    if total <= _DOCKER:
        mend = "start the container with --shm-size=8g or --ipc=host"
    else:
        mend = "delete files in /dev/shm"
    if not used_by:
        return ok("shared memory", f"{text}; small, but unused here (loader processes and NCCL would use it)")
    say = fail if total <= _DOCKER else warn
    return say("shared memory", f"{text}, for {' and '.join(used_by)}", mend)


def open_files(place: CheckContext) -> CheckResult:
    """Compare the limit of open files with the sockets and loader processes of this world."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = _FILES + _PER_PEER * (place.size - 1) + _PER_WORKER * place.config.data.workers
    if 0 <= soft < required:
        if hard in (resource.RLIM_INFINITY, -1) or hard >= required:
            room = ""
        else:
            room = f" (the hard limit, {hard}, needs root)"
        text = f"the limit is {soft} open files, and {place.size} ranks need about {required} each"
        return CheckResult([fail("open files", text, f"run `ulimit -n 65536` before the start{room}")])
    return CheckResult([ok("open files", f"the limit is {soft}, about {required} needed")])
