"""Manage the checkpoints of a run: write, find and prune them.

    path = save(folder, step, tensors, state, world, engine="ddp")
    path = newest(folder, say=print)            the newest whole one, or None
    load(path, tensors, world); read_state(path)
    retain(folder, last=3, best=400, every=0)

`folder` is the run's folder; the checkpoints are in its `checkpoints/`. `save` and `load` are collective; the others
are for rank 0 alone.
"""

import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.check import is_marked, verify
from lockstep.checkpoint.files import remove
from lockstep.checkpoint.format import read_run_state, read_state, step_name, step_of
from lockstep.checkpoint.read import fingerprint, fingerprint_of, load
from lockstep.checkpoint.write import save, write_share
from lockstep.files import printable, refusal_error, retry_io, sync

__all__ = [
    "clean",
    "discard",
    "fingerprint",
    "fingerprint_of",
    "is_marked",
    "kept_steps",
    "list_steps",
    "load",
    "newest",
    "path_of",
    "read_run_state",
    "read_state",
    "retain",
    "save",
    "verify",
    "write_share",
]

_LEFTOVER = re.compile(r"\.step-\d{8,18}\.(tmp|old)-[0-9a-f]{16}", re.ASCII)


def path_of(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`, which need not exist."""
    return folder / "checkpoints" / step_name(step)


def list_steps(folder: Path) -> list[int]:
    """Return the steps of the run's checkpoints, complete or not, ascending."""
    steps = []
    for path in _inside(folder):
        if _is_folder(path):
            steps.append(step_of(path.name))
    return sorted(step for step in steps if step is not None)


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(retry_io(lambda: list((folder / "checkpoints").iterdir())))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise refusal_error(error) from error


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(retry_io(path.stat).st_mode)
    except OSError:
        # Removed meanwhile, or a broken link.
        return False


def newest(folder: Path, *, say: Callable[[str], None]) -> Path | None:
    """Return the folder of the newest complete checkpoint; None without one.

    Reads every byte of it. `say` gets a line for each damaged newer one, with the file and the reason. If several ranks
    resume, use `find_newest`.
    """
    for step in reversed(list_steps(folder)):
        path = path_of(folder, step)
        problems = verify(path)
        if not problems:
            return path
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        say(f"skipped checkpoint {path.name}: {problems[0]}{more}")
    return None


def retain(folder: Path, *, last: int, best: Path | int | None, every: int, sending: int | None = None) -> list[int]:
    """Remove all checkpoints except the newest, the best and every n-th.

    A checkpoint is renamed before it is removed, so that a kill midway leaves no damaged one. One with a tensor that is
    not finite does not count, and stays only while it is the newest.

    Args:
        last: number of newest ones to keep, >= 1.
        best: a step or a checkpoint's folder; None: there is none.
        every: also keep steps that are multiples of it; 0: none.
        sending: also keep this step, which is being uploaded; None: none is.

    Returns:
        The removed steps, ascending.

    Raises:
        ValueError: `last` < 1 or `every` < 0.
        CheckpointError: the file system refused.
    """
    if last < 1 or every < 0:
        raise ValueError(f"last ({last}) must be at least 1 and every ({every}) at least 0")
    best_step = step_of(best.name) if isinstance(best, Path) else best
    steps = list_steps(folder)
    stay = kept_steps(steps, lambda step: is_marked(path_of(folder, step)), last=last, best=best_step, every=every)
    removed = []
    for step in steps:
        if step not in stay and step != sending:
            removed.append(step)
    discard(folder, removed)
    return removed


def kept_steps(
    steps: list[int], is_marked: Callable[[int], bool], *, last: int, best: int | None, every: int
) -> set[int]:
    """Return which of the ascending `steps` the retention keeps, see `retain`.

    Args:
        is_marked: whether a step's checkpoint has a tensor that is not finite.
    """
    stay = {step for step in steps if step == best or (every and step % every == 0)} | {*steps[-1:]}
    for step in reversed(steps):
        if last and not is_marked(step):
            stay.add(step)
            last -= 1
    return stay


def discard(folder: Path, steps: list[int]) -> None:
    """Remove the checkpoints of these steps; each is renamed first, see `retain`.

    Raises:
        CheckpointError: the file system refused.
    """
    try:
        asides = [_put_aside(path_of(folder, step)) for step in steps]
        if asides:
            sync(folder / "checkpoints")
    except OSError as error:
        raise refusal_error(error) from error
    for aside in asides:
        remove(aside)


def _put_aside(path: Path) -> Path:
    aside = path.with_name(f".{path.name}.old-{secrets.token_hex(8)}")
    os.rename(path, aside)
    return aside


def clean(folder: Path) -> list[str]:
    """Remove leftovers of interrupted saves and removals, and return their names. Not during a save."""
    leftovers = []
    for path in _inside(folder):
        if _LEFTOVER.fullmatch(path.name):
            leftovers.append(path)
    for path in leftovers:
        remove(path)
    return [printable(path.name) for path in leftovers]
