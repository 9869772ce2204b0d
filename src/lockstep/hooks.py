"""Define the interfaces of tasks with hooks or manual optimization.

    class Mine(lockstep.Task):
        hooks = Watching()              # a subclass of Hooks

Prefer a line in the loop of `lockstep.Run`: hooks are for tasks that adapt another library.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

__all__ = ["Clip", "Due", "Hooks", "OwnSteps", "RunContext"]


class RunContext(Protocol):
    """The run, as its task's hooks may use it.

    Attributes:
        state: the hooks' own state, plain JSON values that every checkpoint stores.
        log_freq: steps between records.
    """

    state: dict[str, Any]
    log_freq: int

    @property
    def best(self) -> Any:
        """The run's best step so far, a `lockstep.records.Best`, as `Run.best`; None before the first."""

    def log(self, values: Mapping[str, float]) -> None:
        """Log numbers of the current step to every sink.

        Only those of rank 0 are used.
        """

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's plain value, by rank. Collective."""

    def stop(self) -> None:
        """Save and end the run after the current step. Every rank must call it."""

    def compare(self, metric: str, value: float, *, higher: bool) -> bool:
        """Make the current step the run's best if `value` is better than before.

        Returns whether it is.

        For a metric of the training, in a run without evaluations. Every rank calls it with the same value.
        """


class Due(NamedTuple):
    """Whether an evaluation and a save follow a step."""

    evaluate: bool
    save: bool


class Hooks:
    """Callbacks of a task's `hooks`, called on every rank; each does nothing by default.

    Only `after_update` may change parameters and buffers: it is part of the step.

    Attributes:
        reads_steps: `before_evaluation` gets the record of its own step; else a device may deliver it with the next.
    """

    reads_steps = False

    def before_batch(self, step: int, index: int, slot: int, slots: int, *, counts: bool) -> None:
        """Called before the forward of a micro-batch.

        Args:
            index: of the micro-batch in `step`.
            slot: position among this rank's micro-batches, 0 .. slots - 1.
            counts: whether this rank counts the micro-batch. Not for an empty slot, which is computed only for its
                collectives; of the ranks of a replica, which compute the same, one does.
        """

    def after_backward(self) -> None:
        """Called after each backward: gradients hold this rank's sum so far."""

    def after_update(self) -> None:
        """Called after the engine's update, or after it was skipped."""

    def before_run(self, context: RunContext, done: int) -> None:
        """Called before the first step, once the checkpoint is loaded; `done` steps are trained."""

    def after_step(self, context: RunContext, done: int) -> bool | None:
        """Called after each step is recorded and evaluated, before it is saved.

        Returns:
            Whether to save the step, even if no save is due; the same on every rank.
        """

    def before_evaluation(self, context: RunContext, step: Any, record: Mapping[str, float] | None, due: Due) -> Due:
        """Called after each step, before it is evaluated.

        Args:
            step: the `lockstep.Step`.
            record: of the steps up to this one, if they are recorded with it and `reads_steps`; else None.
            due: by the configuration.

        Returns:
            What to do; the same on every rank. The last step is saved anyway.
        """
        return due

    def after_evaluation(self, context: RunContext, done: int, metrics: Mapping[str, float]) -> bool:
        """Called after an evaluation, once its metrics are recorded.

        Returns:
            Whether to save the step, even if no save is due; the same on every rank.
        """
        return False

    def before_save(self, state: dict[str, Any], done: int) -> None:
        """Called before a checkpoint: put what it must store into `state` (`RunContext.state`)."""

    def after_save(self, done: int) -> None:
        """Called after a checkpoint is saved, or begun in the background."""

    def after_run(self, context: RunContext, done: int) -> None:
        """Called at the end of the run, before its last save is complete."""

    def after_failure(self, error: BaseException) -> None:
        """Called on a rank whose run ends with an error.

        Not collective, since the other ranks may not call it.
        """


class Clip(NamedTuple):
    """Gradient clipping: `by` their common "norm", or each by its "value"."""

    limit: float
    by: str


class OwnSteps(Protocol):
    """Manual optimization: a task that steps its own optimizers, even within a micro-batch.

    The task's `loss` then computes nothing: it records the micro-batch, and returns a number that is filled in later.
    """

    def run(self, weights: list[float], engine: Any) -> None:
        """Compute the recorded micro-batches; the `engine` makes the updates (see `engines/manual.py`).

        Args:
            weights: of each micro-batch's gradient: 1 / items of the whole step, 0 for an empty slot.
        """

    def forget(self) -> None:
        """Drop the recorded micro-batches of a skipped step."""

    def buffers(self) -> list[Any]:
        """Return, by micro-batch, what the engine's `collect_writes` returned after its last forward."""
