"""The rehearsal of an update: all that the end of a step does, on copied state, before step 1.

rehearse(engine, lambda: loss_of(engine.model, batch))          # on every rank alike
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.fetch import failure
from lockstep.engines.base import Engine
from lockstep.errors import ConfigError, DataError, LockstepError

__all__ = ["Alone", "blame_optimizer", "check_dense", "rehearse"]


def rehearse(engine: Engine, loss: Callable[[], Tensor]) -> None:
    """Try backward, penalty, norm, clip and the optimizer's step, and put everything back. Collective.

    Parameters (copies of which lie on the host), the optimizer's states and numbers, gradients and what the engine
    counts are as before; buffers, the task's tensors and generators are the caller's. A rank works alone on its own
    gradients. In `fsdp` under exact mode the gradients are zeros and `loss` is not computed, since a backward of one
    micro-batch has no place in the tree; `deepspeed` and a task with own steps do nothing, since neither can take a
    step back.

    Args:
        loss: computes the loss of one micro-batch with `engine.model`, with a graph.

    Raises:
        DataError: the backward or the optimizer's `step` failed; it names the line.
        ConfigError: what the optimizer asks for does not go with the engine.
    """
    engine.rehearse(loss)


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
