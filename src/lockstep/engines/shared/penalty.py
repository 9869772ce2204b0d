"""The penalty of a task, a function of the parameters that is added to the loss once a step.

penalty = Penalty(task.penalty, model)
value = penalty.add(scale)              # after the gradients of the step are summed, before their norm
"""

from typing import final

import torch
from torch import Tensor, nn

from lockstep.data.fetch import failure
from lockstep.engines.base import MakePenalty
from lockstep.engines.shared.scaled_backward import ScaledBackward
from lockstep.errors import DataError, LockstepError
from lockstep.tensors import is_dtensor

__all__ = ["Penalty"]


@final
class Penalty:
    """Every rank computes it of the parameters that it holds, so that it counts once whatever the ranks.

    Args:
        compute: the task's.
        model: without what an engine puts around it, so that no hook of a reducer sees the gradient.
    """

    def __init__(self, compute: MakePenalty, model: nn.Module) -> None:
        self._compute, self._model = compute, model
        self._roots = ScaledBackward()
        self._first = True

    def add(self, scale: float | Tensor) -> Tensor:
        """Add its gradient to the parameters' `.grad`.

        Where it is not finite, every gradient is NaN, as with a loss.

        Args:
            scale: of the loss.

        Returns:
            its value: 0-dim, without a graph, alike on all ranks.

        Raises:
            DataError: it failed, or is no 0-dim tensor of the parameters; or the first one is not finite.
        """
        with torch.enable_grad():
            value = self._value()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        root = self._roots(value, scale)
        for parameter, found in zip(trained, torch.autograd.grad(value, trained, root, allow_unused=True), strict=True):
            if found is None:
                continue
            if is_dtensor(parameter) and is_dtensor(found):
                found = found.redistribute(parameter.device_mesh, parameter.placements)
            if parameter.grad is None:
                parameter.grad = found
            elif parameter.grad.is_sparse:
                parameter.grad = found + parameter.grad
            else:
                parameter.grad.add_(found)
        return value.detach()

    def _value(self) -> Tensor:
        try:
            found = self._compute(self._model)
            if is_dtensor(found):  # type: ignore[arg-type]
                found = found.full_tensor()  # collective
        except LockstepError:
            raise
        except Exception as error:
            raise DataError(f"the task's `penalty` failed: {failure(error)}; mend it there") from error
        if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
            raise DataError(
                f"the task's `penalty` returned {_described(found)}: it must return one number, a 0-dim float tensor"
            )
        if not found.requires_grad:
            raise DataError(
                "the task's `penalty` returned a tensor without a graph, so it changes nothing: compute it from the "
                "model's trained parameters, without detach() and .data"
            )
        if self._first:
            self._first = False
            if not bool(found.isfinite()):  # waits for the device, in the first step
                raise DataError(f"the task's `penalty` is {found.item()} at the first parameters: it must be finite")
        return found


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
