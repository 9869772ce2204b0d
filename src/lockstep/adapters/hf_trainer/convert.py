"""Convert a constructed Hugging Face Trainer to a config and a task.

    config, task = lockstep.from_trainer(trainer)           # in place of trainer.train()
    result = lockstep.train(config, task)

Only the call of `train` changes in the user's script. The task calls the Trainer's own code for a batch (collator,
`compute_loss`, `prediction_step`, `compute_metrics`), overrides in a subclass included. Processes, steps and files
are lockstep's. The module also converts the callbacks, the optimizer and the schedule. It does not import
transformers.
"""

import dataclasses
import random
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from lockstep.adapters.hf_trainer.arguments import check_arguments, config_of, value
from lockstep.adapters.hf_trainer.callbacks import PACKAGES, Events, callbacks_of
from lockstep.adapters.hf_trainer.data import Batching, PairBatching, collator_of, count_labels, samples_of
from lockstep.adapters.hf_trainer.refusals import EVALUATION, LOOP, OPTIMIZERS
from lockstep.adapters.hf_trainer.task import LabelledTrainerTask, TrainerTask, is_own
from lockstep.adapters.hf_trainer.trl import adapt, check_micro_batches, check_trl
from lockstep.config.schema import Config
from lockstep.errors import ConfigError, LockstepError

__all__ = [
    "TrainerTask",
    "check_optimizer",
    "from_trainer",
    "settings_of",
]


# Callbacks that print, log or decide when to: the run does this itself. `report_to` turns sinks on.
_REPLACED_BY_RUN = (
    *("DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback"),
    *("JITCheckpointCallback", "RichProgressCallback"),
)
_SINKS = {"TensorBoardCallback": "tensorboard", "WandbCallback": "wandb", "MLflowCallback": "mlflow"}
_EARLY_STOPPING = "EarlyStoppingCallback"


def settings_of(trainer: Any, config: Config) -> Config:
    """Convert the Trainer's callbacks to settings, and add them to the config.

    Raises:
        ConfigError: a callback that is not supported; the message names its class.
    """
    changes: dict[str, Any] = {}
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        if not type(callback).__module__.startswith(PACKAGES):
            # `Events` calls the user's callbacks.
            continue
        if name in _SINKS:
            changes[_SINKS[name]] = True
        elif name == _EARLY_STOPPING:
            changes |= {"patience": int(callback.early_stopping_patience)}
            changes |= {"min_delta": float(callback.early_stopping_threshold or 0.0)}
        elif name not in _REPLACED_BY_RUN:
            raise ConfigError(
                f"from_trainer: the callback {name} is not supported: call trainer.remove_callback({name}), and do its "
                "work in a TrainerCallback of your own"
            )
    if changes.get("patience") and not config.eval_freq:
        raise ConfigError("from_trainer: EarlyStoppingCallback needs evaluations: set eval_strategy='steps' or 'epoch'")
    return dataclasses.replace(config, **changes)


def check_optimizer(trainer: Any) -> None:
    """Check that an engine can step the Trainer's optimizer.

    Raises:
        ConfigError: no engine can; the message names the optimizer.
    """
    if trainer.optimizer is not None:
        return
    if trainer.optimizer_cls_and_kwargs is not None:
        factory = trainer.optimizer_cls_and_kwargs[0]
        if not (isinstance(factory, type) and issubclass(factory, Optimizer)):
            raise ConfigError(
                f"from_trainer: optimizer_cls_and_kwargs={getattr(factory, '__name__', factory)} is a factory, "
                "which is not served: give a class of torch.optim.Optimizer"
            )
        return
    name = value(trainer.args.optim)
    if name not in OPTIMIZERS and not _is_own_method(trainer, "create_optimizer"):
        raise ConfigError(
            f"from_trainer: TrainingArguments(optim='{name}') is not supported: use one of {', '.join(OPTIMIZERS)}, or "
            "give the Trainer optimizer_cls_and_kwargs"
        )


def _is_own_method(trainer: Any, method: str) -> bool:
    """Whether the user wrote the method, rather than transformers."""
    return not getattr(type(trainer), method).__module__.startswith("transformers.")


