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

from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.base import NOTHING, BareEngine, Evaluate, StepResult
from lockstep.engines.buffers import Replay
from lockstep.engines.group_settings import settings_of
from lockstep.engines.moving import differing
from lockstep.engines.optimizer_step import total_norm
from lockstep.engines.request import EngineRequest, MakeOptimizer
from lockstep.engines.state_dict import materialise, named_state, restore_state
from lockstep.errors import ConfigError, LockstepError
from lockstep.hooks import Clip
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
    """A buffer's value at the beginning of a step, the tensor, and its version counter.

    Attributes:
        silent: it may be written without the version counter, and no graph reads it.
        by_value: compare values, since it is not known yet whether it is silent.
    """

    value: Tensor
    tensor: Tensor
    version: int
    silent: bool
    by_value: bool

    def is_written(self, present: Tensor) -> bool:
        return self.silent or self.is_counted(present) or (self.by_value and self.differs(present))

    def is_counted(self, present: Tensor) -> bool:
        return present is not self.tensor or present._version != self.version

    def differs(self, present: Tensor) -> bool:
        # Waits for the device, in the first two steps only.
        return differing([(self.value, present)])[0]


@final
class Manual(BareEngine):
    """The engine for `task.own_steps`. Raises ConfigError with float16's loss scaling."""

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, world: World, request: EngineRequest) -> None:
        assert request.own_steps is not None
        if request.loss_scaling:
            raise ConfigError(
                "--precision fp16 does not work with a task that steps its optimizers itself: use bf16 or float32"
            )
        instance = optimizer(model)
        self._group_settings = settings_of(instance)
        self.model = model
        if isinstance(instance, Several):
            self._optimizer = instance
        else:
            self._optimizer = Several([instance])
        self._world = world
        self._own_steps = request.own_steps
        self._exact = request.exact
        self._sharing = request.sharing
        layers = recorders(model)
        self._replay = Replay(layers, world, request.sharing) if layers else None
        self._weights: list[float] = []
        self._blank = False
        self._squares: list[Tensor] = []
        self._starts: list[_BufferStart] = []
        self._steps = 0
        # Indices in `_plain_buffers` of buffers that are written without the version counter.
        self._silent: set[int] = set()

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        self._weights.append(weight)

    def step(
        self,
        factor: float | None = None,
        limit: float = math.inf,
        momentum: float | None = None,
        evaluate: Evaluate | None = None,
    ) -> StepResult:
        weights = self._weights
        self._weights = []
        self._squares = []
        # Writes no rate, since the task sets it, but records it for the log.
        self._group_settings.write(None)
        if self._blank:
            self._blank = False
            self._optimizer.state.clear()
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        # A limit of -inf always skips, so the forwards need not run.
        if limit == -math.inf:
            self._own_steps.forget()
            return StepResult(torch.zeros((), device=device), False)
        if self._replay:
            self._replay.begin()
        self._steps += 1
        self._starts = [
            _BufferStart(b.clone(), b, b._version, silent or index in self._silent, self._steps <= _CHECKED)
            for index, (b, silent) in enumerate(self._plain_buffers())
        ]
        self._own_steps.run(weights, self)
        self._end(weights)
        if self._squares:
            norm = torch.stack(self._squares).sum().sqrt()
        else:
            norm = torch.zeros((), device=device)
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

    def agree(self, points: list[Any]) -> None:
        """Check that every micro-batch of every rank has reached the same point. Collective.

        Raises:
            LockstepError: they have not.
        """
        # First this rank's micro-batches, then all ranks'. All ranks take part, at each optimizer's step.
        for compared in (points, self._world.gather(points[0])):  # collective
            odd = None
            for point in compared:
                if point != compared[0]:
                    odd = point
                    break
            if odd is not None:
                raise LockstepError(
                    f"the micro-batches of a step must step together: one is at {compared[0]} and another at {odd}; "
                    "decide by values that all of them share, such as batch_idx"
                )

    @torch.no_grad()
    def update(
        self, place: int, parts: list[Gradients], weights: list[float], writes: list[_BufferWrites], clip: Clip | None
    ) -> None:
        """Take one optimizer's step with the weighted sum of all micro-batches' gradients. Collective.

        First brings running statistics up to date, as a loop over the micro-batches before each optimizer's step
        would.

        Args:
            place: index of the optimizer.
            parts: gradients by parameter of each micro-batch on this rank, in order.
            weights: weight of each micro-batch.
            writes: the result of `collect_writes` for each micro-batch; their statistics are folded in here.
            clip: how to clip; None: not at all.
        """
        self._fold_statistics(writes, weights)
        # The gradients of the micro-batches are in `parts`; what is in `.grad` belongs to another optimizer.
        for parameter in self.model.parameters():
            parameter.grad = None
        optimizer = self._optimizer.members[place]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        present = []
        for p in parameters:
            present.append(any(p in gradients_of_batch for gradients_of_batch in parts))
        if self._world.size > 1:
            flags = torch.tensor(present, dtype=torch.int32, device=parameters[0].device)
            # All ranks: a parameter that some micro-batch used is stepped on every rank.
            collectives.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._world.group)  # collective
            # Waits for the device, at each optimizer's step.
            present = [bool(flag) for flag in flags.tolist()]
        parameters = [parameter for parameter, in_use in zip(parameters, present, strict=True) if in_use]
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            self._sum([parameter for parameter in parameters if parameter.dtype is dtype], parts, weights)
        gradients = []
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        self._squares.append(total_norm(gradients).double() ** 2)
        if clip is not None:
            _clip(gradients, clip)
        self._optimizer.step_one(place)
        for parameter in parameters:
            parameter.grad = None

    def collect_writes(self) -> _BufferWrites:
        """Return the changes to buffers by forwards since the last `restore`."""
        values = []
        for buffer, start in self._pairs():
            values.append(buffer.clone() if start.is_written(buffer) else None)
        if self._steps <= _CHECKED:
            pairs = enumerate(zip(values, self._pairs(), strict=True))
            for k, (value, (b, start)) in pairs:
                if value is not None and not start.is_counted(b):
                    self._silent.add(k)
        return _BufferWrites(self._replay.row() if self._replay else None, values)

    def recomputing(self) -> AbstractContextManager[None]:
        """Wrap a backward, which may recompute forwards whose statistics are already counted."""
        if self._replay:
            return self._replay.discard_statistics()
        return NOTHING

    @torch.no_grad()
    def restore(self, writes: _BufferWrites | None) -> None:
        """Restore the result of `collect_writes`; None: the state at the beginning of the step."""
        if self._replay and writes is not None and writes.statistics is not None:
            self._replay.put(writes.statistics)
        elif self._replay:
            self._replay.clear()
        self._set_buffers(writes.buffers if writes else [None] * len(self._starts))

    # --- buffers and sums

    def _plain_buffers(self) -> list[tuple[Tensor, bool]]:
        """Return the buffers outside replayed BatchNorm layers, and whether their writes are silent."""
        return [
            (buffer, isinstance(module, _NormBase))
            for module in self.model.modules()
            if not isinstance(module, Recording)
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def _pairs(self) -> Iterator[tuple[Tensor, "_BufferStart"]]:
        return zip((buffer for buffer, _ in self._plain_buffers()), self._starts, strict=True)

    def _set_buffers(self, values: list[Tensor | None]) -> None:
        """Set buffers to these values; None: their values at the beginning of the step.

        Unchanged buffers are not written, since a graph that is still needed may hold them.
        """
        for (buffer, start), value in zip(self._pairs(), values, strict=True):
            if start.is_written(buffer):
                silent = start.silent or not start.is_counted(buffer)
                # A graph may have saved a silent buffer's version; `.data` leaves the counter alone.
                (buffer.data if silent else buffer).copy_(start.value if value is None else value)

    @torch.no_grad()
    def _end(self, weights: list[float]) -> None:
        """End the step: fold in statistics and keep the first micro-batch's buffers. Collective."""
        writes: list[_BufferWrites] = self._own_steps.buffers()
        self._fold_statistics(writes, weights)
        if writes:
            self._set_buffers(writes[0].buffers)
        if self._world.size > 1:
            for buffer, _ in self._plain_buffers():
                # All ranks get rank 0's values: the forwards wrote other ones on each rank.
                collectives.broadcast(buffer, group_src=0, group=self._world.group)  # collective

    def _fold_statistics(self, writes: list[_BufferWrites], weights: list[float]) -> None:
        """Fold in the statistics of the micro-batches since the last call. Collective."""
        if not self._replay:
            return
        for write, weight in zip(writes, weights, strict=True):
            assert write.statistics is not None
            self._replay.take(weight, write.statistics)
        self._replay.finish()  # collective
        for write in writes:
            assert write.statistics is not None
            write.statistics.zero_()

    def _sum(self, parameters: list[Tensor], parts: list[Gradients], weights: list[float]) -> None:
        """Set `grad` of parameters of one dtype to the sum over all micro-batches. Collective."""
        # An empty slot is left out: adding its zeros would turn a -0.0 into 0.0.
        rows = []
        for gradients, weight in zip(parts, weights, strict=True):
            if weight:
                pieces = []
                for p in parameters:
                    piece = gradients[p] * weight if p in gradients else torch.zeros_like(p)
                    pieces.append(piece.reshape(-1))
                rows.append(torch.cat(pieces))
        # Exact: gather every micro-batch's gradients, and add them in order on each rank.
        if self._exact:
            rows = self._all_rows(rows, parameters)
        if rows:
            total = rows[0]
        else:
            total = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        for row in rows[1:]:
            total = total + row
        if self._world.size > 1 and not self._exact:
            # All ranks, once per optimizer's step and dtype.
            collectives.all_reduce(total, group=self._world.group)  # collective
        totals = total.split_with_sizes([p.numel() for p in parameters])
        for parameter, gradient in zip(parameters, totals, strict=True):
            parameter.grad = gradient.view_as(parameter).clone()

    def _all_rows(self, rows: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        """Return the rows of all ranks' non-empty micro-batches, in order. Collective."""
        if self._world.size == 1:
            return rows
        # All ranks: an all-gather needs equal sizes, so shorter ranks are padded.
        counts = self._world.gather(len(rows))  # collective
        padded = parameters[0].new_zeros(max(counts), sum(p.numel() for p in parameters))
        for index, row in enumerate(rows):
            padded[index] = row
        rows_by_rank = [torch.empty_like(padded) for _ in counts]
        # All ranks need every micro-batch's gradients, to add them in the same order.
        collectives.all_gather(rows_by_rank, padded, group=self._world.group)  # collective
        return [row for rows_of_rank, count in zip(rows_by_rank, counts, strict=True) for row in rows_of_rank[:count]]


def _clip(gradients: list[Tensor], clip: Clip) -> None:
    if clip.by == "value":
        # Private to torch, here and below: one kernel for all gradients, as in torch's own clipping.
        torch._foreach_clamp_max_(gradients, clip.limit)
        torch._foreach_clamp_min_(gradients, -clip.limit)
        return
    # 1e-6 as in torch's `clip_grad_norm_`.
    factor = torch.clamp(clip.limit / (total_norm(gradients) + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor.to(gradients[0].device))
