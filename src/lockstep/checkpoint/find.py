"""Find the checkpoint to resume from, on all ranks together.

    found = find_resume(folder, world, say)         (its folder, its state), or None in a run that has none yet
    path = find_newest(folder, world, say)          the newest whole one, or None
    load(path, tensors, world, verified=True)       its checksums were just verified

Rank 0 checks the names, sizes and small files. All ranks read the data, each its share of the files, with signs of life
meanwhile: no timeout ends that as long as every process is alive. If a checkpoint is damaged, or has a tensor that is
not finite, all ranks try the next older one.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.check import (
    attach,
    check_contents,
    check_headers,
    check_sizes,
    data_files,
    find_damage,
    find_strays,
    index_files,
    resume_problems,
)
from lockstep.checkpoint.format import MANIFEST, STATE, Manifest, read_manifest, read_state, step_name
from lockstep.checkpoint.remote import RemoteRun
from lockstep.checkpoint.store import discard, list_steps, path_of
from lockstep.checkpoint.stored import StoredFiles
from lockstep.distributed.agreement import LONG, Signs, gather_results
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError
from lockstep.files import bytes_text, printable

__all__ = ["find_newest", "find_resume"]

# Seconds between two lines about a long read.
_REPORT_SECONDS = 30.0

Say = Callable[[str], None]


def find_resume(
    folder: Path, world: World, say: Say, remote: RemoteRun | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Find the newest complete checkpoint of the run, and its state. Collective.

    Args:
        folder: the run's.
        say: called on rank 0 with a line for each damaged newer one, and for a long read.
        remote: the run's folder in an object store: what is newer or whole there is downloaded, with the records.

    Returns:
        (its folder, its state as rank 0 read it). None if the run has no checkpoint, the same on every rank.

    Raises:
        CheckpointError: there are checkpoints, and none is complete.
        PeerError: the same on another rank, or a rank was lost.
        StorageError: the store does not answer.
    """
    steps, remote_steps = _steps(folder, world, remote)
    newest = _newest_stored if remote and world.leads else _newest
    path, downloaded = newest(folder, steps, world, say, remote, remote_steps)
    # Without the store no checkpoint can be made of the nodes' parts.
    at_risk = remote_steps if remote and world.leads else steps
    # A new start would overwrite them.
    if path is None and at_risk:
        error = CheckpointError(
            f"{remote.url if remote else folder}: none of its {len(steps)} checkpoints is complete (see the lines "
            "above); repair one, move checkpoints/ away to start over from step 0, or use another --experiment-name"
        )
        # Rank 0 has the message; every rank raises it.
        world.check(error if world.is_main else None)
    if path is None:
        return None
    if downloaded and remote:
        # Collective.
        gather_results(world, lambda: remote.download_records(folder) if world.is_main else None, signs=LONG)
    return path, gather_results(world, lambda: read_state(path) if world.is_main else {}, signs=LONG)[0]  # collective


def find_newest(folder: Path, world: World, say: Say, remote: RemoteRun | None = None) -> Path | None:
    """Find the newest complete checkpoint of the run, as `find_resume`; None without one. Collective."""
    steps, remote_steps = _steps(folder, world, remote)
    newest = _newest_stored if remote and world.leads else _newest
    return newest(folder, steps, world, say, remote, remote_steps)[0]


def _steps(folder: Path, world: World, remote: RemoteRun | None) -> tuple[list[int], list[int]]:
    """Return the steps of all checkpoints, ascending, and those in the store. Collective."""

    def read() -> tuple[list[int], list[int]]:
        here = list_steps(folder) if world.leads_folder else []
        return here, remote.steps() if remote and world.is_main else []

    replies = gather_results(world, read, signs=LONG)  # collective
    there = replies[0][1]
    return sorted({*there, *(step for here, _ in replies for step in here)}), there


def _newest(
    folder: Path, steps: list[int], world: World, say: Say, remote: RemoteRun | None, remote_steps: list[int]
) -> tuple[Path | None, bool]:
    """Return the newest complete checkpoint, and whether it was downloaded. Collective."""
    for step in reversed(steps):
        path = path_of(folder, step)
        problems = _problems(path, world, say)
        if not problems:
            return path, False
        if remote and step in remote_steps:
            problems = _download(remote, folder, step, world, say) or _problems(path, world, say)
            if not problems:
                return path, True
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        if world.is_main:
            say(f"skipped checkpoint {path.name}: {problems[0]}{more}")
    return None, False


def _newest_stored(
    folder: Path, steps: list[int], world: World, say: Say, remote: RemoteRun | None, remote_steps: list[int]
) -> tuple[Path | None, bool]:
    """Return the newest complete checkpoint in the store, as `_newest`. Collective.

    For nodes with local folders of their own: each has only its part. The folder gets the checkpoint's documents, and
    `load` takes from the store what it lacks.
    """
    assert remote
    drop = partial(_drop_others, remote, folder, remote_steps)
    gather_results(world, lambda: drop() if world.leads_folder else None, signs=LONG)  # collective
    for step in reversed(steps):
        path = path_of(folder, step)
        problems = [f"it was not uploaded, and each node has only its part: not in {remote.url}"]
        if step in remote_steps:
            problems = _stored_problems(remote, step, world)
        if not problems:
            return path, _attach_stored(remote, folder, step, world)  # collective
        if world.is_main:
            say(f"skipped checkpoint {path.name}: {problems[0]}")
    return None, False


