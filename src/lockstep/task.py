"""What is trained, as a user writes it: a model, its data, and the loss.

    class Digits(lockstep.Task):
        def model(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def dataset(self, split):
            return digits if split == "train" else held_out         # samples (image, label)

        def loss(self, model, batch):
            images, labels = batch
            return F.cross_entropy(model(images), labels)

Model, dataset and loss must be written (or `outputs` and `step_loss` in the loss's place); all else has a default. An
object of another class that has these methods will do too: `adapted` gives it the defaults.
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
    """Which sample stands at each position of the run's endless stream. Its length, if any, is that of an epoch."""

    def at(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epochs and the sample indices at the positions start .. stop - 1."""


class Task(ABC):
    """The base class of what is trained. Every rank makes its own object, and all must be alike.

    Attributes:
        reduction: whether `loss` is the "sum" over the items of a batch, or their "mean"; "auto": found before step 1.
            "micro-batch": it is neither, and the losses of the micro-batches, each by itself, are averaged by their
            items, as DistributedDataParallel averages those of its ranks.
        items_per_sample: items of every sample, where all have as many; None: `count` says. The ranks then need not ask
            each other. Of a task without a `collate` and a `count` of its own it is 1: an item is a sample.
        item_name: what an item is called where a rate is shown.
        defaults: which work it is: what suits it is chosen where the configuration says nothing.
        fingerprint: of the data; a resume with another one is refused.
        sources: what came from elsewhere, name -> revision; it is recorded, and must be the same on every rank.
        hooks: called at named moments of a run; None: there are none.
        own_steps: takes the steps of several optimizers itself; None: the engine takes one.
        divisible: whether the loss of half a micro-batch may be tried before the run, to see that losses add up.
        attention_mask: whether the model gives `scaled_dot_product_attention` a mask; None: not known. Some kernels are
            faster without one, and wrong beside one, see `lockstep.transforms.attention`.
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
    # Of adapters, and of wrappers around a task; no user sets these.
    framework = ""  # whose batches are micro-batches
    gathers = False  # it has collectives in `loss`, for what it logs
    is_compared = False  # what it trains is compared between numbers of ranks

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the default device, drawn from torch's default generators."""

    @abstractmethod
    def dataset(self, split: str) -> Any:
        """The samples of "train" or "evaluation": an object with `len(dataset)` and `dataset[i]`.

        For "evaluation" alone: a dict, name -> such an object, for several sets; None where there is nothing to
        evaluate on.
        """

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Compute the loss of a batch: its sum, or its mean, over the items that `count` counts.

        `model` is what an engine holds: call it, and nothing inside it. Where the loss looks at all samples of a step
        together, write `outputs` and `step_loss` in place of this.

        Returns:
            a 0-dim tensor; or (that, name -> number) with numbers of your own, see "Numbers of your own" in the
            documentation.
        """
        outputs = self.outputs(model, batch)
        wide = pytree.tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALVES else t, outputs)
        return self.step_loss(wide)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Compute what `step_loss` needs of each sample of a batch.

        Returns:
            a tensor of shape [samples, ...], or a tuple or dict of such. A learned number that the loss needs is an
            output too: `scale.repeat(samples)`.
        """
        raise NotImplementedError

    def step_loss(self, outputs: Any) -> Tensor:
        """Compute the loss of a whole step from the outputs of all of its samples, in the run's order: 0-dim.

        Called on every rank alike, with the same values; those of half precision come as float32. It uses no parameter
        of the model.
        """
        return self.step_loss_rows(outputs, outputs, 0)

    def step_loss_rows(self, own: Any, whole: Any, first: int) -> Tensor:
        """Compute one micro-batch's part of the step's loss, which is the SUM of these parts: 0-dim.

        To be written in place of `step_loss` where that is too much work for one device: each rank then computes the
        parts of its own micro-batches.

        Args:
            own: the outputs of the micro-batch.
            whole: those of all samples of the step, in the run's order.
            first: which row of `whole` is the first of `own`.
        """
        raise NotImplementedError

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Compute what is added to the loss once a step, whatever the number of micro-batches and ranks: 0-dim.

        It looks at the parameters alone, by `model.parameters()`. Where it is not written nothing is added.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """A list of samples as one batch, in host memory."""
        return default_collate(samples)

    def count(self, batch: Any) -> Any:
        """Count the items of a batch in host memory: labelled tokens, images. Default: its samples (first tensor).

        Returns:
            a finite number, 0 or more, or a tensor of one; also a sum of weights. Called for every micro-batch.
        """
        found = first_length(batch)
        if found is None:
            raise ConfigError(
                f"the task's `collate` returned {type(batch).__name__}, whose samples cannot be counted: write "
                "`count(batch)`"
            )
        return found

    def work(self, dataset: Any, samples: Sequence[int]) -> float | None:
        """What a micro-batch of these samples costs, in any unit, told without loading them: its padded tokens.

        With --shares auto each step is cut by it. `dataset` is what `dataset("train")` returned; a number above 0, the
        same on every rank. To be written where samples differ in length; None: all are alike.
        """
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """name -> (sum, count) over a batch of the evaluation set; the metric is the sums over the counts.

        A value may also be a `torchmetrics.Metric` that was updated with this batch alone.
        """
        return {}

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """(loss, metrics) of a batch of the evaluation set. To be written where one forward can serve both."""
        return self.loss(model, batch), self.metrics(model, batch)

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer | None:
        """Any torch optimizer over the parameters of `model`, in any groups; None: the one that --optim says.

        `model` is as the engine holds it, perhaps in shards. The groups' `lr` are the base rates.
        """
        return None

    def schedule(self, step: int, steps: int) -> float | None:
        """What the base rates are multiplied by in `step` (0-based) of `steps`; None: what --optim.schedule says."""
        return None

    def order(self, samples: int, seed: int) -> Order | Iterable[int] | None:
        """Return a torch Sampler, or an object with `at`; None: another shuffle in each epoch.

        A sampler is drawn anew for each epoch, under a seed of that epoch, and its length is that of an epoch.
        """
        return None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """The repeated blocks of a model that `model` built, in order; None: they are looked for."""
        return None

    def untrained(self) -> Sequence[str]:
        """Modules of the model that `model` built last, by name or pattern, which are new where the rest is trained: a
        head. With --lora.rank they are trained whole, beside the adapters.
        """
        return ()

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """A text that shows what was learnt, at the end of a run; called on every rank alike. "" shows nothing."""
        return ""

    def state_dict(self) -> dict[str, Tensor]:
        """The task's own tensors that a checkpoint must keep (an average of the weights, a queue). Not copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  nothing to do for most
        """Called on a resume once the tensors that `state_dict()` gave have been filled in place."""


_MUST = {
    "model": "model() returns the nn.Module",
    "dataset": "dataset(split) returns the samples of 'train' or 'evaluation'",
    "loss": "loss(model, batch) returns the loss of a batch as a 0-dim tensor",
}
METHODS = tuple(name for name, value in vars(Task).items() if callable(value) and not name.startswith("_"))
VALUES = tuple(Task.__annotations__)

# What other trainers call it.
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
    """A Task of an object of another class: what it has is its own, the rest is the default."""

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
    """`task` as a Task. Only an object of another class with the same methods needs it.

    Raises:
        ConfigError: it lacks a method, has one that is misspelt, or one of its values cannot be.
    """
    if isinstance(task, type):
        raise ConfigError(f"the task is the class {task.__name__} itself; give an object of it: {task.__name__}()")
    name = type(task).__name__
    _check_names(task)
    for method, what in _MUST.items():
        if method != "loss" and not callable(getattr(task, method, None)):
            raise ConfigError(f"the task {name} has no method `{method}`: {what}")
    made = task if isinstance(task, Task) else _Adapted(task)
    if "_reduction_before" in vars(made):  # a run before this one found it, perhaps in another cut
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
    """Raises ConfigError unless the task has a loss, of one kind alone."""
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
    """Whether the losses of micro-batches are averaged, weighted by their items, and not added up."""
    return task.reduction in ("mean", "micro-batch")


def takes_gradients(task: Task) -> bool:
    """Whether the task's loss takes gradients of its own, so that an evaluation needs a graph."""
    return bool(getattr(task, "_takes_gradients", False))


def set_found(task: Task, reduction: str, gradients: bool) -> None:
    """Set what was found of a task that does not declare it; the next run finds it for itself.

    Args:
        reduction: "" where it is declared.
        gradients: see `takes_gradients`.
    """
    if reduction:
        vars(task).setdefault("_reduction_before", task.reduction)
        task.reduction = reduction  # type: ignore[assignment]
    vars(task)["_takes_gradients"] = gradients


def looks_at_whole_step(task: Task) -> bool:
    """Whether the task's loss is one over all samples of a step (`outputs` and `step_loss`)."""
    return has_own(task, "outputs")


def written(task: Task) -> Any:
    """The object that the user wrote."""
    return task.given if isinstance(task, _Adapted) else task


def has_own(task: Task, method: str) -> bool:
    """Whether `method` is more than the base class's default."""
    return getattr(getattr(task, method), "__func__", None) is not getattr(Task, method)


def items_of_a_sample(task: Task) -> int | None:
    """Items of every sample where that is known; None where each batch must be counted: it may lack samples."""
    return task.items_per_sample or (None if has_own(task, "count") or has_own(task, "collate") else 1)


def _check_names(task: Any) -> None:
    """Raises ConfigError for a method that is meant to be one of a Task's, and is not called as it is named."""
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
