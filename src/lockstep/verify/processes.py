"""Processes for a proof: N ranks of one function, on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.distributed import spawn
from lockstep.distributed.spawn import RankFailed

__all__ = ["RankFailed", "start"]


def start(
    function: Callable[..., None], size: int, args: tuple[Any, ...], *, folder: Path, device: str, patience: float
) -> None:
    """Runs `function(world, say, *args)` on each of `size` ranks to the end. See `spawn.start`."""
    preload = ["lockstep.verify.worker"]
    spawn.start(function, size, args, device=device, patience=patience, folder=folder, preload=preload, what="the task")
