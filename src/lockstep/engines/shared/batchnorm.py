"""BatchNorm that does not depend on the world size: the running statistics of a step, replayed in order on every rank.

    replay = Replay(recorders(model), world)
    replay.begin()                      # before a step's first forward
    replay.take(weight)                 # after each backward
    replay.finish()                     # after the last: running statistics

Each micro-batch leaves its mean and variance in its layers (see lockstep.transforms.batchnorm). At the end of a step
one gather brings those of all micro-batches to every rank, which folds them in, in the order of the micro-batches. A
single process does the same, so the bits are the same at every world size. What a recomputation writes is what was
there already; empty slots weigh 0; a layer that ran several times within a micro-batch counts once, with its last.
"""

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
        pairs = [layer.bind() for layer in layers]
        self._own = [mean for mean, _ in pairs] + [var for _, var in pairs]
        self._sizes = [vector.numel() for vector in self._own]
        device = self._own[0].device
        widest = max((vector.dtype for vector in self._own), key=lambda dtype: dtype.itemsize)
        self._dtype = torch.promote_types(widest, torch.float32)
        index = torch.arange(len(layers), device=device)
        lengths = torch.tensor(self._sizes[: len(layers)], device=device)
        layer_of = torch.repeat_interleave(index, lengths, output_size=sum(self._sizes[: len(layers)]))
        self._layer_of = layer_of.repeat(2)  # of each element, its layer
        self._momentum = torch.tensor([layer.momentum or 0.0 for layer in layers], dtype=torch.float64, device=device)
        self._average = torch.tensor([layer.momentum is None for layer in layers], device=device)
        self._flags: dict[tuple[float, ...], Tensor] = {}
        self._rows: list[Tensor] = []

    def begin(self) -> None:
        """A step comes: forgets what forwards outside of a step have left."""
        self._rows = []
        self._clear()

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
    def take(self, weight: float) -> None:
        """A micro-batch's backward is over: keeps [means of all layers, variances, which layers count], one vector.

        Args:
            weight: 0 for an empty slot, which counts nothing.
        """
        flags = tuple(float(weight != 0.0 and layer.ran) for layer in self._layers)
        if flags not in self._flags:
            self._flags[flags] = torch.tensor(flags, dtype=self._dtype, device=self._own[0].device)
        self._rows.append(torch.cat([vector.to(self._dtype) for vector in self._own] + [self._flags[flags]]))
        self._clear()

    def _clear(self) -> None:
        torch._foreach_zero_(self._own)  # the kernel multiplies what is there by 0, which would keep a NaN for ever
        for layer in self._layers:
            layer.ran = False

    def _chunk(self, rows: Tensor) -> None:
        """running += share * (statistic - running), a row after the other; share 0 changes nothing."""
        counts = rows[:, -len(self._layers) :].to(torch.int64)
        tracked = _present([layer.num_batches_tracked for layer in self._layers])
        # In whole numbers: a cumulative sum of floats is not deterministic on CUDA, where exact mode refuses it.
        total = (torch.stack(tracked) + counts.cumsum(0)).double()
        shares = torch.where(self._average, 1.0 / total.clamp(min=1.0), self._momentum) * counts.double()
        spread = shares.to(self._dtype)[:, self._layer_of]
        running = _present([layer.running_mean for layer in self._layers])
        running += _present([layer.running_var for layer in self._layers])
        flat = torch.cat([vector.to(self._dtype) for vector in running])
        for row, share in zip(rows[:, : -len(self._layers)].unbind(), spread.unbind(), strict=True):
            flat = torch.lerp(flat, row, share)
        torch._foreach_copy_(running, list(flat.split_with_sizes(self._sizes)))
        torch._foreach_add_(tracked, list(counts.sum(0).unbind()))


def _present(tensors: list[Tensor | None]) -> list[Tensor]:
    """All of them: only layers that track statistics record."""
    return [tensor for tensor in tensors if tensor is not None]
