"""BatchNorm that does not depend on the world size: the running statistics of a step, replayed in order on every rank.

    engine, batches = replayed(engine, batches, model, world)      both as they were, where no layer records

Each micro-batch leaves its mean and variance in its layers (see lockstep.transforms.batchnorm). At the end of a step
one gather brings those of all micro-batches to every rank, which folds them in, in the order of the micro-batches. A
single process does the same, so the bits are the same at every world size. What a recomputation writes is what was
there already; empty slots weigh 0; a layer that ran several times within a micro-batch counts once, with its last.
"""

from contextlib import AbstractContextManager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.batches import Batches, Feed, MicroBatch
from lockstep.engines.base import Engine, StepResult
from lockstep.transforms.batchnorm import Recording, recorders
from lockstep.world import World

__all__ = ["Replay", "Replayed", "replayed"]


def replayed(engine: Engine, batches: Batches, model: nn.Module, world: World) -> tuple[Engine, Batches]:
    """The engine and the training batches with the replay between them; unchanged for a model that records nothing.

    Args:
        engine: holds `model`, which is on its device.
        batches: the training stream. It tells the replay which slots are empty.
        model: the plain module.
    """
    layers = recorders(model)
    if not layers:
        return engine, batches
    replay = Replay(layers, world)
    return Replayed(engine, replay), _Watched(batches, replay)


class Replay:
    """Collects the statistics of this rank's micro-batches, and folds in those of all ranks.

    Args:
        layers: in the same order on every rank; bound from now on.
        world: its ranks take part in every `finish`, each with as many micro-batches.

    Attributes:
        weights: 1.0 or 0.0 for each of this rank's slots of the present step; [] counts all.
    """

    def __init__(self, layers: list[Recording], world: World) -> None:
        self.weights: list[float] = []
        self._layers, self._world = layers, world
        pairs = [layer.bind() for layer in layers]
        self._own = [mean for mean, _ in pairs] + [var for _, var in pairs]
        self._sizes = [vector.numel() for vector in self._own]
        device = self._own[0].device
        widest = max((vector.dtype for vector in self._own), key=lambda dtype: dtype.itemsize)
        self._dtype = torch.promote_types(widest, torch.float32)
        index = torch.arange(len(layers), device=device)
        lengths = torch.tensor(self._sizes[: len(layers)], device=device)
        self._layer_of = torch.repeat_interleave(index, lengths).repeat(2)  # of each element, its layer
        self._momentum = torch.tensor([layer.momentum or 0.0 for layer in layers], dtype=torch.float64, device=device)
        self._average = torch.tensor([layer.momentum is None for layer in layers], device=device)
        self._flags: dict[tuple[float, ...], Tensor] = {}
        self._rows: list[Tensor] = []
        self._open = False

    def begin(self) -> None:
        """A micro-batch comes."""
        self._take()
        self._open = True

    @torch.no_grad()
    def finish(self) -> None:
        """The step's last micro-batch is over: updates the running statistics. One gather; does not wait."""
        self._take()
        rows = torch.stack(self._rows)
        self._rows, self.weights = [], []
        if self._world.size > 1:
            parts = [torch.empty_like(rows) for _ in range(self._world.size)]
            dist.all_gather(parts, rows)  # collective
            rows = torch.cat(parts)
        self._fold(rows)

    def _take(self) -> None:
        """Keeps what the last micro-batch left: [means of all layers, variances, which layers count], one vector."""
        if not self._open:
            return
        self._open = False
        place = len(self._rows)
        weight = self.weights[place] if self.weights else 1.0
        flags = tuple(weight * layer.ran for layer in self._layers)
        if flags not in self._flags:
            self._flags[flags] = torch.tensor(flags, dtype=self._dtype, device=self._own[0].device)
        self._rows.append(torch.cat([vector.to(self._dtype) for vector in self._own] + [self._flags[flags]]))
        torch._foreach_zero_(self._own)  # the kernel multiplies what is there by 0, which would keep a NaN for ever
        for layer in self._layers:
            layer.ran = False

    def _fold(self, rows: Tensor) -> None:
        """running += share * (statistic - running), a row after the other; share 0 changes nothing."""
        counts = rows[:, -len(self._layers) :].double()
        tracked = _present([layer.num_batches_tracked for layer in self._layers])
        total = torch.stack(tracked).double() + counts.cumsum(0)
        shares = torch.where(self._average, 1.0 / total.clamp(min=1.0), self._momentum) * counts
        spread = shares.to(self._dtype)[:, self._layer_of]
        running = _present([layer.running_mean for layer in self._layers])
        running += _present([layer.running_var for layer in self._layers])
        flat = torch.cat([vector.to(self._dtype) for vector in running])
        for row, share in zip(rows[:, : -len(self._layers)].unbind(), spread.unbind(), strict=True):
            flat = torch.lerp(flat, row, share)
        torch._foreach_copy_(running, list(flat.split_with_sizes(self._sizes)))
        torch._foreach_add_(tracked, list(counts.sum(0).to(torch.int64).unbind()))


def _present(tensors: list[Tensor | None]) -> list[Tensor]:
    """All of them: only layers that track statistics record."""
    return [tensor for tensor in tensors if tensor is not None]


@final
class Replayed:
    """Any engine, with the replay around it."""

    def __init__(self, engine: Engine, replay: Replay) -> None:
        self.model, self._engine, self._replay = engine.model, engine, replay
        self.backward, self.state, self.restore = engine.backward, engine.state, engine.restore

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        self._replay.begin()
        return self._engine.accumulate(last)

    def step(self, factor: float) -> StepResult:
        self._replay.finish()
        return self._engine.step(factor)


class _Watched(Batches):
    """The same batches, whose feed tells the replay the weights of a step's slots."""

    def __init__(self, batches: Batches, replay: Replay) -> None:
        self.__dict__.update(batches.__dict__)
        self._replay = replay

    def from_step(self, start: int) -> Feed:
        return _WatchedFeed(self, start, self._replay)


class _WatchedFeed(Feed):
    def __init__(self, batches: Batches, start: int, replay: Replay) -> None:
        super().__init__(batches, start)
        self._replay = replay

    def __next__(self) -> tuple[int, list[MicroBatch]]:
        step, micro = super().__next__()
        self._replay.weights = [batch.weight for batch in micro]
        return step, micro
