"""Convert the arguments of a Lightning Trainer to a Config.

    check_arguments(trainer)                        # refuses, by name, an argument that is set and not served
    config = config_of(module, loaders, trainer, devices=2)

The table in `refusals` maps each argument; docs/inside/lightning.md has it for users.
"""

import os
import re
from typing import Any

import torch

from lockstep.adapters.lightning.data import Loaders
from lockstep.adapters.lightning.hooks import settings_of
from lockstep.adapters.lightning.refusals import ARGUMENTS
from lockstep.adapters.lightning.trainer import Standing
from lockstep.config.engine_options import ENGINES
from lockstep.config.schema import Config
from lockstep.errors import ConfigError

__all__ = [
    "check_arguments",
    "config_of",
    "describe",
]


# Lightning's precision -> --precision.
_PRECISIONS = {
    "32-true": "float32",
    "32": "float32",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16-true",
    "64-true": "float64",
    "64": "float64",
}
# Settings that the module's trainer gets unchanged.
_PLAIN = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "min_epochs"),
    *("log_every_n_steps", "check_val_every_n_epoch", "val_check_interval", "fast_dev_run", "default_root_dir"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"),
    *("precision", "min_steps", "max_epochs"),
)


def check_arguments(trainer: Any) -> None:
    """Check that every argument that is set is served.

    Raises:
        ConfigError: an argument is set and not served; one line that names it.
    """
    # Lightning keeps some arguments only in private attributes.
    connector = trainer._accelerator_connector
    plugins = []
    for name in ("_precision_plugin_flag", "_cluster_environment_flag"):
        plugins.append(getattr(connector, name, None))
    plugins.append(getattr(connector, "checkpoint_io", None))
    algorithm = trainer.gradient_clip_algorithm
    timer = None
    for extension in trainer.callbacks:
        if type(extension).__name__ == "Timer":
            timer = extension
            break
    set_ = {
        "min_epochs": trainer.min_epochs,
        "min_steps": trainer.min_steps,
        "max_time": timer and type(timer).__name__,
        "overfit_batches": trainer.overfit_batches,
        "gradient_clip_algorithm": algorithm if str(getattr(algorithm, "value", algorithm)) == "value" else None,
        "profiler": None
        if type(trainer.profiler).__name__ == "PassThroughProfiler"
        else type(trainer.profiler).__name__,
        "detect_anomaly": trainer._detect_anomaly,
        "plugins": next((type(extension).__name__ for extension in plugins if extension is not None), None),
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs,
        "model_registry": getattr(trainer, "_model_registry", None),
    }
    for name, setting in set_.items():
        if setting:
            raise build_error(name, setting, ARGUMENTS[name].what)
    if str(trainer.precision) not in _PRECISIONS:
        raise build_error("precision", trainer.precision, f"use one of {', '.join(_PRECISIONS)}")
    if getattr(trainer, "_val_check_time_interval", None):
        raise build_error("val_check_interval", "a time", "set it in batches, or as a share of an epoch")


def build_error(name: str, setting: Any, why: str) -> ConfigError:
    """Build the error for an argument that is not supported."""
    return ConfigError(f"from_lightning: Trainer({name}={setting!r}) is not supported: {why}")


def describe(stand_in: Standing, trainer: Any) -> None:
    """Copy the real Trainer's settings to the trainer that the module sees."""
    if trainer is None:
        return
    for name in _PLAIN:
        setattr(stand_in, name, getattr(trainer, name))
    stand_in.loggers = list(trainer.loggers)
    stand_in.enable_autolog_hparams = getattr(trainer, "enable_autolog_hparams", True)


