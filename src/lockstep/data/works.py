"""What each micro-batch of a step costs, as the task can tell without loading it.

    works = Works(task, dataset, order, step_plan)
    works(500)          # (96.0, 12.0, ...): M numbers, of the task's `work`

Arithmetic on the order and the task's own numbers, so every rank knows every other's work, of any step, at once.
"""

import math
from typing import Any, final

from lockstep.data.batches import StepPlan
from lockstep.data.fetch import blamed
from lockstep.errors import DataError, LockstepError
from lockstep.task import Order, Task

__all__ = ["Works"]

_KEPT = 256  # steps
_LOOKED_UP = 4096  # samples at a time: a lone look-up is slow


@final
class Works:
    """step -> the work of each of its M micro-batches; empty slots repeat the last one that is there.

    Args:
        task: its `work` is asked.
        dataset: what the task's `dataset("train")` returned.
    """

    def __init__(self, task: Task, dataset: Any, order: Order, step_plan: StepPlan) -> None:
        self._task, self._dataset, self._order, self._plan = task, dataset, order, step_plan
        self._known: dict[int, tuple[float, ...]] = {}

    def known(self) -> bool:
        """Whether the task tells what its samples cost: asked of the first micro-batch. Raises what `work` raises."""
        first = self._plan.origin.step
        a, b = self._plan.positions(first, 0)
        return self._answer(self._order.at(a, b)[1].tolist(), first) is not None

    def __call__(self, step: int) -> tuple[float, ...]:
        """Raises DataError where `work` fails, or gives no number above 0."""
        if step not in self._known:
            self._look_up(step)
        return self._known[step]

    def _look_up(self, first: int) -> None:
        plan = self._plan
        last = max(first + 1, min(first + _LOOKED_UP // plan.size, plan.steps))
        origin = plan.start(first)
        samples = self._order.at(origin, plan.start(last))[1].tolist()
        for step in range(first, last):
            found = []
            for micro in range(plan.present(step)):
                a, b = plan.positions(step, micro)
                found.append(self._asked(samples[a - origin : b - origin], step))
            found += [found[-1]] * (plan.micro_batches - len(found))
            self._known[step] = tuple(found)
        for step in sorted(self._known)[: max(0, len(self._known) - max(_KEPT, last - first))]:
            if step != first:
                del self._known[step]

    def _answer(self, samples: list[int], step: int) -> float | None:
        try:
            found = self._task.work(self._dataset, samples)
            return None if found is None else float(found)
        except LockstepError:
            raise
        except Exception as error:
            raise blamed("work", error, f"step {step}, samples {samples[:8]}") from error

    def _asked(self, samples: list[int], step: int) -> float:
        found = self._answer(samples, step)
        if found is None or not (math.isfinite(found) and found > 0.0):
            raise DataError(
                f"the task's `work` is {found} for the samples {samples[:8]} of step {step}: it must be a number above "
                "0, what a micro-batch of them costs"
            )
        return found
