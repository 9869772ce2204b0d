"""Name, restore and snapshot the state of a model and its optimizer.

snapshot = Snapshot(optimizer, parameters)
...                                     # steps, or part of one
snapshot.put_back()

`named_state` and `restore_state` map a model and optimizer to tensors by plain name, for checkpoints. `materialise`
makes an optimizer create its state before a load. `Snapshot` copies parameters and optimizer, and restores them.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from lockstep.engines.base import set_extra
from lockstep.engines.closure import pack, step_of, takes_closure, unpack
from lockstep.errors import CheckpointError, DataError, LockstepError, error_line
from lockstep.tensors import copy_into, is_expanded, local_of

__all__ = [
    "Snapshot",
    "begin",
    "drop_states",
    "first_step",
    "forget",
    "has_states",
    "materialise",
    "named_state",
    "restore_state",
]


# Initial values of torch's optimizers that are not zero: a number, or the key of the group that has it.
_INITIAL_VALUES: dict[str, dict[str, float | str]] = {
    "Adagrad": {"sum": "initial_accumulator_value"},
    "ASGD": {"mu": 1.0, "eta": "lr"},
    "NAdam": {"mu_product": 1.0},
    "Rprop": {"step_size": "lr"},
}

# Packages whose optimizers contain no other optimizer with a state.
_PLAIN_PACKAGES = (
    "torch.optim",
    "torch.distributed",
    "lockstep.optim",
)
# Number of parts into which `first_step` splits the parameters, so that copies take little memory.
_PARTS = 16


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a model and its optimizer by plain name.

    Numbers in the optimizer's state become 0-dim float64 tensors. An entry of a list or dict is named `KEY.PLACE`; the
    state of an optimizer held as an attribute (SAM's base) is named `ATTRIBUTE.KEY`.
    """
    state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    if isinstance(optimizer, LBFGS):
        prefix = _name_of_lbfgs(model, optimizer)
        return state | {f"{prefix}/{key}": tensor for key, tensor in pack(optimizer).items()}
    for slot in _slots(model, optimizer):
        value = slot.value
        state[slot.name] = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    return state


def restore_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    """Copy `state` into the model and the optimizer. Raises CheckpointError for mismatched names."""
    materialise(optimizer)
    for _, inner in _optimizers_in(optimizer):
        forget(model, inner.state, state)
    present_state = named_state(model, optimizer)
    missing = sorted(present_state.keys() ^ state.keys())
    if missing:
        raise CheckpointError(
            f"the state does not match the model: {', '.join(missing[:3])} on one side only; use the model and "
            "optimizer that wrote it"
        )
    with torch.no_grad():
        for name, tensor in present_state.items():
            if tensor is not state[name]:
                copy_into(tensor, state[name])
    set_extra(model, state)
    if isinstance(optimizer, LBFGS):
        prefix = _name_of_lbfgs(model, optimizer)
        unpack(optimizer, {name.removeprefix(f"{prefix}/"): t for name, t in state.items() if name.startswith(prefix)})
        return
    for slot in _slots(model, optimizer):
        if not isinstance(slot.value, Tensor | bool) and not isinstance(slot.holder, tuple):
            # Reads from the device, at a load only.
            slot.holder[slot.key] = type(slot.value)(state[slot.name].item())


class _StateSlot(NamedTuple):
    """One tensor or number of an optimizer's state, at `holder[key]`."""

    name: str
    holder: Any
    key: Any
    value: Any


def _slots(model: nn.Module, optimizer: Optimizer) -> Iterator[_StateSlot]:
    for prefix, inner in _optimizers_in(optimizer):
        for name, parameter in model.named_parameters():
            yield from _leaves(inner.state.get(parameter, {}), f"optimizer/{name}/{prefix}")


def _leaves(holder: Any, prefix: str) -> list[_StateSlot]:
    slots = []
    for key, value in list(holder.items() if isinstance(holder, Mapping) else enumerate(holder)):
        if isinstance(value, Tensor | int | float):
            slots.append(_StateSlot(f"{prefix}{key}", holder, key, value))
        elif isinstance(value, Mapping | list | tuple):
            slots += _leaves(value, f"{prefix}{key}.")
    return slots


def _name_of_lbfgs(model: nn.Module, optimizer: Optimizer) -> str:
    """Return the name prefix of LBFGS's state, which it stores once, with the first parameter."""
    first_parameter = optimizer.param_groups[0]["params"][0]
    return next(f"optimizer/{name}" for name, parameter in model.named_parameters() if parameter is first_parameter)


