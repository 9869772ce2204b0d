"""A trained model from a run's folder.

model = lockstep.load("outputs/mine", Mine(), which="best")
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import checkpoint
from lockstep.errors import ConfigError
from lockstep.run.adapters import left_out, with_adapters
from lockstep.run.weights import chosen, fill
from lockstep.task import adapted

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    task: Any,
    which: str | int = "best",
    device: str | torch.device = "cpu",
    *,
    ema: bool = False,
) -> nn.Module:
    """The model of `task` with the weights of a checkpoint, in eval mode. Whatever engine and world wrote it.

    A checkpoint of adapters gives the base, as `task.model()` makes it, with the adapters beside its layers.

    Args:
        path: a run's folder, or a checkpoint's.
        task: what the run trained; its `model()` is called.
        which: in a run's folder: "best" (the best evaluation; the last where nothing was evaluated), "last", or
            a step.
        device: where the model is put.
        ema: with the averaged weights of `--optim.ema`; buffers are the checkpoint's.

    Raises:
        CheckpointError: no such checkpoint, it is damaged, it is of another model (or adapters for another base), or it
            has no averaged weights.
        ConfigError: `which` is none of these.
    """
    if isinstance(which, str) and which not in ("best", "last"):
        raise ConfigError(f"which is '{which}': it must be 'best', 'last', or a step")
    found = chosen(Path(path).expanduser(), which)
    state = checkpoint.read_state(found)
    model = adapted(task).model()
    if "lora" in state:
        with_adapters(model, state["lora"])
    fill(found, model.to(device), without=left_out(model, state), ema=ema)
    return model.eval()
