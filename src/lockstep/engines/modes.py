"""Switch optimizers that hold other weights for evaluation than for training, such as schedule-free ones.

    with evaluation_weights(optimizer):     # optimizer.eval(), then optimizer.train()
        evaluate(model)

Such an optimizer trains at one point and evaluates at another, and moves the parameters between them in its `eval()`
and `train()`. Switching there and back rounds, so the weights of training are restored from a copy: an evaluation does
not change the training by a bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.tensors import local_of

__all__ = [
    "evaluation_weights",
    "has_modes",
    "switch",
]


def has_modes(optimizer: Optimizer | None) -> bool:
    """Whether the optimizer has weights for training and others for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def switch(optimizer: Optimizer | None, *, training: bool) -> None:
    """Give the model its weights for training or for evaluation. Collective under zero.

    An optimizer without such modes is left alone.
    """
    if has_modes(optimizer):
        # `has_modes` has checked both methods, which mypy cannot see.
        (optimizer.train if training else optimizer.eval)()  # type: ignore[union-attr]


@contextmanager
def evaluation_weights(optimizer: Optimizer | None) -> Iterator[None]:
    """Give the model the weights for evaluation; restore those of training afterwards.

    The restored weights are bitwise identical.

    Takes memory for a copy of the trained parameters. Take no step within the context. Collective under zero.
    """
    if optimizer is None or not has_modes(optimizer):
        yield
        return
    # The program may have switched already.
    switch(optimizer, training=True)
    parameters = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters.append(local_of(parameter))
    training_weights = [parameter.detach().clone() for parameter in parameters]
    switch(optimizer, training=False)
    try:
        yield
    finally:
        switch(optimizer, training=True)
        _restore(parameters, training_weights)


@torch.no_grad()
def _restore(parameters: list[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
