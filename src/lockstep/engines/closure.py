"""Support optimizers with a closure, and rehearse a step.

- `Closure`, `takes_closure`, `step_of`: an optimizer that evaluates the loss several times in a step.
- `uniform_groups`: groups of parameters on one mesh each, or of whole ones.
- `pack`, `unpack`: the state of LBFGS as named tensors.
- `Alone`, `blame_optimizer`, `check_dense`: for the engines' `rehearse`: a loss computed on one rank, and errors that
  name the user's line.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lockstep.errors import ConfigError, DataError, LockstepError, error_line
from lockstep.tensors import is_dtensor, local_of

__all__ = [
    "Alone",
    "Closure",
    "blame_optimizer",
    "check_dense",
    "pack",
    "step_of",
    "takes_closure",
    "uniform_groups",
    "unpack",
]


_OWN_PACKAGES = ("torch.optim", "lockstep.optim")  # packages whose optimizers evaluate the loss once, except LBFGS


@final
class Closure:
    """Compute the loss and its gradient at the current parameters.

    Args:
        parameters: those of the optimizer.
        first: returns the loss of the pass whose gradients are in `.grad`.
        repeat: repeats the pass, fills `.grad` and returns the loss.
        suspicious: compare the parameters' norms too: torch's version counter misses writes through `.data`. Waits for
            the device.

    Attributes:
        repeated: how many times the pass was repeated.
        silent: the parameters had changed before the first call without the version counter showing it.
    """

    def __init__(
        self, parameters: Sequence[Tensor], first: Callable[[], Tensor], repeat: Callable[[], Tensor], suspicious: bool
    ) -> None:
        self._parameters = parameters
        self._first = first
        self._repeat = repeat
        self._versions_before = _versions(parameters)
        self._norms = _norms(parameters) if suspicious else None
        self._called = False
        self.repeated = 0
        self.silent = False

    def __call__(self) -> Tensor:
        """Return the loss, 0-dim, without a graph. Collective."""
        called = self._called
        self._called = True
        with torch.enable_grad():
            if not called and not self._is_changed():
                return self._first()
            self.repeated += 1
            return self._repeat()

    def _is_changed(self) -> bool:
        if any(p.grad is not None for p in self._parameters) and self._versions_before == _versions(self._parameters):
            self.silent = self._norms is not None and not torch.equal(self._norms, _norms(self._parameters))
            return self.silent
        return True


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer may evaluate the loss in its step.

    True for LBFGS, and for optimizers outside torch and lockstep whose `step` accepts a closure.
    """
    step = inspect.unwrap(type(optimizer).step)
    if (step.__module__ or "").startswith(_OWN_PACKAGES):
        return isinstance(optimizer, LBFGS)
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return any(parameter.name == "closure" or parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)


@contextmanager
def uniform_groups(optimizer: Optimizer) -> Iterator[None]:
    """Split each group by the meshes of its parameters; whole ones have none.

    torch's foreach and fused kernels take no list with several.

    Afterwards the groups are the same objects as before, with what the optimizer wrote into them.
    """
    groups = optimizer.param_groups
    split_groups = list[dict[str, Any]]()
    first_indices = []
    for group in groups:
        by_mesh: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(parameter.device_mesh if is_dtensor(parameter) else None, []).append(parameter)
        first_indices.append(len(split_groups))
        if len(by_mesh) > 1:
            split_groups += [{**group, "params": parameters} for parameters in by_mesh.values()]
        else:
            split_groups.append(group)
    if len(split_groups) == len(groups):
        yield
        return
    optimizer.param_groups = split_groups
    try:
        yield
    finally:
        # The optimizer may have written settings such as a step count into the copies.
        optimizer.param_groups = groups
        for group, index in zip(groups, first_indices, strict=True):
            group.update({key: value for key, value in split_groups[index].items() if key != "params"})


def step_of(optimizer: Optimizer, closure: Callable[[], Tensor] | None) -> None:
    """Take the optimizer's step, with or without a closure."""
    step: Any = optimizer.step
    if closure is None:
        with uniform_groups(optimizer):
            step()
    elif "closure" in inspect.signature(inspect.unwrap(type(optimizer).step)).parameters:
        step(closure=closure)
    else:
        # torch's version counter is private: it is the only cheap way to see a write.
        step(closure)


