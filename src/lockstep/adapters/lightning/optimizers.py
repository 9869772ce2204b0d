"""Read the result of `configure_optimizers`.

    config = read(module.configure_optimizers())
    rates = Rates(config.optimizers[0], config.schedulers, place)   # see `lockstep.adapters.rates`

`read` accepts every form that Lightning 2 accepts.
"""

from dataclasses import dataclass, field
from typing import Any

from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.adapters.rates import Scheduler
from lockstep.errors import ConfigError

__all__ = [
    "Configured",
    "read",
]


# Keys of a scheduler's dict that Lightning 2 reads.
_KEYS = ("scheduler", "name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict")


@dataclass
class Configured:
    """A module's optimizers and schedulers, in order."""

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Scheduler] = field(default_factory=list)


def read(result: Any, *, automatic: bool = True) -> Configured:
    """Return the optimizers and schedulers of a result of `configure_optimizers`.

    Args:
        automatic: lockstep takes the steps; else `training_step` does, and may have several optimizers.

    Raises:
        ConfigError: a form that Lightning 2 does not accept, or an optimizer that no engine can step.
    """
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    monitor = None
    # The forms that Lightning 2 accepts: an optimizer, a dict, ([optimizers], [schedulers]), dicts, a list.
    if isinstance(result, Optimizer):
        optimizers = [result]
    elif isinstance(result, dict):
        optimizers = [result.get("optimizer")]
        monitor = result.get("monitor")
        schedulers = [result["lr_scheduler"]] if result.get("lr_scheduler") is not None else []
    elif isinstance(result, list | tuple) and len(result) == 2 and isinstance(result[0], list | tuple):
        optimizers = list(result[0])
        schedulers = list(result[1]) if isinstance(result[1], list | tuple) else [result[1]]
    elif isinstance(result, list | tuple) and result and all(isinstance(entry, dict) for entry in result):
        if any("frequency" in entry for entry in result):
            raise _error(
                "gives its optimizers a frequency, which Lightning 2 removed: set automatic_optimization = False "
                "and step them in training_step"
            )
        optimizers = [entry.get("optimizer") for entry in result]
        schedulers = []
        for entry in result:
            if entry.get("lr_scheduler") is not None:
                schedulers.append(entry["lr_scheduler"])
    elif isinstance(result, list | tuple):
        optimizers = list(result)
    if not optimizers or not all(isinstance(entry, Optimizer) for entry in optimizers):
        type_name = "None" if result is None else type(result).__name__
        raise _error(f"returned {type_name}: it must return an optimizer, lists or dicts of them as Lightning 2 has it")
    if automatic and len(optimizers) > 1:
        raise _error(
            f"returned {len(optimizers)} optimizers: Lightning 2 steps one by itself; set automatic_optimization = "
            "False and step them in training_step"
        )
    if any(isinstance(entry, LBFGS) for entry in optimizers):
        raise _error("returned LBFGS, which computes the loss several times in a step: use another optimizer")
    configs = [_scheduler(entry, monitor, automatic=automatic) for entry in schedulers]
    return Configured(optimizers, configs)


def _scheduler(entry: Any, monitor: str | None, *, automatic: bool) -> Scheduler:
    if isinstance(entry, dict):
        options = dict(entry)
    else:
        options = {"scheduler": entry}
    options = {key: value for key, value in options.items() if key in _KEYS}
    scheduler = options.get("scheduler")
    if scheduler is None:
        raise _error("returned a dict for a scheduler without the key 'scheduler'")
    plateau = options.pop("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    interval = options.get("interval", "epoch")
    frequency = int(options.get("frequency", 1))
    if interval not in ("step", "epoch") or frequency < 1:
        raise _error(f"returned a scheduler with interval '{interval}' and frequency {frequency}: step or epoch, 1..")
    followed = options.get("monitor") or monitor
    if plateau and automatic and not followed:
        raise _error(f"returned {type(scheduler).__name__} without a monitor: name the logged value that it follows")
    strict = bool(options.get("strict", True))
    return Scheduler(scheduler, options.get("name"), interval, frequency, followed if plateau else None, strict)


def _error(problem: str) -> ConfigError:
    return ConfigError(f"from_lightning: configure_optimizers {problem}")