def config_of(module: Any, loaders: Loaders, trainer: Any, devices: int) -> Config:
    """Build the Config that trains as the Trainer would.

    Raises:
        ConfigError: a setting that no Config field can express.
    """
    train = loaders.train
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", type(module).__name__)
    if trainer is not None:
        accumulate = trainer.accumulate_grad_batches
    else:
        accumulate = 1
    batch_size = train.micro_batch_size * accumulate * devices
    fields: dict[str, Any] = {
        "experiment_name": name,
        "batch_size": batch_size,
        "micro_batch_size": train.micro_batch_size,
        "ckpt_freq": "1epoch",
        # Only validation loaders have evaluations.
        "eval_freq": 0,
        "compile": False,
    }
    optim: dict[str, Any] = {"clip": 0.0}
    data: dict[str, Any] = {"workers": train.workers}
    if train.prefetch:
        data["prefetch"] = train.prefetch
    # A step combines the batches of all devices and of accumulation, so drop_last drops whole steps.
    samples = train.positions
    if train.drop_last and samples % batch_size and samples >= batch_size:
        fields["limit_train_batches"] = samples // batch_size
    if loaders.validation:
        validation = next(iter(loaders.validation.values()))
        fields |= {
            "eval_freq": "1epoch",
            "eval_micro_batch_size": validation.batch_size,
            "eval_workers": validation.workers,
        }
    if trainer is not None:
        fields |= _of_trainer(trainer, devices, evaluates=bool(loaders.validation))
        optim["clip"] = float(trainer.gradient_clip_val or 0.0)
    fields |= {"data": data, "optim": optim}
    return settings_of(module.trainer.callbacks, trainer, Config(**fields))


def _of_trainer(trainer: Any, devices: int, *, evaluates: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        # 50 is Lightning's default.
        "log_freq": max(1, int(trainer.log_every_n_steps or 50)),
        "precision": _PRECISIONS[str(trainer.precision)],
        **_length(trainer),
        **_limits(trainer, devices),
    }
    if os.path.abspath(trainer.default_root_dir) != os.getcwd():
        fields["save_dir"] = str(trainer.default_root_dir)
    if type(trainer.accelerator).__name__ == "CPUAccelerator":
        fields["device"] = "cpu"
    strategy = type(trainer.strategy).__name__.removesuffix("Strategy").lower()
    # Without a launcher there is one process, whatever the strategy.
    if strategy in ENGINES and "RANK" in os.environ:
        fields["engine"] = strategy
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        fields["exact"] = True
    if getattr(trainer._accelerator_connector, "_layer_sync", None) is not None:
        fields["batchnorm"] = "sync"
    if evaluates:
        fields["eval_freq"] = _evaluations(trainer)
    return fields


def _length(trainer: Any) -> dict[str, Any]:
    """Return the Config field for the length: epochs or steps.

    Lightning's default here is a thousand epochs.
    """
    if trainer.max_steps > 0:
        return {"max_steps": trainer.max_steps}
    epochs = trainer.max_epochs
    if epochs is not None and epochs < 0:
        raise build_error("max_epochs", epochs, "a run has an end: set max_epochs or max_steps")
    if epochs == 0:
        raise build_error("max_epochs", epochs, "there is nothing to train: set 1 or more")
    return {"num_epochs": 1000 if epochs is None else int(epochs)}


def _limits(trainer: Any, devices: int) -> dict[str, Any]:
    """Return the Config fields that limit the data. Lightning's limits count batches on each device."""
    fields: dict[str, Any] = {}
    train = trainer.limit_train_batches
    held_out = trainer.limit_val_batches
    if isinstance(train, float) and train < 1.0:
        fields["limit_train_batches"] = _percent(train)
    elif isinstance(train, int) and not trainer.fast_dev_run:
        fields["limit_train_batches"] = max(1, train // trainer.accumulate_grad_batches)
    if isinstance(held_out, float) and 0 < held_out < 1.0:
        fields["limit_eval_batches"] = _percent(held_out)
    elif isinstance(held_out, int) and held_out:
        fields["limit_eval_batches"] = held_out * devices
    if trainer.fast_dev_run:
        fields["ckpt_freq"] = 0
    return fields


def _evaluations(trainer: Any) -> Any:
    """Return the interval between evaluations, in steps or epochs."""
    every = trainer.check_val_every_n_epoch or 1
    interval = trainer.val_check_interval
    # In Lightning 1.0 means an epoch, and 1 a batch.
    is_partial = isinstance(interval, int) or interval < 1.0
    if is_partial and every > 1:
        raise build_error(
            "check_val_every_n_epoch",
            every,
            f"val_check_interval={interval} is part of an epoch: set one of them",
        )
    if isinstance(interval, int):
        return max(1, interval // trainer.accumulate_grad_batches)
    if is_partial:
        return f"{interval:g}epochs"
    if every > 1:
        return f"{every}epochs"
    return "1epoch"


def _percent(share: float) -> str:
    return f"{100 * share:.6f}".rstrip("0").rstrip(".") + "%"
