"""What a backward begins with: a factor of the loss, applied at no cost."""

import torch
from torch import Tensor

__all__ = ["ScaledBackward"]


class ScaledBackward:
    """`loss.backward(roots(loss, factor))` has the gradients of `factor * loss`; the factors' tensors are made once.

    Where the loss is NaN or infinite the root is NaN, and so is every gradient, on every rank that it is summed with:
    the update is left out then, though the loss's own gradient may be finite. No device is waited for.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, float], Tensor] = {}

    def __call__(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        """A 0-dim tensor like the loss; a factor that is a tensor, 0-dim, is on its device."""
        if isinstance(factor, Tensor):
            return torch.add(factor.to(loss.dtype), loss.detach(), alpha=0)
        found = self._made.get((loss.dtype, factor))
        if found is None:
            if len(self._made) > 16:  # loss scales that are over
                self._made.clear()
            found = self._made[loss.dtype, factor] = torch.full_like(loss, factor, requires_grad=False).detach()
        return torch.add(found, loss.detach(), alpha=0)  # 0 * inf is NaN; else nothing is added
