"""What a backward begins with: a factor of the loss, applied at no cost."""

import torch
from torch import Tensor

__all__ = ["Roots"]


class Roots:
    """`loss.backward(roots(loss, factor))` has the gradients of `factor * loss`. The tensors are made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, float], Tensor] = {}

    def __call__(self, loss: Tensor, factor: float) -> Tensor | None:
        """A 0-dim tensor like the loss; None for a factor of 1."""
        if factor == 1.0:
            return None
        found = self._made.get((loss.dtype, factor))
        if found is None:
            if len(self._made) > 16:  # loss scales that are over
                self._made.clear()
            found = self._made[loss.dtype, factor] = torch.full_like(loss, factor, requires_grad=False).detach()
        return found
