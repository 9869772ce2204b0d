"""What a forward moves besides gradients: the model's buffers, as a part of the step.

    engine = with_buffers(engine, model, world, exact=False)        itself for a model without buffers

A step that is not applied leaves the buffers as they were before it. Where the device alone knows whether it was, the
device decides, in the same step: nothing that is read later has to be put right. BatchNorm's running statistics are
replayed (see batchnorm.py); other buffers that a forward writes (a moving average, a codebook, the vectors of spectral
norm), and tensors of the task's `state_dict()` that `loss` writes (a queue), are those of rank 0 on every rank after
each step, as buffers are under DistributedDataParallel (see moving.py).
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.balance import Sharing
from lockstep.distributed.world import World
from lockstep.engines.base import Engine, Evaluate, StepResult
from lockstep.engines.moving import Moving, Own
from lockstep.errors import ConfigError
from lockstep.transforms.batchnorm import Recording, recorders

__all__ = [
    "Buffered",
    "Replay",
    "as_before",
    "unmoved",
    "with_buffers",
]


@final
class Replay:
    """Collects the statistics of this rank's micro-batches, and folds in those of all ranks.

    Args:
        layers: in the same order on every rank; bound from now on.
        world: its ranks take part in every `finish`.
        sharing: how many micro-batches each rank has; None: all have as many.
    """

    def __init__(self, layers: list[Recording], world: World, sharing: Sharing | None = None) -> None:
        self._layers, self._world, self._sharing = layers, world, sharing
        bound = [layer.bind() for layer in layers]
        self._own = [mean for mean, _, _ in bound] + [var for _, var, _ in bound]
        self._runs = [runs for _, _, runs in bound]
        self._sizes = [vector.numel() for vector in self._own]
        device = self._own[0].device
        widest = max((vector.dtype for vector in self._own), key=lambda dtype: dtype.itemsize)
        self._dtype = torch.promote_types(widest, torch.float32)
        index = torch.arange(len(layers), device=device)
        lengths = torch.tensor(self._sizes[: len(layers)], device=device)
        layer_of = torch.repeat_interleave(index, lengths, output_size=sum(self._sizes[: len(layers)]))
        self._layer_of = layer_of.repeat(2)  # of each element, its layer
        self._kept = torch.tensor([1.0 - (layer.share or 0.0) for layer in layers], dtype=torch.float64, device=device)
        self._average = torch.tensor([layer.share is None for layer in layers], device=device)
        self._rows: list[Tensor] = []

    def begin(self) -> None:
        """A step comes: forgets what forwards outside of a step have left."""
        self._rows = []
        self.clear()

    @torch.no_grad()
    def finish(self) -> None:
        """The step's last micro-batch is over: updates the running statistics. One gather; does not wait."""
        rows = torch.stack(self._rows)
        most = max(self._sharing.now.slots) if self._sharing else 0
        if len(rows) < most:  # rows of zeros say that no layer counts
            rows = torch.cat([rows, rows.new_zeros(most - len(rows), rows.shape[1])])
        if self._world.size > 1:
            parts = [torch.empty_like(rows) for _ in range(self._world.size)]
            dist.all_gather(parts, rows)  # collective
            rows = torch.cat(parts)
        self._chunk(rows)
        self._rows = []  # of a loop that does without `accumulate`, whose next step is not begun

    @torch.no_grad()
    def take(self, weight: float, row: Tensor | None = None) -> None:
        """The forwards of a micro-batch are over: keeps their row.

        Args:
            weight: 0 for an empty slot, which counts nothing.
            row: what `row` gave after them; None: it is asked for now.
        """
        row = self.row() if row is None else row
        self._rows.append(row if weight else torch.zeros_like(row))

    def clear(self) -> None:
        """Forgets what the forwards since the last `clear` have left."""
        torch._foreach_zero_(self._own)
        torch._foreach_zero_(self._runs)

    def row(self) -> Tensor:
        """[means of all layers, variances, how often each ran] since the last `clear`; a copy, one vector."""
        return torch.cat([vector.to(self._dtype) for vector in [*self._own, torch.stack(self._runs)]])

    @torch.no_grad()
    def put(self, row: Tensor) -> None:
        """Gives the layers what `row` gave."""
        found = row.split_with_sizes([*self._sizes, *[1] * len(self._runs)])
        torch._foreach_copy_(self._own, list(found[: len(self._own)]))
        torch._foreach_copy_(self._runs, [each.reshape(()) for each in found[len(self._own) :]])

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        """What forwards within it leave is dropped: they compute again what has been counted."""
        row = self.row()
        yield
        self.put(row)

    def _chunk(self, rows: Tensor) -> None:
        """running = running * kept + added, a row after the other; where no forward was, kept is 1 and added 0."""
        runs = rows[:, -len(self._layers) :].to(torch.int64)
        tracked = _present([layer.num_batches_tracked for layer in self._layers])
        # In whole numbers: a cumulative sum of floats is not deterministic on CUDA, where exact mode refuses it.
        total = (torch.stack(tracked) + runs.cumsum(0)).double().clamp(min=1.0)
        kept = torch.where(self._average, 1.0 - runs / total, self._kept**runs).to(self._dtype)[:, self._layer_of]
        scale = torch.where(self._average, 1.0 / total, 1.0).to(self._dtype)[:, self._layer_of]
        running = _present([layer.running_mean for layer in self._layers])
        running += _present([layer.running_var for layer in self._layers])
        flat = torch.cat([vector.to(self._dtype) for vector in running])
        added = rows[:, : -len(self._layers)] * scale
        for row, share in zip(added.unbind(), kept.unbind(), strict=True):
            flat = flat * share + row
        torch._foreach_copy_(running, list(flat.split_with_sizes(self._sizes)))
        torch._foreach_add_(tracked, list(runs.sum(0).unbind()))


def _present(tensors: list[Tensor | None]) -> list[Tensor]:
    """All of them: only layers that track statistics record."""
    return [tensor for tensor in tensors if tensor is not None]


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
