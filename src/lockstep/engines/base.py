"""What an engine is, and what all engines share: clipping, the update, and the names of their state.

An engine holds a model and an optimizer and knows how both are split over the ranks. It knows no data, loop or files.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import CheckpointError

__all__ = ["NOTHING", "Engine", "MakeOptimizer", "StepResult", "Update", "named_state", "restore_state"]

MakeOptimizer = Callable[[nn.Module], Optimizer]

NOTHING: AbstractContextManager[None] = nullcontext()


class StepResult(NamedTuple):
    """What an update reports: the gradient's 2-norm before clipping (0-dim, unread), and whether it was applied."""

    norm: Tensor
    applied: bool


class Engine(Protocol):
    """How the model is split and stepped.

    Attributes:
        model: call this for the forward.
    """

    model: nn.Module

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; gradients are exchanged in a step's last, where they can."""

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradient. After the last micro-batch the gradients are SUMMED over the ranks."""

    def step(self, factor: float) -> StepResult:
        """Clips, updates each parameter group at its base rate times `factor`, clears the gradients."""

    def state(self) -> dict[str, Tensor]:
        """Everything a resume needs, by plain names: `model/NAME`, `optimizer/NAME/KEY`. Not copies."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Takes a state over; tensors that `state()` itself handed out are in place already."""


class Update:
    """Clipping and the optimizer's step, resolved once so that a step does little besides computing.

    Args:
        optimizer: its groups' `lr` are the base rates.
        clip: largest 2-norm of the whole gradient; 0 does not clip.
    """

    def __init__(self, optimizer: Optimizer, clip: float) -> None:
        self.optimizer, self._clip = optimizer, clip
        self._groups = [(group, float(group["lr"])) for group in optimizer.param_groups]
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, factor: float) -> StepResult:
        """One update at base rate times `factor`. Nothing here waits for the device."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm(gradients)
        if self._clip and gradients:
            # Always multiplied: to ask whether the norm is too large would wait for the device.
            torch._foreach_mul_(gradients, torch.clamp(self._clip / (norm + 1e-6), max=1.0))
        for group, rate in self._groups:
            group["lr"] = rate * factor
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        return StepResult(norm, True)


def total_norm(gradients: list[Tensor]) -> Tensor:
    """2-norm of all gradients together, 0-dim, in the order given; float32, or float64 where a gradient is."""
    if not gradients:
        return torch.zeros(())
    norms = list(torch._foreach_norm(gradients))
    if any(norm.dtype in (torch.bfloat16, torch.float16) for norm in norms):
        norms = [norm.float() for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of a model and its optimizer by plain name. Optimizer state that is not there yet is made, as zeros.

    Numbers in the optimizer's state become 0-dim float64 tensors.
    """
    _materialise(optimizer)
    found = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{name}/{key}"] = value
            elif isinstance(value, int | float):
                found[f"optimizer/{name}/{key}"] = torch.tensor(float(value), dtype=torch.float64)
    return found


def restore_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    """Copies `state` into the model and the optimizer. Raises CheckpointError for names that do not fit."""
    own = named_state(model, optimizer)
    missing = sorted(own.keys() ^ state.keys())
    if missing:
        raise CheckpointError(f"the state does not fit the model: {', '.join(missing[:3])} on one side only")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor is not state[name]:
                tensor.copy_(state[name])
    for name, parameter in model.named_parameters():
        slots = optimizer.state.get(parameter, {})
        for key, value in slots.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                slots[key] = type(value)(state[f"optimizer/{name}/{key}"].item())


def _materialise(optimizer: Optimizer) -> None:
    """Makes the optimizer create its state, as it would in its first step, and sets it to zero."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or not parameters:
        return
    kept = [p.detach().clone() for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, before in zip(parameters, kept, strict=True):
            parameter.grad = None
            parameter.copy_(before)
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
