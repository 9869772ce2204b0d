"""A module that a file has, by name: what `lockstep train --lightning FILE.py:Module --datamodule FILE.py:DM` means.

    task = load("lightning:FILE.py:Module,FILE.py:DM")
    config, task = configured(values)           # its loaders' batch size and the rest where the flags say nothing

Both are made without arguments, the module under the run's seed.
"""

from typing import Any

import torch

from lockstep.config import options
from lockstep.config.config import Config
from lockstep.errors import ConfigError
from lockstep.seeds import derive
from lockstep.task_file import imported_class
from lockstep.tasks.lightning import from_lightning
from lockstep.tasks.lightning_task import LightningTask

__all__ = ["configured", "load"]

_MUST = {"--lightning": ["training_step"], "--datamodule": ["from_datasets"]}  # a module has train_dataloader too


def load(named: str, seed: int = 0) -> LightningTask:
    """The task of `lightning:FILE.py:Module` or `lightning:FILE.py:Module,FILE.py:DM`.

    Raises:
        ConfigError: no such file or class, one that cannot be made so, or what it uses is not served.
    """
    return _made(named, seed)[1]


def configured(values: dict[str, Any]) -> tuple[Config, LightningTask]:
    """The config that flags and file ask for, on top of what the module's loaders say, and the task."""
    asked = options.build(values)
    suited, task = _made(asked.task, asked.seed)
    plain = options.flat(Config(), own_task=True)
    derived = {name: value for name, value in options.flat(suited, own_task=True).items() if value != plain[name]}
    if "batch_size" in values and values["batch_size"] % derived.get("micro_batch_size", 1):
        derived.pop("micro_batch_size", None)
    return options.build({**derived, **values}), task


def _made(named: str, seed: int) -> tuple[Config, LightningTask]:
    module, _, data = named.removeprefix("lightning:").partition(",")
    torch.manual_seed(derive(seed, "model"))
    made = _object(module, "--lightning")
    return from_lightning(made, _object(data, "--datamodule") if data else None)


def _object(named: str, flag: str) -> Any:
    kind = imported_class(named, flag, _MUST[flag])
    try:
        return kind()
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{flag} '{named}': {kind.__name__}() failed ({line}); it must need no arguments: give them defaults, or "
            "call lockstep.from_lightning in a script"
        ) from error
