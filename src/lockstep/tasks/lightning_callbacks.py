"""The callbacks of a Trainer and of a module by their meaning: what an early end is here, and what none is.

config = settings_of(module, trainer, config)
"""

import dataclasses
import inspect
from typing import Any

from lockstep.config.config import Config
from lockstep.errors import ConfigError
from lockstep.tasks.lightning_package import PACKAGES, written
from lockstep.tasks.tables.lightning import WAYS

__all__ = ["DONE", "settings_of"]

# What shows, logs or measures: the run does it itself.
DONE = (
    *("ModelSummary", "RichModelSummary", "ProgressBar", "TQDMProgressBar", "RichProgressBar", "DeviceStatsMonitor"),
    *("ThroughputMonitor", "LearningRateMonitor", "OnExceptionCheckpoint"),
)


def settings_of(module: Any, trainer: Any, config: Config) -> Config:
    """The config with what the callbacks mean.

    Raises:
        ConfigError: one whose meaning is not known, by its class; or two that judge one thing by different values.
    """
    given = list(trainer.callbacks) if trainer is not None else []
    if written(module, "configure_callbacks"):
        more = module.configure_callbacks()
        given += list(more) if isinstance(more, list | tuple) else [more]
    changes: dict[str, Any] = {}
    for each in given:
        name, theirs = type(each).__name__, f"{type(each).__module__}.".startswith(PACKAGES)
        if theirs and name == "EarlyStopping":
            if "patience" in changes:
                raise ConfigError(
                    "from_lightning: two EarlyStopping callbacks, and one value ends a run: leave one out"
                )
            changes |= _early(each)
        elif theirs and name == "ModelCheckpoint":
            _keep(changes, _checkpoints(each, config))
        elif theirs and name == "EMAWeightAveraging":
            changes["optim"] = dataclasses.replace(config.optim, ema=_decay(each))
        elif not (theirs and name in DONE):
            way = WAYS.get(name, "") if theirs else ""
            way = way or "leave it out, and write what it does as a line in the loop of lockstep.Run"
            raise ConfigError(f"from_lightning: the callback {name} is not served: {way}")
    if trainer is not None and not trainer.checkpoint_callbacks:
        changes["ckpt_freq"] = 0
    if changes.get("patience") and not config.eval_freq:
        raise ConfigError(
            "from_lightning: EarlyStopping needs evaluations, and the module has no validation: leave it out"
        )
    if "patience" in changes and "best_metric" not in changes:  # no ModelCheckpoint judges: one best for both
        changes["best_metric"] = changes.pop("patience_metric")
    return dataclasses.replace(config, **changes)


def _keep(changes: dict[str, Any], more: dict[str, Any]) -> None:
    before = changes.get("best_metric")
    if before and more.get("best_metric") not in (None, before):
        names = " and ".join(each.partition(":")[0] for each in (before, more["best_metric"]))
        raise ConfigError(
            f"from_lightning: two ModelCheckpoints monitor {names}, and one value judges the best: let them "
            "monitor the same"
        )
    changes |= more


def _judged(monitor: str, mode: str) -> str:
    """By what is judged. Lightning puts the loader's index behind a name, lockstep the set's name before."""
    name, _, place = monitor.partition("/dataloader_idx_")
    full = f"dataloader_idx_{place}/{name}" if place else name
    return f"{full}:{mode}"


def _early(each: Any) -> dict[str, Any]:
    for name in ("stopping_threshold", "divergence_threshold"):
        if getattr(each, name) is not None:
            raise ConfigError(
                f"from_lightning: EarlyStopping({name}={getattr(each, name)}) is not served: call run.stop() in the "
                "loop of lockstep.Run"
            )
    return {
        "patience": max(1, int(each.patience)),  # of 0 it ends at the first that is no better, as of 1
        "patience_metric": _judged(each.monitor, each.mode),
        "min_delta": abs(float(each.min_delta)),
    }


def _checkpoints(each: Any, config: Config) -> dict[str, Any]:
    if each._train_time_interval is not None:
        raise ConfigError(
            "from_lightning: ModelCheckpoint(train_time_interval=...) is not served: set every_n_train_steps"
        )
    kept = each.save_top_k
    found: dict[str, Any] = {"checkpoint": dataclasses.replace(config.checkpoint, keep=kept if kept > 0 else _ALL)}
    if kept == 0:
        found = {"ckpt_freq": 0}
    elif each._every_n_train_steps:
        found["ckpt_freq"] = int(each._every_n_train_steps)
    elif each._every_n_epochs and each._every_n_epochs > 1:
        found["ckpt_freq"] = f"{each._every_n_epochs}epochs"
    if each.monitor is not None and config.eval_freq:
        found["best_metric"] = _judged(each.monitor, each.mode)
    return found


_ALL = 10**6


def _decay(each: Any) -> float:
    """Of EMAWeightAveraging."""
    if each.update_every_n_steps != 1 or each.update_starting_at_step or each.update_starting_at_epoch:
        raise ConfigError(
            "from_lightning: EMAWeightAveraging with update_every_n_steps or a later start is not served: every step "
            "moves the average"
        )
    function = inspect.unwrap(each._kwargs.get("multi_avg_fn") or each._kwargs.get("avg_fn"))
    names = function.__code__.co_freevars
    found = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)).get("decay")
    if not isinstance(found, float):
        raise ConfigError("from_lightning: the decay of EMAWeightAveraging is not known: set the config's optim.ema")
    return found
