"""lockstep: one training loop that gives the same PyTorch training on any number of devices.

Importing this loads no torch: the names below are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what a type checker sees; at run time `__getattr__` below gives the same
    from lockstep.config import Config
    from lockstep.diagnose.verify import verify
    from lockstep.engines import engine
    from lockstep.run import train
    from lockstep.task import Task
    from lockstep.tasks.causal_lm import CausalLM
    from lockstep.world import World

__version__ = "0.1.0"

# The public names and the modules that define them.
_HOME = {
    "Task": "lockstep.task",
    "CausalLM": "lockstep.tasks.causal_lm",
    "Config": "lockstep.config",
    "World": "lockstep.world",
    "engine": "lockstep.engines",
    "train": "lockstep.run",
    "verify": "lockstep.diagnose.verify",
}

__all__ = ["CausalLM", "Config", "Task", "World", "engine", "train", "verify"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
