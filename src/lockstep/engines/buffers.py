"""Make a model's buffers part of the step: a skipped update leaves them unchanged.

    engine = with_buffers(engine, model, world, request)        # unchanged for a model without buffers

Where only the device knows whether an update was applied, the device decides in the same step, so no later read has to
correct anything. BatchNorm's running statistics are replayed over all ranks' micro-batches (see batchnorm.py). Other
buffers that a forward writes (a moving average, a codebook, spectral norm's vectors), and tensors of the task's
`state_dict()` that `loss` writes (a queue), get rank 0's values on every rank after each step, as buffers do under
DistributedDataParallel (see moving.py). State by sample or stream is merged (see sample_state.py).
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from torch import Tensor, nn

from lockstep.distributed import collectives
from lockstep.distributed.balance import ShareSchedule
from lockstep.distributed.world import World
from lockstep.engines.base import Engine, Evaluate, ForwardingEngine, StepResult
from lockstep.engines.moving import Moving
from lockstep.engines.request import EngineRequest, Own
from lockstep.errors import ConfigError
from lockstep.transforms.batchnorm import Recording, Synchronised, recorders

__all__ = [
    "Buffered",
    "Replay",
    "restore_tensors",
    "with_buffers",
]


@final
class Replay:
    """Collect BatchNorm statistics of this rank's micro-batches, and fold in those of all ranks.

    Args:
        layers: in the same order on every rank; bound to this object from now on.
        world: its ranks take part in every `finish`.
        sharing: the number of micro-batches of each rank; None: the same on all.
    """

    def __init__(self, layers: list[Recording], world: World, sharing: ShareSchedule | None = None) -> None:
        self._layers = layers
        self._world = world
        self._sharing = sharing
        bound = [layer.bind() for layer in layers]
        self._moments = [mean for mean, _, _ in bound] + [var for _, var, _ in bound]
        self._runs = [runs for _, _, runs in bound]
        self._sizes = [vector.numel() for vector in self._moments]
        device = self._moments[0].device
        # At least float32: in half precision small updates of the statistics would vanish.
        widest = max((vector.dtype for vector in self._moments), key=lambda dtype: dtype.itemsize)
        self._dtype = torch.promote_types(widest, torch.float32)
        index = torch.arange(len(layers), device=device)
        lengths = torch.tensor(self._sizes[: len(layers)], device=device)
        layer_of = torch.repeat_interleave(index, lengths, output_size=sum(self._sizes[: len(layers)]))
        # The layer of each element, for means and variances.
        self._layer_of = layer_of.repeat(2)
        self._decay = torch.tensor([1.0 - (layer.share or 0.0) for layer in layers], dtype=torch.float64, device=device)
        self._average = torch.tensor([layer.share is None for layer in layers], device=device)
        self._rows: list[Tensor] = []
        # Synchronised layers have the statistics of all ranks: there is nothing to gather, and an empty slot counts
        # where others have samples.
        self._is_shared = world.size > 1 and isinstance(layers[0], Synchronised)

    def begin(self) -> None:
        """Begin a step: discard statistics left by forwards outside a step."""
        self._rows = []
        self.clear()

    @torch.no_grad()
    def finish(self) -> None:
        """Update the running statistics after the step's last micro-batch.

        At most one gather; does not wait.
        """
        rows = torch.stack(self._rows)
        most = max(self._sharing.now.slots) if self._sharing else 0
        # All ranks send as many rows. In rows of zeros no layer counts.
        if len(rows) < most:
            rows = torch.cat([rows, rows.new_zeros(most - len(rows), rows.shape[1])])
        if self._world.size > 1 and not self._is_shared:
            rows_by_rank = [torch.empty_like(rows) for _ in range(self._world.size)]
            # All ranks, once a step: the statistics of every micro-batch, in their order.
            collectives.all_gather(rows_by_rank, rows, group=self._world.group)  # collective
            rows = torch.cat(rows_by_rank)
        self._fold_in(rows)
        # A loop that does not call `accumulate` never calls `begin` either.
        self._rows = []

    @torch.no_grad()
    def take(self, weight: float, row: Tensor | None = None) -> None:
        """Store the statistics of a micro-batch after its forwards.

        Args:
            weight: 0 for an empty slot, which counts nothing of its own.
            row: the result of `row` after the forwards; None: computed now.
        """
        row = self.row() if row is None else row
        self._rows.append(row if weight or self._is_shared else torch.zeros_like(row))

    def clear(self) -> None:
        """Discard the statistics of forwards since the last `clear`."""
        # Private to torch: zeroes all vectors in one kernel. Also below: one kernel for all layers.
        torch._foreach_zero_(self._moments)
        torch._foreach_zero_(self._runs)

    def row(self) -> Tensor:
        """Return the statistics since the last `clear`.

        One vector, a copy: [means of all layers, variances, runs of each layer].
        """
        return torch.cat([vector.to(self._dtype) for vector in [*self._moments, torch.stack(self._runs)]])

    @torch.no_grad()
    def put(self, row: Tensor) -> None:
        """Restore into the layers a vector returned by `row`."""
        vectors = row.split_with_sizes([*self._sizes, *[1] * len(self._runs)])
        # Private to torch: copies all vectors in one kernel.
        torch._foreach_copy_(self._moments, list(vectors[: len(self._moments)]))
        torch._foreach_copy_(self._runs, [run_count.reshape(()) for run_count in vectors[len(self._moments) :]])

    @contextlib.contextmanager
    def discard_statistics(self) -> Iterator[None]:
        """Discard the statistics of forwards in this context, which recompute what was counted already."""
        row = self.row()
        yield
        self.put(row)

    def _fold_in(self, rows: Tensor) -> None:
        """Fold in the statistics, row by row: running = running * decay + added.

        Without a forward of a layer its decay is 1 and nothing is added.
        """
        runs = rows[:, -len(self._layers) :].to(torch.int64)
        tracked = _not_none([layer.num_batches_tracked for layer in self._layers])
        # Count in integers: a cumulative sum of floats is not deterministic on CUDA, and exact mode refuses it there.
        total = (torch.stack(tracked) + runs.cumsum(0)).double().clamp(min=1.0)
        decay = torch.where(self._average, 1.0 - runs / total, self._decay**runs).to(self._dtype)[:, self._layer_of]
        scale = torch.where(self._average, 1.0 / total, 1.0).to(self._dtype)[:, self._layer_of]
        running = _not_none([layer.running_mean for layer in self._layers])
        running += _not_none([layer.running_var for layer in self._layers])
        flat = torch.cat([vector.to(self._dtype) for vector in running])
        added = rows[:, : -len(self._layers)] * scale
        # A loop, not one product: the additions must have the order of the micro-batches.
        for row, share in zip(added.unbind(), decay.unbind(), strict=True):
            flat = flat * share + row
        # Private to torch: writes all layers in one kernel.
        torch._foreach_copy_(running, list(flat.split_with_sizes(self._sizes)))
        torch._foreach_add_(tracked, list(runs.sum(0).unbind()))


def _not_none(tensors: list[Tensor | None]) -> list[Tensor]:
    """Filter out None for the type checker: only layers that track statistics record."""
    return [tensor for tensor in tensors if tensor is not None]


def with_buffers(engine: Engine, model: nn.Module, world: World, request: EngineRequest) -> Engine:
    """Wrap the engine so that its steps include the buffers of `model` (the plain module).

    In exact mode a forward must not write buffers, since their values then depend on which rank computes what. Else
    they get rank 0's values on all ranks after each step, with the option `broadcast_buffers`. The task's own tensors
    are treated the same.
    """
    moving = Moving(model, request.own, world, bool(request.exact), request.options.broadcast_buffers)
    if not len(moving):
        return engine
    layers = recorders(model)
    return Buffered(engine, Replay(layers, world, request.sharing) if layers else None, moving)


@final
class Buffered(ForwardingEngine):
    """An engine whose skipped steps leave the model's buffers unchanged."""

    def __init__(self, engine: Engine, replay: Replay | None, buffers: Moving) -> None:
        super().__init__(engine)
        self._replay = replay
        self._buffers = buffers
        self._in_step = False  # from a step's first micro-batch to its end
        self._counts = True  # the current pass may change buffers
        # Whether the current micro-batch is this rank's last in the step.
        self._is_last = True
        # A loop that does not call `accumulate` begins its first step here.
        self._buffers.begin()

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        if not self._in_step:
            self._in_step = True
            self._buffers.begin()
            if self._replay:
                self._replay.begin()
        self._buffers.begin_slot()
        self._counts = counts
        self._is_last = last
        inner = self.inner.accumulate(last, counts)
        if counts:
            return inner
        return self._discard(inner)

    @contextmanager
    def _discard(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        """Run a forward without effect: restore buffers and discard statistics."""
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
            self.inner.backward(loss, weight)
            return
        # Take the statistics before the backward, which may recompute the forward.
        if self._replay:
            self._replay.take(weight)
        self.inner.backward(loss, weight)
        if weight == 0.0:
            self._buffers.undo_slot()
        else:
            self._buffers.end_slot(self._is_last)
        if self._replay:
            self._replay.clear()

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        in_step = self._in_step
        # All ranks, in the first two steps: which buffers do the forwards write?
        self._buffers.check()
        if self._replay:
            self._replay.finish()  # collective
        # All ranks. Before the update: if a rank fails, either all ranks have updated or none has.
        self._buffers.share()  # collective
        result = self.inner.step(factor, limit, momentum, evaluate)
        self._in_step = False
        self._buffers.end(result, limit)
        # In a loop that does not call `accumulate` the next step begins here.
        if not in_step:
            self._buffers.begin()
        return result

    def undo_step(self) -> None:
        """Restore what the forwards of an unfinished step changed."""
        super().undo_step()
        if self._in_step:
            self._in_step = False
            self._buffers.put_back()

    def kinds(self) -> dict[str, str]:
        return super().kinds() | self._buffers.kinds()


@contextmanager
def restore_tensors(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore these tensors (a model's buffers, a task's own) at the end of the context."""
    copies = []
    for tensor in tensors:
        if not tensor.is_meta:
            copies.append((tensor, tensor.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in copies:
                tensor.copy_(before)


@contextmanager
def as_before(model: nn.Module, own: Own) -> Iterator[None]:
    """Restore a model's buffers and a task's tensors, by value and shape, after the context.

    Args:
        own: returns the task's tensors by name.

    Raises:
        ConfigError: a tensor of the task was replaced by one of another shape, which cannot be restored.
    """
    module_buffers = []
    for module in model.modules():
        module_buffers.append((module._buffers, dict(module._buffers)))
    buffers = {id(b): b for _, entries in module_buffers for b in entries.values() if b is not None and not b.is_meta}
    copies = []
    for tensor in (*buffers.values(), *own().values()):
        if not tensor.is_meta:
            copies.append((tensor, tensor.detach().clone()))
    names = {}
    for name, tensor in own().items():
        if not tensor.is_meta:
            names[name] = (tensor, tensor.detach().clone())
    try:
        yield
    finally:
        # First put the tensor objects back, since a forward may have replaced them; then their values.
        for present, entries in module_buffers:
            present.clear()
            present.update(entries)
        with torch.no_grad():
            for tensor, before in copies:
                _restore(tensor, before)
    with torch.no_grad():
        _restore_replaced(names, own())


def _restore(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape == before.shape and tensor.dtype is before.dtype:
        tensor.copy_(before)
    else:
        tensor.data = before


def _restore_replaced(names: Mapping[str, tuple[Tensor, Tensor]], present: Mapping[str, Tensor]) -> None:
    """Copy the former values into a tensor that replaced another under the same name."""
    for name, (tensor, before) in names.items():
        current = present.get(name)
        if current is None or current is tensor:
            continue
        if current.shape != before.shape:
            raise ConfigError(
                f"task/{name}, which `loss` writes, changed its shape from {list(before.shape)} to "
                f"{list(current.shape)}: allocate it at full size, and write into it in place"
            )
        current.copy_(before)
