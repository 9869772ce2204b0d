"""The state of a model and its optimizer by plain names: `model/NAME`, `optimizer/NAME/KEY`."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engines.shared.extra import set_extra
from lockstep.errors import CheckpointError

__all__ = ["begin", "first_step", "forget", "materialise", "named_state", "restore_state"]

# What torch's optimizers begin with where that is not zero: a number, or the setting of the group that has it.
_BEGINNINGS: dict[str, dict[str, float | str]] = {
    "Adagrad": {"sum": "initial_accumulator_value"},
    "ASGD": {"mu": 1.0, "eta": "lr"},
    "NAdam": {"mu_product": 1.0},
    "Rprop": {"step_size": "lr"},
}


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of a model and its optimizer by plain name.

    Numbers in the optimizer's state become 0-dim float64 tensors.
    """
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
    materialise(optimizer)
    forget(model, optimizer.state, state)
    own = named_state(model, optimizer)
    missing = sorted(own.keys() ^ state.keys())
    if missing:
        raise CheckpointError(f"the state does not fit the model: {', '.join(missing[:3])} on one side only")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor is not state[name]:
                tensor.copy_(state[name])
    set_extra(model, state)
    for name, parameter in model.named_parameters():
        slots = optimizer.state.get(parameter, {})
        for key, value in slots.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                slots[key] = type(value)(state[f"optimizer/{name}/{key}"].item())


def forget(model: nn.Module, states: MutableMapping[Any, Any], given: Mapping[str, Tensor]) -> None:
    """Drops what `states` has of parameters for which `given` has none, as of one that never had a gradient.

    The optimizer makes it in the first step that gives them one, as it would have without the restart.
    """
    stepped = {name.rpartition("/")[0] for name in given if name.startswith("optimizer/")}
    for name, parameter in model.named_parameters():
        if stepped and f"optimizer/{name}" not in stepped:
            states.pop(parameter, None)


def materialise(optimizer: Optimizer, states: Mapping[Any, Any] | None = None) -> bool:
    """Makes the optimizer create its state, as it would in its first step, for a checkpoint to be loaded into.

    Of torch's own optimizers the values are those that they begin with. What another one begins with only its first
    step knows: whoever goes on without loading must drop the state before it (see OptimizerStep).

    Args:
        optimizer: left as it is if it has state already.
        states: where its state is, if not in `optimizer.state`.

    Returns:
        Whether the state was made now.
    """
    states = optimizer.state if states is None else states
    if states or not any(group["params"] for group in optimizer.param_groups):
        return False
    first_step(optimizer, states)
    return True


@torch.no_grad()
def first_step(optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
    """A step with zero gradients and rates: states as they begin, all else as it is.

    Args:
        optimizer: any.
        states: where its state is.
    """
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has the optimizer inside
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [(p.grad, p.detach().clone()) for p in parameters]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, (gradient, values) in zip(parameters, before, strict=True):
        parameter.grad = gradient
        parameter.copy_(values)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
        for parameter in group["params"]:
            begin(inner, group, states.get(parameter, {}))


@torch.no_grad()
def begin(optimizer: Optimizer, group: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Sets a parameter's tensors to what the optimizer begins with: zeros, but for a few of torch's own.

    Args:
        optimizer: whose class decides.
        group: of the parameter; its `lr` is the base rate.
        values: the parameter's state.
    """
    kinds = (kind.__name__ for kind in type(optimizer).__mro__)
    known = next((_BEGINNINGS[kind] for kind in kinds if kind in _BEGINNINGS), {})
    for key, value in values.items():
        if isinstance(value, Tensor):
            start = known.get(key, 0.0)
            value.fill_(float(group[start] if isinstance(start, str) else start))
