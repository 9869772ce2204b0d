"""Divide a run into epochs and steps.

run_plan = resolve(config, facts).run_plan
run_plan.step_plan                  # which samples a step has
run_plan.place(done)                # the position after `done` steps
"""

import math
from dataclasses import dataclass

from lockstep.config.fields import in_batches
from lockstep.config.schema import Config
from lockstep.data.batches import Origin, StepPlan
from lockstep.data.shard_order import ONE_LANE, Geometry
from lockstep.run_state import Position

__all__ = [
    "BY_RANKS",
    "FIXED",
    "RunPlan",
    "describe_replicas",
    "samples_in_epoch",
    "samples_in_evaluation",
]


# How a step is cut: into the same micro-batches on any number of ranks, or one for each rank.
FIXED = "fixed"
BY_RANKS = "by ranks"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The steps of a run, and their position in the epochs.

    Attributes:
        samples: of an epoch: those of the training set or of the task's order, limited by --limit-train-batches; 0 for
            a stream.
        config: number of epochs or steps, and the size of a step.
        origin: step and sample position at which steps of this size begin.
        min_samples: of a micro-batch: 2 with trainable BatchNorm, which fails on one sample.
        dataset_samples: of the training set.
        geometry: of the run's first start, for orders that depend on it.
        grouped: the task's order is a batch sampler; samples and sizes count its lists.
        cut: FIXED, or BY_RANKS.
    """

    samples: int
    config: Config
    origin: Origin
    min_samples: int
    dataset_samples: int
    geometry: Geometry = ONE_LANE
    grouped: bool = False
    cut: str = FIXED

    @property
    def step_plan(self) -> StepPlan:
        """The division of the sample positions into steps.

        With --max-steps each step is full; otherwise the last step ends with the last epoch. A last step that is short
        is dropped with --data.drop-last, and a last micro-batch of less than `min_samples` is dropped always.
        """
        config = self.config
        origin = self.origin
        micro_size = self.config.micro_size
        if config.max_steps:
            remaining = max(0, config.max_steps - origin.step) * config.batch_size
        else:
            remaining = max(0, config.num_epochs * self.samples - origin.position)
            # A cut by ranks must not decide which samples are left out.
            if self.cut == FIXED and not config.data.drop_last:
                unit = micro_size
            else:
                unit = config.batch_size
            if config.data.drop_last or remaining % unit < min(self.min_samples, unit):
                remaining -= remaining % unit
        return StepPlan(config.batch_size, micro_size, origin.position + remaining, origin)

    def place(self, done: int) -> Position:
        """Return the run's position after `done` steps.

        Epochs are counted in samples, so a step may span two.
        """
        size = self.config.batch_size
        position = self.step_plan.start(done)
        # The batches of a stream know the epoch.
        if not self.samples:
            return Position(done, position=position)
        epoch, within = divmod(position, self.samples)
        is_end = within == 0 and position == self.step_plan.total
        # The end of a run is the end of its last epoch, not the start of another.
        if is_end and epoch:
            epoch = epoch - 1
            within = self.samples
        remaining = self.samples - within
        if not self.config.max_steps:
            # A last incomplete step may be dropped.
            remaining = min(remaining, self.step_plan.total - position)
        return Position(
            global_step=done,
            epoch=epoch,
            epoch_step=-(-within // size),
            epoch_progress=within / self.samples,
            num_batches_remaining=-(-remaining // size),
            position=position,
        )


def samples_in_epoch(config: Config, samples: int) -> int:
    """Return the samples of an epoch under --limit-train-batches: whole steps, or all."""
    if not config.limit_train_batches:
        return samples
    return min(samples, in_batches(config.limit_train_batches, samples / config.batch_size) * config.batch_size)


def samples_in_evaluation(config: Config, samples: int) -> int:
    """Return the samples of an evaluation set of `samples` under --limit-eval-batches."""
    micro_size = config.eval_micro_batch_size or config.micro_size
    return min(samples, in_batches(config.limit_eval_batches, math.ceil(samples / micro_size)) * micro_size)


def describe_replicas(ranks: int, size: int) -> str:
    """Describe how many replicas the ranks are, ` (2 replicas of 2 ranks)`; "" if each rank has a whole model."""
    if size == 1:
        return ""
    count = ranks // size
    return f" ({count} replica{'s' * (count > 1)} of {size} ranks)"
