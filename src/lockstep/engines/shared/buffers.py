"""What a forward moves besides gradients: the model's buffers, as a part of the step.

    engine = with_buffers(engine, model, world, exact=False)        itself for a model without buffers

A step that is not applied leaves the buffers as they were before it. Where the device alone knows whether it was, the
device decides, in the same step: nothing that is read later has to be put right. BatchNorm's running statistics are
replayed (see batchnorm.py); other buffers that a forward writes (a moving average, a codebook, the vectors of spectral
norm) are those of rank 0 on every rank after each step, as under DistributedDataParallel.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.shares import Sharing
from lockstep.distributed.world import World
from lockstep.engines.base import Engine, Evaluate, StepResult
from lockstep.engines.shared.batchnorm import Replay
from lockstep.errors import ConfigError, LockstepError
from lockstep.transforms.batchnorm import Recording, recorders

__all__ = ["Buffered", "unmoved", "with_buffers"]


def with_buffers(
    engine: Engine,
    model: nn.Module,
    world: World,
    *,
    exact: bool,
    shared: bool = True,
    sharing: Sharing | None = None,
) -> Engine:
    """The engine, its steps taking the buffers of `model` (the plain module) along.

    Args:
        exact: refuse a forward that writes buffers whose values then depend on who computed what.
        shared: what forwards write is rank 0's on all ranks after each step.
        sharing: how many forwards each rank makes; None: all make as many.
    """
    if not any(True for _ in model.buffers()):
        return engine
    layers = recorders(model)
    return Buffered(engine, Replay(layers, world, sharing) if layers else None, _Moving(model, world, exact, shared))


@final
class Buffered:
    """Any engine, whose step is applied to the model's buffers too, or not."""

    def __init__(self, engine: Engine, replay: Replay | None, buffers: "_Moving") -> None:
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

    def state_dict(self) -> dict[str, Tensor]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._engine.load_state_dict(state)


class _Place:
    """One buffer of one module, which a forward may write or replace.

    Attributes:
        replayed: BatchNorm's replay alone writes it.
        silent: a kernel may write it without torch's counter of writes knowing.
        kept, before: its values at the step's begin; at the micro-batch's, None where they are still the same.
        seen: the tensor that was there then, and torch's count of its writes.
    """

    def __init__(self, owner: nn.Module, key: str, name: str) -> None:
        self._owner, self._key, self.name = owner, key, name
        self.replayed = isinstance(owner, Recording)
        self.silent = isinstance(owner, nn.modules.batchnorm._NormBase)
        self.kept: Tensor | None = None
        self.before: Tensor | None = None
        self.seen: tuple[Tensor, int] | None = None

    @property
    def now(self) -> Tensor:
        found = self._owner._buffers[self._key]
        if found is None:
            raise LockstepError(f"the forward removed the buffer {self.name}; keep it, or make it a plain attribute")
        return found

    @property
    def written(self) -> bool:
        """Whether it may have changed since the step's begin: written in place, or another tensor in its place."""
        present = self.now
        return self.silent or self.seen is None or present is not self.seen[0] or present._version != self.seen[1]

    @property
    def fits(self) -> bool:
        """Whether the present tensor can take what was kept."""
        return self.kept is not None and (self.kept.shape, self.kept.dtype) == (self.now.shape, self.now.dtype)


