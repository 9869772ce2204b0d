"""What a forward moves besides gradients: the model's buffers, as a part of the step.

    engine = with_buffers(engine, model, world, exact=False)        itself for a model without buffers

A step that is not applied leaves the buffers as they were before it. Where the device alone knows whether it was, the
device decides, in the same step: nothing that is read later has to be put right. BatchNorm's running statistics are
replayed (see batchnorm.py); other buffers that a forward writes (a moving average, a codebook, the vectors of spectral
norm), and tensors of the task's `state_dict()` that `loss` writes (a queue), are those of rank 0 on every rank after
each step, as buffers are under DistributedDataParallel (see moving.py).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from torch import Tensor, nn

from lockstep.distributed.shares import Sharing
from lockstep.distributed.world import World
from lockstep.engines.base import Engine, Evaluate, StepResult
from lockstep.engines.shared.batchnorm import Replay
from lockstep.engines.shared.moving import Moving, Own
from lockstep.errors import ConfigError
from lockstep.transforms.batchnorm import recorders

__all__ = ["Buffered", "as_before", "unmoved", "with_buffers"]


def with_buffers(
    engine: Engine,
    model: nn.Module,
    world: World,
    *,
    exact: bool,
    shared: bool = True,
    sharing: Sharing | None = None,
    own: Own | None = None,
) -> Engine:
    """The engine, its steps taking the buffers of `model` (the plain module) along.

    Args:
        exact: refuse a forward that writes buffers whose values then depend on who computed what.
        shared: what forwards write is rank 0's on all ranks after each step.
        sharing: how many forwards each rank makes; None: all make as many.
        own: gives the task's own tensors by name, which are treated alike; None: it has none.
    """
    moving = Moving(model, own, world, exact, shared)
    if not len(moving):
        return engine
    layers = recorders(model)
    return Buffered(engine, Replay(layers, world, sharing) if layers else None, moving)


@final
class Buffered:
    """Any engine, whose step is applied to the model's buffers too, or not."""

    def __init__(self, engine: Engine, replay: Replay | None, buffers: Moving) -> None:
        self.model: nn.Module = engine.model
        self._engine, self._replay, self._buffers = engine, replay, buffers
        self._within = False  # between a step's first micro-batch and its end
        self._counts = True  # the present pass moves buffers
        self._buffers.begin()

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        if not self._within:
            self._within = True
            self._buffers.begin()
            if self._replay:
                self._replay.begin()
        self._buffers.begin_slot()
        self._counts = counts
        inner = self._engine.accumulate(last, counts)
        return inner if counts else self._dropping(inner)

    @contextmanager
    def _dropping(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        """Within it a forward moves nothing: buffers are as they were, and no statistics are kept."""
        try:
            with inner:
                yield
        finally:
            self._counts = True
            self._buffers.undo_slot()
            if self._replay:
                self._replay.clear()

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if not self._counts:
            self._engine.backward(loss, weight)
            return
        if self._replay:  # before the backward, which may compute the forward again
            self._replay.take(weight)
        self._engine.backward(loss, weight)
        if weight == 0.0:
            self._buffers.undo_slot()
        if self._replay:
            self._replay.clear()

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        told = self._within
        self._buffers.check()
        if self._replay:
            self._replay.finish()  # collective
        self._buffers.share()  # collective; before the update, so that a rank that is lost leaves it whole or not made
        result = self._engine.step(factor, limit, momentum, evaluate)
        self._within = False
        self._buffers.end(result, limit)
        if not told:  # a loop that does without `accumulate`: the next step begins here
            self._buffers.begin()
        return result

    def undo_step(self) -> None:
        """Puts back what the forwards of a step moved that did not come to its end."""
        if self._within:
            self._within = False
            self._buffers.put_back()

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        self._engine.rehearse(loss)

    def kinds(self) -> dict[str, str]:
        """Name in a state -> what it is, of all that forwards were seen to write."""
        return self._buffers.kinds()

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._engine.load_state_dict(state)


@contextmanager
def unmoved(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within it forwards may move these tensors (a model's buffers, a task's own); afterwards they are as before."""
    held = [(tensor, tensor.clone()) for tensor in tensors if not tensor.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in held:
                tensor.copy_(before)


@contextmanager
def as_before(model: nn.Module, own: Own) -> Iterator[None]:
    """Restore a model's buffers and a task's tensors, by value and shape, whatever forwards within did to them.

    Args:
        own: gives the task's tensors by name.

    Raises:
        ConfigError: a tensor of the task's has another shape, and nobody knows where it is kept.
    """
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = {id(b): b for _, kept in places for b in kept.values() if b is not None and not b.is_meta}
    held = [(tensor, tensor.detach().clone()) for tensor in (*buffers.values(), *own().values()) if not tensor.is_meta]
    names = {name: (tensor, tensor.detach().clone()) for name, tensor in own().items() if not tensor.is_meta}
    try:
        yield
    finally:
        for present, kept in places:
            present.clear()
            present.update(kept)
        with torch.no_grad():
            for tensor, before in held:
                _restore(tensor, before)
    with torch.no_grad():
        _restore_replaced(names, own())


def _restore(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape == before.shape and tensor.dtype is before.dtype:
        tensor.copy_(before)
    else:
        tensor.data = before


def _restore_replaced(names: Mapping[str, tuple[Tensor, Tensor]], present: Mapping[str, Tensor]) -> None:
    """Gives a tensor that stands in the place of another one the values that this one had."""
    for name, (tensor, before) in names.items():
        now = present.get(name)
        if now is None or now is tensor:
            continue
        if now.shape != before.shape:
            raise ConfigError(
                f"task/{name}, which `loss` writes, had the shape {list(before.shape)} and now has {list(now.shape)}: "
                "make it as large as it will be, and write into it in place"
            )
        now.copy_(before)
