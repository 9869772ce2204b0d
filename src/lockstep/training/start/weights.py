"""Select a checkpoint, and load its weights into a model without an engine.

source = select_checkpoint(Path("outputs/mine"), "best")
load_model(source, model)
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint.check import read_contents
from lockstep.checkpoint.format import read_manifest
from lockstep.checkpoint.read import AVERAGE, averages_of, evaluated_of, open_tensors
from lockstep.checkpoint.remote import RemoteRun
from lockstep.config.fields import is_url, local_dir
from lockstep.config.schema import Config
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.world import World
from lockstep.engines.model_init import copy_expanded
from lockstep.errors import CheckpointError
from lockstep.training.start.shared_folder import find_folders
from lockstep.training.state.run_dir import RunFolder

__all__ = [
    "find_weights",
    "load_model",
    "select_checkpoint",
]

_LOG = logging.getLogger("lockstep")


def load_model(
    source: Path,
    model: nn.Module,
    own: Mapping[str, Tensor] | None = None,
    *,
    without: Collection[str] = (),
    leave: Callable[[str], bool] = lambda name: False,
    ema: bool = False,
) -> None:
    """Load a checkpoint's weights into a model, and the task's own tensors into `own`.

    Args:
        source: the checkpoint's folder.
        without: `model/NAME` of tensors to leave as they are: the base of adapters.
        leave: whether to leave a tensor as it is that the checkpoint may have, by its name.
        ema: load averages for the parameters that have one.

    Raises:
        CheckpointError: it is damaged, of another model, or lacks the averaged weights of `ema`.
    """
    copy_expanded(model)
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=False).items() if not leave(name)}
    state = {f"model/{name}": tensor for name, tensor in tensors.items() if f"model/{name}" not in without}
    state |= {f"task/{name}": tensor for name, tensor in (own or {}).items()}
    with torch.no_grad():
        checkpoint.load(source, state, None, leave=lambda name: leave(name.removeprefix("model/")))
        if ema:
            _load_averages(source, model)
        elif replaced := evaluated_of(read_contents(source, read_manifest(source))):
            _load_evaluated(source, model, replaced)


def _load_averages(source: Path, model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    with open_tensors(source) as tensors:
        for name in averages_of(source, tensors.contents):
            parameters[name.removeprefix(AVERAGE)].copy_(tensors.read(name))


def _load_evaluated(source: Path, model: nn.Module, names: Mapping[str, str]) -> None:
    """Load the weights for evaluation of an optimizer that has others for training."""
    parameters = dict(model.named_parameters())
    with open_tensors(source) as tensors:
        for name, stored in names.items():
            parameters[name.removeprefix("model/")].copy_(tensors.read(stored))


def select_checkpoint(path: Path, which: str | int) -> Path:
    """Return the checkpoint that `lockstep.load` loads.

    Args:
        path: a run's folder, or a checkpoint's.
        which: "best", "last", or a step.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if (path / "manifest.json").is_file():
        return path
    steps = checkpoint.list_steps(path) if path.is_dir() else []
    if not steps:
        raise CheckpointError(f"{path} has no checkpoint; give the folder of a run or of a checkpoint")
    if which == "best":
        folder = RunFolder(str(path.parent), path.name)
        _, selection = folder.read_evaluated()
        which = selection.best.step if selection.best else "last"
    step = _newest_finite(path, steps) if which == "last" else int(which)
    if step not in steps:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return checkpoint.path_of(path, step)


def _newest_finite(path: Path, steps: list[int]) -> int:
    """Return the newest step with finite tensors, or the newest step if there is none."""
    for step in reversed(steps):
        if not checkpoint.is_marked(checkpoint.path_of(path, step)):
            return step
        _LOG.warning("skipped checkpoint %s: it has tensors that are not finite", checkpoint.path_of(path, step))
    return steps[-1]


def find_weights(config: Config, world: World, say: Callable[[str], None]) -> tuple[Path, bool]:
    """Find the checkpoint that --init-from names. Collective.

    Returns:
        The checkpoint, or the newest complete one of a run; and whether it was verified.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    name = config.init_from
    remote = None
    path = Path(local_dir(name, config.checkpoint.local_dir)).expanduser()
    if is_url(name):
        remote = RemoteRun(name, "", "--init-from")
        world = dataclasses.replace(world)
        find_folders(RunFolder(str(path.parent), path.name), world)  # collective
    # The file may be visible on some ranks only, so all ranks decide together.
    elif any(world.gather(on_all_ranks(world, (path / "manifest.json").exists))):
        return path, False
    newest = checkpoint.find_newest(path, world, say, remote)  # collective
    if newest is None:
        raise CheckpointError(
            f"--init-from {name}: it has no complete checkpoint; give the folder of a run or of a checkpoint"
        )
    return newest, True
