"""Track which parameters a run trains: unfreezing, freezing, added groups.

    restore_initial_set(model, state)       # before an engine is made, so that the checkpoint's tensors fit it
    restore_trained_set(model, state)       # once they are loaded
    store_trained_set(engine, state)        # before the state is saved

From the first change on, every checkpoint has a `run_state.TrainedSet`.
"""

import zlib
from collections.abc import Collection

from torch import nn
from torch.optim import Optimizer

from lockstep.engines.base import Engine
from lockstep.engines.ddp import shorten
from lockstep.engines.registry import trained_set
from lockstep.engines.wrappers import set_trained
from lockstep.errors import ResumeError
from lockstep.run_state import RunState, TrainedSet

__all__ = [
    "check_in_optimizer",
    "restore_initial_set",
    "restore_trained_set",
    "store_trained_set",
    "trained_digest",
]


def trained_digest(trained: TrainedSet | None) -> int:
    """Hash the trained set; 0 if it never changed."""
    if trained:
        return zlib.crc32("\n".join(sorted(trained.now)).encode())
    return 0


def store_trained_set(engine: Engine, state: RunState) -> None:
    """Store the current trained set in the state, if it ever changed."""
    state.trained = trained_set(engine) or state.trained


def restore_initial_set(model: nn.Module, state: RunState) -> list[str]:
    """Make the model train the parameters that the checkpoint's engine was made for.

    Returns:
        The names of those that the model would not train by itself.
    """
    trained = state.trained
    if trained is None:
        return []
    default = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            default.add(name)
    set_trained(model, {*trained.made})
    return [name for name in trained.made if name not in default]


def check_in_optimizer(model: nn.Module, optimizer: Optimizer | None, names: Collection[str]) -> None:
    """Raise ResumeError if the optimizer lacks some of these unfrozen parameters."""
    optimized = set()
    for group in optimizer.param_groups if optimizer else ():
        for p in group["params"]:
            optimized.add(id(p))
    parameters = dict(model.named_parameters())
    missing = []
    for name in names:
        if name in parameters and id(parameters[name]) not in optimized:
            missing.append(name)
    if missing:
        raise ResumeError(
            f"the run unfroze {shorten(missing)} while it trained, and the task's `optimizer` has no group with them: "
            "give it all parameters that require gradients"
        )


def restore_trained_set(model: nn.Module, state: RunState) -> None:
    """Make the model train the parameters that the run trained when its state was stored."""
    if state.trained is not None:
        set_trained(model, {*state.trained.now})
