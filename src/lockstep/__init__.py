"""lockstep: one training loop that gives the same PyTorch training on any number of devices.

Importing this loads no torch: the names below are imported when they are first used.
"""

import importlib
import os
from typing import TYPE_CHECKING

from lockstep.verify import verify  # here, so that the name is the function and not the package, which loads no torch

if TYPE_CHECKING:  # what a type checker sees; at run time `__getattr__` below gives the same
    from lockstep.config.options import Config
    from lockstep.config.sections import Checkpoint, Data, Guards, Model, Optim
    from lockstep.distributed.world import World
    from lockstep.engines.make import engine
    from lockstep.engines.options import EngineOptions
    from lockstep.optim.torch_schedule import torch_schedule
    from lockstep.own_loop.gather import autocast, gather_for_metrics
    from lockstep.own_loop.loader import loader
    from lockstep.own_loop.states import load_state, save_state
    from lockstep.own_loop.whole_step import step_backward
    from lockstep.records import Best, EvaluationRecord, Step
    from lockstep.run.find_lr import find_lr
    from lockstep.run.find_micro_batch import find_micro_batch
    from lockstep.run.load import load
    from lockstep.run.run import Result, Run, train
    from lockstep.task import Task
    from lockstep.tasks.causal_lm import CausalLM
    from lockstep.tasks.lightning import from_lightning
    from lockstep.tasks.trainer import from_trainer

__version__ = "0.1.0"

# ATen reads it once, at the first cuBLAS call of a process, whether kernels must be deterministic then or not: set any
# later, an exact run after a plain one would be refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# The modules of the public names.
_MODULES = {
    "lockstep.config.options": ("Config",),
    "lockstep.config.sections": ("Checkpoint", "Data", "Guards", "Model", "Optim"),
    "lockstep.engines.make": ("engine",),
    "lockstep.engines.options": ("EngineOptions",),
    "lockstep.optim.torch_schedule": ("torch_schedule",),
    "lockstep.own_loop.gather": ("autocast", "gather_for_metrics"),
    "lockstep.own_loop.loader": ("loader",),
    "lockstep.own_loop.states": ("load_state", "save_state"),
    "lockstep.own_loop.whole_step": ("step_backward",),
    "lockstep.run.find_lr": ("find_lr",),
    "lockstep.run.find_micro_batch": ("find_micro_batch",),
    "lockstep.run.load": ("load",),
    "lockstep.records": ("Best", "EvaluationRecord", "Step"),
    "lockstep.run.run": ("Result", "Run", "train"),
    "lockstep.task": ("Task",),
    "lockstep.tasks.causal_lm": ("CausalLM",),
    "lockstep.tasks.lightning": ("from_lightning",),
    "lockstep.tasks.trainer": ("from_trainer",),
    "lockstep.distributed.world": ("World",),
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
    "autocast",
    "engine",
    "find_lr",
    "find_micro_batch",
    "from_lightning",
    "from_trainer",
    "gather_for_metrics",
    "load",
    "load_state",
    "loader",
    "save_state",
    "step_backward",
    "torch_schedule",
    "train",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
