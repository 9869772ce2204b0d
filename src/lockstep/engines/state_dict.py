"""An optimizer and its parameters as they are at one moment, to be put back.

kept = Snapshot(optimizer, parameters)
...                                     # steps, or the half of one
kept.put_back()
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from lockstep.data.loader import failure
from lockstep.engines.base import set_extra
from lockstep.engines.closure import packed, step_of, takes_closure, unpack
from lockstep.errors import CheckpointError, DataError, LockstepError
from lockstep.tensors import local_of

__all__ = [
    "Snapshot",
    "begin",
    "drop_states",
    "first_step",
    "forget",
    "materialise",
    "named_state",
    "restore_state",
]


# What torch's optimizers begin with where that is not zero: a number, or the setting of the group that has it.
_BEGINNINGS: dict[str, dict[str, float | str]] = {
    "Adagrad": {"sum": "initial_accumulator_value"},
    "ASGD": {"mu": 1.0, "eta": "lr"},
    "NAdam": {"mu_product": 1.0},
    "Rprop": {"step_size": "lr"},
}

_OWN = ("torch.optim", "torch.distributed", "lockstep.optim")  # no optimizer of these keeps states in another
_PARTS = 16  # in which a model's parameters are gone through


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors of a model and its optimizer by plain name.

    Numbers in the optimizer's state become 0-dim float64 tensors. What it keeps in a list or dict is `KEY.PLACE`, and
    what an optimizer has that it holds as an attribute (SAM's base) is `ATTRIBUTE.KEY`.
    """
    found = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    if isinstance(optimizer, LBFGS):
        prefix = _name_of_lbfgs(model, optimizer)
        return found | {f"{prefix}/{key}": tensor for key, tensor in packed(optimizer).items()}
    for slot in _slots(model, optimizer):
        value = slot.value
        found[slot.name] = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    return found


def restore_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    """Copies `state` into the model and the optimizer. Raises CheckpointError for names that do not fit."""
    materialise(optimizer)
    for _, each in _optimizers_in(optimizer):
        forget(model, each.state, state)
    own = named_state(model, optimizer)
    missing = sorted(own.keys() ^ state.keys())
    if missing:
        raise CheckpointError(f"the state does not fit the model: {', '.join(missing[:3])} on one side only")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor is not state[name]:
                tensor.copy_(state[name])
    set_extra(model, state)
    if isinstance(optimizer, LBFGS):
        prefix = _name_of_lbfgs(model, optimizer)
        unpack(optimizer, {name.removeprefix(f"{prefix}/"): t for name, t in state.items() if name.startswith(prefix)})
        return
    for slot in _slots(model, optimizer):
        if not isinstance(slot.value, Tensor | bool) and not isinstance(slot.holder, tuple):
            slot.holder[slot.key] = type(slot.value)(state[slot.name].item())


class _StateSlot(NamedTuple):
    """One tensor or number of an optimizer's state, and where it is: `holder[key]`."""

    name: str
    holder: Any
    key: Any
    value: Any


def _slots(model: nn.Module, optimizer: Optimizer) -> Iterator[_StateSlot]:
    for prefix, each in _optimizers_in(optimizer):
        for name, parameter in model.named_parameters():
            yield from _leaves(each.state.get(parameter, {}), f"optimizer/{name}/{prefix}")


def _leaves(holder: Any, prefix: str) -> list[_StateSlot]:
    found = []
    for key, value in list(holder.items() if isinstance(holder, Mapping) else enumerate(holder)):
        if isinstance(value, Tensor | int | float):
            found.append(_StateSlot(f"{prefix}{key}", holder, key, value))
        elif isinstance(value, Mapping | list | tuple):
            found += _leaves(value, f"{prefix}{key}.")
    return found


def _name_of_lbfgs(model: nn.Module, optimizer: Optimizer) -> str:
    """Where the state of LBFGS is, which it keeps once for all parameters, with the first."""
    first = optimizer.param_groups[0]["params"][0]
    return next(f"optimizer/{name}" for name, parameter in model.named_parameters() if parameter is first)


