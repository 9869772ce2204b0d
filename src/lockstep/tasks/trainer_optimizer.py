"""The optimizer and the rates of a Hugging Face Trainer, made by its own methods for the model that an engine holds.

check_optimizer(trainer)                        # what is not served is refused by its name
recipe = given_optimizer(trainer)               # of one that the Trainer was given; None where there is none
optimizer = recipe(model) if recipe else made_optimizer(trainer, model)
rates = schedule_of(trainer)                    # (step, steps) -> factor; None for a plateau
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.errors import ConfigError
from lockstep.optim.torch_schedule import torch_schedule
from lockstep.tasks.tables.trainer import OPTIMIZERS
from lockstep.tasks.trainer_arguments import value

__all__ = ["check_optimizer", "given_optimizer", "made_optimizer", "schedule_of"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # what transformations put into parameters' names

Rates = Callable[[int, int], float]


def check_optimizer(trainer: Any) -> None:
    """Raises ConfigError, by its name, for an optimizer that no engine steps."""
    if trainer.optimizer is not None:
        return
    if trainer.optimizer_cls_and_kwargs is not None:
        kind = trainer.optimizer_cls_and_kwargs[0]
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise ConfigError(
                f"from_trainer: optimizer_cls_and_kwargs={getattr(kind, '__name__', kind)} is a factory, which is not "
                "served: give a class of torch.optim.Optimizer"
            )
        return
    name = value(trainer.args.optim)
    if name not in OPTIMIZERS and not _is_own(trainer, "create_optimizer"):
        raise ConfigError(
            f"from_trainer: TrainingArguments(optim='{name}') is not served: use one of {', '.join(OPTIMIZERS)}, or "
            "give the Trainer optimizer_cls_and_kwargs"
        )


def given_optimizer(trainer: Any) -> Callable[[nn.Module], Optimizer] | None:
    """How to make the optimizer that the Trainer was given anew, over the parameters of the same names.

    Raises:
        ConfigError: it has stepped already, or holds parameters that are not of the Trainer's model.
    """
    given = trainer.optimizer
    if given is None:
        return None
    if given.state:
        raise ConfigError("from_trainer: the optimizer of the Trainer has stepped already: give it a new one")
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    groups = []
    for group in given.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise ConfigError(
                "from_trainer: the optimizer of the Trainer holds parameters that are not of its model: make it from "
                "model.parameters()"
            )
        options = {key: option for key, option in group.items() if key not in ("params", "initial_lr")}
        options["lr"] = group.get("initial_lr", group["lr"])  # a scheduler has multiplied the other
        groups.append(([_plain(names[parameter]) for parameter in group["params"]], options))
    kind, known = type(given), inspect.signature(type(given)).parameters
    defaults = {key: option for key, option in given.defaults.items() if key in known}

    def make(model: nn.Module) -> Optimizer:
        parameters = {_plain(name): parameter for name, parameter in model.named_parameters()}
        members = [{**options, "params": [parameters[name] for name in held]} for held, options in groups]
        made: Optimizer = kind(members, **defaults)
        return made

    return make


def made_optimizer(trainer: Any, model: nn.Module) -> Optimizer:
    """What the Trainer's `create_optimizer` makes for `model`; groups without parameters are left out."""
    held = trainer.model
    trainer.model, trainer.optimizer = model, None
    try:
        takes = "model" in inspect.signature(trainer.create_optimizer).parameters
        made: Optimizer = trainer.create_optimizer(model) if takes else trainer.create_optimizer()
    finally:
        trainer.model = held
    made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    return made


def schedule_of(trainer: Any) -> Rates | None:
    """(step, steps) -> what the base rates are multiplied by; None for a plateau, which is not the step's alone.

    Raises:
        ConfigError: a scheduler that was given and is no function of the step.
    """
    given = trainer.lr_scheduler
    if given is not None:
        if not isinstance(given, LambdaLR) or any(each is not given.lr_lambdas[0] for each in given.lr_lambdas):
            raise ConfigError(
                f"from_trainer: the scheduler of the Trainer, {type(given).__name__}, is not served: give a LambdaLR "
                "with one function, or say it as lr_scheduler_type"
            )
        rate = given.lr_lambdas[0]
        return lambda step, steps: float(rate(step))
    if value(trainer.args.lr_scheduler_type) == "reduce_lr_on_plateau":
        return None

    def make(optimizer: Optimizer, steps: int) -> Any:
        held = trainer.optimizer
        trainer.optimizer, trainer.lr_scheduler = optimizer, None
        try:
            return trainer.create_scheduler(steps, optimizer)
        finally:
            trainer.optimizer, trainer.lr_scheduler = held, None

    return torch_schedule(make, lr=float(trainer.args.learning_rate) or 1.0)


def _is_own(trainer: Any, method: str) -> bool:
    """Whether the method is written by the user, and not in transformers."""
    return not getattr(type(trainer), method).__module__.startswith("transformers.")


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
