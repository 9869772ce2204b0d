"""Find the checkpoint to resume from, on all ranks together.

    found = find_resume(folder, world, say)         (its folder, its state), or None in a run that has none yet
    path = find_newest(folder, world, say)          the newest whole one, or None
    load(path, tensors, world, verified=True)       its checksums were held a moment ago

Rank 0 checks the names, sizes and small files. All ranks read the data, each its share of the files, with signs of life
meanwhile: no timeout ends that as long as every process lives. If a checkpoint is damaged, or holds a tensor that is
not finite, all ranks try the next older one.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint.check import damaged, data_files, hold, outline, strangers, unusable
from lockstep.checkpoint.files import on_all_ranks, printable
from lockstep.checkpoint.format import MANIFEST, Manifest, read_manifest, read_state
from lockstep.checkpoint.store import list_steps, path_of
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import CheckpointError
from lockstep.files import bytes_text

__all__ = ["find_newest", "find_resume"]

_TELL = 30.0  # seconds between two lines about a long read

Say = Callable[[str], None]


def find_resume(folder: Path, world: World, say: Say) -> tuple[Path, dict[str, Any]] | None:
    """Find the newest complete checkpoint of the run, and its state. Collective.

    Args:
        folder: the run's.
        say: called on rank 0 with a line for each newer one that is damaged, and for a long read.

    Returns:
        Its folder, and its state as rank 0 read it. None if the run has no checkpoint, the same on every rank.

    Raises:
        CheckpointError: there are checkpoints, and none is complete.
        PeerError: another rank found so, or was lost.
    """
    steps = _steps(folder, world)
    path = _newest(folder, steps, world, say)
    if path is None and steps:  # a new start would overwrite them
        error = CheckpointError(
            f"{folder}: none of its {len(steps)} checkpoints is whole (the lines above say why); repair "
            "one, move checkpoints/ away to begin again from step 0, or use another --experiment-name"
        )
        world.check(error if world.is_main else None)  # collective
    if path is None:
        return None
    state = on_all_ranks(world, lambda: read_state(path) if world.is_main else {})  # collective
    return path, world.gather(state)[0]  # collective


def find_newest(folder: Path, world: World, say: Say) -> Path | None:
    """Find the newest complete checkpoint of the run; None without one. Collective."""
    return _newest(folder, _steps(folder, world), world, say)


def _steps(folder: Path, world: World) -> list[int]:
    mine = on_all_ranks(world, lambda: list_steps(folder) if world.is_main else [])  # collective
    found: list[int] = world.gather(mine)[0]  # collective
    return found


def _newest(folder: Path, steps: list[int], world: World, say: Say) -> Path | None:
    for step in reversed(steps):
        path = path_of(folder, step)
        problems = _problems(path, world, say)
        if not problems:
            return path
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        if world.is_main:
            say(f"skipped checkpoint {path.name}: {problems[0]}{more}")
    return None


def _problems(path: Path, world: World, say: Say) -> list[str]:
    """Return what is wrong with the checkpoint, the same on every rank; [] for nothing."""
    problems, checksum = world.gather(on_all_ranks(world, lambda: _seen(path, world)))[0]  # collective
    if problems:
        return list(problems)
    reading = _ReadProgress(path, world, say)
    mine = on_all_ranks(  # collective
        world, lambda: _read(path, checksum, world, reading), done=lambda: reading.bytes, heard=reading.heard
    )
    found = sorted(problem for each in world.gather(mine) for problem in each)  # collective
    return found or list(world.gather(on_all_ranks(world, lambda: _held(path, world)))[0])  # collective


def _seen(path: Path, world: World) -> tuple[list[str], str]:
    """On rank 0, return what a quick check finds, and the manifest's checksum."""
    if not world.is_main:
        return [], ""
    try:
        manifest = read_manifest(path)
        return unusable(path, manifest) + strangers(path, manifest) + outline(path, manifest), manifest.checksum
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
        return [f"{path.name}/{MANIFEST} is another one on {rank_label(world.rank)} than on rank 0"]
    reading.begin(manifest)
    return damaged(path, manifest, data_files(manifest, world.rank, world.size), reading.add)


def _held(path: Path, world: World) -> list[str]:
    """On rank 0, check the contents of the files, once all checksums match."""
    try:
        if world.is_main:
            hold(path, read_manifest(path))
    except CheckpointError as error:
        return [str(error)]
    return []


class _ReadProgress:
    """Progress of reading a checkpoint's data; rank 0 reports it from time to time.

    Attributes:
        bytes: read on this rank.
    """

    def __init__(self, path: Path, world: World, say: Say) -> None:
        self._name, self._say = path.name, say if world.is_main else lambda line: None
        self._whole, self._told = 0, time.monotonic()
        self.bytes = 0

    def begin(self, manifest: Manifest) -> None:
        self._whole = sum(manifest.files[name]["size"] for name in data_files(manifest))

    def add(self, count: int) -> None:
        self.bytes += count

    def heard(self, counts: list[int]) -> None:
        """Report the bytes read by every rank, if it is time."""
        if time.monotonic() - self._told > _TELL:
            self._told = time.monotonic()
            self._say(f"checking checkpoint {self._name}: {bytes_text(sum(counts))} of {bytes_text(self._whole)} read")
