"""The state of a model and its optimizer by plain names: `model/NAME`, `optimizer/NAME/KEY`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import CheckpointError

__all__ = ["materialise", "named_state", "restore_state"]


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of a model and its optimizer by plain name. Optimizer state that is not there yet is made, as zeros.

    Numbers in the optimizer's state become 0-dim float64 tensors.
    """
    materialise(optimizer)
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


def materialise(optimizer: Optimizer, states: Mapping[Any, Any] | None = None) -> None:
    """Makes the optimizer create its state, as it would in its first step, and sets it to zero.

    Args:
        optimizer: left as it is if it has state already.
        states: where its state is, if not in `optimizer.state`.
    """
    states = optimizer.state if states is None else states
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if states or not parameters:
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
            for value in states.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
