"""The checkpoint to go on from, found by all ranks together.

    found = find_resume(folder, world, say)         (its folder, its state), or None in a run that has none yet
    path = find_newest(folder, world, say)          the newest whole one, or None
    load(path, tensors, world, verified=True)       its checksums were held a moment ago

Rank 0 looks at the names, sizes and small files; the data is read by all ranks, each its share of the files, with signs
of life meanwhile: no timeout ends that, as long as every process lives. What is damaged, or holds a
tensor that is not finite, is left for the next older one, by all ranks alike.
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

_TELL = 30.0  # seconds between two lines about a reading that takes long

Say = Callable[[str], None]


def find_resume(folder: Path, world: World, say: Say) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint of the run in `folder`, and its state as rank 0 read it. Collective.

    Args:
        say: called on rank 0 with one line for each newer one that is damaged, and for a reading that takes long.

    Returns:
        None where the run has no checkpoint, alike on every rank.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
        PeerError: another rank found so, or was lost.
    """
    steps = _steps(folder, world)
    path = _newest(folder, steps, world, say)
    if path is None and steps:  # to begin again would write over them
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
    """The folder of the newest whole checkpoint of the run in `folder`, None without one. Collective; see above."""
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
    """What is wrong with the checkpoint, the same on every rank; [] when it is whole."""
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
    """On rank 0: what a first look finds, and the manifest's checksum."""
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
    """What is wrong with this rank's share of the data files."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [f"{rank_label(world.rank)}: {error}"]
    if manifest.checksum != checksum:
        return [f"{path.name}/{MANIFEST} is another one on {rank_label(world.rank)} than on rank 0"]
    reading.begin(manifest)
    return damaged(path, manifest, data_files(manifest, world.rank, world.size), reading.add)


def _held(path: Path, world: World) -> list[str]:
    """On rank 0, once all checksums held: what is wrong with what the files say."""
    try:
        if world.is_main:
            hold(path, read_manifest(path))
    except CheckpointError as error:
        return [str(error)]
    return []


class _ReadProgress:
    """How far the reading of a checkpoint's data is; rank 0 says so from time to time.

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
        """Takes the bytes read by every rank."""
        if time.monotonic() - self._told > _TELL:
            self._told = time.monotonic()
            self._say(f"checking checkpoint {self._name}: {bytes_text(sum(counts))} of {bytes_text(self._whole)} read")