def _optimizers_in(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """The optimizer, under "", and those with states of their own that it holds as attributes, under `ATTRIBUTE.`."""
    if type(optimizer).__module__.startswith(_OWN):
        return [("", optimizer)]
    found, seen = [("", optimizer)], [optimizer.state]
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and not any(value.state is state for state in seen):
            found.append((f"{name}.", value))
            seen.append(value.state)
    return found


def drop_states(optimizer: Optimizer) -> None:
    """Forget all states, so that the next step makes them as a first one does."""
    for _, each in _optimizers_in(optimizer):
        each.state.clear()


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
    if states or not any(group["params"] for group in optimizer.param_groups) or isinstance(optimizer, LBFGS):
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
    own = {name: value for name, value in vars(inner).items() if name not in ("state", "param_groups")}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = None
    for chunk in _chunks(optimizer, parameters):
        _step_unmoved(optimizer, chunk)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    vars(inner).update(own)  # what an optimizer counts for itself
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
            f"the `step` of the optimizer {type(kernel).__name__} failed with gradients of zero, by which a resume "
            f"makes its states: {failure(error)}; mend it there"
        ) from error
    for parameter, local, values in zip(parameters, locals_, before, strict=True):
        parameter.grad = None
        if local_of(parameter).data_ptr() != local.data_ptr():  # an optimizer gave it other memory, by `.data =`
            parameter.data = local
        local.copy_(values)


def _no_gradient(parameter: Tensor, sparse: bool) -> Tensor:
    """Zeros, or a sparse gradient without an entry."""
    if not sparse:
        return torch.zeros_like(parameter)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, layout=torch.sparse_coo, device=parameter.device)


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


@final
class Snapshot:
    """Copies of parameters, and of all that their optimizer keeps: states, groups, numbers of its own.

    Tensors keep their identity, so whoever holds one finds its old values in it. Gradients are not kept.

    Args:
        optimizer: with those that it holds as attributes.
        parameters: as this rank has them.
        on_host: copies lie in host memory, which waits for the device.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._parameters = [(p, local_of(p), self._copy(local_of(p))) for p in parameters]
        inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer has the optimizer inside
        outer = [optimizer] if isinstance(inner, Optimizer) else []
        self._held = [self._of(each) for each in (*outer, *(o for _, o in _optimizers_in(inner or optimizer)))]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything as it was."""
        for parameter, local, values in self._parameters:
            if local_of(parameter).data_ptr() != local.data_ptr():  # an optimizer gave it other memory, by `.data =`
                parameter.data = local
            local.copy_(values)
        for optimizer, own, groups, states in self._held:
            for name in vars(optimizer).keys() - own.keys() - {"state", "param_groups"}:
                delattr(optimizer, name)
            for name, kept in own.items():
                optimizer.__dict__[name] = self._thawed(kept)
            for group, settings in groups:
                for key in group.keys() - settings.keys() - {"params"}:
                    del group[key]
                group.update({key: self._thawed(kept) for key, kept in settings.items()})
            optimizer.state.clear()
            for parameter, values in states.items():
                optimizer.state[parameter] = self._thawed(values)

    def _of(self, optimizer: Optimizer) -> tuple[Optimizer, dict[str, Any], list[Any], dict[Any, Any]]:
        own = {k: self._frozen(v) for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
        groups = [
            (group, {key: self._frozen(value) for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]
        return optimizer, own, groups, {p: self._frozen(values) for p, values in optimizer.state.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to("cpu", copy=True) if self._on_host and tensor.is_cuda else tensor.clone()  # may wait

    def _frozen(self, value: Any) -> Any:
        """The value with copies of what may change in it: (value, copy)."""
        if isinstance(value, Tensor):
            return value, self._copy(local_of(value))
        if isinstance(value, list):
            return value, [self._frozen(each) for each in value]
        if isinstance(value, dict):
            return value, {key: self._frozen(each) for key, each in value.items()}
        return value, None

    def _thawed(self, frozen: Any) -> Any:
        value, copy = frozen
        if isinstance(value, Tensor):
            local_of(value).copy_(copy)
        elif isinstance(value, list):
            value[:] = [self._thawed(each) for each in copy]
        elif isinstance(value, dict):
            kept = {key: self._thawed(each) for key, each in copy.items()}
            value.clear()
            value.update(kept)
        return value
