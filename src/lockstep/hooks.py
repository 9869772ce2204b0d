"""What a task may have called at named moments of a run, and how one takes its optimizers' steps itself.

    class Mine(lockstep.Task):
        hooks = Watching()              # a subclass of Hooks

What can be written as a line in the loop of `lockstep.Run` is better written there: these are for tasks that stand for
another library's way to say it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

__all__ = ["Clip", "Course", "Hooks", "OwnSteps"]


class Course(Protocol):
    """What a task's hooks may ask of the run that calls them.

    Attributes:
        state: of the hooks, in every checkpoint: plain values that JSON keeps, under names of their own.
        log_freq: steps between records.
    """

    state: dict[str, Any]
    log_freq: int

    def log(self, values: Mapping[str, float]) -> None:
        """Puts numbers into every sink, at the present step. Rank 0's are taken."""

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, by rank; plain values. Collective."""

    def stop(self) -> None:
        """Saves and ends the run after the present step; to be asked for on every rank alike."""


class Hooks:
    """What a run calls at named moments, on every rank alike, where a task has `hooks`. Each does nothing by itself.

    Parameters and buffers may be changed in `after_update` alone: it is a part of the step.
    """

    def before_batch(self, step: int, index: int, slot: int, slots: int, *, counts: bool) -> None:
        """Before the forward of micro-batch `index` of `step`, this rank's slot 0 .. slots - 1.

        Args:
            counts: it is no empty slot, which is computed for the collectives in it alone.
        """

    def after_backward(self) -> None:
        """Gradients are this rank's so far."""

    def after_update(self) -> None:
        """The engine has taken its step, or left it out."""

    def begins(self, course: Course, done: int) -> None:
        """The run has loaded what it resumes from, and goes on after `done` steps."""

    def after_step(self, course: Course, done: int) -> None:
        """`done` steps are taken, recorded and, where it was due, evaluated."""

    def evaluated(self, course: Course, done: int, metrics: Mapping[str, float]) -> None:
        """An evaluation was made, and its numbers recorded."""

    def saves(self, state: dict[str, Any], done: int) -> None:
        """A checkpoint is about to be made: what it is to keep goes into `state`, which is `Course.state`."""

    def ends(self, course: Course, done: int) -> None:
        """The run has come to its end, and everything is saved."""


class Clip(NamedTuple):
    """Gradients are to be clipped: `by` their "norm" together, or each by its "value"."""

    limit: float
    by: str


class OwnSteps(Protocol):
    """The steps of a task that takes those of its optimizers itself, in the midst of a micro-batch.

    The task's `loss` then computes nothing: it notes the micro-batch, and gives a number that is filled later.
    """

    def run(self, weights: list[float], engine: Any) -> None:
        """Computes the micro-batches that were noted; the `engine` makes the updates (see `engines/manual.py`).

        Args:
            weights: by how much each micro-batch's gradient counts: 1 / items of the whole step, 0 for an empty slot.
        """

    def forget(self) -> None:
        """The step is left out: what was noted is dropped."""

    def buffers(self) -> list[Any]:
        """By micro-batch, what the engine's `kept` gave after its last forward."""
