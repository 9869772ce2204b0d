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
default. An object of another class with these methods works too: `as_task` adds the defaults.
"""

import contextlib
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lockstep.config.schema import Config
from lockstep.counts import first_length
from lockstep.errors import ConfigError
from lockstep.hooks import Hooks, OwnSteps
from lockstep.tensors import collate_samples

__all__ = [
    "AVERAGED",
    "HALVES",
    "METHODS",
    "UNDIVIDED",
    "VALUES",
    "LiveRates",
    "Order",
    "Task",
    "TaskAround",
    "as_task",
    "check_class",
    "current_step",
    "has_mean_loss",
    "has_own",
    "has_step_loss",
    "in_context",
    "inner_task",
    "items_of_a_sample",
    "needs_graph",
    "set_detected",
    "set_step",
    "user_task",
]

HALVES = (torch.float16, torch.bfloat16)
_STEP = "_current_step"
_REDUCTIONS = ("auto", "sum", "mean", "micro-batch")
# Losses of micro-batches are averaged, weighted by their items.
AVERAGED = ("mean", "micro-batch")
# An undeclared loss has its value on the whole batch. "whole": a step has one micro-batch. "total": the losses are
# proved to be sums, so that a step's loss is the sum of its micro-batches' losses.
UNDIVIDED = ("whole", "total")


class Order(Protocol):
    """The order of samples in the run's endless stream.

    Its length, if it has one, is that of an epoch.
    """

    def at(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epochs and the sample indices of positions start .. stop - 1.

        Two arrays, int64 [stop - start].
        """


class LiveRates(Protocol):
    """Schedulers of an adapted library, which write into the optimizer's groups.

    They write rates and momenta. lockstep then writes none, so a user's value stays until a scheduler writes again.
    """

    def check(self, steps: int) -> None:
        """Step them over a plan of `steps`, and restore them.

        Raises ConfigError for a scheduler that fails.
        """

    def drive_to(self, done: int) -> None:
        """Step them as after `done` updates."""

    def replay(self, watched: list[list[Any]], done: int) -> None:
        """Restart them, and step them as after `done` updates.

        Args:
            watched: the values that some of them followed so far, as the hooks' state stores them.
        """


class DataFacts(NamedTuple):
    """Facts about a language model's data that decide defaults.

    Attributes:
        options: dotted name -> the value of an option that is "auto".
        has_prompts: the rows are prompts or conversations.
        summary: a line about the data, for the log; "": none.
        width: of the pretrained model's hidden states; 0: unknown, or not pretrained.
    """

    options: Mapping[str, Any]
    has_prompts: bool = False
    summary: str = ""
    width: int = 0


class _CurrentStep:
    """The step in which a task's `loss` is called.

    A user's own attribute of that name takes precedence.
    """

    def __get__(self, task: Any, kind: type[Any]) -> int:
        if task is not None:
            return int(vars(task).get(_STEP, 0))
        return 0


