"""What the engines' `rehearse` shares: a loss that is computed alone, and errors that name the user's line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.fetch import failure
from lockstep.errors import ConfigError, DataError, LockstepError

__all__ = ["Alone", "blame_optimizer", "check_dense"]


@final
class Alone:
    """The loss of a step that is one micro-batch of this rank; see `lockstep.engines.base.Evaluate`.

    Args:
        compute: the loss, with a graph.
        backward: its gradient into `.grad`, without an exchange.
    """

    def __init__(self, compute: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> None:
        self._compute, self._backward = compute, backward
        self._loss = torch.zeros(())

    def loss(self) -> Tensor:
        return self._loss

    def again(self) -> Tensor:
        with torch.enable_grad():
            found = self._compute()
            with _blamed("the backward of the task's `loss`"):
                self._backward(found)
        self._loss = found.detach()
        return self._loss


@contextmanager
def blame_optimizer(optimizer: Optimizer) -> Iterator[None]:
    """Around an optimizer's step in a rehearsal: what fails is one line."""
    with _blamed(f"the `step` of the optimizer {type(optimizer).__name__}"):
        yield


def check_dense(model: nn.Module, why: str) -> None:
    """Raise ConfigError where a parameter has a sparse gradient, which an engine cannot take.

    Args:
        why: the flag that stands in the way; "": nothing does.
    """
    for name, parameter in model.named_parameters() if why else ():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of {name} is sparse, and {why} takes dense ones: make the embedding with sparse=False, "
                "or use --engine single without --exact"
            )


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise DataError(f"{what} failed in the trial, before step 1: {failure(error)}; mend it there") from error
