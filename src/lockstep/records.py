"""Records of steps and evaluations, and the exact sums behind their numbers.

`StepRecord` is what the loop yields, `Step` what the user's loop gets, `EvaluationRecord` the result of an evaluation.
A task's own numbers are checked, collected and averaged here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, LockstepError, UsageError

__all__ = [
    "TRAIN",
    "Best",
    "EvaluationRecord",
    "Gathered",
    "Number",
    "Step",
    "StepRecord",
    "checked_log",
    "checked_numbers",
    "described",
    "expanded",
    "filled",
    "flat",
    "mean_numbers",
    "merged_sums",
    "number_of",
    "summed",
]


@dataclass(frozen=True, slots=True)
class Number:
    """One micro-batch's part of a number that the task's `loss` returns.

    Tensors are detached and unread, 0-dim.

    Attributes:
        value: multiplied by `factor` it is a sum.
        count: what that sum is over.
    """

    value: Tensor | float
    count: Tensor | float
    factor: float = 1.0


@dataclass(slots=True)
class StepRecord:
    """Record of one optimizer update, as this rank saw it.

    Tensors are detached and unread: reading one waits for the device.

    Attributes:
        step: 0-based.
        items: divisor of the loss: the items of the whole step, over all ranks; an int if it is whole.
        losses: this rank's summed losses, 0-dim float32, one per slot that has weight; they add up over the ranks. If
            the task has a penalty, the rank of micro-batch 0 appends it, times the items.
        norm: 0-dim; the gradient's 2-norm before clipping, over the whole model.
        factor: of the base learning rate.
        stop_agreed: what the ranks agreed to do after this step: step_exchange.CONTINUE, or a request to stop.
        applied: whether the update was applied, the same on all ranks; None if only the device knows yet.
        limit: the update is applied if the norm is below it.
        numbers: the task's own, by name, each with its parts in this rank's micro-batches, which add up over the ranks;
            every rank has all names, in the same order.
        gradients: norms of the gradient by block, 0-dim, in steps that measure them.
    """

    step: int
    items: float
    losses: list[Tensor]
    norm: Tensor | None
    factor: float
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
        items: each counted once.
        metrics: the task's own, each a sum over a count, or what a torchmetrics.Metric computed.

    With several sets, `loss` and `items` are those of the first, and `metrics` has the numbers of each under its name:
    NAME/loss, NAME/items, NAME/METRIC.
    """

    step: int
    loss: float
    items: float
    metrics: dict[str, float] = field(default_factory=dict)


class Step:
    """A step of a run, in the body of its loop. Attributes are lazy.

    Attributes:
        global_step: steps trained, including this one; as in metrics.jsonl and in the names of checkpoints.
        epoch: passes over the training data so far; 1.25 is a quarter into the second.
        lr: learning rate of the first parameter group in this step.
        items: divisor of the loss: the items of the whole step, over all ranks; an int if it is whole.
        evaluation: the evaluation that followed this step, or None.
        record: the step as this rank saw it, with tensors that are not read yet.
    """

    __slots__ = ("_read", "_told", "epoch", "evaluation", "global_step", "items", "lr", "record")

    def __init__(
        self, record: StepRecord, epoch: float, lr: float, read: "Callable[[Step], tuple[float, dict[str, float]]]"
    ) -> None:
        self.record, self.epoch, self.lr = record, epoch, lr
        self.global_step, self.items = record.step + 1, record.items
        self.evaluation: EvaluationRecord | None = None
        self._read = read
        self._told: tuple[float, dict[str, float]] | None = None

    @property
    def loss(self) -> float:
        """Mean loss over the items of the whole step.

        Read it on every rank, in the body of its own step. Waits for the device. Collective the first time, with
        several ranks.

        Raises:
            LockstepError: the next step has begun.
        """
        return self._numbers()[0]

    @property
    def numbers(self) -> dict[str, float]:
        """The task's own numbers that `loss` returns, each averaged over the step.

        Read them as `loss`.
        """
        return dict(self._numbers()[1])

    def _numbers(self) -> tuple[float, dict[str, float]]:
        if self._told is None:
            self._told = self._read(self)
        return self._told

    @property
    def norm(self) -> float:
        """2-norm of the gradient before clipping. Waits for the device."""
        norm = self.record.norm
        return math.nan if norm is None else float(norm)

    @property
    def applied(self) -> bool:
        """Whether the update was applied, and not skipped by a guard or the loss scale.

        Waits for the device.
        """
        known = self.record.applied
        return self.norm < self.record.limit if known is None else known

    def __repr__(self) -> str:
        return f"Step(global_step={self.global_step}, epoch={self.epoch:.2f}, lr={self.lr:.3g})"


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far, by `--best-metric`.

    Attributes:
        step: number of steps trained before it.
        loss: its loss.
        path: its checkpoint; "" without one (`--checkpoint.mode none`).
        metric, value: the metric that judged it, and its value.
    """

    step: int
    loss: float
    path: str
    metric: str = "loss"
    value: float = math.nan


TRAIN = "train/"  # prefix of the numbers of `loss` in a record
_OWN = frozenset(
    (
        *("global_step", "epoch", "epoch_progress", "num_batches_remaining", "lr", "loss", "items", "running_loss"),
        *("grad_norm", "items_per_second", "memory", "skipped_steps", "steps_left_out", "shares"),
    )
)
_OWN_PREFIXES = ("evaluation/", "gradients/", "loading/", "time/")
_ZERO = (0.0, 0.0, 0.0)

Sums = tuple[float, float, float]


def described(value: Any) -> str:
    """Describe what a method returned: `a float`, `a float32 tensor of shape [8, 2]`."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    """Whether `value` is one real number; reads no tensor."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, int | float | np.integer | np.floating | np.bool_)


