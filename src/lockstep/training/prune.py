"""Remove a run's old checkpoints safely.

lockstep checkpoint prune RUN --keep N
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep import checkpoint
from lockstep.checkpoint.check import find_source, verify_data
from lockstep.checkpoint.format import read_manifest, step_name
from lockstep.checkpoint.stored import open_run, remote_of
from lockstep.checkpoint.upload import Uploader
from lockstep.config.fields import is_url
from lockstep.config.secrets import printable
from lockstep.errors import CheckpointError
from lockstep.files import bytes_text
from lockstep.training.state.run_dir import RunFolder, describe_owner, has_ended

__all__ = [
    "prune",
]


def prune(run: str | Path, keep: int, *, best: bool = True, dry_run: bool = False, as_json: bool = False) -> list[int]:
    """Remove all checkpoints of a run except the newest `keep` complete ones.

    Prints a line for each. Damaged checkpoints do not count and are removed too, if a complete one stays. A checkpoint
    is renamed before it is removed, so that a kill half-way leaves no damaged one behind.

    Args:
        run: the run's folder or URL.
        keep: >= 1.
        best: keep the checkpoint of the best evaluation too.
        dry_run: only print what would be removed.
        as_json: print a JSON list with the step of each checkpoint, its bytes, and whether it was removed.

    Returns:
        The steps of the removed checkpoints.

    Raises:
        ConfigError: a run has locked the folder, or uploads to the URL.
        CheckpointError: there are no checkpoints, none is complete, or the file system refused.
    """
    with open_run(run) as local_path:
        path = local_path.resolve()
        folder = RunFolder(str(path.parent), path.name)
        with _hold_url(str(run), path) if is_url(str(run)) else folder.hold():
            steps = _steps_to_remove(folder, keep, best)
            sizes = {step: _bytes_in(checkpoint.path_of(path, step)) for step in steps}
            if not dry_run:
                _discard(str(run), path, steps)
    _print_removed(sizes, dry_run=dry_run, as_json=as_json)
    return steps


@contextmanager
def _hold_url(url: str, path: Path) -> Iterator[None]:
    """Own a run's URL within the context. Raises ConfigError if a run uploads there."""
    owner = Uploader(remote_of(url, "RUN")[0], path, keep=1, every=0)
    owner.own(describe_owner(), has_ended, lambda line: print(line, file=sys.stderr))
    try:
        yield
    finally:
        owner.release()


def _discard(run: str, path: Path, steps: list[int]) -> None:
    if is_url(run):
        remote_of(run, "RUN")[0].discard(steps)
    else:
        checkpoint.discard(path, steps)


def _print_removed(sizes: dict[int, int], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        entries = []
        for step, size in sizes.items():
            entries.append({"step": step, "bytes": size, "removed": not dry_run})
        print(json.dumps(entries, indent=1))
        return
    verb = "would remove" if dry_run else "removed"
    for step, size in sizes.items():
        print(f"{verb} {step_name(step)}: {bytes_text(size)} ({size:,} bytes)")
    total = sum(sizes.values())
    print(f"{verb} {len(sizes)} checkpoint{'s' * (len(sizes) != 1)}, {bytes_text(total)} ({total:,} bytes)")


def _steps_to_remove(folder: RunFolder, keep: int, best: bool) -> list[int]:
    """Return the steps to remove, ascending."""
    steps = checkpoint.list_steps(folder.path)
    name = printable(str(folder.path))
    if not steps:
        raise CheckpointError(f"{name} has no checkpoint; give a run's folder, SAVE_DIR/EXPERIMENT_NAME")
    keeps: list[int] = []
    for step in reversed(steps):
        if len(keeps) < keep and not verify_data(checkpoint.path_of(folder.path, step)):
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
    if best:
        return best.step
    return -1


def _bytes_in(path: Path) -> int:
    with suppress(CheckpointError):
        if find_source(path):
            return read_manifest(path).size
    # A link counts as itself: its target may be elsewhere.
    total = 0
    for file in path.rglob("*"):
        if file.is_file():
            total += file.lstat().st_size
    return total
