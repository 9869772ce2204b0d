"""A task whose loss runs through the stages of a pipeline.

task = stage_task(task, pipeline)
loss = task.loss(model, batch)      # the last stage's, on every stage; collective over the stages
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import nn

from lockstep.parallel.context_task import whole_task, wrap_whole
from lockstep.parallel.pipeline import Loss, Pipeline
from lockstep.passes import split_loss
from lockstep.task import Task, TaskAround, has_own

__all__ = ["stage_task", "without_sharing"]


def stage_task(task: Task, pipeline: Pipeline) -> Task:
    """Return the task with a loss that every stage of the pipeline computes together.

    Args:
        task: if its batches are divided, each stage computes the same part of them.
    """
    return wrap_whole(task, lambda whole: cast("Task", _StagedTask(whole, pipeline)))


class _StagedTask(TaskAround):
    """A task on one stage of a pipeline; everything but its loss is the inner task's.

    Args:
        inner: computes the loss with this stage's model.
        pipeline: the stages.
    """

    __slots__ = ("_pipeline",)

    def __init__(self, inner: Task, pipeline: Pipeline) -> None:
        super().__init__(inner, _pipeline=pipeline)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self._pipeline.is_scheduled:
            # Before the last stage it ends with the stage, which the schedule expects.
            return self._inner.loss(model, batch)
        return self._join(self._pipeline.loss(lambda: split_loss(self._inner.loss(model, batch))))  # collective

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        if not has_own(self._inner, "metrics"):
            return {}
        return self._pipeline.metrics(lambda: self._inner.metrics(model, batch))  # collective

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        return self.loss(model, batch), self.metrics(model, batch)

    def _join(self, loss: Loss) -> Any:
        return loss if loss[1] else loss[0]


def without_sharing(task: Task) -> AbstractContextManager[None]:
    """Return a context in which stages before the last one get 0 as the loss, and wait for nothing."""
    staged: Any = whole_task(task)
    # Not isinstance: it passes for the task inside.
    if type(staged) is _StagedTask:
        pipeline: Pipeline = object.__getattribute__(staged, "_pipeline")
        return pipeline.without_sharing()
    return nullcontext()