def checked_numbers(given: Mapping[Any, Any], method: str = "loss") -> Mapping[str, Any]:
    """Check the numbers that a task's method returned with its loss.

    Returns:
        `given`: name -> a number, or (sum, count).

    Raises:
        ConfigError: a name is not a string or belongs to the record; or a value is neither a number nor a pair of
            numbers.
    """
    for name, value in given.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the task's `{method}` names a number {name!r}: a name is a text")
        if name in _OWN:
            raise ConfigError(
                f"the task's `{method}` names a number '{name}', which is the record's own name: choose another"
            )
        pair = isinstance(value, tuple | list)
        if not (len(value) == 2 and all(map(_is_number, value)) if pair else _is_number(value)):
            told = f"({', '.join(map(described, value))})" if pair else described(value)
            raise ConfigError(
                f"the task's `{method}` returned {told} as the number '{name}': it must be one number, reduced as the "
                "loss is, or (sum, count)"
            )
    return given


def number_of(value: Any, items: float, factor: float) -> Number:
    """Convert a checked value to one micro-batch's part of a number.

    It is copied on its device, and not read.

    Args:
        value: a number, or (sum, count).
        items: what a number without its own count is averaged over: the micro-batch's items.
        factor: turns such a number into a sum over them: 1, or their number if the loss is a mean.
    """
    if isinstance(value, tuple | list):
        return Number(_kept(value[0]), _kept(value[1]))
    return Number(_kept(value), float(items), float(factor))


def _kept(value: Any) -> Tensor | float:
    """Copy: the tensor may be overwritten, or its memory reused, before it is read."""
    if not isinstance(value, Tensor):
        return float(value)
    held = value.detach().reshape(())
    return held.clone() if held.is_floating_point() else held.double()  # float32 would round an integer