def _drop_others(remote: RemoteRun, folder: Path, remote_steps: list[int]) -> None:
    """Remove local parts of checkpoints that differ from the store's.

    They must not take the place of the stored ones.
    """
    for step in {*list_steps(folder)} & {*remote_steps}:
        with suppress(CheckpointError):
            if read_manifest(path_of(folder, step)) == remote.manifest(step):
                continue
        discard(folder, [step])


def _stored_problems(remote: RemoteRun, step: int, world: World) -> list[str]:
    """Return what is wrong with a checkpoint in the store. Collective.

    The result is the same on every rank; each rank reads its share.
    """

    def check() -> list[str]:
        try:
            manifest = remote.manifest(step)
        except CheckpointError as error:
            return [str(error)]
        names = data_files(manifest, world.rank, world.size)
        documents = [*index_files(manifest), STATE] if world.is_main else []
        return resume_problems(Path(step_name(step)), manifest) or remote.verify(step, [*names, *documents])

    # Collective.
    return sorted({problem for problems in gather_results(world, check, signs=LONG) for problem in problems})


def _attach_stored(remote: RemoteRun, folder: Path, step: int, world: World) -> bool:
    """Let all ranks read a checkpoint from the store. Collective.

    Returns whether rank 0's folder lacked it.
    """

    def copy() -> bool:
        if world.leads_folder:
            return _copy_documents(remote, folder, step)
        return False

    fresh: bool = gather_results(world, copy, signs=LONG)[0]  # collective
    path = path_of(folder, step)
    # Collective.
    gather_results(world, lambda: attach(path, StoredFiles(remote, step, read_manifest(path))), signs=LONG)
    return fresh


def _copy_documents(remote: RemoteRun, folder: Path, step: int) -> bool:
    """Download the documents of a checkpoint that a folder lacks.

    Returns whether the folder had none, or those of another checkpoint.
    """
    path = path_of(folder, step)
    manifest = remote.manifest(step)
    if manifest.format == 1:
        names = [*manifest.files]
    else:
        names = [*index_files(manifest), STATE]
    with suppress(CheckpointError):
        if read_manifest(path) == manifest and not find_damage(path, manifest, names):
            return False
    remote.download(folder, step, names=names)
    return True


def _download(remote: RemoteRun, folder: Path, step: int, world: World, say: Say) -> list[str]:
    """Download a checkpoint on rank 0; return what is wrong with it. Collective."""

    def download() -> list[str]:
        try:
            if world.is_main:
                remote.download(folder, step, say)
        except CheckpointError as error:
            return [str(error)]
        return []

    problems: list[str] = gather_results(world, download, signs=LONG)[0]  # collective
    return problems


def _problems(path: Path, world: World, say: Say) -> list[str]:
    """Return what is wrong with the checkpoint, the same on every rank; [] if nothing."""
    problems, checksum = gather_results(world, lambda: _quick_check(path, world), signs=LONG)[0]  # collective
    if problems:
        return list(problems)
    reading = _ReadProgress(path, world, say)
    damage = gather_results(  # collective
        world,
        lambda: _read(path, checksum, world, reading),
        signs=Signs(progress=lambda: reading.bytes, on_progress=reading.report),
    )
    problems = sorted(problem for lines in damage for problem in lines)
    # Collective.
    return problems or list(gather_results(world, lambda: _check_all_contents(path, world), signs=LONG)[0])


def _quick_check(path: Path, world: World) -> tuple[list[str], str]:
    """On rank 0, return what a quick check finds, and the manifest's checksum."""
    if not world.is_main:
        return [], ""
    try:
        manifest = read_manifest(path)
        return resume_problems(path, manifest) + find_strays(path, manifest) + check_sizes(
            path, manifest
        ), manifest.checksum
    except CheckpointError as error:
        return [str(error)], ""
    except OSError as error:
        return [f"{printable(path.name)} cannot be read: {error.strerror}"], ""


def _read(path: Path, checksum: str, world: World, reading: "_ReadProgress") -> list[str]:
    """Read this rank's share of the data files, and return what is wrong."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [f"{rank_label(world.rank)}: {error}"]
    if manifest.checksum != checksum:
        return [f"{path.name}/{MANIFEST} on {rank_label(world.rank)} differs from rank 0's"]
    reading.begin(manifest)
    names = data_files(manifest, world.rank, world.size)
    try:
        problems = find_damage(path, manifest, [*index_files(manifest), *names], reading.add)
        if not problems:
            check_headers(path, manifest, names)
    except CheckpointError as error:
        return [str(error)]
    return problems


def _check_all_contents(path: Path, world: World) -> list[str]:
    """On rank 0, check the contents of the files, once all checksums match."""
    try:
        if world.is_main:
            check_contents(path, read_manifest(path))
    except CheckpointError as error:
        return [str(error)]
    return []


class _ReadProgress:
    """Progress of reading a checkpoint's data, which rank 0 reports from time to time.

    Attributes:
        bytes: read on this rank.
    """

    def __init__(self, path: Path, world: World, say: Say) -> None:
        self._name = path.name
        self._say = say if world.is_main else lambda line: None
        self._total = 0
        self._last_report = time.monotonic()
        self.bytes = 0

    def begin(self, manifest: Manifest) -> None:
        self._total = sum(manifest.files[name]["size"] for name in data_files(manifest))

    def add(self, count: int) -> None:
        self.bytes += count

    def report(self, counts: list[int]) -> None:
        """Report the bytes read by every rank, if it is time."""
        if time.monotonic() - self._last_report > _REPORT_SECONDS:
            self._last_report = time.monotonic()
            self._say(f"checking checkpoint {self._name}: {bytes_text(sum(counts))} of {bytes_text(self._total)} read")
