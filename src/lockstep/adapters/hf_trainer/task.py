"""A Hugging Face Trainer as a task: its model, data, loss, optimizer and schedule.

    task = TrainerTask(trainer, batching, samples, evaluates=True)      # `from_trainer` makes it

The task calls the Trainer's own code for a batch (collator, `compute_loss`, `prediction_step`, `compute_metrics`),
overrides in a subclass included. It does not import transformers.
"""

import contextlib
import copy
import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler

from lockstep.adapters.hf_trainer.arguments import value
from lockstep.adapters.hf_trainer.callbacks import Events
from lockstep.adapters.hf_trainer.data import (
    Batching,
    EpochShuffled,
    PairBatching,
    Predictions,
    count_labels,
    of_transformers,
    samples_of,
)
from lockstep.adapters.hf_trainer.one_device import one_device
from lockstep.adapters.hf_trainer.schedule import describe_scheduler, schedule_of
from lockstep.config.schema import Config
from lockstep.data.sampler import Sequential
from lockstep.errors import ConfigError
from lockstep.task import Order, Task

__all__ = [
    "FINGERPRINT_ARGUMENTS",
    "LabelledTrainerTask",
    "TrainerTask",
    "is_own",
]


# Prefixes that compilation and activation checkpointing add to parameter names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# Modules whose methods do not change a step; an override from elsewhere would not be called.
_KNOWN_MODULES = ("transformers.", *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "reward")))
# Arguments that change what is computed: a resume with others raises an error.
FINGERPRINT_ARGUMENTS = (
    *("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("label_smoothing_factor", "data_seed", "train_sampling_strategy"),
)


class TrainerTask(Task):
    """A Trainer as a task; batch losses are averaged by samples.

    Made by `from_trainer`.
    """

    framework = "the Trainer"
    reduction = "micro-batch"
    item_name = "samples"
    # `compute_loss` may call collectives, to gather what it logs.
    gathers = True
    # As Accelerate prepares the model: autocast in the forward, float32 outputs.
    autocast_scope = "float32 outputs"
    # Subclasses add arguments of their own.
    fingerprint_arguments: tuple[str, ...] = FINGERPRINT_ARGUMENTS
    events: Events | None = None

    def __init__(self, trainer: Any, batching: Batching | PairBatching, training: Any, *, evaluates: bool) -> None:
        self.trainer = trainer
        self._batching = batching
        self._training = training
        self._evaluates = evaluates
        self._recipe = _optimizer_factory(trainer)
        self._schedule = schedule_of(trainer)
        self.live_rates = self._schedule
        self.hooks = self._schedule.hooks if self._schedule else None
        self._predictions = Predictions(trainer)
        self._loss_takes = inspect.signature(trainer.compute_loss).parameters
        settings = []
        for name in self.fingerprint_arguments:
            settings.append(str(value(getattr(trainer.args, name, None))))
        self.fingerprint = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:16]
        if trainer.lr_scheduler is not None:
            self.scheduler = describe_scheduler(trainer.lr_scheduler)
        else:
            self.scheduler = {}
        _align(trainer, trainer.model)
        self._first: nn.Module | None = trainer.model
        if trainer.model_init is not None:
            self._initial = None
        else:
            self._initial = _copy_to_host(trainer.model)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the batching for a loader process, and not the Trainer."""
        return copy.copy, (self._batching,)

    def model(self) -> nn.Module:
        """Return the Trainer's own model; on later calls, a copy of its initial state.

        With `model_init` every call makes a new model.
        """
        trainer = self.trainer
        if self._initial is None:
            model = _init_model(trainer)
        else:
            if self._first is None:
                model = _copy_model(self._initial)
            else:
                model = self._first
        self._first = None
        trainer.model = trainer.model_wrapped = model
        return model.train()

    def dataset(self, split: str) -> Any:
        if split == "train":
            return self._training
        dataset = self.trainer.eval_dataset if self._evaluates else None
        if isinstance(dataset, dict):
            datasets = {}
            for name, subset in dataset.items():
                datasets[name] = samples_of(self.trainer, subset, f"eval_dataset['{name}']")
            return datasets
        if dataset is None:
            return None
        return samples_of(self.trainer, dataset, "eval_dataset")

    def collate(self, samples: list[Any]) -> Any:
        return self._batching.collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of `compute_loss`: a 0-dim mean over the items that `count` counts."""
        inputs = self.trainer._prepare_inputs(batch)
        items = self._items(inputs)
        takes = items is not None and self._takes("num_items_in_batch")
        # A float: the Trainer divides it.
        if items is not None and takes:
            more = {"num_items_in_batch": items.float()}
        else:
            more = {}
        with self._alone(), self.trainer.compute_loss_context_manager():
            loss: Tensor = self.trainer.compute_loss(model, inputs, **more)
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the loss and, with `compute_metrics`, the predictions, from one `prediction_step`."""
        trainer = self.trainer
        predictions = self._predictions
        loss_only = trainer.compute_metrics is None or trainer.args.prediction_loss_only
        with self._alone():
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
        include = trainer.args.include_for_metrics
        main = getattr(trainer.model, "main_input_name", "input_ids")
        inputs = batch[main] if "inputs" in include else None
        losses = loss.repeat(_rows(batch)) if "loss" in include else None
        predictions.add(logits, labels, inputs, losses)
        return loss, {"": predictions}

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        if self._recipe:
            optimizer = self._recipe(model)
        else:
            optimizer = _create_optimizer(self.trainer, model)
        # The fused kernel rounds differently by an element's position in its shard.
        if config.exact:
            for group in optimizer.param_groups:
                group["fused"] = False if group.get("fused") else group.get("fused")
        self.trainer.optimizer = optimizer
        if self._schedule:
            self._schedule.attach(optimizer)
        if self.events:
            self.events.set_length(config, optimizer)
        return optimizer

    def order(self, samples: int, seed: int) -> Order | None:
        """Return the Trainer's sample order: shuffled, sequential, or its own sampler's."""
        args = self.trainer.args
        sampling = getattr(args, "train_sampling_strategy", "random")
        if sampling == "sequential":
            return Sequential(samples)
        by_length = sampling == "group_by_length" or getattr(args, "group_by_length", False)
        has_sampler = by_length or is_own(self.trainer, "_get_train_sampler")
        sampler: Order | None = _sampler_of(self.trainer, self._training) if has_sampler else None
        if sampler is None:
            return EpochShuffled(samples, seed if args.data_seed is None else args.data_seed)
        return sampler

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Make the Trainer take itself for the only process, in a context."""
        args = self.trainer.args
        former = getattr(args, "average_tokens_across_devices", False)
        # With it `compute_loss` would multiply the loss by the number of processes.
        args.average_tokens_across_devices = False
        try:
            yield
        finally:
            args.average_tokens_across_devices = former

    def _items(self, inputs: Mapping[str, Any]) -> Tensor | None:
        return None

    def _takes(self, name: str) -> bool:
        parameters = self._loss_takes
        return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


