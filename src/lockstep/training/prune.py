"""`lockstep checkpoint prune RUN --keep N`: room on the disk, by the library's own way of removing a checkpoint."""

import json
from pathlib import Path

from lockstep import checkpoint
from lockstep.config.secrets import printable
from lockstep.errors import CheckpointError
from lockstep.files import bytes_text
from lockstep.training.run_dir import RunFolder

__all__ = [
    "prune",
]


def prune(path: Path, keep: int, *, best: bool = True, dry_run: bool = False, as_json: bool = False) -> list[int]:
    """Removes the checkpoints of the run in `path`, but the `keep` newest whole ones, and says each; returns the steps.

    What is damaged counts for nothing and goes too, once something whole stays. A checkpoint loses its name first, so
    that a kill half-way leaves no damaged one behind.

    Args:
        keep: >= 1.
        best: the one of the best evaluation stays too.
        dry_run: only say what would go.
        as_json: print one JSON list, an entry a checkpoint: its step, its bytes, and whether it was removed.

    Raises:
        ConfigError: a run holds the folder.
        CheckpointError: there are no checkpoints, none is whole, or the file system refused.
    """
    path = path.expanduser().resolve()
    folder = RunFolder(str(path.parent), path.name)
    with folder.held():
        going = _going(folder, keep, best)
        sizes = {step: _size(checkpoint.path_of(path, step)) for step in going}
        if not dry_run:
            checkpoint.discard(path, going)
    if as_json:
        found = [{"step": step, "bytes": size, "removed": not dry_run} for step, size in sizes.items()]
        print(json.dumps(found, indent=1))
        return going
    verb = "would remove" if dry_run else "removed"
    for step, size in sizes.items():
        print(f"{verb} {checkpoint.path_of(path, step).name}: {bytes_text(size)} ({size:,} bytes)")
    total = sum(sizes.values())
    print(f"{verb} {len(going)} checkpoint{'s' * (len(going) != 1)}, {bytes_text(total)} ({total:,} bytes)")
    return going


def _going(folder: RunFolder, keep: int, best: bool) -> list[int]:
    """The steps to remove, ascending."""
    steps, shown = checkpoint.list_steps(folder.path), printable(str(folder.path))
    if not steps:
        raise CheckpointError(f"{shown} has no checkpoint; give a run's folder, SAVE_DIR/EXPERIMENT_NAME")
    kept: list[int] = []
    for step in reversed(steps):
        if len(kept) < keep and not checkpoint.verify(checkpoint.path_of(folder.path, step)):
            kept.append(step)
    if not kept:
        raise CheckpointError(f"{shown}: none of its {len(steps)} checkpoints is whole, so all stay")
    if best:
        kept.append(_best_of(folder, kept[0]))
    return [step for step in steps if step not in kept]


def _best_of(folder: RunFolder, newest: int) -> int:
    """The step of the best evaluation, as the folder or else the newest whole checkpoint has it; -1: there is none."""
    state = checkpoint.read_state(checkpoint.path_of(folder.path, newest))
    known = folder.read_evaluated().get("best") or state.get("best")
    step = known.get("step") if isinstance(known, dict) else None
    return step if isinstance(step, int) else -1


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
