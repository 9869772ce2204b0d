"""Restore what a trial changes, and find what a loss leaves behind.

with preserve_state(model, task, device):
    task.loss(model, batch)         # leaves no marks
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.loader import generators_kept
from lockstep.engines.base import at_rest
from lockstep.object_state import ObjectState
from lockstep.task import Task, user_task

__all__ = ["preserve_state", "state_of"]

# Attributes of a task that a trial finds out; they stay.
_FINDINGS = ("reduction", "_reduction_before", "_takes_gradients", "evaluates_loss")


@contextlib.contextmanager
def preserve_state(model: nn.Module, task: Task, device: torch.device, *, training: bool = False) -> Iterator[None]:
    """Restore modes, generators, and all that hangs on the model and the user's objects, at the end.

    Args:
        training: leave the modes as they are; False: run in eval mode.
    """
    _start(task)
    state = state_of(model, task)
    cuda_generator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    if not training:
        model.eval()
    try:
        with generators_kept():
            yield
    finally:
        at_rest(model)
        findings = {name: vars(task)[name] for name in _FINDINGS if name in vars(task)}
        state.restore()
        vars(task).update(findings)
        if cuda_generator is not None:
            torch.cuda.set_rng_state(cuda_generator, device)


def state_of(model: nn.Module, task: Task) -> ObjectState:
    """Record the state of the model and of the user's own objects.

    The values of parameters, of `fixed_models` and of their optimizers' states are watched, not copied.

    Args:
        model: the engine's or the plain one.
    """
    roots, skip = _roots(task)
    roots |= {"model": model, "task.state_dict()": task.state_dict()}
    fixed: list[Tensor] = [each for fixed in task.fixed_models.values() for each in fixed.parameters()]
    return ObjectState(roots, [*model.parameters(), *fixed], skip)


def _roots(task: Task) -> tuple[dict[str, Any], list[Any]]:
    """Return the user's own objects by name, and what is left alone: what belongs to the run."""
    if not task.framework:
        return {"task": user_task(task)}, []
    trainer: Any = getattr(task, "trainer", None)
    if task.framework == "Lightning":  # its loggers have files and connections, and the run logs nothing in a trial
        run = [task, task.hooks, trainer._results, *trainer.loggers, *trainer.optimizers]
        return {"module": vars(task)["module"], "trainer": trainer}, run
    return {"trainer": trainer}, [task, trainer.optimizer, trainer.lr_scheduler]


def _start(task: Task) -> None:
    """Start a Lightning training, whose first hooks may make what the run needs: they are no marks of the trial."""
    if task.framework == "Lightning":
        life: Any = task.hooks
        life.start()
