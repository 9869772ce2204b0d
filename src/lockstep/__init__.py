"""lockstep: one training loop that gives the same PyTorch training on any number of devices.

Importing this loads no torch: the names below are imported when they are first used.
"""

import importlib
import os
from typing import TYPE_CHECKING

from lockstep.distributed.failures import print_uncaught
from lockstep.launch import launch  # here, so that the name is the function and not the package, which loads no torch
from lockstep.verify import verify  # the same

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` below imports the same
    from lockstep.adapters.hf_trainer.convert import from_trainer
    from lockstep.adapters.lightning.convert import from_lightning
    from lockstep.config.cli import Config
    from lockstep.config.engine_options import EngineOptions
    from lockstep.config.sections import Checkpoint, Data, Guards, Model, Optim
    from lockstep.data.hold_out import hold_out
    from lockstep.data.mixture import mixture
    from lockstep.data.shards import index_shards, shards
    from lockstep.data.stream_types import stream
    from lockstep.distributed.world import World
    from lockstep.engines.registry import engine
    from lockstep.optim.schedule import torch_schedule
    from lockstep.own_loop import autocast, gather_for_metrics, load_state, loader, save_state, step_backward
    from lockstep.parallel.context import attention
    from lockstep.records import Best, EvaluationRecord, Step
    from lockstep.task import Task
    from lockstep.tasks.image_samples import image_folder
    from lockstep.tasks.language_model import CausalLM
    from lockstep.training.inference import load
    from lockstep.training.run import Result, Run, train

__version__ = "0.1.0"

# ATen reads it once, at the first cuBLAS call of a process, even if that call need not be deterministic: set later, an
# exact run after a plain one would be refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

print_uncaught()  # here, because a script's Config may be invalid before any run starts

# The modules of the public names.
_MODULES = {
    "lockstep.adapters.hf_trainer.convert": ("from_trainer",),
    "lockstep.adapters.lightning.convert": ("from_lightning",),
    "lockstep.config.cli": ("Config",),
    "lockstep.config.engine_options": ("EngineOptions",),
    "lockstep.config.sections": (
        "Checkpoint",
        "Data",
        "Guards",
        "Model",
        "Optim",
    ),
    "lockstep.data.hold_out": ("hold_out",),
    "lockstep.data.mixture": ("mixture",),
    "lockstep.data.shards": (
        "index_shards",
        "shards",
    ),
    "lockstep.data.stream_types": ("stream",),
    "lockstep.distributed.world": ("World",),
    "lockstep.engines.registry": ("engine",),
    "lockstep.optim.schedule": ("torch_schedule",),
    "lockstep.own_loop": (
        "autocast",
        "gather_for_metrics",
        "load_state",
        "loader",
        "save_state",
        "step_backward",
    ),
    "lockstep.parallel.context": ("attention",),
    "lockstep.records": (
        "Best",
        "EvaluationRecord",
        "Step",
    ),
    "lockstep.task": ("Task",),
    "lockstep.tasks.image_samples": ("image_folder",),
    "lockstep.tasks.language_model": ("CausalLM",),
    "lockstep.training.inference": ("load",),
    "lockstep.training.run": (
        "Result",
        "Run",
        "train",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Best",
    "CausalLM",
    "Checkpoint",
    "Config",
    "Data",
    "EngineOptions",
    "EvaluationRecord",
    "Guards",
    "Model",
    "Optim",
    "Result",
    "Run",
    "Step",
    "Task",
    "World",
    "attention",
    "autocast",
    "engine",
    "from_lightning",
    "from_trainer",
    "gather_for_metrics",
    "hold_out",
    "image_folder",
    "index_shards",
    "launch",
    "load",
    "load_state",
    "loader",
    "mixture",
    "save_state",
    "shards",
    "step_backward",
    "stream",
    "torch_schedule",
    "train",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