def _versions(parameters: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Return each parameter's version counter, its gradient's id and that gradient's version counter."""
    return [(p._version, id(p.grad), -1 if p.grad is None else p.grad._version) for p in parameters]


@torch.no_grad()
def _norms(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norm of each parameter, as a cheap fingerprint of its values."""
    if parameters:
        # Private to torch: norms of all parameters in one kernel.
        norms = torch._foreach_norm([local_of(parameter) for parameter in parameters])
    else:
        norms = ()
    if norms:
        return torch.stack([norm.double() for norm in norms])
    return torch.zeros(0)


_NUMBERS = ("func_evals", "n_iter", "t", "H_diag", "prev_loss")
_VECTORS = ("d", "prev_flat_grad")
_HISTORIES = ("old_dirs", "old_stps", "ro")


def pack(optimizer: LBFGS) -> dict[str, Tensor]:
    """Return the state of LBFGS by name, zeros where it has none.

    Histories have `history_size` rows; the first `pairs` of them are valid.
    """
    group = optimizer.param_groups[0]
    parameters: list[Tensor] = group["params"]
    state: dict[str, Any] = optimizer.state.get(parameters[0], {})
    length = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
    like = state.get("prev_flat_grad")
    if like is None:
        like = parameters[0].new_zeros(0, dtype=_dtype(parameters))
    tensors = {key: torch.tensor(float(state.get(key) or 0.0), dtype=torch.float64) for key in _NUMBERS}
    tensors["pairs"] = torch.tensor(float(len(state.get("ro") or ())), dtype=torch.float64)
    for key in _VECTORS:
        tensors[key] = like.new_zeros(length) if state.get(key) is None else state[key]
    for key in _HISTORIES:
        shape = (group["history_size"], *(() if key == "ro" else (length,)))
        tensors[key] = like.new_zeros(shape)
        for row, value in enumerate(state.get(key) or ()):
            tensors[key][row] = value
    return tensors


def unpack(optimizer: LBFGS, tensors: Mapping[str, Tensor]) -> None:
    """Load a state returned by `pack`."""
    parameters = optimizer.param_groups[0]["params"]
    state = optimizer.state[parameters[0]]
    state.clear()
    # Reads from the device, at a load only.
    state |= {key: int(tensors[key].item()) for key in ("func_evals", "n_iter")}
    if not state["n_iter"]:
        return
    # As above.
    state |= {key: tensors[key].item() for key in ("t", "H_diag", "prev_loss")}
    state |= {key: tensors[key].clone() for key in _VECTORS}
    # As above.
    pairs = int(tensors["pairs"].item())
    state |= {key: [row.clone() for row in tensors[key][:pairs].unbind()] for key in _HISTORIES}


def _dtype(parameters: list[Tensor]) -> torch.dtype:
    """Return the dtype of the flat vector of all gradients."""
    dtype = torch.zeros(0, dtype=parameters[0].dtype).abs().dtype
    for parameter in parameters[1:]:
        dtype = torch.promote_types(dtype, torch.zeros(0, dtype=parameter.dtype).abs().dtype)
    return dtype


@final
class Alone:
    """The loss of a step of one micro-batch on this rank; implements `lockstep.engines.base.Evaluate`.

    Args:
        compute: returns the loss, with a graph.
        backward: adds its gradient to `.grad`, without an exchange.
    """

    def __init__(self, compute: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> None:
        self._compute = compute
        self._backward = backward
        self._loss = torch.zeros(())

    def loss(self) -> Tensor:
        return self._loss

    def again(self) -> Tensor:
        with torch.enable_grad():
            loss = self._compute()
            with _blame("the backward of the task's `loss`"):
                self._backward(loss)
        self._loss = loss.detach()
        return self._loss


@contextmanager
def blame_optimizer(optimizer: Optimizer) -> Iterator[None]:
    """Reduce an error of a rehearsal's optimizer step to one line."""
    with _blame(f"the `step` of the optimizer {type(optimizer).__name__}"):
        yield


def check_dense(model: nn.Module, why: str) -> None:
    """Raise ConfigError for a sparse gradient, which the engine does not support.

    Args:
        why: the flag that rules them out; "": none does.
    """
    for name, parameter in model.named_parameters() if why else ():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of {name} is sparse, and {why} needs dense ones: build the embedding with sparse=False, "
                "or use --engine single without --exact"
            )


@contextmanager
def _blame(subject: str) -> Iterator[None]:
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise DataError(
            f"{subject} failed in the rehearsal before step 1: {error_line(error)}; fix it there"
        ) from error
