"""The closure that an optimizer gets which evaluates the loss in its step: LBFGS, SAM, a line search.

closure = Closure(parameters, first=..., again=..., suspicious=True)
optimizer.step(closure)

The first call is answered by the pass that the loop has made, so that an optimizer which merely calls its closure costs
no pass. Where a parameter or a gradient was changed before it, and in every later call, the pass is repeated.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lockstep.tensors import local_of

__all__ = ["Closure", "step_of", "takes_closure"]

_OWN = ("torch.optim", "lockstep.optim")  # whose optimizers evaluate the loss once, but for LBFGS


@final
class Closure:
    """Computes the loss and its gradient at the present parameters.

    Args:
        parameters: those that the optimizer has.
        first: gives the loss of the pass whose gradients `.grad` has.
        again: repeats the pass, fills `.grad` and gives the loss.
        suspicious: look at the parameters' values too, not only at torch's count of their writes, which does not know
            of those through `.data`. Waits for the device.

    Attributes:
        repeated: how often the pass was repeated.
        silent: the parameters had changed before the first call without torch's count knowing.
    """

    def __init__(
        self, parameters: Sequence[Tensor], first: Callable[[], Tensor], again: Callable[[], Tensor], suspicious: bool
    ) -> None:
        self._parameters, self._first, self._again = parameters, first, again
        self._seen = _versions(parameters)
        self._norms = _norms(parameters) if suspicious else None
        self._called = False
        self.repeated, self.silent = 0, False

    def __call__(self) -> Tensor:
        """Return the loss, 0-dim, without a graph. Collective."""
        called, self._called = self._called, True
        with torch.enable_grad():
            if not called and not self._moved():
                return self._first()
            self.repeated += 1
            return self._again()

    def _moved(self) -> bool:
        if any(p.grad is not None for p in self._parameters) and self._seen == _versions(self._parameters):
            self.silent = self._norms is not None and not torch.equal(self._norms, _norms(self._parameters))
            return self.silent
        return True


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer may evaluate the loss in its step: LBFGS, and one whose `step` is not torch's own."""
    step = inspect.unwrap(type(optimizer).step)
    if (step.__module__ or "").startswith(_OWN):
        return isinstance(optimizer, LBFGS)
    takes = list(inspect.signature(step).parameters.values())[1:]
    return any(each.name == "closure" or each.kind is not each.KEYWORD_ONLY for each in takes)


def step_of(optimizer: Optimizer, closure: Callable[[], Tensor] | None) -> None:
    """Take the optimizer's step, with a closure or without."""
    step: Any = optimizer.step
    if closure is None:
        step()
    elif "closure" in inspect.signature(inspect.unwrap(type(optimizer).step)).parameters:
        step(closure=closure)
    else:
        step(closure)


def _versions(parameters: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """For each parameter torch's count of its writes, and which tensor its gradient is, and its count."""
    return [(p._version, id(p.grad), -1 if p.grad is None else p.grad._version) for p in parameters]


@torch.no_grad()
def _norms(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of each, which any other values would hardly have."""
    found = torch._foreach_norm([local_of(parameter) for parameter in parameters]) if parameters else ()
    return torch.stack([norm.double() for norm in found]) if found else torch.zeros(0)
