"""What is trained, as a user writes it: a model, its data, and the loss.

    class Digits(lockstep.Task):
        def model(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def dataset(self, split):
            return digits if split == "train" else held_out         # samples (image, label)

        def loss(self, model, batch):
            images, labels = batch
            return F.cross_entropy(model(images), labels, reduction="sum")      # the SUM over the batch's items

Model, dataset and loss must be written; all else has a default. An object of another class that has these methods will
do too: `adapted` gives it the defaults.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from lockstep.config.config import Config
from lockstep.errors import ConfigError
from lockstep.hooks import Hooks, OwnSteps
from lockstep.tasks.options import LIGHTNING

__all__ = ["Order", "Task", "adapted", "has_own", "imported_class", "items_of_a_sample", "load_task", "written"]


class Order(Protocol):
    """Which sample stands at each position of the run's endless stream."""

    def at(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epochs and the sample indices at the positions start .. stop - 1."""


class Task(ABC):
    """The base class of what is trained. Every rank makes its own object, and all must be alike.

    Attributes:
        reduction: whether `loss` is the "sum" over the items of a batch, or their "mean".
        items_per_sample: items of every sample, where all have as many; None: `count` says. The ranks then need not ask
            each other. Of a task without a `count` of its own it is 1: an item is a sample.
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

    reduction: Literal["sum", "mean"] = "sum"
    items_per_sample: int | None = None
    item_name: str = "items"
    defaults: Literal["general", "language-model", "fine-tuning", "images"] = "general"
    fingerprint: str = ""
    sources: Mapping[str, str] = {}
    hooks: Hooks | None = None
    own_steps: OwnSteps | None = None
    divisible: bool = True
    attention_mask: bool | None = None

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the default device, drawn from torch's default generators."""

    @abstractmethod
    def dataset(self, split: str) -> Any:
        """The samples of "train" or "evaluation": an object with `len(dataset)` and `dataset[i]`.

        For "evaluation" alone: a dict, name -> such an object, for several sets; None where there is nothing to
        evaluate on.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss summed over the items that `count` counts (or their mean, see `reduction`): 0-dim.

        `model` is what an engine holds: call it, and nothing inside it.
        """

    def collate(self, samples: list[Any]) -> Any:
        """A list of samples as one batch, in host memory."""
        return default_collate(samples)

    def count(self, batch: Any) -> int:
        """The items of a batch in host memory: labelled tokens, images. Default: its samples, by its first tensor."""
        return _length(batch)

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

    def order(self, samples: int, seed: int) -> Order | None:
        """Which sample stands at each position of the run's endless stream; None: another shuffle in each epoch."""
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
    "loss": "loss(model, batch) returns the loss, summed over the items of the batch, as a 0-dim tensor",
}
_METHODS = tuple(name for name, value in vars(Task).items() if callable(value) and not name.startswith("_"))
_VALUES = tuple(Task.__annotations__)

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
        for name in (*_METHODS, *_VALUES):
            if hasattr(given, name):
                setattr(self, name, getattr(given, name))

    def model(self) -> nn.Module:
        raise NotImplementedError

    def dataset(self, split: str) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
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
        if not callable(getattr(task, method, None)):
            raise ConfigError(f"the task {name} has no method `{method}`: {what}")
    made = task if isinstance(task, Task) else _Adapted(task)
    if made.reduction not in ("sum", "mean"):
        raise ConfigError(f"the task's reduction is {made.reduction!r}: it must be 'sum', the default, or 'mean'")
    mask = made.attention_mask
    if mask is not None and not isinstance(mask, bool):
        raise ConfigError(
            f"the task's attention_mask is of type {type(mask).__name__}: it must be True or False, whether the model "
            "gives attention a mask, or None, the default"
        )
    return made


def written(task: Task) -> Any:
    """The object that the user wrote."""
    return task.given if isinstance(task, _Adapted) else task


