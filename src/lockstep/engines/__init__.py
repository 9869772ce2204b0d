"""How a model is split and stepped: one engine a file, found here by name."""

import importlib
from typing import cast

from torch import nn
from torch.optim import Optimizer

from lockstep.engines.base import Engine, MakeOptimizer, StepResult
from lockstep.engines.exact import check_servable, fold_of
from lockstep.errors import ConfigError
from lockstep.world import World

__all__ = ["ENGINES", "Engine", "MakeOptimizer", "StepResult", "engine"]

# name -> (module, class); imported when asked for, so that an engine's package is loaded only where it is used
ENGINES = {"single": ("lockstep.engines.single", "Single"), "ddp": ("lockstep.engines.ddp", "DDP")}


def engine(
    name: str,
    model: nn.Module,
    optimizer: Optimizer | MakeOptimizer,
    world: World,
    *,
    clip: float = 0.0,
    exact_micro_batches: int = 0,
) -> Engine:
    """The engine `name` around a model on its device, for the built-in loop or one of your own.

    Args:
        name: "single", "ddp", or "auto": ddp where a launcher started this process, else single.
        model: on `world.device`.
        optimizer: one over the model's parameters, or a function that makes it from the model as the engine holds it.
        world: see `World.join`.
        clip: largest 2-norm of the gradient; 0 does not clip.
        exact_micro_batches: M, to sum a step's M micro-batches in the fixed tree; 0: as the backend does.

    Raises:
        ConfigError: an unknown engine, or one that this world cannot form.
    """
    if name == "auto":
        name = "single" if world.control is None else "ddp"
    if name not in ENGINES:
        raise ConfigError(f"--engine is '{name}': choose one of auto, {', '.join(ENGINES)}")
    fold = 0
    if exact_micro_batches:
        check_servable(exact_micro_batches, world.size)
        fold = fold_of(exact_micro_batches)
    module, kind = ENGINES[name]
    make = (lambda _: optimizer) if isinstance(optimizer, Optimizer) else optimizer
    return cast(Engine, getattr(importlib.import_module(module), kind)(model, make, world, clip=clip, fold=fold))
