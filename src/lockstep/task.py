"""Define what to train, as a user writes it: model, data and loss.

    class Digits(lockstep.Task):
        def model(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def dataset(self, split):
            return digits if split == "train" else held_out         # samples (image, label)

        def loss(self, model, batch):
            images, labels = batch
            return F.cross_entropy(model(images), labels)

Model, dataset and loss must be written (or `outputs` and `step_loss` in place of the loss); everything else has a
default. An object of another class with these methods works too: `adapted` gives it the defaults.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from lockstep.config.schema import Config
from lockstep.counts import first_length
from lockstep.errors import ConfigError
from lockstep.hooks import Hooks, OwnSteps

__all__ = [
    "HALVES",
    "METHODS",
    "VALUES",
    "Order",
    "Task",
    "adapted",
    "averages",
    "has_own",
    "items_of_a_sample",
    "looks_at_whole_step",
    "set_found",
    "takes_gradients",
    "written",
]

HALVES = (torch.float16, torch.bfloat16)
_REDUCTIONS = ("auto", "sum", "mean", "micro-batch")


class Order(Protocol):
    """The order of samples in the run's endless stream. Its length, if any, is an epoch's."""

    def at(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epochs and the sample indices of positions start .. stop - 1. int64 [stop - start] each"""


class Task(ABC):
    """Base class of what is trained.

    Every rank makes its own object, and all must be equal.

    Attributes:
        reduction: whether `loss` is the "sum" over the items of a batch, or their "mean"; "auto": detected before step
            1. "micro-batch": it is neither, and the losses of the micro-batches, each by itself, are averaged by their
            items, as DistributedDataParallel averages those of its ranks.
        items_per_sample: items of every sample, if all have the same number; None: `count` decides. The ranks then need
            not exchange counts. For a task without its own `collate` and `count` it is 1: an item is a sample.
        item_name: name of an item where a rate is shown.
        defaults: the kind of work, for which the configuration's "auto" values are chosen.
        fingerprint: of the data; a resume with another one is refused.
        sources: external sources, name -> revision; they are recorded, and must be the same on every rank.
        hooks: called at named moments of a run; None: no hooks.
        own_steps: steps several optimizers itself (manual optimization); None: the engine steps one.
        divisible: whether the loss of half a micro-batch may be tried before the run, to check that losses add up.
        attention_mask: whether the model passes a mask to `scaled_dot_product_attention`; None: unknown. Some kernels
            are faster without one, and wrong with one, see `lockstep.transforms.attention`.
    """

    reduction: Literal["auto", "sum", "mean", "micro-batch"] = "auto"
    items_per_sample: int | None = None
    item_name: str = "items"
    defaults: Literal["general", "language-model", "fine-tuning", "images"] = "general"
    fingerprint: str = ""
    sources: Mapping[str, str] = {}
    hooks: Hooks | None = None
    own_steps: OwnSteps | None = None
    divisible: bool = True
    attention_mask: bool | None = None
    # For adapters and wrappers around a task; users do not set these.
    framework = ""  # the adapted library, whose batches are micro-batches
    gathers = False  # `loss` has collectives, for what it logs
    is_compared = False  # its training is compared between world sizes

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model on the default device, drawn from torch's default generators."""

    @abstractmethod
    def dataset(self, split: str) -> Any:
        """Return the samples of "train" or "evaluation".

        Returns:
            An object with `len(dataset)` and `dataset[i]`. For "evaluation" also a dict, name -> such an object, for
            several sets; or None without an evaluation.
        """

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Compute the loss of a batch: its sum or mean over the items.

        Items are what `count` counts. `model` is the engine's: call it, and nothing inside it. If the loss covers all
        samples of a step together, write `outputs` and `step_loss` instead.

        Returns:
            A 0-dim tensor; or (that, name -> number) with numbers of your own, see "Numbers of your own" in the
            documentation.
        """
        outputs = self.outputs(model, batch)
        wide = pytree.tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALVES else t, outputs)
        return self.step_loss(wide)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Compute what `step_loss` needs of each sample of a batch.

        Returns:
            A tensor of shape [samples, ...], or a tuple or dict of such. A learned number that the loss needs is an
            output too: `scale.repeat(samples)`.
        """
        raise NotImplementedError

    def step_loss(self, outputs: Any) -> Tensor:
        """Compute the loss of a whole step from the outputs of all its samples: 0-dim.

        Called on every rank with the same values, in the run's order; half precision comes as float32. It uses no
        parameter of the model.
        """
        return self.step_loss_rows(outputs, outputs, 0)

    def step_loss_rows(self, own: Any, whole: Any, first: int) -> Tensor:
        """Compute one micro-batch's part of the step's loss: 0-dim.

        The loss is the SUM of these parts. Write it in place of `step_loss` if that is too much work for one device:
        each rank then computes the parts of its own micro-batches.

        Args:
            own: the outputs of the micro-batch.
            whole: those of all samples of the step, in the run's order.
            first: the row of `whole` that is the first of `own`.
        """
        raise NotImplementedError

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Compute a term that is added to the loss once per step: 0-dim.

        It does not depend on the number of micro-batches and ranks, and uses only the parameters, by
        `model.parameters()`. Unless it is overridden nothing is added.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Combine a list of samples into one batch, in host memory."""
        return default_collate(samples)

    def count(self, batch: Any) -> Any:
        """Count the items of a batch in host memory: labelled tokens, images.

        Called for every micro-batch. Default: its samples (the length of the first tensor).

        Returns:
            A finite number, 0 or more, or a tensor of one; also a sum of weights.
        """
        found = first_length(batch)
        if found is None:
            raise ConfigError(
                f"the task's `collate` returned {type(batch).__name__}, whose samples cannot be counted: write "
                "`count(batch)`"
            )
        return found

    def work(self, dataset: Any, samples: Sequence[int]) -> float | None:
        """Estimate the cost of a micro-batch without loading it, such as its padded tokens.

        With --shares auto each step is divided by it. Write it if samples differ in length.

        Args:
            dataset: what `dataset("train")` returned.
            samples: indices of the micro-batch's samples.

        Returns:
            A number above 0 in any unit, the same on every rank; None: all micro-batches cost the same.
        """
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return name -> (sum, count) over a batch of the evaluation set.

        The metric is the total of the sums over the total of the counts. A value may also be a `torchmetrics.Metric`
        that was updated with this batch only.
        """
        return {}

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return (loss, metrics) of a batch of the evaluation set.

        Override it if one forward can serve both.
        """
        return self.loss(model, batch), self.metrics(model, batch)

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer | None:
        """Return a torch optimizer over the parameters of `model`; None: the one of --optim.

        `model` is the engine's, perhaps sharded. Groups are free; their `lr` are the base rates.
        """
        return None

    def schedule(self, step: int, steps: int) -> float | None:
        """Return the factor of the base rates in `step` (0-based) of `steps`.

        None: the factor of --optim.schedule.
        """
        return None

    def order(self, samples: int, seed: int) -> Order | Iterable[int] | None:
        """Return a sampler or other order of samples; None: shuffle in each epoch.

        A torch Sampler is iterated again for each epoch, under a seed of that epoch, and its length is that of an
        epoch. For an object with `at` see `Order`.
        """
        return None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Return the repeated blocks of a model that `model` built, in order.

        None: they are searched for.
        """
        return None

    def untrained(self) -> Sequence[str]:
        """Return the new modules of a pretrained model, such as a head.

        They are named by name or pattern, in the model that `model` built last. With --lora.rank they are trained in
        full, in addition to the adapters.
        """
        return ()

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Return a text that shows what was learnt, at the end of a run.

        Called on every rank. "" shows nothing.
        """
        return ""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the task's own tensors to store in checkpoints. Not copies.

        For example an average of the weights, or a queue.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  nothing to do for most
        """Called on a resume, once the tensors of `state_dict()` are filled in place."""


_MUST = {
    "model": "model() returns the nn.Module",
    "dataset": "dataset(split) returns the samples of 'train' or 'evaluation'",
    "loss": "loss(model, batch) returns the loss of a batch as a 0-dim tensor",
}
METHODS = tuple(name for name, value in vars(Task).items() if callable(value) and not name.startswith("_"))
VALUES = tuple(Task.__annotations__)

# Names of other trainers -> the method here.
_ELSEWHERE = {
    "training_step": "loss",
    "compute_loss": "loss",
    "criterion": "loss",
    "configure_model": "model",
    "get_model": "model",
    "train_dataloader": "dataset",
    "val_dataloader": "dataset",
    "get_train_dataloader": "dataset",
    "train_dataset": "dataset",
    "eval_dataset": "dataset",
    "validation_step": "evaluate",
    "eval_step": "evaluate",
    "compute_metrics": "metrics",
    "configure_optimizers": "optimizer",
    "create_optimizer": "optimizer",
    "lr_schedule": "schedule",
    "lr_lambda": "schedule",
    "collate_fn": "collate",
    "data_collator": "collate",
}


class _Adapted(Task):
    """A Task around an object of another class, with defaults for what it lacks."""

    def __init__(self, given: Any) -> None:
        self.given = given
        for name in (*METHODS, *VALUES):
            if hasattr(given, name):
                setattr(self, name, getattr(given, name))

    def model(self) -> nn.Module:
        raise NotImplementedError

    def dataset(self, split: str) -> Any:
        raise NotImplementedError


def adapted(task: Any) -> Task:
    """Check `task`, and return it as a Task.

    Only an object of another class with the same methods is wrapped.

    Raises:
        ConfigError: it lacks a method, has a misspelt one, or an invalid value.
    """
    if isinstance(task, type):
        raise ConfigError(f"the task is the class {task.__name__} itself; give an object of it: {task.__name__}()")
    name = type(task).__name__
    _check_names(task)
    for method, what in _MUST.items():
        if method != "loss" and not callable(getattr(task, method, None)):
            raise ConfigError(f"the task {name} has no method `{method}`: {what}")
    made = task if isinstance(task, Task) else _Adapted(task)
    if "_reduction_before" in vars(made):  # an earlier run detected it, perhaps with another micro-batch size
        made.reduction = vars(made).pop("_reduction_before")
    _check_loss(made, name)
    if made.reduction not in _REDUCTIONS:
        raise ConfigError(
            f"the task's reduction is {made.reduction!r}: it must be one of {', '.join(map(repr, _REDUCTIONS))}"
        )
    mask = made.attention_mask
    if mask is not None and not isinstance(mask, bool):
        raise ConfigError(
            f"the task's attention_mask is of type {type(mask).__name__}: it must be True or False, whether the model "
            "gives attention a mask, or None, the default"
        )
    return made


def _check_loss(task: Task, name: str) -> None:
    """Raise ConfigError unless the task has exactly one kind of loss."""
    forms = [method for method in ("step_loss", "step_loss_rows") if has_own(task, method)]
    if has_own(task, "outputs") and not forms:
        raise ConfigError(
            f"the task {name} has `outputs` and no `step_loss`: step_loss(outputs) returns the loss of a whole step; "
            "or write `loss` alone"
        )
    if forms and not has_own(task, "outputs"):
        raise ConfigError(
            f"the task {name} has `{forms[0]}` and no `outputs`: outputs(model, batch) returns what it needs of each "
            "sample, tensors of shape [samples, ...]"
        )
    if len(forms) == 2:
        raise ConfigError(f"the task {name} has both `step_loss` and `step_loss_rows`: write one of them")
    if not forms and not has_own(task, "loss"):
        raise ConfigError(f"the task {name} has no method `loss`: {_MUST['loss']}")
    if forms and has_own(task, "evaluate"):
        raise ConfigError(
            f"the task {name} has both `{forms[0]}` and `evaluate`: an evaluation computes the loss by the same cut "
            "as the training; write `metrics` in place of `evaluate`"
        )
    if forms and has_own(task, "loss"):
        raise ConfigError(f"the task {name} has both `loss` and `{forms[0]}`: leave `loss` out, or `outputs` and that")


def averages(task: Task) -> bool:
    """Whether the losses of micro-batches are averaged by their items, not added up."""
    return task.reduction in ("mean", "micro-batch")


def takes_gradients(task: Task) -> bool:
    """Whether the task's loss computes gradients itself, so that an evaluation needs a graph."""
    return bool(getattr(task, "_takes_gradients", False))


