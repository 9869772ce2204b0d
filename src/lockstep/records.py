"""What a step and an evaluation report."""

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["EvaluationRecord", "StepRecord"]


@dataclass(slots=True)
class StepRecord:
    """One optimizer update, as this rank saw it. Tensors are detached and unread: reading one waits for the device.

    Attributes:
        step: 0-based.
        items: what the loss was divided by: the items of the whole step, over all ranks.
        losses: this rank's summed losses, 0-dim float32, one a slot that has weight; they add up over the ranks.
        norm: 0-dim; the gradient's 2-norm before clipping, over the whole model.
        factor: what the base learning rate was multiplied by.
        applied: whether the update was made, on all ranks alike; None where the device alone knows yet.
        agreed: what the ranks agreed to do after this step: heartbeat.CONTINUE, or a wish to stop.
    """

    step: int
    items: int
    losses: list[Tensor]
    norm: Tensor | None
    factor: float
    agreed: int = 0
    applied: bool | None = True


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation, the same on every rank and at every world size.

    Attributes:
        step: steps taken before it.
        loss: mean over the items.
        items: counted once each.
        metrics: the task's own, each a sum over a count.
    """

    step: int
    loss: float
    items: int
    metrics: dict[str, float] = field(default_factory=dict)