class _Moving:
    """The buffers of a model through a step."""

    def __init__(self, model: nn.Module, world: World, exact: bool, shared: bool) -> None:
        self._world, self._exact, self._share = world, exact, shared and world.size > 1
        self._places = [
            _Place(owner, key, f"{prefix}.{key}".lstrip("."))
            for prefix, owner in model.named_modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]
        self._forward = [place for place in self._places if not place.replayed]  # which a forward itself may write
        self._steps = 0
        self._shared: list[_Place] = []  # written by forwards, and rank 0's after each step
        self._before: set[str] = set()  # those that were written in the first step

    @torch.no_grad()
    def begin(self) -> None:
        """Keeps the values of those that may have changed since they were kept."""
        changed = [place for place in self._places if place.written]
        fitting = [place for place in changed if place.fits]
        _copy([(place.kept, place.now) for place in fitting if place.kept is not None])
        for place in changed:
            if not place.fits:
                place.kept = place.now.detach().clone()
            place.seen = (place.now, place.now._version)

    @torch.no_grad()
    def begin_slot(self) -> None:
        """Keeps what a forward may move now, should its micro-batch turn out to be an empty slot."""
        for place in self._forward:
            place.before = place.now.clone() if place.written else None

    @torch.no_grad()
    def undo_slot(self) -> None:
        """The forward was an empty slot's, which moves nothing."""
        pairs = [(p.now, p.kept if p.before is None else p.before) for p in self._forward if p.written and p.fits]
        _copy([(present, before) for present, before in pairs if before is not None])

    def check(self) -> None:
        """Sees which buffers the forwards of a first step write, the same on every rank. Collective, in two steps.

        What is written in the first step alone, such as a table that is made when it is first needed, is no matter.

        Raises:
            ConfigError: in exact mode, where a forward writes a buffer in both.
        """
        if self._steps == 2:
            return
        self._steps += 1
        moved = {place.name for place in self._places if not place.replayed and self._moved(place)}
        names = {name for each in self._world.gather(sorted(moved)) for name in each}  # collective
        if self._steps == 1:
            self._before = names
        elif self._exact and names & self._before:
            raise ConfigError(
                f"--exact cannot hold with the buffer {min(names & self._before)}, which the forward writes: its "
                "values depend on which rank computes what; write it in the loop's body, or leave --exact out"
            )
        if self._share:
            shapes = self._world.gather({p.name: list(p.now.shape) for p in self._places if p.name in names})
            self._shared = [p for p in self._places if all(s.get(p.name) == list(p.now.shape) for s in shapes)]

    def _moved(self, place: _Place) -> bool:
        """Whether the forward wrote it; where torch does not count that, whether the values changed."""
        if not place.silent:
            return place.written
        return place.kept is None or not torch.equal(place.kept, place.now)  # waits for the device, in two steps

    @torch.no_grad()
    def put_back(self) -> None:
        """As they were at the step's begin."""
        _copy(self._moved_pairs())

    @torch.no_grad()
    def end(self, result: StepResult, limit: float) -> None:
        """Puts back what a step moved that was not applied."""
        if result.applied is False:
            self.put_back()
        elif result.applied is None:
            _copy(_chosen(self._moved_pairs(), result.norm < limit))

    def _moved_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(p.now, p.kept) for p in self._places if p.kept is not None and p.written and p.fits]

    @torch.no_grad()
    def share(self) -> None:
        """Gives all ranks rank 0's values. Collective."""
        for place in self._shared:
            present = place.now
            if not place.fits:
                raise LockstepError(
                    f"rank {self._world.rank}: the forward gave the buffer {place.name} another shape or dtype, so it "
                    "cannot be the same on all ranks; keep both"
                )
            sent = present.contiguous()
            dist.broadcast(sent, src=0)  # collective
            if sent is not present:
                present.copy_(sent)


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies the second of each pair into the first, in few calls."""
    for group in _by_dtype(pairs):
        torch._foreach_copy_([target for target, _ in group], [source for _, source in group])


def _chosen(pairs: list[tuple[Tensor, Tensor]], applied: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(present, present where the device says `applied`, else kept) for each pair (present, kept)."""
    found = []
    for group in _by_dtype(pairs):
        presents, kepts = (torch.cat([tensor.reshape(-1) for tensor in column]) for column in zip(*group, strict=True))
        values = torch.where(applied.to(presents.device), presents, kepts)
        parts = values.split_with_sizes([present.numel() for present, _ in group])
        found += [(present, part.view(present.shape)) for (present, _), part in zip(group, parts, strict=True)]
    return found


def _by_dtype(pairs: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].dtype, []).append(pair)
    return list(groups.values())


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
