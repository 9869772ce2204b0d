"""The run's folder: whether it can be written to, how fast, whether it is the same on all nodes, its locks and clock.

Nothing stays: files are made in the nearest folder above that is there, and removed.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.diagnose.doctor.finding import Finding, Found, Place, fail, ok, warn
from lockstep.run.folder import RunFolder
from lockstep.units import bytes_text

__all__ = ["STUCK", "clock", "disk", "judge_shared_folder", "locks", "shared_folder"]

_SIZE, _PIECE = 16 << 20, 1 << 20
_SLOW = 5e6  # bytes a second, written and synced: a checkpoint of 1 GB takes minutes
_LEAST = 1 << 30  # bytes free where the model is not known
_APART = 2.0  # seconds
STUCK = "is it a network folder whose server is gone? `df` on it hangs too; give another --save-dir"


def above(place: Place) -> Path:
    """The nearest folder that is there, at the run's folder or above it."""
    path = RunFolder(place.config.save_dir, place.config.experiment_name).path.absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


@contextlib.contextmanager
def _file(place: Place) -> Iterator[int]:
    """A file in that folder, open, without a name."""
    with tempfile.TemporaryFile(dir=above(place)) as file:
        yield file.fileno()


def disk(place: Place) -> Found:
    """Whether the run's folder can be written to, has room, and how fast it takes what is synced."""
    folder = above(place)
    if place.local_rank:  # one a node
        return Found()
    try:
        rate = statistics.median(_rates(place))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"{folder} cannot be written to: {error.strerror or error}"
        mend = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give another --save-dir, or its rights"
        return Found([fail("disk", text, mend)])
    return Found(list(judge_disk(folder, rate, free)))


def judge_disk(folder: Path, rate: float, free: int, needed: int = _LEAST) -> Iterator[Finding]:
    """What is to be said of a disk that syncs `rate` bytes a second and has `free` bytes."""
    written = f"writes and syncs {bytes_text(rate)} a second"
    if free < needed:
        text = f"{folder} has {bytes_text(free)} free, and this needs {bytes_text(needed)}"
        yield fail("disk", text, "make room, or give another --save-dir")
    if rate < _SLOW:
        mend = "take a local disk for --save-dir; checkpoints are written beside the training, but not faster than this"
        yield warn("disk", f"{folder} {written}", mend)
    elif free >= needed:
        yield ok("disk", f"{folder} {written}, {bytes_text(free)} free")


def _rates(place: Place) -> Iterator[float]:
    """Bytes a second, three times; fewer where it is slow."""
    piece, ended = os.urandom(_PIECE), time.monotonic() + 4.0
    for _ in range(3):
        with _file(place) as file:
            began, written = time.perf_counter(), 0
            while written < _SIZE and time.monotonic() < ended:
                written += os.write(file, piece)
            os.fsync(file)
            yield written / (time.perf_counter() - began)
        if time.monotonic() > ended:
            return


def locks(place: Place) -> Found:
    """Whether the folder's locks hold: a lock that is held twice protects no run from a second one."""
    if place.local_rank:
        return Found()
    try:
        with tempfile.NamedTemporaryFile(dir=above(place), prefix=".lockstep-doctor-") as file:
            again = os.open(file.name, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return Found([_locked_twice(again)])
            finally:
                os.close(again)
    except OSError as error:
        text = f"{above(place)} takes no locks: {error.strerror or error}"
        mend = "mount it with locks (NFS: without nolock, lockd running), or start no run twice in one folder"
        return Found([warn("locks", text, mend)])


def _locked_twice(again: int) -> Finding:
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return ok("locks", "a lock in the run's folder holds")
    mend = "mount it with locks, or start no run twice in one folder: nothing would stop the second"
    return warn("locks", "a lock in the run's folder can be taken twice", mend)


def clock(place: Place) -> Found:
    """The clock of the folder's file system against this machine's."""
    if place.local_rank:
        return Found()
    try:
        with _file(place) as file:
            before = time.time()
            os.write(file, b"now")
            os.fsync(file)
            return Found([judge_clock(os.fstat(file).st_mtime, before, time.time())])
    except OSError as error:
        return Found([ok("folder's clock", f"could not be asked: {error.strerror or error}")])


def judge_clock(written: float, before: float, after: float) -> Finding:
    """What is to be said of a file that says it was written at `written`, between `before` and `after` by our clock."""
    apart = max(0.0, before - written, written - after)
    if apart <= _APART:
        return ok("folder's clock", "it agrees with this machine's")
    text = f"files of the run's folder are dated {apart:.1f} s apart from this machine's clock"
    return warn("folder's clock", text, "have the file server and the nodes keep time (chronyc tracking, timedatectl)")


def shared_folder(place: Place) -> Found:
    """A file that rank 0 puts into the run's folder, looked for by all: every rank writes its part of a checkpoint."""
    board = place.board
    if board is None or place.size == 1:
        return Found()
    if place.rank:
        name = board.of("folder", 0, 4.0)  # "": rank 0 could not write, which another check says
        sees = not name or (above(place) / name).exists()
        board.put("folder seen", sees)
        return Found([], {"sees": sees, "folder": str(above(place))})
    with contextlib.ExitStack() as kept:
        name = ""
        with contextlib.suppress(OSError):
            made = tempfile.NamedTemporaryFile(dir=above(place), prefix=".lockstep-doctor-")  # noqa: SIM115
            name = Path(kept.enter_context(made).name).name
        board.put("folder", name)
        for rank in range(1, place.size):  # it stays until all have looked
            board.of("folder seen", rank, 0.0 if rank in board.missing else 3.0)
    return Found([], {"sees": True, "folder": str(above(place))})


def judge_shared_folder(facts: list[Any], place: Place) -> list[Finding]:
    """Names the ranks that look into another folder."""
    blind = [rank for rank, each in enumerate(facts) if each is not None and not each["sees"]]
    if not blind:
        return [ok("shared folder", f"all ranks see {facts[0]['folder']}")] if place.several_nodes and facts[0] else []
    return [
        fail(
            "shared folder",
            f"{place.who(rank)} does not see what rank 0 writes: its {facts[rank]['folder']} is another folder",
            "give a --save-dir that all nodes share, by its whole path",
        )
        for rank in blind
    ]
