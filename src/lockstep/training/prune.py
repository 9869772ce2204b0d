"""Remove a run's old checkpoints safely.

lockstep checkpoint prune RUN --keep N
"""

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
    """Remove all checkpoints of a run except the newest `keep` complete ones.

    Prints a line for each. Damaged ones do not count and are removed too, once a complete one is kept. A checkpoint is
    renamed before it is removed, so that a kill half-way leaves no damaged one behind.

    Args:
        path: the run's folder.
        keep: >= 1.
        best: keep the checkpoint of the best evaluation too.
        dry_run: only print what would be removed.
        as_json: print a JSON list with an entry per checkpoint: its step, its bytes, and whether it was removed.

    Returns:
        The steps of the removed checkpoints.

    Raises:
        ConfigError: a run holds the folder.
        CheckpointError: there are no checkpoints, none is complete, or the file system refused.
    """
    path = path.expanduser().resolve()
    folder = RunFolder(str(path.parent), path.name)
    with folder.held():
        going = _steps_to_remove(folder, keep, best)
        sizes = {step: _bytes_in(checkpoint.path_of(path, step)) for step in going}
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


def _steps_to_remove(folder: RunFolder, keep: int, best: bool) -> list[int]:
    """Return the steps to remove, ascending."""
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
    """Return the step of the best evaluation; -1 if there is none.

    The folder's record wins over the newest complete checkpoint's.
    """
    _, selection = folder.read_evaluated()
    best = selection.best or checkpoint.read_run_state(checkpoint.path_of(folder.path, newest)).selection.best
    return best.step if best else -1


def _bytes_in(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