def _optimizers_in(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """Return the optimizer under "", and optimizers held as attributes under `ATTRIBUTE.`.

    Only those with a state of their own.
    """
    if type(optimizer).__module__.startswith(_PLAIN_PACKAGES):
        return [("", optimizer)]
    optimizers = [("", optimizer)]
    states = [optimizer.state]
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and not any(value.state is state for state in states):
            optimizers.append((f"{name}.", value))
            states.append(value.state)
    return optimizers


def drop_states(optimizer: Optimizer) -> None:
    """Clear all states, so that the next step creates them as a first step does."""
    for _, inner in _optimizers_in(optimizer):
        inner.state.clear()


def forget(model: nn.Module, states: MutableMapping[Any, Any], state: Mapping[str, Tensor]) -> None:
    """Drop `states` of parameters that `state` has none for: they never had a gradient.

    The optimizer creates a state in the first step that gives them a gradient, as it would have without the restart.
    """
    stepped = set()
    for name in state:
        if name.startswith("optimizer/"):
            stepped.add(name.rpartition("/")[0])
    for name, parameter in model.named_parameters():
        if stepped and f"optimizer/{name}" not in stepped:
            states.pop(parameter, None)


def materialise(optimizer: Optimizer, states: Mapping[Any, Any] | None = None) -> bool:
    """Make the optimizer create its initial state, so that a checkpoint can be loaded.

    For torch's own optimizers the values are their initial ones. Only its first step knows the initial values of
    another optimizer: to continue without loading, drop the state first (see OptimizerStep).

    Args:
        optimizer: unchanged if it already has state.
        states: the optimizer's state, if not `optimizer.state`.

    Returns:
        Whether the state was created now.
    """
    states = optimizer.state if states is None else states
    if has_states(states) or not any(group["params"] for group in optimizer.param_groups):
        return False
    if isinstance(optimizer, LBFGS):
        return False
    first_step(optimizer, states)
    return True


def has_states(states: Mapping[Any, Any]) -> bool:
    """Whether an optimizer has states.

    A lookup such as `"z" in self.state[p]` leaves an empty one, which does not count.
    """
    return any(not isinstance(values, dict) or bool(values) for values in states.values())


@torch.no_grad()
def first_step(optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
    """Step with zero gradients and rates: creates initial states and changes nothing else.

    Temporarily holds gradients and copies of a sixteenth of the parameters at a time (of one, if that is larger) for
    torch's optimizers; for others the gradients of all parameters, and copies in host memory.

    Args:
        optimizer: any.
        states: its state.
    """
    # ZeroRedundancyOptimizer has the optimizer inside.
    inner = getattr(optimizer, "optim", optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    settings = []
    for group in optimizer.param_groups:
        settings.append({k: v for k, v in group.items() if k != "params"})
    attributes = {}
    for name, value in vars(inner).items():
        if name not in ("state", "param_groups"):
            attributes[name] = value
    # With a rate of 0, and gradients of 0, no parameter moves, except by rules that ignore both; see `_step_unmoved`.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = None
    for chunk in _chunks(optimizer, parameters):
        _step_unmoved(optimizer, chunk)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    # Restore attributes in which the optimizer counts, too.
    vars(inner).update(attributes)
    for group, options in zip(optimizer.param_groups, settings, strict=True):
        group.update(options)
        for parameter in group["params"]:
            begin(inner, group, states.get(parameter, {}))


def _steps_in_parts(optimizer: Optimizer) -> bool:
    """Whether the optimizer skips parameters without a gradient, as torch's own do."""
    return type(optimizer).__module__.startswith(("torch.optim", "lockstep.optim"))


def _chunks(optimizer: Optimizer, parameters: list[Tensor]) -> list[list[Tensor]]:
    """Split the parameters, in order, into parts of at most a sixteenth of all bytes.

    Optimizers that need all parameters get one part. A larger parameter is a part of its own.
    """
    if not _steps_in_parts(optimizer):
        return [parameters]
    sizes = [local_of(parameter).nbytes for parameter in parameters]
    limit = sum(sizes) // _PARTS
    chunks = list[list[Tensor]]()
    filled = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        if not chunks or filled + size > limit:
            chunks.append([])
            filled = 0
        chunks[-1].append(parameter)
        filled += size
    return chunks


def _step_unmoved(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Step these parameters with zero gradients; restore their values and clear gradients."""
    on_host = not _steps_in_parts(optimizer)
    locals_ = [local_of(parameter) for parameter in parameters]
    # Waits for the device, in a copy to the host.
    before = []
    for local in locals_:
        before.append(local.to("cpu", copy=True) if on_host else local.clone())
    zeros = torch.zeros((), device=locals_[0].device if locals_ else None)

    def evaluate() -> Tensor:
        for parameter in parameters:
            parameter.grad = _no_gradient(parameter, sparse)
        return zeros

    kernel = getattr(optimizer, "optim", optimizer)
    sparse = isinstance(kernel, SparseAdam)
    evaluate()
    try:
        step_of(optimizer, evaluate if takes_closure(kernel) else None)
    except LockstepError:
        raise
    except Exception as error:
        raise DataError(
            f"the `step` of the optimizer {type(kernel).__name__} failed on zero gradients, with which a resume "
            f"creates its states: {error_line(error)}; fix it there"
        ) from error
    for parameter, local, values in zip(parameters, locals_, before, strict=True):
        parameter.grad = None
        # The optimizer has replaced the parameter's memory (`.data =`).
        if local_of(parameter).data_ptr() != local.data_ptr():
            parameter.data = local
        local.copy_(values)


def _no_gradient(parameter: Tensor, sparse: bool) -> Tensor:
    """Return zeros, or an empty sparse gradient."""
    if not sparse:
        return torch.zeros_like(parameter)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, layout=torch.sparse_coo, device=parameter.device)


@torch.no_grad()
def begin(optimizer: Optimizer, group: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Set a parameter's state to its initial values: zeros, except for some of torch's optimizers.

    Args:
        optimizer: its class decides.
        group: the parameter's group; its `lr` is the base rate.
        values: the parameter's state.
    """
    class_names = (class_name.__name__ for class_name in type(optimizer).__mro__)
    initial = {}
    for class_name in class_names:
        if class_name in _INITIAL_VALUES:
            initial = _INITIAL_VALUES[class_name]
            break
    for key, value in values.items():
        if isinstance(value, Tensor):
            start = initial.get(key, 0.0)
            if is_expanded(value):
                value = values[key] = value.contiguous()
            value.fill_(float(group[start] if isinstance(start, str) else start))


@final
class Snapshot:
    """A copy of parameters and their optimizer's states, groups and attributes.

    Tensors keep their identity, so other references see the restored values. Gradients are not kept.

    Args:
        optimizer: with the optimizers that it holds as attributes.
        parameters: as this rank has them.
        on_host: keep copies in host memory; waits for the device.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._parameters = [(p, local_of(p), self._copy(local_of(p))) for p in parameters]
        # ZeroRedundancyOptimizer has the optimizer inside.
        inner = getattr(optimizer, "optim", None)
        outer = [optimizer] if isinstance(inner, Optimizer) else []
        self._copies = [
            self._copy_optimizer(part) for part in (*outer, *(o for _, o in _optimizers_in(inner or optimizer)))
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore everything."""
        for parameter, local, values in self._parameters:
            # The optimizer has replaced the parameter's memory (`.data =`).
            if local_of(parameter).data_ptr() != local.data_ptr():
                parameter.data = local
            local.copy_(values)
        for optimizer, attributes, groups, states in self._copies:
            for name in vars(optimizer).keys() - attributes.keys() - {"state", "param_groups"}:
                delattr(optimizer, name)
            for name, frozen in attributes.items():
                optimizer.__dict__[name] = self._thaw(frozen)
            for group, settings in groups:
                for key in group.keys() - settings.keys() - {"params"}:
                    del group[key]
                for key, frozen in settings.items():
                    group[key] = self._thaw(frozen)
            optimizer.state.clear()
            for parameter, values in states.items():
                optimizer.state[parameter] = self._thaw(values)

    def _copy_optimizer(self, optimizer: Optimizer) -> tuple[Optimizer, dict[str, Any], list[Any], dict[Any, Any]]:
        attributes = {}
        for k, v in vars(optimizer).items():
            if k not in ("state", "param_groups"):
                attributes[k] = self._freeze(v)
        groups = []
        for group in optimizer.param_groups:
            groups.append((group, {key: self._freeze(value) for key, value in group.items() if key != "params"}))
        return optimizer, attributes, groups, {p: self._freeze(values) for p, values in optimizer.state.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        # Waits for the device.
        if self._on_host and tensor.is_cuda:
            return tensor.to("cpu", copy=True)
        return tensor.clone()

    def _freeze(self, value: Any) -> Any:
        """Return (value, copy), where the copy covers whatever may change in the value."""
        if isinstance(value, Tensor):
            return value, self._copy(local_of(value))
        if isinstance(value, list):
            return value, [self._freeze(element) for element in value]
        if isinstance(value, dict):
            return value, {key: self._freeze(element) for key, element in value.items()}
        return value, None

    def _thaw(self, frozen: Any) -> Any:
        value, copy = frozen
        if isinstance(value, Tensor):
            local_of(value).copy_(copy)
        elif isinstance(value, list):
            value[:] = [self._thaw(element) for element in copy]
        elif isinstance(value, dict):
            entries = {key: self._thaw(element) for key, element in copy.items()}
            value.clear()
            value.update(entries)
        return value
