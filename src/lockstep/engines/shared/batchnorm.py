"""BatchNorm that does not depend on the world size: the running statistics of a step, replayed in order on every rank.

    replay = Replay(recorders(model), world)
    replay.begin()                      # before a step's first forward
    replay.take(weight)                 # after each micro-batch's forwards, before its backward
    replay.clear()                      # after it: what a recomputation has added is dropped
    replay.finish()                     # after the last: running statistics

The forwards of a micro-batch leave in its layers what they would add to running statistics of zeros, and how many they
were (see lockstep.transforms.batchnorm): k forwards are running * (1 - momentum)^k + that. At the end of a step one
gather brings those of all micro-batches to every rank, which folds them in, in the order of the micro-batches. A single
process does the same, so the bits are the same at every world size. Empty slots count nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.shares import Sharing
from lockstep.distributed.world import World
from lockstep.transforms.batchnorm import Recording

__all__ = ["Replay"]


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
