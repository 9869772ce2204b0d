"""Which checkpoint is meant, and its weights into a model.

found = chosen(Path("outputs/mine"), "best")
fill(found, model)
"""

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint.read import AVERAGE, averages_of, opened
from lockstep.distributed.world import World, on_all_ranks
from lockstep.errors import CheckpointError
from lockstep.run.folder import RunFolder

__all__ = ["chosen", "fill", "weights_in"]

_LOG = logging.getLogger("lockstep")


def fill(
    found: Path,
    model: nn.Module,
    own: Mapping[str, Tensor] | None = None,
    *,
    without: Collection[str] = (),
    ema: bool = False,
) -> None:
    """Fills the model with the weights of the checkpoint in `found`, and the task's own tensors where they are given.

    Args:
        without: `model/NAME` of what stays as it is: the base, where the checkpoint is of adapters.
        ema: then gives the parameters that have an average that one.

    Raises:
        CheckpointError: it is damaged, of another model, or has no averaged weights where they are asked for.
    """
    state = {f"model/{name}": tensor for name, tensor in model.state_dict(keep_vars=False).items()}
    state = {name: tensor for name, tensor in state.items() if name not in without}
    state |= {f"task/{name}": tensor for name, tensor in (own or {}).items()}
    with torch.no_grad():
        checkpoint.load(found, state, None)
        if ema:
            _fill_averages(found, model)


def _fill_averages(found: Path, model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    with opened(found) as whole:
        for name in averages_of(found, whole.stored):
            parameters[name.removeprefix(AVERAGE)].copy_(whole.read(name))


def chosen(path: Path, which: str | int) -> Path:
    """The checkpoint that `lockstep.load` takes for these two. Raises CheckpointError where there is no such one."""
    if (path / "manifest.json").is_file():
        return path
    steps = checkpoint.list_steps(path) if path.is_dir() else []
    if not steps:
        raise CheckpointError(f"{path}: no checkpoint there; give a run's folder or a checkpoint's")
    if which == "best":
        folder = RunFolder(str(path.parent), path.name)
        which = (folder.read_evaluated().get("best") or {}).get("step", "last")
    step = _last(path, steps) if which == "last" else int(which)
    if step not in steps:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return checkpoint.path_of(path, step)


def _last(path: Path, steps: list[int]) -> int:
    """The newest of these steps whose tensors are finite; where there is none, the newest."""
    for step in reversed(steps):
        if not checkpoint.is_marked(checkpoint.path_of(path, step)):
            return step
        _LOG.warning("skipped checkpoint %s: it has tensors that are not finite", checkpoint.path_of(path, step))
    return steps[-1]


def weights_in(path: Path, world: World, say: Callable[[str], None]) -> tuple[Path, bool]:
    """The checkpoint that --init-from names, and whether it was verified: itself, or the newest whole one of a run."""
    if any(world.gather(on_all_ranks(world, (path / "manifest.json").exists))):  # collective
        return path, False
    found = checkpoint.find_newest(path, world, say)  # collective
    if found is None:
        raise CheckpointError(f"--init-from {path}: no whole checkpoint there; give a run's folder or a checkpoint's")
    return found, True
