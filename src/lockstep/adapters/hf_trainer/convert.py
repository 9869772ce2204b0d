"""Convert a constructed Hugging Face Trainer to a config and a task.

    config, task = lockstep.from_trainer(trainer)           # in place of trainer.train()
    result = lockstep.train(config, task)

Only the call of `train` changes in the user's script. The task calls the Trainer's own code for a batch (collator,
`compute_loss`, `prediction_step`, `compute_metrics`), overrides in a subclass included. Processes, steps and files
are lockstep's. The module also converts the callbacks, the optimizer and the schedule. It does not import
transformers.
"""

import contextlib
import copy
import dataclasses
import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import RandomSampler

from lockstep.adapters.hf_trainer.arguments import check_arguments, config_of, value
from lockstep.adapters.hf_trainer.callbacks import PACKAGES, Events, callbacks_of
from lockstep.adapters.hf_trainer.data import (
    Batching,
    EpochShuffled,
    Predictions,
    collator_of,
    labelled,
    of_transformers,
    samples_of,
)
from lockstep.adapters.hf_trainer.refusals import EVALUATION, LOOP, OPTIMIZERS
from lockstep.config.schema import Config
from lockstep.data.sampler import Sequential
from lockstep.errors import ConfigError, LockstepError
from lockstep.optim.schedule import torch_schedule
from lockstep.task import Order, Task

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
    for each in trainer.callback_handler.callbacks:
        name = type(each).__name__
        if not type(each).__module__.startswith(PACKAGES):
            continue  # it is called
        if name in _SINKS:
            changes[_SINKS[name]] = True
        elif name == _EARLY_STOPPING:
            changes |= {"patience": int(each.early_stopping_patience)}
            changes |= {"min_delta": float(each.early_stopping_threshold or 0.0)}
        elif name not in _REPLACED_BY_RUN:
            raise ConfigError(
                f"from_trainer: the callback {name} is not supported: call trainer.remove_callback({name}), and do its "
                "work in a TrainerCallback of your own"
            )
    if changes.get("patience") and not config.eval_freq:
        raise ConfigError("from_trainer: EarlyStoppingCallback needs evaluations: set eval_strategy='steps' or 'epoch'")
    return dataclasses.replace(config, **changes)


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # added to parameter names by transformations

Rates = Callable[[int, int], float]


def check_optimizer(trainer: Any) -> None:
    """Check that an engine can step the Trainer's optimizer.

    Raises:
        ConfigError: no engine can; the message names the optimizer.
    """
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
    if name not in OPTIMIZERS and not _is_own_method(trainer, "create_optimizer"):
        raise ConfigError(
            f"from_trainer: TrainingArguments(optim='{name}') is not supported: use one of {', '.join(OPTIMIZERS)}, or "
            "give the Trainer optimizer_cls_and_kwargs"
        )


def _optimizer_factory(trainer: Any) -> Callable[[nn.Module], Optimizer] | None:
    """Return a factory that rebuilds the Trainer's optimizer over parameters of the same names.

    Raises:
        ConfigError: it has already stepped, or has parameters that are not in the Trainer's model.
    """
    optimizer = trainer.optimizer
    if optimizer is None:
        return None
    if optimizer.state:
        raise ConfigError("from_trainer: the Trainer's optimizer has already stepped: pass a new one")
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise ConfigError(
                "from_trainer: the Trainer's optimizer has parameters outside its model: build it from "
                "model.parameters()"
            )
        options = {key: option for key, option in group.items() if key not in ("params", "initial_lr")}
        options["lr"] = group.get("initial_lr", group["lr"])  # a scheduler has multiplied the other
        groups.append(([_plain(names[parameter]) for parameter in group["params"]], options))
    kind, accepts = type(optimizer), inspect.signature(type(optimizer)).parameters
    defaults = {key: option for key, option in optimizer.defaults.items() if key in accepts}

    def make(model: nn.Module) -> Optimizer:
        parameters = {_plain(name): parameter for name, parameter in model.named_parameters()}
        members = [{**options, "params": [parameters[name] for name in group_names]} for group_names, options in groups]
        result: Optimizer = kind(members, **defaults)
        return result

    return make