class LabelledTrainerTask(TrainerTask):
    """A Trainer task that takes the mean loss over the labels that are not -100.

    The model or `compute_loss_func` computes that mean.
    """

    item_name = "labels"

    def count(self, batch: Any) -> int:
        return self._batching.count(batch)

    def _items(self, inputs: Mapping[str, Any]) -> Tensor | None:
        if isinstance(self._batching, Batching):
            return count_labels(inputs, shifts=self._batching.shifts)
        return None


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
        options = {}
        for key, option in group.items():
            if key not in ("params", "initial_lr"):
                options[key] = option
        # A scheduler that exists already has changed `lr`; `initial_lr` is the user's.
        options["lr"] = group.get("initial_lr", group["lr"])
        groups.append(([_plain(names[parameter]) for parameter in group["params"]], options))
    optimizer_class = type(optimizer)
    accepts = inspect.signature(type(optimizer)).parameters
    defaults = {}
    for key, option in optimizer.defaults.items():
        if key in accepts:
            defaults[key] = option

    def make(model: nn.Module) -> Optimizer:
        parameters = {}
        for name, parameter in model.named_parameters():
            parameters[_plain(name)] = parameter
        members = []
        for group_names, options in groups:
            members.append({**options, "params": [parameters[name] for name in group_names]})
        result: Optimizer = optimizer_class(members, **defaults)
        return result

    return make