class Gathered:
    """The task's numbers in a step, under names that all ranks agree on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: dict[str, None] | None = None  # in the first rank's order; None: before the first micro-batch
        self._agreed = False
        self._parts: dict[str, list[Number]] = {}

    def add(self, step: int, micro: int, parts: Mapping[str, Number], *, counts: bool) -> None:
        """Add the numbers of a micro-batch.

        Args:
            micro: its index; below 0: the numbers are of the whole step.
            counts: False: only compare the names.

        Raises:
            LockstepError: it has other names than those before it.
        """
        if not parts and not self._names:  # the common case, fast
            self._names = {}
            return
        if self._names is None:
            self._names = dict.fromkeys(parts)
        if parts.keys() != self._names.keys():
            where = f"{rank_label(self._world.rank)}, step {step}" + (f", micro-batch {micro}" if micro >= 0 else "")
            raise LockstepError(_differ(where, parts.keys(), "the micro-batches before it", self._names.keys()))
        if counts:
            for name, part in parts.items():
                self._parts.setdefault(name, []).append(part)

    def end(self, step: int) -> dict[str, list[Number]]:
        """Return the step's numbers: every name, with this rank's parts.

        Collective in a start's first step.

        Raises:
            LockstepError: ranks have different names, in the first step.
        """
        if not self._agreed:
            self._agree(step)
        if not self._names:
            return {}
        parts, self._parts = self._parts, {}
        return {name: parts.get(name, []) for name in self._names}

    def _agree(self, step: int) -> None:
        own = None if self._names is None else list(self._names)
        found = [(rank, names) for rank, names in enumerate(self._world.gather(own)) if names is not None]  # collective
        for rank, names in found:
            if set(names) != set(found[0][1]):
                where = f"{rank_label(rank)}, step {step}"
                raise LockstepError(_differ(where, names, rank_label(found[0][0]), found[0][1]))
        self._names, self._agreed = dict.fromkeys(found[0][1]) if found else {}, True


def _differ(where: str, names: Iterable[str], other: str, others: Iterable[str]) -> str:
    here, there = dict.fromkeys(names), dict.fromkeys(others)
    more = next((name for name in here if name not in there), None)
    name = more if more is not None else next(name for name in there if name not in here)
    said = "returned a number" if more is not None else "returned no number"
    return (
        f"{where}: the task's loss {said} '{name}', other than {other}: return the same names each time, with (0, 0) "
        "where there is nothing to count"
    )


def exact_sum(values: Iterable[float]) -> Sums:
    """Return the sum as three floats that add up to it without rounding.

    The first is the sum, correctly rounded. What cannot be summed (inf - inf, or beyond a float) is NaN.
    """
    rest, found = list(values), []
    try:
        for _ in _ZERO:
            found.append(math.fsum(rest))
            if not math.isfinite(found[0]):
                return found[0], 0.0, 0.0
            rest.append(-found[-1])
    except (OverflowError, ValueError):
        return math.nan, 0.0, 0.0
    return found[0], found[1], found[2]


def expanded(parts: Sequence[tuple[float, float]]) -> list[float]:
    """Return six floats: the exact sums of the sums, and of the counts, of micro-batches."""
    return [*exact_sum(part[0] for part in parts), *exact_sum(part[1] for part in parts)]


def merged_sums(sums: Sequence[Sequence[float]]) -> list[float]:
    """Add up results of `expanded`: six floats again."""
    sum_of, count_of = (exact_sum(x for six in sums for x in six[at : at + 3]) for at in (0, 3))
    return [*sum_of, *count_of]


def mean_numbers(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Divide each number's sum by its count; NaN if nothing was counted."""
    return {name: six[0] / six[3] if six[3] else math.nan for name, six in sums.items()}


def checked_log(values: Any, numbers: Iterable[str] = ()) -> Mapping[str, Any]:
    """Check the arguments of `run.log`; reads no tensor.

    Args:
        values: name -> a number.
        numbers: names of the current step's numbers of `loss`, which the run itself records.

    Raises:
        UsageError: a name is not a string or belongs to the record, or a value is not a number.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"run.log takes a dict of name -> number, not {described(values)}")
    taken = {f"{TRAIN}{name}" for name in numbers}
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"run.log: the name {name!r} is no text; nothing was logged")
        if name in _OWN or name in taken or name.startswith(_OWN_PREFIXES):
            raise UsageError(f"run.log: '{name}' is a name of the run's own records; choose another: 'own/{name}'")
        if not _is_number(value):
            raise UsageError(f"run.log: '{name}' is {described(value)}: it must be one number; nothing was logged")
    return values


def flat(numbers: Mapping[str, Sequence[Number]]) -> list[Tensor | float]:
    """Return value and count of each part, in the order of names and micro-batches."""
    return [each for parts in numbers.values() for part in parts for each in (part.value, part.count)]


def filled(numbers: Mapping[str, Sequence[Number]], read: Iterable[float]) -> dict[str, list[tuple[float, float]]]:
    """Return (sum, count) of each part by name, from the values that were read.

    Args:
        read: what `flat` returned, as floats.
    """
    told = iter(read)
    return {name: [(next(told) * part.factor, next(told)) for part in parts] for name, parts in numbers.items()}


def summed(value: Any, items: float, *, mean: bool) -> tuple[Any, Any]:
    """Return (sum, count) of a checked value of one micro-batch in an evaluation.

    A mean of no items is 0 of 0.
    """
    part = number_of(value, items, items if mean else 1)
    if not isinstance(value, tuple | list) and mean:
        return (part.value * items, items) if items else (0.0, 0.0)
    return part.value, part.count
