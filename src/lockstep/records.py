"""Define the records of steps and evaluations, and average the task's own numbers exactly.

The loop yields a `StepRecord`; the user's loop gets a `Step`. An evaluation returns an `EvaluationRecord`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError, UsageError

__all__ = [
    "TRAIN",
    "VERDICT_FILE",
    "Best",
    "EvaluationRecord",
    "Number",
    "NumberCollector",
    "Step",
    "StepRecord",
    "check_log",
    "check_numbers",
    "describe_value",
    "exact_sums",
    "fill_numbers",
    "flatten_numbers",
    "float_of",
    "is_number",
    "mean_numbers",
    "merge_sums",
    "number_of",
    "sum_and_count",
]


@dataclass(frozen=True, slots=True)
class Number:
    """One micro-batch's part of a number that the task's `loss` returns.

    Tensors are detached, unread and 0-dim. `value` * `factor` is a sum, over `count`.
    """

    value: Tensor | float
    count: Tensor | float
    factor: float = 1.0


@dataclass(slots=True)
class StepRecord:
    """Record of one optimizer step on this rank.

    Tensors are detached and unread: reading one waits for the device.

    Attributes:
        step: 0-based.
        items: divisor of the loss: the items of the whole step, over all ranks; an int if it is whole.
        losses: this rank's summed losses, 0-dim float32, one per slot with weight; to be added over the ranks. If the
            task has a penalty, the rank of micro-batch 0 appends it, times the items.
        norm: the gradient's 2-norm before clipping, over the whole model; 0-dim.
        factor: of the base learning rate; None: lockstep sets no rates.
        rate: learning rate of the first group.
        stop_agreed: the ranks' agreement: `exchange.CONTINUE`, or a request to stop after this step.
        applied: whether the update was applied, the same on all ranks; None if only the device knows yet.
        limit: the update is applied if the norm is below it.
        numbers: the task's own, by name: the parts of this rank's micro-batches, to be added over the ranks. Every rank
            has all names, in the same order.
        gradients: norms of the gradient by block, 0-dim, in steps that measure them.
    """

    step: int
    items: float
    losses: list[Tensor]
    norm: Tensor | None
    factor: float | None
    rate: float = math.nan
    stop_agreed: int = 0
    applied: bool | None = True
    limit: float = math.inf
    numbers: dict[str, list[Number]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """Result of an evaluation, the same on every rank and at every world size.

    Attributes:
        step: number of steps trained before it.
        loss: mean over the items.
        items: number of items, each counted once.
        metrics: the task's own, each a sum over a count, or the result of a torchmetrics.Metric.

    With several sets, `loss` and `items` are those of the first, and `metrics` has those of each set: NAME/loss,
    NAME/items, NAME/METRIC.
    """

    step: int
    loss: float
    items: float
    metrics: dict[str, float] = field(default_factory=dict)


class Step:
    """A step of a run, in the body of its loop. Attributes are lazy.

    Attributes:
        global_step: steps trained, including this one; as in metrics.jsonl and in the names of checkpoints.
        lr: learning rate of the first parameter group in this step.
        items: divisor of the loss: the items of the whole step, over all ranks; an int if it is whole.
        evaluation: the evaluation that followed this step, or None.
        record: the record of this rank, with unread tensors.
    """

    __slots__ = ("_epochs", "_read", "_values", "evaluation", "global_step", "items", "lr", "record")

    def __init__(
        self,
        record: StepRecord,
        epochs: Callable[[int], float],
        lr: float,
        read: "Callable[[Step], tuple[float, dict[str, float]]]",
    ) -> None:
        self.record = record
        self._epochs = epochs
        self.lr = lr
        self.global_step = record.step + 1
        self.items = record.items
        self.evaluation: EvaluationRecord | None = None
        self._read = read
        self._values: tuple[float, dict[str, float]] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the training data so far; 1.25 is a quarter into the second."""
        return self._epochs(self.global_step)

    @property
    def loss(self) -> float:
        """Mean loss over the items of the whole step.

        Read it on every rank, before the next step. Waits for the device; collective the first time.

        Raises:
            LockstepError: the next step has begun.
        """
        return self._numbers()[0]

    @property
    def numbers(self) -> dict[str, float]:
        """The task's own numbers, averaged over the step; read them as `loss`."""
        return dict(self._numbers()[1])

    def _numbers(self) -> tuple[float, dict[str, float]]:
        if self._values is None:
            self._values = self._read(self)
        return self._values

    @property
    def norm(self) -> float:
        """2-norm of the gradient before clipping. Waits for the device."""
        norm = self.record.norm
        if norm is None:
            return math.nan
        return float(norm)

    @property
    def applied(self) -> bool:
        """Whether the update was applied. Waits for the device.

        A guard, or the loss scale of float16, may skip it.
        """
        applied = self.record.applied
        if applied is None:
            return self.norm < self.record.limit
        return applied

    def __repr__(self) -> str:
        return f"Step(global_step={self.global_step}, epoch={self.epoch:.2f}, lr={self.lr:.3g})"


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far, by `--best-metric`.

    Attributes:
        step: number of steps trained before it.
        loss: its loss.
        path: its checkpoint; "" without one (`--checkpoint.mode none`).
        metric, value: the metric of the comparison, and its value.
    """

    step: int
    loss: float
    path: str
    metric: str = "loss"
    value: float = math.nan


# What a profile of a run concluded.
VERDICT_FILE = "verdict.json"
TRAIN = "train/"  # prefix of the numbers of `loss` in a record
_RECORD_NAMES = frozenset(
    (
        *("global_step", "epoch", "epoch_progress", "num_batches_remaining", "lr", "loss", "items", "running_loss"),
        *("grad_norm", "items_per_second", "memory", "skipped_steps", "spikes", "steps_left_out", "shares"),
    )
)
_RECORD_PREFIXES = ("data/share/", "evaluation/", "gradients/", "loading/", "time/")
_ZERO = (0.0, 0.0, 0.0)

Sums = tuple[float, float, float]


def describe_value(value: Any) -> str:
    """Describe a returned value: `a float`, `a float32 tensor of shape [8, 2]`."""
    if isinstance(value, Tensor):
        # A nested tensor has no shape.
        if value.is_nested:
            return "a nested tensor"
        description = (
            f"{str(value.dtype).removeprefix('torch.')} {'' if value.layout is torch.strided else 'sparse '}tensor"
        )
        return f"a {description} of shape {list(value.shape)}"
    if value is None:
        return "None"
    return f"a {type(value).__name__}"


def is_number(value: Any) -> bool:
    """Whether `value` is one real number; reads no tensor."""
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not value.is_nested and not value.is_quantized
        return is_plain and value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, int | float | np.integer | np.floating | np.bool_)


def float_of(value: Any) -> float:
    """Return a checked number as a float; reading a tensor waits for the device."""
    # Waits for the device if the value is a device tensor.
    return float(value.item() if isinstance(value, Tensor | np.ndarray) else value)


def check_numbers(numbers: Mapping[Any, Any], method: str = "loss") -> Mapping[str, Any]:
    """Check and return the numbers that a task's method returned with its loss.

    Args:
        numbers: name -> a number, or (sum, count).
        method: of the task, for errors.

    Raises:
        ConfigError: a name is not a string or belongs to the record; or a value is neither a number nor a pair of
            numbers.
    """
    for name, value in numbers.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the task's `{method}` returned a number with the name {name!r}; use a string")
        if name in _RECORD_NAMES:
            raise ConfigError(
                f"the task's `{method}` returned a number '{name}', a name of the run's own records; choose another"
            )
        pair = isinstance(value, tuple | list)
        if not (len(value) == 2 and all(map(is_number, value)) if pair else is_number(value)):
            if pair:
                kind = f"({', '.join(map(describe_value, value))})"
            else:
                kind = describe_value(value)
            raise ConfigError(
                f"the task's `{method}` returned {kind} as the number '{name}': it must be one number, reduced like "
                "the loss, or (sum, count)"
            )
    return numbers


def number_of(value: Any, items: float, factor: float) -> Number:
    """Convert a checked value to one micro-batch's part, copied on its device and not read.

    Args:
        value: a number, or (sum, count).
        items: the micro-batch's items; the count of a number without its own.
        factor: converts such a number to a sum over the items: 1, or their number if the loss is a mean.
    """
    if isinstance(value, tuple | list):
        return Number(_copy_number(value[0]), _copy_number(value[1]))
    return Number(_copy_number(value), float(items), float(factor))


def _copy_number(value: Any) -> Tensor | float:
    """Copy a number: its tensor may be overwritten before it is read."""
    if not isinstance(value, Tensor):
        return float_of(value)
    number = value.detach().reshape(())
    # float32 cannot represent every integer.
    if number.is_floating_point():
        return number.clone()
    return number.double()


class NumberCollector:
    """Collector of a step's numbers, whose names must be equal on all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        # The names, in the order of the first rank that has any; None before the first micro-batch.
        self._names: dict[str, None] | None = None
        self._agreed = False
        self._parts: dict[str, list[Number]] = {}

    def add(self, step: int, micro: int, parts: Mapping[str, Number], *, counts: bool) -> None:
        """Add the numbers of a micro-batch.

        Args:
            step: 0-based.
            micro: index of the micro-batch; below 0: the numbers are of the whole step.
            parts: by name.
            counts: False: compare the names only.

        Raises:
            LockstepError: the names differ from those of earlier micro-batches.
        """
        # Most tasks return no numbers; this keeps the loop fast for them.
        if not parts and not self._names:
            self._names = {}
            return
        if self._names is None:
            self._names = dict.fromkeys(parts)
        if parts.keys() != self._names.keys():
            location = f"{rank_label(self._world.rank)}, step {step + 1}" + (
                f", micro-batch {micro}" if micro >= 0 else ""
            )
            raise LockstepError(
                _different_names(location, parts.keys(), "the micro-batches before it", self._names.keys())
            )
        if counts:
            for name, number in parts.items():
                self._parts.setdefault(name, []).append(number)

    def end(self, step: int) -> dict[str, list[Number]]:
        """Return this rank's parts of the step by name, and start the next step.

        Collective in the first step.

        Raises:
            LockstepError: ranks have different names, in the first step.
        """
        if not self._agreed:
            self._agree(step)
        if not self._names:
            return {}
        numbers = self._parts
        self._parts = {}
        return {name: numbers.get(name, []) for name in self._names}

    def _agree(self, step: int) -> None:
        local_names = None if self._names is None else list(self._names)
        # All ranks take part, once a run. A rank without micro-batches has no names and takes the others'.
        names_by_rank = [
            (rank, names) for rank, names in enumerate(self._world.gather(local_names)) if names is not None
        ]  # collective
        for rank, names in names_by_rank:
            if set(names) != set(names_by_rank[0][1]):
                location = f"{rank_label(rank)}, step {step + 1}"
                raise LockstepError(
                    _different_names(location, names, rank_label(names_by_rank[0][0]), names_by_rank[0][1])
                )
        self._names = dict.fromkeys(names_by_rank[0][1]) if names_by_rank else {}
        self._agreed = True