def set_found(task: Task, reduction: str, gradients: bool) -> None:
    """Set what was detected of a task that does not declare it.

    The next run detects it again.

    Args:
        reduction: "" if it is declared.
        gradients: see `takes_gradients`.
    """
    if reduction:
        vars(task).setdefault("_reduction_before", task.reduction)
        task.reduction = reduction  # type: ignore[assignment]
    vars(task)["_takes_gradients"] = gradients


def looks_at_whole_step(task: Task) -> bool:
    """Whether the loss covers all samples of a step (`outputs` and `step_loss`)."""
    return has_own(task, "outputs")


def written(task: Task) -> Any:
    """Return the object that the user wrote."""
    return task.given if isinstance(task, _Adapted) else task


def has_own(task: Task, method: str) -> bool:
    """Whether `method` is more than the base class's default."""
    return getattr(getattr(task, method), "__func__", None) is not getattr(Task, method)


def items_of_a_sample(task: Task) -> int | None:
    """Return the items of every sample, if known.

    None if each batch must be counted: it may lack samples.
    """
    return task.items_per_sample or (None if has_own(task, "count") or has_own(task, "collate") else 1)


def _check_names(task: Any) -> None:
    """Raise ConfigError for a method that resembles one of a Task's and is never called."""
    own = [name for kind in type(task).__mro__ if kind is not Task for name in vars(kind) if callable(vars(kind)[name])]
    missing = [name for name in METHODS if getattr(type(task), name, None) in (None, getattr(Task, name))]
    for name in own:
        if name.startswith("_") or name in METHODS:
            continue
        close = difflib.get_close_matches(name, missing, n=1, cutoff=0.8)
        meant = close[0] if close else _ELSEWHERE.get(name, "")
        if meant in missing:
            raise ConfigError(
                f"the task {type(task).__name__} has a method `{name}`, which is never called: call it `{meant}`, or "
                f"`_{name}` if it is only a helper"
            )
