"""What a step and an evaluation report."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Best", "EvaluationRecord", "Number", "Step", "StepRecord"]


@dataclass(frozen=True, slots=True)
class Number:
    """One micro-batch's part of a number that the task's `loss` returns; tensors are detached and unread, 0-dim.

    Attributes:
        value: times `factor` it is a sum.
        count: what that sum is over.
    """

    value: Tensor | float
    count: Tensor | float
    factor: float = 1.0


@dataclass(slots=True)
class StepRecord:
    """One optimizer update, as this rank saw it. Tensors are detached and unread: reading one waits for the device.

    Attributes:
        step: 0-based.
        items: what the loss was divided by: the items of the whole step, over all ranks; an int where it is whole.
        losses: this rank's summed losses, 0-dim float32, one a slot that has weight; they add up over the ranks. Where
            the task has a penalty, the rank of micro-batch 0 has it, times the items, behind its own.
        norm: 0-dim; the gradient's 2-norm before clipping, over the whole model.
        factor: what the base learning rate was multiplied by.
        applied: whether the update was made, on all ranks alike; None where the device alone knows yet.
        stop_agreed: what the ranks agreed to do after this step: step_exchange.CONTINUE, or a request to stop.
        limit: what the norm had to stay below.
        numbers: of the task's own by name, each with its parts in this rank's micro-batches, which add up over the
            ranks; every rank has all names, in the same order.
        gradients: norms of the gradient by block, 0-dim, in a step that asks for them.
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
    """One evaluation, the same on every rank and at every world size.

    Attributes:
        step: steps taken before it.
        loss: mean over the items.
        items: counted once each.
        metrics: the task's own, each a sum over a count, or what a torchmetrics.Metric computed.

    Of several sets `loss` and `items` are those of the first, and `metrics` has the numbers of each under its name:
    NAME/loss, NAME/items, NAME/METRIC.
    """

    step: int
    loss: float
    items: float
    metrics: dict[str, float] = field(default_factory=dict)


class Step:
    """One step of a run, in the body of its loop. What is not asked costs nothing.

    Attributes:
        global_step: steps taken, this one included; as in metrics.jsonl and in the names of checkpoints.
        epoch: passes over the training data so far; 1.25 is a quarter into the second.
        lr: learning rate of the first parameter group in this step.
        items: what the loss was divided by: the items of the whole step, over all ranks; an int where it is whole.
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
        """Mean loss over the items of the whole step. To be read on every rank alike, in the body of its own step.

        Waits for the device. Collective, the first time, on more than one rank.

        Raises:
            LockstepError: the next step has begun.
        """
        return self._numbers()[0]

    @property
    def numbers(self) -> dict[str, float]:
        """What the task's `loss` returns beside the loss, each averaged over the whole step. Read as `loss` is."""
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
        """Whether the update was made; a guard, or the loss scale of float16, may have left it out.

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
        step: after so many steps.
        loss: its loss.
        path: the checkpoint that keeps it; "" where none does (`--checkpoint.mode none`).
        metric, value: what it was judged by, and that number.
    """

    step: int
    loss: float
    path: str
    metric: str = "loss"
    value: float = math.nan
