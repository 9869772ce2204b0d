"""A micro-batch's loss and gradient, seen while they are computed, and computed again, so that nothing is left of it.

again = Again(model, task, loss, seed, device)
again.begin()                           # before a step's first forward
with again.watched(batch) as seen:      # around forward and backward of the engine
    loss = seen(loss_of(model, batch))
    engine.backward(loss, weight)
told = again.told()[batch.index]        # what another rank needs to compute it too, and what it should find
again.bits(step, batch, told.root)      # here, from the same state
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.errors import ConfigError, raised_in
from lockstep.guards.digests import Digests, of_batch, of_digests
from lockstep.task import Task

__all__ = ["LOSS", "Again", "Told", "named"]

LOSS = ""  # the loss's name among those of the parameters
_SILENT = nn.modules.batchnorm._NormBase  # their statistics do not decide what they do in training


class Told(NamedTuple):
    """What a rank says of a micro-batch that it computed, in plain values.

    Attributes:
        root: what its backward began with; NaN where the loss was not finite.
        data, state: digests of the batch, and of the buffers and the task's own tensors, before the forward.
        names: digest of the names of the parameters that had a gradient.
        bits: digest of loss and gradients.
    """

    root: float
    data: str
    state: str
    names: str
    bits: str


class _Watched(NamedTuple):
    """The same, on a device not yet read."""

    data: str
    state: Digests
    bits: Digests
    roots: list[Tensor]


class Again:
    """Sees micro-batches of this rank, and computes those of any rank.

    Args:
        model: the plain module: its forward takes no other rank.
        loss: the loss of a micro-batch, a sum over its items.
        seed: as in the loop, so that dropout falls as it did.
        kernels: as in the loop.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        loss: Callable[[nn.Module, MicroBatch], Tensor],
        seed: Callable[[int, int], None],
        device: torch.device,
        kernels: Callable[[int, int], AbstractContextManager[Any]] = lambda step, index: nullcontext(),
    ) -> None:
        self._model, self._task, self._loss, self._seed, self._device = model, task, loss, seed, device
        self._kernels = kernels
        self._trained = _trained(model)
        self._watched: dict[int, _Watched] = {}
        self._begun, self._state = _Moment(model, task), Digests()

    @property
    def names(self) -> list[str]:
        """The loss's, then those of the trained parameters in the model's order."""
        return [LOSS, *self._trained]

    def begin(self) -> None:
        """A step begins whose micro-batches are computed again: keeps what its forwards may move."""
        self._watched = {}
        self._trained = _trained(self._model)  # which may have changed since the last step
        self._begun, self._state = _Moment(self._model, self._task), _state(self._model, self._task)

    @contextmanager
    def watched(self, batch: MicroBatch) -> Iterator[Callable[[Tensor], Tensor]]:
        """Around forward and backward; what it gives takes the loss between the two, and returns it."""
        found = _Watched(of_batch(batch.held), _state(self._model, self._task), Digests(), [])
        handles = []

        def seen(loss: Tensor) -> Tensor:
            found.bits.add(LOSS, loss)
            handles.append(loss.register_hook(found.roots.append))  # type: ignore[no-untyped-call]
            for name, parameter in self._trained.items():  # each sees its gradient before it is added to the others'
                handles.append(parameter.register_hook(partial(found.bits.add, name)))  # type: ignore[no-untyped-call]
            return loss

        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()
        self._watched[batch.index] = found

    def told(self) -> dict[int, Told]:
        """What there is to say of each micro-batch that was watched since `begin`."""
        return {index: _read(found) for index, found in self._watched.items()}

    def own(self, index: int) -> dict[str, str]:
        """The digests of a micro-batch that was watched; {} where it was not."""
        return self._watched[index].bits.read() if index in self._watched else {}

    def moved(self) -> bool:
        """Whether forwards have moved, since `begin`, what may decide what a forward does."""
        return _state(self._model, self._task).read() != self._state.read()  # waits for the device

    def unlike(self, batch: MicroBatch, told: Told) -> str:
        """What keeps this rank from computing the same: a word or two; "" where nothing does."""
        if of_batch(batch.held) != told.data:
            return "data"
        return "" if of_digests(self._state.read()) == told.state else "buffers"  # waits for the device

    def bits(self, step: int, batch: MicroBatch, told: Told) -> dict[str, str]:
        """The digests of loss and gradients by name, computed from what was there at the step's begin.

        Gradients, buffers, the task's own tensors and the generators are then as they were.

        Raises:
            ConfigError: the model's gradient can be computed in a whole backward alone.
        """
        now, found = _Moment(self._model, self._task), Digests()
        with _drawn_as_before(self._device):
            try:
                self._begun.put_back()
                self._seed(step, batch.index)
                with self._kernels(step, batch.index):
                    loss = self._loss(self._model, batch)
                found.add(LOSS, loss)
                for name, gradient in zip(self._trained, self._gradients(loss, told.root), strict=True):
                    if gradient is not None:
                        found.add(name, gradient)
            finally:
                now.put_back()
        bits = found.read()  # waits for the device
        if _names(bits) != told.names:
            raise ConfigError(_REENTRANT)
        return bits

    def _gradients(self, loss: Tensor, root: float) -> tuple[Tensor | None, ...]:
        """Beside `.grad`, and beside whatever an engine has hung up where gradients are added."""
        parameters = list(self._trained.values())
        try:
            return torch.autograd.grad(loss, parameters, torch.full_like(loss, root).detach(), allow_unused=True)
        except RuntimeError as error:
            if raised_in(error) != _REFUSES:
                raise
            raise ConfigError(_REENTRANT) from error