def _different_names(place: str, names: Iterable[str], other: str, other_names: Iterable[str]) -> str:
    names_here = dict.fromkeys(names)
    names_there = dict.fromkeys(other_names)
    extra = next((name for name in names_here if name not in names_there), None)
    if extra is not None:
        name = extra
    else:
        name = next(name for name in names_there if name not in names_here)
    if extra is not None:
        verb = "returned a number"
    else:
        verb = "returned no number"
    return (
        f"{place}: the task's loss {verb} '{name}', unlike {other}; return the same names each time, with (0, 0) if "
        "there is nothing to count"
    )


def exact_sum(values: Iterable[float]) -> Sums:
    """Return three floats that add up to the exact sum.

    The first is the rounded sum. A sum that does not exist (inf - inf, or beyond a float) is NaN.
    """
    remaining = list(values)
    terms = []
    # Subtract each rounded sum from the values: what remains is the rounding error of the previous round.
    try:
        for _ in _ZERO:
            terms.append(math.fsum(remaining))
            if not math.isfinite(terms[0]):
                return terms[0], 0.0, 0.0
            remaining.append(-terms[-1])
    except (OverflowError, ValueError):
        return math.nan, 0.0, 0.0
    return terms[0], terms[1], terms[2]


def exact_sums(parts: Sequence[tuple[float, float]]) -> list[float]:
    """Return six floats: the exact sum of the parts' sums, and that of their counts."""
    return [*exact_sum(pair[0] for pair in parts), *exact_sum(pair[1] for pair in parts)]


