"""What of a module is served, and what is refused before step 1, by the name of the hook and with the way out.

check_module(module, trainer)
"""

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lockstep.data.fetch import generators_kept
from lockstep.errors import ConfigError
from lockstep.tasks.lightning_data import Parts
from lockstep.tasks.lightning_leavings import Leavings
from lockstep.tasks.lightning_package import calls, kind_of, takes, written
from lockstep.tasks.tables.lightning import HOOKS

__all__ = ["check_module", "made_whole"]


def check_module(module: Any, trainer: Any) -> None:
    """Raises ConfigError, in one line, for what is no module, has trained, or trains in a way that is not served."""
    if isinstance(module, type):
        raise ConfigError(f"from_lightning: {module.__name__} is a class: give an object of it, {module.__name__}()")
    if kind_of(module, "LightningModule") is None:
        raise ConfigError(f"from_lightning takes a LightningModule, and this is {type(module).__name__}")
    if trainer is not None and kind_of(trainer, "Trainer") is None:
        raise ConfigError(f"from_lightning: trainer is {type(trainer).__name__}: give a Trainer of Lightning, or none")
    name = type(module).__name__
    for needed in ("training_step", "configure_optimizers"):
        if not written(module, needed):
            raise ConfigError(f"from_lightning: {name} has no `{needed}`: write it")
    for hook, out in HOOKS.items():
        if _has(module, hook):
            raise ConfigError(f"from_lightning: {name} has its own `{hook}`, which is not served: {out}")
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        method = getattr(module, step, None)
        if method is not None and takes(method, "dataloader_iter"):
            raise ConfigError(
                f"from_lightning: {step} of {name} takes a dataloader_iter, and which batches it reads is not known: "
                "take (batch, batch_idx)"
            )
    for more, out in (
        ("optimizer_idx", "Lightning 2 has it no more: set automatic_optimization = False"),
        ("hiddens", "Lightning 2 has it no more: keep the state in the module"),
    ):
        if takes(module.training_step, more):
            raise ConfigError(f"from_lightning: training_step of {name} takes `{more}`: {out}")


def made_whole(module: Any, train: Parts) -> None:
    """Gives lazy parameters their shapes, by one `training_step` on the first samples.

    Raises:
        ConfigError: the step fails, or leaves lazy parameters behind.
    """
    if not any(is_lazy(parameter) for parameter in module.parameters()):
        return
    name = next(name for name, parameter in module.named_parameters() if is_lazy(parameter))
    count = min(train.batch_size, len(train.dataset))
    before, reason = module._current_fx_name, "it is not used"
    try:
        with generators_kept(), torch.no_grad(), Leavings.undone(module):
            module._current_fx_name = "training_step"
            batch = train.collate([train.dataset[place] for place in range(count)])
            module.training_step(*calls(module.training_step, batch, 0))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        module._current_fx_name = before
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ConfigError(
            f"from_lightning: the parameter {name} is lazy, and training_step on the first samples does not make it "
            f"({reason}): call the module on a batch before"
        )


def _has(module: Any, hook: str) -> bool:
    return hasattr(module, hook) and written(module, hook)