def _create_optimizer(trainer: Any, model: nn.Module) -> Optimizer:
    """Call the Trainer's `create_optimizer` for `model`, and drop groups without parameters."""
    former = trainer.model
    trainer.model, trainer.optimizer = model, None
    try:
        takes = "model" in inspect.signature(trainer.create_optimizer).parameters
        optimizer: Optimizer = trainer.create_optimizer(model) if takes else trainer.create_optimizer()
    finally:
        trainer.model = former
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _schedule_of(trainer: Any) -> Rates | None:
    """Return the schedule, (step, steps) -> factor of the base rates; None for a plateau.

    A plateau depends on the evaluations too, so it is no function of the step.

    Raises:
        ConfigError: the Trainer has a scheduler that is no function of the step.
    """
    scheduler = trainer.lr_scheduler
    if scheduler is not None:
        if not isinstance(scheduler, LambdaLR) or any(
            each is not scheduler.lr_lambdas[0] for each in scheduler.lr_lambdas
        ):
            raise ConfigError(
                f"from_trainer: the Trainer's scheduler, {type(scheduler).__name__}, is not supported: pass a LambdaLR "
                "with one function, or set lr_scheduler_type"
            )
        rate = scheduler.lr_lambdas[0]
        return lambda step, steps: float(rate(step))
    if value(trainer.args.lr_scheduler_type) == "reduce_lr_on_plateau":
        return None

    def make(optimizer: Optimizer, steps: int) -> Any:
        former = trainer.optimizer
        trainer.optimizer, trainer.lr_scheduler = optimizer, None
        try:
            return trainer.create_scheduler(steps, optimizer)
        finally:
            trainer.optimizer, trainer.lr_scheduler = former, None

    return torch_schedule(make, lr=float(trainer.args.learning_rate) or 1.0)


