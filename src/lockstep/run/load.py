"""A trained model from a run's folder.

model = lockstep.load("outputs/mine", Mine(), which="best")
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.errors import CheckpointError, ConfigError
from lockstep.run.folder import RunFolder
from lockstep.task import adapted

__all__ = ["chosen", "fill", "load"]


def load(
    path: str | os.PathLike[str], task: Any, which: str | int = "best", device: str | torch.device = "cpu"
) -> nn.Module:
    """The model of `task` with the weights of a checkpoint, in eval mode. Whatever engine and world wrote it.

    Args:
        path: a run's folder, or a checkpoint's.
        task: what the run trained; its `model()` is called.
        which: in a run's folder: "best" (the best evaluation; the last where nothing was evaluated), "last", or
            a step.
        device: where the model is put.

    Raises:
        CheckpointError: no such checkpoint, it is damaged, or it is of another model.
        ConfigError: `which` is none of these.
    """
    if isinstance(which, str) and which not in ("best", "last"):
        raise ConfigError(f"which is '{which}': it must be 'best', 'last', or a step")
    found = chosen(Path(path).expanduser(), which)
    model = adapted(task).model().to(device)
    fill(found, model)
    return model.eval()


def fill(found: Path, model: nn.Module, own: Mapping[str, Tensor] | None = None) -> None:
    """Fills the model with the weights of the checkpoint in `found`, and the task's own tensors where they are given.

    Raises:
        CheckpointError: it is damaged, or of another model.
    """
    state = {f"model/{name}": tensor for name, tensor in model.state_dict(keep_vars=False).items()}
    state |= {f"task/{name}": tensor for name, tensor in (own or {}).items()}
    with torch.no_grad():
        checkpoint.load(found, state, None)


def chosen(path: Path, which: str | int) -> Path:
    """The checkpoint that `load` takes for these two. Raises CheckpointError where there is no such one."""
    if (path / "manifest.json").is_file():
        return path
    steps = checkpoint.list_steps(path) if path.is_dir() else []
    if not steps:
        raise CheckpointError(f"{path}: no checkpoint there; give a run's folder or a checkpoint's")
    if which == "best":
        folder = RunFolder(str(path.parent), path.name)
        which = (folder.read_evaluated().get("best") or {}).get("step", "last")
    step = steps[-1] if which == "last" else int(which)
    if step not in steps:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return checkpoint.path_of(path, step)
