"""A Trainer's callbacks by their meaning: what an early end is here, and what none is.

config = settings_of(trainer, config)
"""

import dataclasses
from typing import Any

from lockstep.config.config import Config
from lockstep.errors import ConfigError

__all__ = ["settings_of"]

# What prints, logs, or decides when to: the run does it itself. Sinks are turned on by `report_to`.
_DONE = (
    *("DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback"),
    *("JITCheckpointCallback", "RichProgressCallback"),
)
_SINKS = {"TensorBoardCallback": "tensorboard", "WandbCallback": "wandb"}
_EARLY = "EarlyStoppingCallback"
_THEIRS = ("transformers.", "trl.")


def settings_of(trainer: Any, config: Config) -> Config:
    """The config with what the Trainer's callbacks mean.

    Raises:
        ConfigError: one whose meaning is not known, by its class.
    """
    changes: dict[str, Any] = {}
    for each in trainer.callback_handler.callbacks:
        name = type(each).__name__
        theirs = name if type(each).__module__.startswith(_THEIRS) else ""
        if theirs in _SINKS:
            changes[_SINKS[theirs]] = True
        elif theirs == _EARLY:
            changes |= {"patience": int(each.early_stopping_patience)}
            changes |= {"min_delta": float(each.early_stopping_threshold or 0.0)}
        elif theirs not in _DONE:
            raise ConfigError(
                f"from_trainer: the callback {name} is not served: trainer.remove_callback({name}), and write what it "
                "does as a line in the loop of lockstep.Run"
            )
    if changes.get("patience") and not config.eval_freq:
        raise ConfigError("from_trainer: EarlyStoppingCallback needs evaluations: set eval_strategy='steps' or 'epoch'")
    return dataclasses.replace(config, **changes)
