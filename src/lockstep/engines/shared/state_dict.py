"""The state of a model and its optimizer by plain names: `model/NAME`, `optimizer/NAME/KEY`."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engines.shared.extra import set_extra
from lockstep.errors import CheckpointError
from lockstep.tensors import local_of

__all__ = ["begin", "first_step", "forget", "materialise", "named_state", "restore_state"]

# What torch's optimizers begin with where that is not zero: a number, or the setting of the group that has it.
_BEGINNINGS: dict[str, dict[str, float | str]] = {
    "Adagrad": {"sum": "initial_accumulator_value"},
    "ASGD": {"mu": 1.0, "eta": "lr"},
    "NAdam": {"mu_product": 1.0},
    "Rprop": {"step_size": "lr"},
}

_PARTS = 16  # in which a model's parameters are gone through


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
    """A step with zero gradients and rates: states as they begin, all else as it is, whatever the step does.

    Beside parameters and states it holds, of torch's optimizers, gradients and copies of a sixteenth of the parameters
    at a time (of one, where that is larger); of another one the gradients of all, and their copies in host memory.

    Args:
        optimizer: any.
        states: where its state is.
    """
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has the optimizer inside
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = None
    for chunk in _chunks(optimizer, parameters):
        _step_unmoved(optimizer, chunk)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
        for parameter in group["params"]:
            begin(inner, group, states.get(parameter, {}))


def _steps_in_parts(optimizer: Optimizer) -> bool:
    """Whether a parameter without a gradient is as if it were not there, as torch's own optimizers have it."""
    return type(optimizer).__module__.startswith(("torch.optim", "lockstep.optim"))


def _chunks(optimizer: Optimizer, parameters: list[Tensor]) -> list[list[Tensor]]:
    """The parameters in their order, cut where a part would have more than a sixteenth of all bytes."""
    if not _steps_in_parts(optimizer):
        return [parameters]
    sizes = [local_of(parameter).nbytes for parameter in parameters]
    limit, found, held = sum(sizes) // _PARTS, list[list[Tensor]](), 0
    for parameter, size in zip(parameters, sizes, strict=True):
        if not found or held + size > limit:
            found.append([])
            held = 0
        found[-1].append(parameter)
        held += size
    return found


def _step_unmoved(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """A step of these parameters with zero gradients; their values, bit for bit, and no gradients afterwards."""
    on_host = not _steps_in_parts(optimizer)
    locals_ = [local_of(parameter) for parameter in parameters]
    before = [local.to("cpu", copy=True) if on_host else local.clone() for local in locals_]  # waits for the device
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, local, values in zip(parameters, locals_, before, strict=True):
        parameter.grad = None
        local.copy_(values)


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