def from_trainer(trainer: Any, devices: int = 0) -> "tuple[Config, TrainerTask]":
    """Convert a `transformers.Trainer` that has not trained yet to a config and a task.

    Args:
        trainer: its `model` becomes the model that is trained, so `trainer.save_model()` and `trainer.evaluate()` work
            on the trained model afterwards.
        devices: the number of devices that its batch size per device is meant for, however many the run has; 0: the
            number that the Trainer itself found.

    Raises:
        ConfigError: it uses a feature that lockstep does not serve; one line that names it and the way out.
    """
    _check_trainer(trainer)
    check_arguments(trainer)
    check_optimizer(trainer)
    evaluates = _evaluates(trainer)
    training = samples_of(trainer, trainer.train_dataset, "train_dataset")
    callbacks = callbacks_of(trainer)
    config = settings_of(trainer, config_of(trainer, devices))
    check_micro_batches(trainer, config)
    # Private in transformers: above 1 the Trainer divides counts among GPUs of one process.
    trainer.args._n_gpu = 1
    task_class, batching = adapt(trainer, collator_of(trainer)) or _adapt(trainer, training)
    task = task_class(trainer, batching, training, evaluates=evaluates)
    # Hooks of a scheduler that follows evaluations.
    evaluations = task.hooks
    if callbacks:
        task.hooks = task.events = Events(trainer, callbacks, len(training), evaluations)
        # Set only if needed: it keeps data from being loaded ahead over the end of an epoch.
        if task.events.changes_epochs:
            task.start_epoch = task.events.start_epoch  # type: ignore[method-assign]
    return config, task


def _adapt(trainer: Any, training: Any) -> tuple[type[TrainerTask], Batching | PairBatching]:
    """Return the class of the task, and what counts its items."""
    batching = Batching(collator_of(trainer), bool(getattr(trainer, "_loss_shifts_labels", False)))
    return (LabelledTrainerTask if _counts_labels(trainer, batching, training) else TrainerTask), batching


def _check_trainer(trainer: Any) -> None:
    """Check that this is an untrained Trainer without a training loop of its own.

    Raises:
        ConfigError: it is not.
    """
    check_trl(trainer)
    if not any(
        base.__name__ == "Trainer" and base.__module__.startswith("transformers.") for base in type(trainer).__mro__
    ):
        raise ConfigError(f"from_trainer takes a transformers.Trainer object, not {type(trainer).__name__}")
    name = type(trainer).__name__
    if trainer.train_dataset is None:
        raise ConfigError("from_trainer: the Trainer has no train_dataset: pass one")
    if trainer.state.global_step:
        raise ConfigError("from_trainer: the Trainer has already trained: build a new one")
    method = getattr(trainer.model, "quantization_method", None)
    if method not in (None, "bitsandbytes"):
        raise ConfigError(f"from_trainer: the model is quantised by {method}: use bitsandbytes, or load it unquantised")
    overridden = [method for method in LOOP if is_own(trainer, method)]
    if overridden:
        way = "do it in the loop of lockstep.Run, or compute it in `compute_loss`"
        if overridden[0] == "get_train_dataloader":
            way = "pass train_dataset and data_collator, and override `_get_train_sampler` for the order"
        raise ConfigError(f"from_trainer: {name} overrides `{overridden[0]}`, which lockstep does not call: {way}")


def _evaluates(trainer: Any) -> bool:
    """Whether the run evaluates.

    It does not if the Trainer has its own `evaluate`, which the script calls after the training.

    Raises:
        ConfigError: it has its own evaluation methods, and `eval_strategy` is not "no".
    """
    overridden = []
    for method in EVALUATION:
        if is_own(trainer, method):
            overridden.append(method)
    if overridden and value(trainer.args.eval_strategy) != "no":
        raise ConfigError(
            f"from_trainer: {type(trainer).__name__} overrides `{overridden[0]}`, which lockstep does not call: set "
            "eval_strategy='no', and call it after the training"
        )
    return not overridden


def _counts_labels(trainer: Any, batching: Batching, training: Any) -> bool:
    """Whether the loss is a mean over labels.

    It is if the model or `compute_loss_func` receives the number of labels, and the batches have labels.

    Raises:
        ConfigError: the first samples cannot be collated.
    """
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return False
    # A collator may draw random numbers; the run's draws must not depend on this call.
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        batch = batching.collate([training[index] for index in range(min(2, len(training)))])
    except LockstepError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"from_trainer: the first samples of train_dataset cannot be collated: {type(error).__name__}: {line}"
        ) from error
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
    return count_labels(batch, shifts=batching.shifts) is not None
