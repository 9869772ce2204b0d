"""Repeat the proof of the loss during training: `--guards.loss-check`.

The check is due at steps 10, 100, 1000, ...

    watch = LossWatch(built, save)
    watch(step, micro)          # before the passes of a step; raises LockstepError if the loss is another kind

A loss may stop being a sum or a mean: the first ignored label comes late, a threshold drops easy samples. The check
computes one micro-batch of the step and its halves, and leaves no trace on the training.
"""

from collections.abc import Callable
from typing import final

from lockstep.data.batches import MicroBatch
from lockstep.errors import LockstepError
from lockstep.task import has_step_loss, set_step
from lockstep.training.state.parts import RunParts
from lockstep.training.state.trained_set import trained_digest
from lockstep.training.trial.evidence import HalvedSamples, halve, weigh
from lockstep.training.trial.loss_check import is_cut
from lockstep.training.trial.trial import Trial

__all__ = ["LossWatch"]

# Reduction -> what its gradients show.
_KINDS = {"mean": "mean", "sum": "sum", "total": "sum"}
# Samples that a message names.
_SHOWN = 8


@final
class LossWatch:
    """A check of the loss in chosen steps, and after the trained set changed.

    Args:
        built: the run's parts.
        save: writes the checkpoint of a number of steps. Collective.
    """

    def __init__(self, built: RunParts, save: Callable[[int], None]) -> None:
        self._built = built
        self._save = save
        self._first = built.config.guards.loss_check
        self._trained = trained_digest(built.state.trained)
        proved = built.task.reduction in _KINDS and not has_step_loss(built.task)
        cut = is_cut(built.config, built.batches)
        self._is_active = bool(self._first) and cut and proved

    def __call__(self, step: int, micro: list[MicroBatch]) -> None:
        """Check the loss on a micro-batch of this step, if that is due. Collective then.

        Args:
            step: 0-based.
            micro: this rank's micro-batches.

        Raises:
            LockstepError: the loss is not what it was shown to be; all steps before are saved.
        """
        if not self._is_active or not self._is_due(step + 1):
            return
        built = self._built
        task = self._built.task
        batch = next((micro_batch for micro_batch in micro if micro_batch.weight), micro[0])
        set_step(task, step)
        halved = halve(batch, task) if batch.weight else _empty_place(batch)
        trial = Trial(built.engine, built.model, task, built.world, built.config, lambda line: None)
        verdict = weigh(trial, [halved], seed=step)  # collective
        if verdict.kind in ("unknown", "not finite", _KINDS[task.reduction]):
            return
        samples = built.batches.samples(step, batch.index)
        shown = ", ".join(map(str, samples[:_SHOWN])) + (", ..." if len(samples) > _SHOWN else "")
        self._save(step)  # collective
        raise LockstepError(
            f"step {step + 1}: the task's `loss` is no longer a {_KINDS[task.reduction]} over its items "
            f"({verdict.evidence}; rank 0's samples {shown}), so its micro-batches do not add up to the step: write it "
            "as `outputs` and `step_loss`, or give the task a `count` under which it is a mean; "
            f"step {step} is saved; --guards.loss-check 0 turns this check off"
        )

    def _is_due(self, number: int) -> bool:
        """Whether the check is due before step `number`, 1-based; the same on every rank."""
        trained = trained_digest(self._built.state.trained)
        changed = trained != self._trained
        self._trained = trained
        due = self._first
        while due < number:
            due *= 10
        return changed or due == number


def _empty_place(batch: MicroBatch) -> HalvedSamples:
    return HalvedSamples(batch, (batch, batch), (0, 0), problem="this rank has no samples in the step")