def _create_optimizer(trainer: Any, model: nn.Module) -> Optimizer:
    """Call the Trainer's `create_optimizer` for `model`, and drop groups without parameters."""
    former = trainer.model
    trainer.model = model
    trainer.optimizer = None
    try:
        takes = "model" in inspect.signature(trainer.create_optimizer).parameters
        with one_device(trainer):
            optimizer: Optimizer = trainer.create_optimizer(model) if takes else trainer.create_optimizer()
    finally:
        trainer.model = former
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _sampler_of(trainer: Any, training: Any) -> Any:
    """Return the sampler of the Trainer's `_get_train_sampler`; None for a shuffle.

    A run seeds it by its epoch, so its draws differ from those in a Trainer's process.
    """
    takes = inspect.signature(trainer._get_train_sampler).parameters
    with one_device(trainer):
        if takes:
            sampler = trainer._get_train_sampler(training)
        else:
            sampler = trainer._get_train_sampler()
    if sampler is None:
        return Sequential(len(training))
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    if plain and sampler.num_samples == len(training):
        return None
    return sampler


def is_own(trainer: Any, method: str) -> bool:
    function = getattr(type(trainer), method, None)
    return function is not None and not function.__module__.startswith(_KNOWN_MODULES)


def _init_model(trainer: Any) -> nn.Module:
    """Call `model_init` under the Trainer's seed, as the Trainer does."""
    random.seed(trainer.args.seed)
    np.random.seed(trainer.args.seed)
    torch.manual_seed(trainer.args.seed)
    with one_device(trainer):
        model: nn.Module = trainer.call_model_init()
    _align(trainer, model)
    return model


def _copy_to_host(model: nn.Module) -> nn.Module:
    """Copy a model to host memory.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        # In host memory, once a run: a run that is rolled back to its start needs the initial state.
        return _copy_model(model).cpu()
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"from_trainer: the model cannot be copied ({line}), and a run may need its initial state: pass the "
            "Trainer a model_init"
        ) from error


def _copy_model(model: nn.Module) -> nn.Module:
    """Copy a model, and bind each replaced `forward` to the copy.

    trl's fused LM head replaces one; what it wraps is bound to the copy too.
    """
    copied = copy.deepcopy(model)
    twins = dict(zip(map(id, model.modules()), copied.modules(), strict=True))
    for module, twin in zip(model.modules(), copied.modules(), strict=True):
        forward = vars(module).get("forward")
        if isinstance(forward, MethodType):
            twin.forward = _bind_to_twin(forward, twins)
    return copied


def _bind_to_twin(value: Any, twins: Mapping[int, nn.Module]) -> Any:
    """Return a copied module's method as its twin's.

    Modules and methods in its closure are replaced in the same way.
    """
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if not isinstance(value, MethodType) or id(value.__self__) not in twins:
        return value
    function = value.__func__
    twin = twins[id(value.__self__)]
    if isinstance(function, FunctionType) and function.__closure__:
        cells = tuple(CellType(_bind_to_twin(cell.cell_contents, twins)) for cell in function.__closure__)
        # copy.deepcopy does not copy functions, so the closure would still refer to the original modules.
        bound = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        bound.__kwdefaults__ = function.__kwdefaults__
        bound.__dict__.update(function.__dict__)
        function = bound
    return MethodType(function, twin)


def _align(trainer: Any, model: nn.Module) -> None:
    """Align the model's special tokens with its tokenizer, as the Trainer does before training."""
    module = of_transformers(trainer)
    align: Callable[..., None] | None = getattr(module, "align_special_tokens", None)
    kinds = tuple(getattr(module, name) for name in ("PreTrainedTokenizerBase", "ProcessorMixin"))
    if align is not None and isinstance(trainer.processing_class, kinds) and hasattr(model, "config"):
        align(model, trainer.processing_class)


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _rows(batch: Any) -> int:
    return next(len(tensor) for tensor in batch.values() if isinstance(tensor, Tensor) and tensor.ndim)
