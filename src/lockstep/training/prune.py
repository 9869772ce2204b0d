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

    Prints a line for each. Damaged checkpoints do not count and are removed too, if a complete one stays. A checkpoint
    is renamed before it is removed, so that a kill half-way leaves no damaged one behind.

    Args:
        path: the run's folder.
        keep: >= 1.
        best: keep the checkpoint of the best evaluation too.
        dry_run: only print what would be removed.
        as_json: print a JSON list with the step of each checkpoint, its bytes, and whether it was removed.

    Returns:
        The steps of the removed checkpoints.

    Raises:
        ConfigError: a run has locked the folder.
        CheckpointError: there are no checkpoints, none is complete, or the file system refused.
    """
    path = path.expanduser().resolve()
    folder = RunFolder(str(path.parent), path.name)
    with folder.hold():
        steps = _steps_to_remove(folder, keep, best)
        sizes = {step: _bytes_in(checkpoint.path_of(path, step)) for step in steps}
        if not dry_run:
            checkpoint.discard(path, steps)
    if as_json:
        entries = [{"step": step, "bytes": size, "removed": not dry_run} for step, size in sizes.items()]
        print(json.dumps(entries, indent=1))
        return steps
    verb = "would remove" if dry_run else "removed"
    for step, size in sizes.items():
        print(f"{verb} {checkpoint.path_of(path, step).name}: {bytes_text(size)} ({size:,} bytes)")
    total = sum(sizes.values())
    print(f"{verb} {len(steps)} checkpoint{'s' * (len(steps) != 1)}, {bytes_text(total)} ({total:,} bytes)")
    return steps


def _steps_to_remove(folder: RunFolder, keep: int, best: bool) -> list[int]:
    """Return the steps to remove, ascending."""
    steps, name = checkpoint.list_steps(folder.path), printable(str(folder.path))
    if not steps:
        raise CheckpointError(f"{name} has no checkpoint; give a run's folder, SAVE_DIR/EXPERIMENT_NAME")
    keeps: list[int] = []
    for step in reversed(steps):
        if len(keeps) < keep and not checkpoint.verify(checkpoint.path_of(folder.path, step)):
            keeps.append(step)
    if not keeps:
        raise CheckpointError(f"{name}: none of its {len(steps)} checkpoints is complete, so nothing was removed")
    if best:
        keeps.append(_best_of(folder, keeps[0]))
    return [step for step in steps if step not in keeps]


def _best_of(folder: RunFolder, newest: int) -> int:
    """Return the step of the best evaluation; -1 if there is none.

    The folder's record is newer than that of the newest complete checkpoint.
    """
    _, selection = folder.read_evaluated()
    best = selection.best or checkpoint.read_run_state(checkpoint.path_of(folder.path, newest)).selection.best
    return best.step if best else -1


def _bytes_in(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