class Task(ABC):
    """Base class for a model, its data and its loss.

    Every rank makes its own object; all must be equal.

    Attributes:
        reduction: what `loss` returns. "auto": its value on a whole step is the loss of the step, as in a plain loop;
            where a step is cut, a check before step 1 must prove that it is a sum or a mean over items. "mean": the
            mean over the items of a batch. "sum": the sum over them, which is divided by the items of the step.
            "micro-batch": it is neither; the losses of the micro-batches are averaged, weighted by their items, as
            DistributedDataParallel averages over its ranks. The run itself sets "total" (an undeclared loss that was
            shown to be a sum, and stays one) and "whole" (one that is used as it is, since a step has one micro-batch).
        items_per_sample: items of every sample, if all have the same number; the ranks then exchange no counts. None:
            `count` decides. For a task without its own `collate` and `count` it is 1: an item is a sample.
        item_name: name of an item in rates, such as "tokens".
        defaults: the kind of training, which decides the configuration's "auto" values.
        fingerprint: of the data; a resume with different data is refused.
        sources: external sources, name -> revision; recorded, and the same on every rank.
        hooks: called at named moments of a run; None: no hooks.
        own_steps: steps several optimizers itself (manual optimization); None: the engine steps one.
        divisible: the loss of half a micro-batch can be computed before the run, to check that losses add up.
        attention_mask: the model passes a mask to `scaled_dot_product_attention`; None: unknown. Some kernels are
            faster without a mask, and wrong with one, see `lockstep.transforms.attention`.
        fixed_models: models that the loss reads and no step changes, by name, such as a teacher; compared between the
            ranks before step 1.
        sample_state: names of buffers, and keys of `state_dict()`, that have rows by sample or stream:
            a hidden state, a memory bank. Each micro-batch reads their values from before the step, and writes rows.
        step: the present step, 0-based, the same on every rank; set by the run before each step. A class that has an
            attribute `step` of its own keeps it.
    """

    reduction: Literal["auto", "sum", "mean", "micro-batch", "total", "whole"] = "auto"
    items_per_sample: int | None = None
    item_name: str = "items"
    defaults: Literal["general", "language-model", "fine-tuning", "images"] = "general"
    fingerprint: str = ""
    sources: Mapping[str, str] = {}
    hooks: Hooks | None = None
    own_steps: OwnSteps | None = None
    divisible: bool = True
    attention_mask: bool | None = None
    fixed_models: Mapping[str, nn.Module] = {}
    sample_state: Sequence[str] = ()
    step = _CurrentStep()
    # For adapters and wrappers around a task; users do not set these.
    # The adapted library, whose batches are micro-batches.
    framework = ""
    # `loss` calls collectives to log numbers.
    gathers = False
    # "loss": everything that computes runs in autocast. "forward" and "float32 outputs": the forward alone does; see
    # `task_in_precision`.
    autocast_scope = "loss"
    # Its training is compared between world sizes.
    is_compared = False
    # Of the built-in language models.
    data_facts = cast("DataFacts | None", None)
    # The optimizer's eval() and train() are called around an evaluation.
    switches_modes = True
    # Schedulers of the adapted library, which write into the groups.
    live_rates = cast("LiveRates | None", None)
    # Class and settings of a scheduler that the user made; a resume with another one is refused.
    scheduler: Mapping[str, Any] = {}
    # Otherwise the loss of an evaluation is NaN, and absent from records.
    evaluates_loss = True

    def metric_name(self, set_name: str, name: str) -> str:
        """Return the name of a number of one of several evaluation sets.

        It is used in records and in `best_metric`.
        """
        return f"{set_name}/{name}"

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model on the default device, drawn from torch's default generators."""

    @abstractmethod
    def dataset(self, split: str) -> Any:
        """Return the samples of "train" or "evaluation".

        Returns:
            An object with `len(dataset)` and `dataset[i]`. For "train" also a stream without an index, see "Data" in
            the documentation; for "evaluation" also a dict of several sets, by name, or None for no evaluation.
        """

    # B027, here and below: an empty method of an abstract class, since most tasks have nothing to do.
    def start_epoch(self, dataset: Any, epoch: int) -> None:  # noqa: B027
        """Change the training set before the first sample of an epoch is loaded.

        Called on every rank with the same seed, which depends on the epoch alone; after a resume in the middle of an
        epoch too, and again before the first step. So set all that the epoch needs from its number. The length of
        the set must stay.

        Args:
            dataset: what `dataset("train")` returned.
            epoch: 0-based. An epoch begins with the first step whose first sample belongs to it.
        """

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Compute the loss of a batch: the sum or mean over its items.

        If a step is not cut, any loss is allowed.

        Items are what `count` counts. `model` is the engine's: call it, and nothing inside it. If the loss covers all
        samples of a step together, write `outputs` and `step_loss` instead.

        Returns:
            A 0-dim tensor; or (loss, name -> number) to record further numbers, see "Numbers of your own" in the
            documentation.
        """
        outputs = self.outputs(model, batch)
        wide = pytree.tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALVES else t, outputs)
        return self.step_loss(wide)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Compute what `step_loss` needs of each sample of a batch.

        Returns:
            A tensor of shape [samples, ...], or a tuple or dict of them. A trained scalar that the loss needs is an
            output too: `scale.repeat(samples)`.
        """
        raise NotImplementedError

    def step_loss(self, outputs: Any) -> Tensor:
        """Compute the loss of a whole step from the outputs of all its samples: 0-dim.

        Called on every rank with the same values, in the run's order; half precision is converted to float32. It must
        not use parameters of the model.
        """
        return self.step_loss_rows(outputs, outputs, 0)

    def step_loss_rows(self, own: Any, whole: Any, first: int) -> Tensor:
        """Compute one micro-batch's part of the step's loss: 0-dim.

        The loss is the SUM of these parts. Write it instead of `step_loss` if that is too slow or large for one device:
        each rank then computes the parts of its own micro-batches.

        Args:
            own: the outputs of the micro-batch.
            whole: the outputs of all samples of the step, in the run's order.
            first: the row of `whole` at which `own` starts.
        """
        raise NotImplementedError

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Compute a term that is added to the loss once per step: 0-dim.

        It must use only the parameters, by `model.parameters()`, so it does not depend on micro-batches and ranks.
        None: no term.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Combine a list of samples into one batch, in host memory.

        The default is torch's `default_collate`, for dataclasses field by field; graphs of PyG become its `Batch`.
        """
        return collate_samples(samples)

    def count(self, batch: Any) -> Any:
        """Count the items of a batch in host memory: labelled tokens, images.

        Called for every micro-batch. The default counts samples: the length of the first tensor.

        Returns:
            A finite number, 0 or more, or a tensor of one; a sum of weights is allowed.
        """
        count = first_length(batch)
        if count is None:
            raise ConfigError(
                f"the task's `collate` returned {type(batch).__name__}, whose samples cannot be counted; define "
                "`count(batch)`"
            )
        return count

    def work(self, dataset: Any, samples: Sequence[int]) -> float | None:
        """Estimate the cost of a micro-batch without loading it, such as its padded tokens.

        --shares auto divides each step by it. Override it if samples differ in length.

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

        Override it to compute both with one forward.
        """
        return self.loss(model, batch), self.metrics(model, batch)

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer | None:
        """Return a torch optimizer over the parameters of `model`; None: the one of --optim.

        `model` is the engine's and may be sharded. Any parameter groups are allowed; their `lr` are the base rates.
        """
        return None

    def schedule(self, step: int, steps: int) -> float | None:
        """Return the factor of the base rates in `step` (0-based) of `steps`; None: of --optim.schedule."""
        return None

    # B027: as above; most tasks set nothing.
    def set_groups(self, groups: list[dict[str, Any]], step: int, steps: int) -> None:  # noqa: B027
        """Set the optimizer's groups for `step` (0-based) of `steps`.

        Rates, weight decay, or any other key.

        Called on every rank just before the update, when the schedule's rates are in the groups. A function of the
        step alone, so that a resume continues it.
        """

    def order(self, samples: int, seed: int) -> Order | Iterable[int] | None:
        """Return a sampler or other order of samples; None: shuffle in each epoch.

        A torch Sampler is iterated once per epoch, with a seed of that epoch; its length is an epoch's. For an object
        with `at` see `Order`.
        """
        return None

    def blocks(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Return the repeated blocks of a model from `model()`, in order; None: search for them."""
        return None

    def parallelize(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Return how the layers of a model from `model()` are divided over ranks, for --parallel.tensor.

        Returns:
            Module name or pattern -> "columns", "rows", "packed:n", "vocabulary", "replicated", or a ParallelStyle of
            torch; see docs/parallel.md. None: the model cannot be divided.
        """
        return None

    def sequence(self, batch: Any) -> Mapping[str, int] | None:
        """Return how the sequences of a batch are divided over ranks, for --parallel.context.

        The loss is then computed of a rank's positions, and the losses of all ranks are added: it must be a sum over
        labelled positions, whose labels `collate` has shifted already. The model attends by `lockstep.attention`.

        Args:
            batch: as `collate` returns it: a dict.

        Returns:
            Name of a tensor -> its dimension of the sequence, such as {"input_ids": 1, "labels": 1, "positions": 1}.
            "positions" is added to a batch without it: 0, 1, 2, ... for each sequence. Other tensors stay whole.
            None: the sequences cannot be divided.
        """
        return None

    def untrained(self) -> Sequence[str]:
        """Return names or patterns of a pretrained model's new modules, such as a head.

        With --lora.rank they are trained in full, alongside the adapters.
        """
        return ()

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """Return a text that shows what the model learned, for the end of a run.

        "": nothing.

        Called on every rank.
        """
        return ""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the task's own tensors, not copies, to store in checkpoints: a queue, an average."""
        return {}

    # B027: as above.
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Called on a resume, after the tensors of `state_dict()` were filled in place."""


_REQUIRED = {
    "model": "model() returns the nn.Module",
    "dataset": "dataset(split) returns the samples of 'train' or 'evaluation'",
    "loss": "loss(model, batch) returns the loss of a batch as a 0-dim tensor",
}
METHODS = tuple(name for name, value in vars(Task).items() if callable(value) and not name.startswith("_"))
VALUES = tuple(Task.__annotations__)

# Names in other libraries -> the method of Task.
_FOREIGN_NAMES = {
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


class _WrappedTask(Task):
    """A Task around an object of another class, with defaults for what it lacks."""

    def __init__(self, original: Any) -> None:
        self.original = original
        for name in (*METHODS, *VALUES):
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))

    def model(self) -> nn.Module:
        raise NotImplementedError

    def dataset(self, split: str) -> Any:
        raise NotImplementedError


class TaskAround:
    """Base of objects around a task that compute some of its methods in another way.

    Everything else is read from the inner task and written to it.

    It passes for the task (`isinstance`), and is pickled and copied as the task itself, which keeps no trace.

    Args:
        inner: the task.
        own: the object's own attributes, by name.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Task, **own: Any) -> None:
        for name, value in (("_inner", inner), *own.items()):
            object.__setattr__(self, name, value)

    # mypy does not allow a property for `__class__`. With it isinstance takes this object for the task.
    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._inner, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _itself, (_inner(self),)


class _TaskInContext(TaskAround):
    """A task whose computing methods run in a context.

    Args:
        context: makes the context of a call.
        report: called once with the dtype of a loss in half precision.
    """

    __slots__ = ("_context", "_report")

    def __init__(
        self, inner: Task, context: Callable[[], AbstractContextManager[Any]], report: Callable[[torch.dtype], None]
    ) -> None:
        super().__init__(inner, _context=context, _report=report)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self._loss(self._inner.loss, model, batch)

    def step_loss(self, outputs: Any) -> Any:
        return self._loss(self._inner.step_loss, outputs)

    def step_loss_rows(self, own: Any, whole: Any, first: int) -> Any:
        return self._loss(self._inner.step_loss_rows, own, whole, first)

    def penalty(self, model: nn.Module) -> Any:
        # The penalty is a term of the loss, so a plain loop computes it in the same context.
        return self._loss(self._inner.penalty, model)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        with self._context():
            return self._inner.outputs(model, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        with self._context():
            return _in_float32(self._inner.evaluate(model, batch))

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        with self._context():
            return _in_float32(self._inner.metrics(model, batch))

    def _loss(self, method: Callable[..., Any], *args: Any) -> Any:
        with self._context():
            loss = method(*args)
        if isinstance(loss, Tensor) and loss.dtype not in HALVES:
            return loss
        value = loss[0] if isinstance(loss, tuple | list) and loss else loss
        if isinstance(value, Tensor) and value.dtype in HALVES:
            self._report(value.dtype)
            object.__setattr__(self, "_report", lambda dtype: None)
        return _in_float32(loss)


def _itself(task: Task) -> Task:
    return task


def _in_float32(value: Any) -> Any:
    """Convert tensors in half precision to float32, in plain tuples, lists and dicts too."""
    if isinstance(value, Tensor):
        if value.dtype in HALVES:
            return value.float()
        return value
    if type(value) is dict:
        return {key: _in_float32(element) for key, element in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_in_float32(element) for element in value)
    return value


def in_context(
    task: Task, context: Callable[[], AbstractContextManager[Any]], report: Callable[[torch.dtype], None]
) -> Task:
    """Return the task with its computing methods in a context, and losses in float32.

    `loss`, `outputs`, `step_loss`, `step_loss_rows`, `penalty`, `evaluate` and `metrics` compute. The object itself is
    not changed.

    Args:
        task: the run's.
        context: makes the context of a call.
        report: called once with the dtype of a loss that came in half precision.
    """
    return cast("Task", _TaskInContext(_inner(task), context, report))


def _inner(task: Any) -> Any:
    """Return the task within the objects around it, or the task itself."""
    while issubclass(type(task), TaskAround):
        task = object.__getattribute__(task, "_inner")
    return task


def check_class(kind: type[Any]) -> None:
    """Raise ConfigError for a missing method without which the class cannot be instantiated."""
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        _check_names(kind)
        purpose = _REQUIRED.get(missing[0], "its base class asks for it")
        raise ConfigError(f"the task {kind.__name__} has no method `{missing[0]}`: {purpose}")


def as_task(task: Any) -> Task:
    """Check a task, and wrap it if it is an object of another class.

    Raises:
        ConfigError: it lacks a method, has a misspelt one, or an invalid value.
    """
    if isinstance(task, type):
        raise ConfigError(f"the task is the class {task.__name__}; give an object: {task.__name__}()")
    task = _inner(task)
    name = type(task).__name__
    _check_names(type(task))
    for method, purpose in _REQUIRED.items():
        if method != "loss" and not callable(getattr(task, method, None)):
            raise ConfigError(f"the task {name} has no method `{method}`: {purpose}")
    result = task if isinstance(task, Task) else _WrappedTask(task)
    # An earlier run has detected the reduction, perhaps with another micro-batch size.
    if "_reduction_before" in vars(result):
        result.reduction = vars(result).pop("_reduction_before")
    set_step(result, 0)
    _check_loss(result, name)
    if result.reduction not in _REDUCTIONS:
        raise ConfigError(
            f"the task's reduction is {result.reduction!r}: it must be one of {', '.join(map(repr, _REDUCTIONS))}"
        )
    mask = result.attention_mask
    if mask is not None and not isinstance(mask, bool):
        raise ConfigError(
            f"the task's attention_mask is of type {type(mask).__name__}: it must be True or False (the model "
            "passes a mask to attention or not), or None"
        )
    return result


def _check_loss(task: Task, name: str) -> None:
    """Check that the task has exactly one kind of loss. Raises ConfigError."""
    forms = []
    for method in ("step_loss", "step_loss_rows"):
        if has_own(task, method):
            forms.append(method)
    if has_own(task, "outputs") and not forms:
        raise ConfigError(
            f"the task {name} has `outputs` but no `step_loss`; define step_loss(outputs), the loss of a whole step, "
            "or only `loss`"
        )
    if forms and not has_own(task, "outputs"):
        raise ConfigError(
            f"the task {name} has `{forms[0]}` but no `outputs`; define outputs(model, batch), what it needs of each "
            "sample: tensors of shape [samples, ...]"
        )
    if len(forms) == 2:
        raise ConfigError(f"the task {name} has both `step_loss` and `step_loss_rows`; remove one")
    if not forms and not has_own(task, "loss"):
        raise ConfigError(f"the task {name} has no method `loss`: {_REQUIRED['loss']}")
    if forms and has_own(task, "evaluate"):
        raise ConfigError(
            f"the task {name} has both `{forms[0]}` and `evaluate`, but an evaluation computes the loss as training "
            "does; define `metrics` instead of `evaluate`"
        )
    if forms and has_own(task, "loss"):
        raise ConfigError(
            f"the task {name} has both `loss` and `{forms[0]}`; remove `loss`, or `{forms[0]}` and `outputs`"
        )


def has_mean_loss(task: Task) -> bool:
    """Whether the losses of micro-batches are averaged, weighted by items, and not added."""
    return task.reduction in AVERAGED


def needs_graph(task: Task) -> bool:
    """Whether the loss itself computes gradients, so that an evaluation needs a graph."""
    return bool(getattr(task, "_takes_gradients", False))


def set_detected(task: Task, reduction: str, gradients: bool) -> None:
    """Store what the trial before step 1 detected; the next run detects it again.

    Args:
        task: the task.
        reduction: the detected one; "" if the task declares it.
        gradients: see `needs_graph`.
    """
    if reduction:
        vars(task).setdefault("_reduction_before", task.reduction)
        # mypy does not see that `reduction` is one of the allowed strings.
        task.reduction = reduction  # type: ignore[assignment]
    vars(task)["_takes_gradients"] = gradients


def set_step(task: Task, step: int) -> None:
    """Set the present step, 0-based, of a task and of the object that it wraps.

    An object with its own attribute `step` keeps it.
    """
    inner = inner_task(task)
    vars(task)[_STEP] = vars(inner)[_STEP] = step
    user_object = user_task(inner)
    if user_object is not inner and (not hasattr(user_object, "step") or hasattr(user_object, _STEP)):
        # An object with slots has no room for the attribute.
        with contextlib.suppress(AttributeError):
            setattr(user_object, _STEP, step)
            user_object.step = step


def current_step(task: Task) -> int:
    """Return the present step, 0-based, also of a task that has its own attribute `step`."""
    return int(vars(inner_task(task)).get(_STEP, 0))


def has_step_loss(task: Task) -> bool:
    """Whether the loss covers all samples of a step (`outputs` and `step_loss`)."""
    return has_own(task, "outputs")


def inner_task(task: Task) -> Task:
    """Return the task that wrappers of this package, which have it as `_wrapped`, delegate to."""
    task = _inner(task)
    while "_wrapped" in vars(task):
        task = _inner(vars(task)["_wrapped"])
    return task


def user_task(task: Task) -> Any:
    """Return the user's own object."""
    task = _inner(task)
    if isinstance(task, _WrappedTask):
        return task.original
    return task


def has_own(task: Task, method: str) -> bool:
    """Whether the task overrides `method`."""
    return getattr(getattr(_inner(task), method), "__func__", None) is not getattr(Task, method)


def items_of_a_sample(task: Task) -> int | None:
    """Return the items of every sample; None if each batch must be counted."""
    return task.items_per_sample or (None if has_own(task, "count") or has_own(task, "collate") else 1)


def _check_names(kind: type[Any]) -> None:
    """Check for methods that resemble one of Task and are never called. Raises ConfigError."""
    methods_of_class = [
        name for base in kind.__mro__ if base is not Task for name in vars(base) if callable(vars(base)[name])
    ]
    missing = []
    for name in METHODS:
        if getattr(kind, name, None) in (None, getattr(Task, name)):
            missing.append(name)
    for name in methods_of_class:
        if name.startswith("_") or name in METHODS:
            continue
        close = difflib.get_close_matches(name, missing, n=1, cutoff=0.75)
        similar = close[0] if close else _FOREIGN_NAMES.get(name, "")
        if similar in missing:
            raise ConfigError(
                f"the task {kind.__name__} has a method `{name}`, which is never called; rename it `{similar}`, "
                f"or `_{name}` if it is a helper"
            )