def _is_own_method(trainer: Any, method: str) -> bool:
    """Whether the user wrote the method, rather than transformers."""
    return not getattr(type(trainer), method).__module__.startswith("transformers.")


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# Modules that define methods lockstep replaces; an override from elsewhere would not be called.
_KNOWN_MODULES = ("transformers.", "trl.trainer.sft_trainer")  # their methods do not change a step
_FINGERPRINT_ARGUMENTS = (
    *("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("label_smoothing_factor", "data_seed", "train_sampling_strategy"),
)


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
    trainer.args._n_gpu = 1  # or it would divide counts among GPUs that lockstep gives a process each
    batching = Batching(collator_of(trainer), bool(getattr(trainer, "_loss_shifts_labels", False)))
    kind = LabelledTrainerTask if _counts_labels(trainer, batching, training) else TrainerTask
    task = kind(trainer, batching, training, evaluates=evaluates)
    task.hooks = task.events = Events(trainer, callbacks, len(training)) if callbacks else None
    return config, task


class TrainerTask(Task):
    """A Trainer as a task; batch losses are averaged by samples.

    Made by `from_trainer`.
    """

    framework = "the Trainer"
    reduction = "micro-batch"
    item_name = "samples"
    gathers = True  # trl gathers what it logs
    events: Events | None = None

    def __init__(self, trainer: Any, batching: Batching, training: Any, *, evaluates: bool) -> None:
        self.trainer, self._batching, self._training = trainer, batching, training
        self._evaluates = evaluates
        self._rates, self._recipe = _schedule_of(trainer), _optimizer_factory(trainer)
        self._predictions = Predictions(trainer)
        self._loss_takes = inspect.signature(trainer.compute_loss).parameters
        settings = [str(value(getattr(trainer.args, name, None))) for name in _FINGERPRINT_ARGUMENTS]
        self.fingerprint = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:16]
        _align(trainer, trainer.model)
        self._first: nn.Module | None = trainer.model
        self._initial = None if trainer.model_init is not None else _copied(trainer.model)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the batching for a loader process, and not the Trainer."""
        return Batching, (self._batching.collate, self._batching.shifts)

    def model(self) -> nn.Module:
        """Return the Trainer's own model; on later calls, a copy of its initial state.

        With `model_init` every call makes a new model.
        """
        trainer = self.trainer
        if self._initial is None:
            model = _init_model(trainer)
        else:
            model = copy.deepcopy(self._initial) if self._first is None else self._first
        self._first = None
        trainer.model = trainer.model_wrapped = model
        return model.train()

    def dataset(self, split: str) -> Any:
        if split == "train":
            return self._training
        dataset = self.trainer.eval_dataset if self._evaluates else None
        if isinstance(dataset, dict):
            return {name: samples_of(self.trainer, each, f"eval_dataset['{name}']") for name, each in dataset.items()}
        return None if dataset is None else samples_of(self.trainer, dataset, "eval_dataset")

    def collate(self, samples: list[Any]) -> Any:
        return self._batching.collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of `compute_loss`: a 0-dim mean over the items that `count` counts."""
        inputs = self.trainer._prepare_inputs(batch)
        items = self._items(inputs)
        more = {} if items is None or not self._takes("num_items_in_batch") else {"num_items_in_batch": items}
        with _single_process(self.trainer), self.trainer.compute_loss_context_manager():
            loss: Tensor = self.trainer.compute_loss(model, inputs, **more)
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the loss and, with `compute_metrics`, the predictions, from one `prediction_step`."""
        trainer, predictions = self.trainer, self._predictions
        loss_only = trainer.compute_metrics is None or trainer.args.prediction_loss_only
        with _single_process(trainer):
            loss, logits, labels = trainer.prediction_step(model, batch, loss_only)
        if self.events:
            self.events.after_prediction()
        if loss is None:
            raise ConfigError(
                "from_trainer: the eval_dataset has no labels, so it has no loss: give it the columns "
                f"{', '.join(trainer.label_names) or 'that the model needs'}, or leave eval_dataset out"
            )
        if loss_only:
            return loss, {}
        if trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        include, main = trainer.args.include_for_metrics, getattr(trainer.model, "main_input_name", "input_ids")
        inputs = batch[main] if "inputs" in include else None
        losses = loss.repeat(_rows(batch)) if "loss" in include else None
        predictions.add(logits, labels, inputs, losses)
        return loss, {"": predictions}

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        optimizer = self._recipe(model) if self._recipe else _create_optimizer(self.trainer, model)
        if config.exact:  # the fused kernel rounds by an element's place in its shard
            for group in optimizer.param_groups:
                group["fused"] = False if group.get("fused") else group.get("fused")
        self.trainer.optimizer = optimizer
        if self.events:
            self.events.planned(config, optimizer)
        return optimizer

    def schedule(self, step: int, steps: int) -> float | None:
        return None if self._rates is None else self._rates(step, steps)

    def order(self, samples: int, seed: int) -> Order | None:
        """Return the Trainer's sample order: a permutation per epoch, the order of the data, or its own sampler's."""
        args = self.trainer.args
        sampling = getattr(args, "train_sampling_strategy", "random")
        if sampling == "sequential":
            return Sequential(samples)
        by_length = sampling == "group_by_length" or getattr(args, "group_by_length", False)
        own = by_length or _is_own(self.trainer, "_get_train_sampler")
        sampler: Order | None = _sampler_of(self.trainer, self._training) if own else None
        if sampler is None:
            return EpochShuffled(samples, seed if args.data_seed is None else args.data_seed)
        return sampler

    def _items(self, inputs: Mapping[str, Any]) -> Tensor | None:
        return None

    def _takes(self, name: str) -> bool:
        parameters = self._loss_takes
        return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class LabelledTrainerTask(TrainerTask):
    """A Trainer task that takes the mean loss over the labels that are not -100.

    The model or `compute_loss_func` computes that mean.
    """

    item_name = "labels"

    def count(self, batch: Any) -> int:
        return self._batching.count(batch)

    def _items(self, inputs: Mapping[str, Any]) -> Tensor | None:
        return labelled(inputs, shifts=self._batching.shifts)


def _check_trainer(trainer: Any) -> None:
    """Check that this is an untrained Trainer without a training loop of its own.

    Raises:
        ConfigError: it is not.
    """
    if not any(
        kind.__name__ == "Trainer" and kind.__module__.startswith("transformers.") for kind in type(trainer).__mro__
    ):
        raise ConfigError(f"from_trainer takes a transformers.Trainer object, not {type(trainer).__name__}")
    name = type(trainer).__name__
    if trainer.train_dataset is None:
        raise ConfigError("from_trainer: the Trainer has no train_dataset: pass one")
    if trainer.state.global_step:
        raise ConfigError("from_trainer: the Trainer has already trained: build a new one")
    if getattr(trainer.model, "quantization_method", None) is not None:
        raise ConfigError("from_trainer: the model is quantised, which is not supported: load it unquantised")
    own = [method for method in LOOP if _is_own(trainer, method)]
    if own:
        way = "do it in the loop of lockstep.Run, or compute it in `compute_loss`"
        if own[0] == "get_train_dataloader":
            way = "pass train_dataset and data_collator, and override `_get_train_sampler` for the order"
        raise ConfigError(f"from_trainer: {name} overrides `{own[0]}`, which lockstep does not call: {way}")


def _evaluates(trainer: Any) -> bool:
    """Whether the run evaluates.

    It does not if the Trainer has its own `evaluate`, which the script calls after the training.

    Raises:
        ConfigError: it has its own evaluation methods, and `eval_strategy` is not "no".
    """
    own = [method for method in EVALUATION if _is_own(trainer, method)]
    if own and value(trainer.args.eval_strategy) != "no":
        raise ConfigError(
            f"from_trainer: {type(trainer).__name__} overrides `{own[0]}`, which lockstep does not call: set "
            "eval_strategy='no', and call it after the training"
        )
    return not own


def _sampler_of(trainer: Any, training: Any) -> Any:
    """Return the sampler of the Trainer's `_get_train_sampler`; None for a shuffle.

    A run seeds it by its epoch, so its draws differ from those in a Trainer's process.
    """
    takes = inspect.signature(trainer._get_train_sampler).parameters
    sampler = trainer._get_train_sampler(training) if takes else trainer._get_train_sampler()
    if sampler is None:
        return Sequential(len(training))
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    return None if plain and sampler.num_samples == len(training) else sampler


def _is_own(trainer: Any, method: str) -> bool:
    function = getattr(type(trainer), method, None)
    return function is not None and not function.__module__.startswith(_KNOWN_MODULES)


def _counts_labels(trainer: Any, batching: Batching, training: Any) -> bool:
    """Whether the loss is a mean over labels.

    It is if the model or `compute_loss_func` receives the number of labels, and the batches have labels.

    Raises:
        ConfigError: the first samples cannot be collated.
    """
    if not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return False
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        batch = batching.collate([training[place] for place in range(min(2, len(training)))])
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
    return labelled(batch, shifts=batching.shifts) is not None


@contextlib.contextmanager
def _single_process(trainer: Any) -> Iterator[None]:
    """Context manager in which the Trainer sees a single process and exchanges nothing."""
    args = trainer.args
    former = getattr(args, "average_tokens_across_devices", False)
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = former


def _init_model(trainer: Any) -> nn.Module:
    """Call `model_init` under the Trainer's seed, as the Trainer does."""
    random.seed(trainer.args.seed)
    np.random.seed(trainer.args.seed)
    torch.manual_seed(trainer.args.seed)
    model: nn.Module = trainer.call_model_init()
    _align(trainer, model)
    return model


def _copied(model: nn.Module) -> nn.Module:
    """Copy a model to host memory.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        return copy.deepcopy(model).cpu()
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"from_trainer: the model cannot be copied ({line}), and a run may need its initial state: pass the "
            "Trainer a model_init"
        ) from error


def _align(trainer: Any, model: nn.Module) -> None:
    """Align the model's special tokens with its tokenizer, as the Trainer does before training."""
    module = of_transformers(trainer)
    align: Callable[..., None] | None = getattr(module, "align_special_tokens", None)
    kinds = tuple(getattr(module, name) for name in ("PreTrainedTokenizerBase", "ProcessorMixin"))
    if align is not None and isinstance(trainer.processing_class, kinds) and hasattr(model, "config"):
        align(model, trainer.processing_class)


def _rows(batch: Any) -> int:
    return next(len(each) for each in batch.values() if isinstance(each, Tensor) and each.ndim)