_REFUSES = "torch.utils.checkpoint:backward"  # of use_reentrant=True; what is computed again there has deeper frames
_REENTRANT = (
    "--guards.audit: computed again, other parameters have a gradient: give the model's checkpoint() of activations "
    "use_reentrant=False, or leave --guards.audit out"
)


def _read(found: _Watched) -> Told:
    """Waits for the device."""
    bits = found.bits.read()
    return Told(float(found.roots[0]), found.data, of_digests(found.state.read()), _names(bits), of_digests(bits))


def _names(bits: dict[str, str]) -> str:
    return of_digests(dict.fromkeys(bits, ""))


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name, the module that has it, its name there, the buffer)."""
    for prefix, owner in model.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                yield f"{prefix}.{key}".lstrip("."), owner, key, buffer


def _state(model: nn.Module, task: Task) -> Digests:
    """Of all that may decide what a forward does, besides parameters."""
    found = Digests()
    for name, owner, _, buffer in _buffers(model):
        if not isinstance(owner, _SILENT):
            found.add(name, buffer)
    for name, tensor in task.state_dict().items():
        found.add(f"task/{name}", tensor)
    return found


class _Moment:
    """The values of a model's buffers and of a task's own tensors at one moment."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._task = task
        self._buffers = [(owner, key, buffer, buffer.detach().clone()) for _, owner, key, buffer in _buffers(model)]
        self._own = [(tensor, tensor.detach().clone()) for tensor in task.state_dict().values()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Gives all of it its values again; what has them already is not written, nor counted as written."""
        for owner, key, tensor, value in self._buffers:
            owner._buffers[key] = tensor
            _give(tensor, value)
        for tensor, value in self._own:
            _give(tensor, value)
        if self._own:
            self._task.load_state_dict(self._task.state_dict())


def _give(tensor: Tensor, value: Tensor) -> None:
    if not torch.equal(tensor, value):  # waits for the device
        tensor.copy_(value)


@contextmanager
def _drawn_as_before(device: torch.device) -> Iterator[None]:
    """Afterwards all generators go on where they were."""
    numpy, python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    np.random.set_state(numpy)
    random.setstate(python)


def named(names: list[str]) -> str:
    """`the loss and the gradients of first.weight and 3 more parameters`; "" for none."""
    parameters = [name for name in names if name != LOSS]
    more = f" and {len(parameters) - 1} more parameters" if len(parameters) > 1 else ""
    gradient = f"the gradient{'s' * (len(parameters) > 1)} of {parameters[0]}{more}" if parameters else ""
    return " and ".join(part for part in ("the loss" * (LOSS in names), gradient) if part)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