def has_own(task: Task, method: str) -> bool:
    """Whether `method` is more than the base class's default."""
    return getattr(getattr(task, method), "__func__", None) is not getattr(Task, method)


def items_of_a_sample(task: Task) -> int | None:
    """Items of every sample where that is known; None where each batch must be counted."""
    return task.items_per_sample or (None if has_own(task, "count") else 1)


def _check_names(task: Any) -> None:
    """Raises ConfigError for a method that is meant to be one of a Task's, and is not called as it is named."""
    own = [name for kind in type(task).__mro__ if kind is not Task for name in vars(kind) if callable(vars(kind)[name])]
    missing = [name for name in _METHODS if getattr(type(task), name, None) in (None, getattr(Task, name))]
    for name in own:
        if name.startswith("_") or name in _METHODS:
            continue
        close = difflib.get_close_matches(name, missing, n=1, cutoff=0.8)
        meant = close[0] if close else _ELSEWHERE.get(name, "")
        if meant in missing:
            raise ConfigError(
                f"the task {type(task).__name__} has a method `{name}`, which is never called: call it `{meant}`, or "
                f"`_{name}` if it is only a helper"
            )


def _length(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    inside = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, list | tuple | Mapping) and len(batch):
        return _length(next(iter(inside)))
    raise ConfigError(
        f"the task's `collate` returned {type(batch).__name__}, whose samples cannot be counted: write `count(batch)`"
    )


def load_task(named: str) -> Task:
    """The task that `FILE.py:Class` names, made without arguments.

    Raises:
        ConfigError: no such file or class, or one that cannot be made so.
    """
    if named.startswith(LIGHTNING):
        made: Task = importlib.import_module("lockstep.tasks.lightning_files").load(named)
        return made
    kind = imported_class(named, "--task")
    try:
        task = kind()
    except Exception as error:
        raise ConfigError(f"--task '{named}': {kind.__name__}() failed ({error}); it must need no arguments") from error
    return adapted(task)


def imported_class(named: str, flag: str, must: Iterable[str] = _MUST) -> Callable[[], Any]:
    """The class that `FILE.py:Class` names, as `flag` said. Raises ConfigError where there is none, and says which
    classes of the file have the methods that it must have."""
    file, _, name = named.rpartition(":")
    if not file and Path(named).is_file():
        file, name = named, ""
    path = Path(file)
    if not file or not path.is_file():
        raise ConfigError(f"{flag} '{named}': there is no such file; give FILE.py:Class")
    module = _imported(named, path, flag)
    kind: Callable[[], Any] | None = getattr(module, name, None) if name else None
    if kind is None:
        said = f"the file has no class {name}" if name else "it names no class"
        own = [key for key, value in vars(module).items() if _has_all(value, module, must)]
        close = difflib.get_close_matches(name, own, n=1)
        meant = f"did you mean {file}:{close[0]}?" if close else f"give {' or '.join(f'{file}:{key}' for key in own)}"
        wanted = "a subclass of lockstep.Task that the file defines" if flag == "--task" else "a class of the file"
        meant = meant if own else f"give {file}:CLASS, {wanted}"
        raise ConfigError(f"{flag} '{named}': {said}; {meant}")
    return kind


def _imported(named: str, path: Path, flag: str) -> ModuleType:
    """The file as a module. Raises ConfigError where it is none, or what it runs fails."""
    module_name = f"lockstep_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag} '{named}' is no Python file; give FILE.py:Class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # its classes can be pickled, to loader processes
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # the file may import its neighbours
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{flag} '{named}': {reason}; the file must import without an error") from error
    return module


def _has_all(value: Any, module: ModuleType, must: Iterable[str]) -> bool:
    """Whether `value` is a class of the file's own that has these methods."""
    own = isinstance(value, type) and value.__module__ == module.__name__ and not inspect.isabstract(value)
    return own and all(callable(getattr(value, method, None)) for method in must)
