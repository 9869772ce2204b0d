"""Which micro-batches are computed by compiled code.

kernels = kernels_of(config.compile, step_plan)
with kernels(step, index):
    loss = loss_of(model, batch)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lockstep.data.batches import StepPlan
from lockstep.transforms.eager import eager

__all__ = ["Kernels", "kernels_of"]

Kernels = Callable[[int, int], AbstractContextManager[Any]]

_ANY: AbstractContextManager[None] = nullcontext()


def kernels_of(compiled: bool, step_plan: StepPlan) -> Kernels:
    """(step, micro-batch) -> what its forward runs in: a micro-batch short of samples, at a run's end, is left eager.

    It would be compiled for that one forward. Decided by the plan alone, so alike on every rank and after a resume.
    """

    def chosen(step: int, index: int) -> AbstractContextManager[Any]:
        start, stop = step_plan.positions(step, index)
        return _ANY if stop - start == step_plan.micro_size else eager()

    return chosen if compiled else lambda step, index: _ANY