def merge_sums(sums: Sequence[Sequence[float]]) -> list[float]:
    """Add up results of `exact_sums`: six floats again."""
    sum_of, count_of = (exact_sum(x for six in sums for x in six[at : at + 3]) for at in (0, 3))
    return [*sum_of, *count_of]


def mean_numbers(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Divide each number's sum by its count; NaN if nothing was counted."""
    return {name: six[0] / six[3] if six[3] else math.nan for name, six in sums.items()}


def check_log(values: Any, numbers: Iterable[str] = ()) -> Mapping[str, Any]:
    """Check the arguments of `run.log`; reads no tensor.

    Args:
        values: name -> a number.
        numbers: names of the current step's own numbers, which the run records itself.

    Raises:
        UsageError: a name is not a string or belongs to the record, or a value is not a number.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"run.log takes a dict of name -> number, not {describe_value(values)}")
    recorded = {f"{TRAIN}{name}" for name in numbers}
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"run.log: the name {name!r} is not a string; nothing was logged")
        if name in _RECORD_NAMES or name in recorded or name.startswith(_RECORD_PREFIXES):
            raise UsageError(
                f"run.log: '{name}' is a name of the run's own records; choose another, such as 'own/{name}'"
            )
        if not is_number(value):
            raise UsageError(f"run.log: '{name}' is {describe_value(value)}: it must be one number; nothing was logged")
    return values


def flatten_numbers(numbers: Mapping[str, Sequence[Number]]) -> list[Tensor | float]:
    """Return value and count of each part, in the order of names and micro-batches."""
    return [
        field_value
        for numbers_of_name in numbers.values()
        for number in numbers_of_name
        for field_value in (number.value, number.count)
    ]


def fill_numbers(
    numbers: Mapping[str, Sequence[Number]], read: Iterable[float]
) -> dict[str, list[tuple[float, float]]]:
    """Return (sum, count) of each part by name.

    Args:
        numbers: the parts.
        read: the result of `flatten_numbers`, as floats.
    """
    values = iter(read)
    return {
        name: [(next(values) * number.factor, next(values)) for number in numbers_of_name]
        for name, numbers_of_name in numbers.items()
    }


def sum_and_count(value: Any, items: float, *, mean: bool) -> tuple[Any, Any]:
    """Return (sum, count) of a checked value of one micro-batch in an evaluation.

    A mean of no items is 0 of 0.
    """
    number = number_of(value, items, items if mean else 1)
    if not isinstance(value, tuple | list) and mean:
        if items:
            return (number.value * items, items)
        return (0.0, 0.0)
    return number.value, number.count
