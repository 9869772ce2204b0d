"""The engine of a task that steps its optimizers itself (`task.own_steps`): one process, or ddp.

The micro-batches of a step run together, each up to the point where it requests an optimizer's step. There their
gradients are summed over all micro-batches of all ranks, and the optimizer steps once. So the result of training does
not depend on the number of ranks. Each such point exchanges the sum as one flat vector; in exact mode it exchanges the
gradients of every micro-batch, and adds them in the micro-batches' order.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, Evaluate, MakeOptimizer, Settings, StepResult
from lockstep.engines.buffers import Replay
from lockstep.engines.moving import differing
from lockstep.engines.optimizer_step import total_norm
from lockstep.engines.state_dict import materialise, named_state, restore_state
from lockstep.errors import ConfigError, LockstepError
from lockstep.hooks import Clip, OwnSteps
from lockstep.optim.optimizers import Several
from lockstep.transforms.batchnorm import Recording, recorders

__all__ = ["Manual"]

Gradients = dict[Tensor, Tensor]
_CHECKED = 2  # first steps, in which writes that bypass torch's version counter are detected


class _BufferWrites(NamedTuple):
    """Changes to the model's buffers by the forwards of one micro-batch.

    Attributes:
        statistics: of BatchNorm layers, as `Replay.row`; None where there are none.
        buffers: the other buffers; None for one that no forward of the step has written yet.
    """

    statistics: Tensor | None
    buffers: list[Tensor | None]


class _BufferStart(NamedTuple):
    """A buffer at the beginning of a step: its value, the tensor, and its version counter.

    Attributes:
        silent: it may be written without the version counter, and no graph reads it.
        by_value: compare values, since it is not known yet whether it is silent.
    """

    value: Tensor
    held: Tensor
    version: int
    silent: bool
    by_value: bool

    def is_written(self, present: Tensor) -> bool:
        return self.silent or self.is_counted(present) or (self.by_value and self.differs(present))

    def is_counted(self, present: Tensor) -> bool:
        return present is not self.held or present._version != self.version

    def differs(self, present: Tensor) -> bool:
        return differing([(self.value, present)])[0]  # waits for the device, in the first two steps


@final
class Manual:
    """The engine for `task.own_steps`. Raises ConfigError with float16's loss scaling."""

    def __init__(
        self, model: nn.Module, optimizer: MakeOptimizer, world: World, settings: Settings, own: OwnSteps
    ) -> None:
        if settings.loss_scaling:
            raise ConfigError(
                "--precision fp16 does not go with a task that takes its optimizers' steps itself: use bf16 or float32"
            )
        made = optimizer(model)
        self.model = model
        self._optimizer = made if isinstance(made, Several) else Several([made])
        self._world, self._own, self._exact = world, own, settings.exact
        self._sharing = settings.sharing
        layers = recorders(model)
        self._replay = Replay(layers, world, settings.sharing) if layers else None
        self._weights: list[float] = []
        self._blank = False
        self._squares: list[Tensor] = []
        self._first: list[_BufferStart] = []
        self._steps = 0
        self._silent: set[int] = set()  # indices in `_others` of buffers written without the version counter

    def accumulate(self, last: bool, counts: bool = True) -> AbstractContextManager[None]:
        return NOTHING

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._weights.append(weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        weights, self._weights, self._squares = self._weights, [], []
        if self._blank:
            self._blank = False
            self._optimizer.state.clear()
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        if limit == -math.inf:
            self._own.forget()
            return StepResult(torch.zeros((), device=device), False)
        if self._replay:
            self._replay.begin()
        self._steps += 1
        self._first = [
            _BufferStart(b.clone(), b, b._version, silent or place in self._silent, self._steps <= _CHECKED)
            for place, (b, silent) in enumerate(self._others())
        ]
        self._own.run(weights, self)
        self._end(weights)
        norm = torch.stack(self._squares).sum().sqrt() if self._squares else torch.zeros((), device=device)
        return StepResult(norm, True)

    def rehearse(self, loss: Callable[[], Tensor]) -> None:
        """Do nothing: the task takes its own steps, which cannot be undone."""

    def state_dict(self) -> dict[str, Tensor]:
        self._blank = materialise(self._optimizer) or self._blank
        return named_state(self.model, self._optimizer)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._blank = False
        restore_state(self.model, self._optimizer, state)

    # --- called by the task's steps

    def agree(self, asked: list[Any]) -> None:
        """Check that every micro-batch of every rank has reached the same point. Collective.

        Raises:
            LockstepError: they have not.
        """
        for each in (asked, self._world.gather(asked[0])):  # collective
            other = next((one for one in each if one != each[0]), None)
            if other is not None:
                raise LockstepError(
                    f"the micro-batches of a step do not step alike: one is at {each[0]} where another is at {other}; "
                    "step optimizers and schedulers by what all of them know, as batch_idx"
                )

    @torch.no_grad()
    def update(
        self, place: int, parts: list[Gradients], weights: list[float], kept: list[_BufferWrites], clip: Clip | None
    ) -> None:
        """Take one optimizer's step with the weighted sum of all micro-batches' gradients. Collective.

        First brings running statistics up to date, as a loop over the micro-batches before each optimizer's step
        would.

        Args:
            place: index of the optimizer.
            parts: gradients by parameter of each micro-batch on this rank, in order.
            weights: weight of each micro-batch.
            kept: the result of `kept` for each micro-batch; their statistics are folded in here.
            clip: how to clip; None: not at all.
        """
        self._count(kept, weights)
        for parameter in self.model.parameters():
            parameter.grad = None
        optimizer = self._optimizer.members[place]
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        present = [any(p in part for part in parts) for p in held]
        if self._world.size > 1:
            flags = torch.tensor(present, dtype=torch.int32, device=held[0].device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)  # collective
            present = [bool(flag) for flag in flags.tolist()]  # waits for the device
        held = [parameter for parameter, found in zip(held, present, strict=True) if found]
        for dtype in dict.fromkeys(parameter.dtype for parameter in held):
            self._sum([parameter for parameter in held if parameter.dtype is dtype], parts, weights)
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        self._squares.append(total_norm(gradients).double() ** 2)
        if clip is not None:
            _clip(gradients, clip)
        self._optimizer.step_one(place)
        for parameter in held:
            parameter.grad = None

    def kept(self) -> _BufferWrites:
        """Return the changes to buffers by forwards since the last `restore`."""
        found = [buffer.clone() if first.is_written(buffer) else None for buffer, first in self._pairs()]
        if self._steps <= _CHECKED:
            pairs = enumerate(zip(found, self._pairs(), strict=True))
            self._silent |= {k for k, (one, (b, first)) in pairs if one is not None and not first.is_counted(b)}
        return _BufferWrites(self._replay.row() if self._replay else None, found)

    def recomputing(self) -> AbstractContextManager[None]:
        """Wrap a backward, which may recompute forwards whose statistics are already counted."""
        return self._replay.unmoved() if self._replay else NOTHING

    @torch.no_grad()
    def restore(self, kept: _BufferWrites | None) -> None:
        """Restore the result of `kept`; None: the state at the beginning of the step."""
        if self._replay and kept is not None and kept.statistics is not None:
            self._replay.put(kept.statistics)
        elif self._replay:
            self._replay.clear()
        self._put(kept.buffers if kept else [None] * len(self._first))

    # --- buffers and sums

    def _others(self) -> list[tuple[Tensor, bool]]:
        """Return the buffers outside replayed BatchNorm layers, and whether their writes are silent."""
        return [
            (buffer, isinstance(module, _NormBase))
            for module in self.model.modules()
            if not isinstance(module, Recording)
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def _pairs(self) -> Iterator[tuple[Tensor, "_BufferStart"]]:
        return zip((buffer for buffer, _ in self._others()), self._first, strict=True)

    def _put(self, values: list[Tensor | None]) -> None:
        """Set buffers to these values; None: their values at the beginning of the step.

        Unchanged buffers are not written, since a graph that is still needed may hold them.
        """
        for (buffer, first), value in zip(self._pairs(), values, strict=True):
            if first.is_written(buffer):
                silent = first.silent or not first.is_counted(buffer)
                (buffer.data if silent else buffer).copy_(first.value if value is None else value)

    @torch.no_grad()
    def _end(self, weights: list[float]) -> None:
        """End the step: fold in running statistics, keep the first micro-batch's other buffers. Collective."""
        found: list[_BufferWrites] = self._own.buffers()
        self._count(found, weights)
        if found:
            self._put(found[0].buffers)
        if self._world.size > 1:
            for buffer, _ in self._others():
                sent = buffer.contiguous()
                dist.broadcast(sent, src=0)  # collective
                if sent is not buffer:
                    buffer.copy_(sent)

    def _count(self, found: list[_BufferWrites], weights: list[float]) -> None:
        """Fold in the statistics of the micro-batches since the last call. Collective."""
        if not self._replay:
            return
        for kept, weight in zip(found, weights, strict=True):
            assert kept.statistics is not None
            self._replay.take(weight, kept.statistics)
        self._replay.finish()  # collective
        for kept in found:
            assert kept.statistics is not None
            kept.statistics.zero_()

    def _sum(self, held: list[Tensor], parts: list[Gradients], weights: list[float]) -> None:
        """Set `grad` of parameters of one dtype to the sum over all micro-batches. Collective."""
        rows = [
            torch.cat([(part[p] * weight if p in part else torch.zeros_like(p)).reshape(-1) for p in held])
            for part, weight in zip(parts, weights, strict=True)
            if weight  # an empty slot's zeros would make a -0.0 a 0.0
        ]
        if self._exact:
            rows = self._all_rows(rows, held)
        total = rows[0] if rows else held[0].new_zeros(sum(p.numel() for p in held))
        for row in rows[1:]:
            total = total + row
        if self._world.size > 1 and not self._exact:
            dist.all_reduce(total)  # collective
        for parameter, part in zip(held, total.split_with_sizes([p.numel() for p in held]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def _all_rows(self, rows: list[Tensor], held: list[Tensor]) -> list[Tensor]:
        """Return the rows of all ranks' non-empty micro-batches, in order. Collective."""
        if self._world.size == 1:
            return rows
        counts = self._world.gather(len(rows))  # collective
        padded = held[0].new_zeros(max(counts), sum(p.numel() for p in held))
        for place, row in enumerate(rows):
            padded[place] = row
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded)  # collective
        return [row for part, count in zip(found, counts, strict=True) for row in part[:count]]


def _clip(gradients: list[Tensor], clip: Clip) -> None:
    if clip.by == "value":
        torch._foreach_clamp_max_(gradients, clip.limit)
        torch._foreach_clamp_min_(gradients, -clip.limit)
        return
    by = torch.clamp(clip.limit / (total_norm(gradients) + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, by.to(gradients[0].device))
