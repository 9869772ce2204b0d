"""Track the tensors that a forward may write: a model's buffers and a task's own.

    moving = Moving(model, own, world, exact=False, shared=True)
    moving.begin()                      # a step begins
    moving.begin_slot(); moving.undo_slot()
    moving.check(); moving.share()      # before the update
    moving.end(result, limit)           # after it

The first two steps find by value which of them a forward writes: writes through `.data` or numpy do not increment
torch's version counter. A tensor that changes without the counter counts as written in every later step.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.engines.base import StepResult
from lockstep.errors import ConfigError, LockstepError
from lockstep.transforms.batchnorm import Recording

__all__ = [
    "Moving",
    "Own",
    "differing",
]


Own = Callable[[], Mapping[str, Tensor]]
_CHECKED = 2  # first steps, in which writes by forwards are detected


class _MovingTensor:
    """One tensor that a forward may write or replace.

    Attributes:
        name: its name in a checkpoint; `shown`, its name in messages.
        own: it is the task's, not the model's.
        replayed: only BatchNorm's replay writes it.
        silent: it may be written without incrementing the version counter.
        kept, before: its values at the beginning of the step, and of the micro-batch; None while these are the same.
        seen: the tensor at that time, and its version counter; `first`, its id and counter in the first step.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Tensor | None],
        *,
        own: bool = False,
        replayed: bool = False,
        silent: bool = False,
    ) -> None:
        self.name, self._find, self.own, self.replayed, self.silent = name, find, own, replayed, silent
        self.shown = f"{name}, which `loss` writes" if own else f"the buffer {name}, which the forward writes"
        self.kept: Tensor | None = None
        self.before: Tensor | None = None
        self.seen: tuple[Tensor, int] | None = None
        self.first: tuple[int, int] | None = None

    @property
    def now(self) -> Tensor:
        found = self._find()
        if found is None and self.own:
            raise LockstepError(f"the task's state_dict() no longer has {self.name}; keep it from the start to the end")
        if found is None:
            raise LockstepError(f"the forward removed the buffer {self.name}; keep it, or make it a plain attribute")
        return found

    @property
    def counted(self) -> bool:
        """Whether the version counter moved, or the tensor was replaced, since the step began."""
        present = self.now
        return self.seen is None or present is not self.seen[0] or present._version != self.seen[1]

    @property
    def written(self) -> bool:
        """Whether it may have changed since the step began."""
        return self.silent or self.counted

    @property
    def fits(self) -> bool:
        """Whether the current tensor has the kept values' shape and dtype."""
        return self.kept is not None and (self.kept.shape, self.kept.dtype) == (self.now.shape, self.now.dtype)


class _OwnTensors:
    """The task's tensors from its last `state_dict()`."""

    def __init__(self, own: Own) -> None:
        self._own = own
        self.now = dict(own())

    def look(self) -> None:
        self.now = dict(self._own())

    def places(self) -> list[_MovingTensor]:
        return [_MovingTensor(f"task/{name}", partial(self._get, name), own=True) for name in self.now]

    def _get(self, name: str) -> Tensor | None:
        return self.now.get(name)

    def is_copy(self, place: _MovingTensor) -> bool:
        """Whether `state_dict()` returns a new tensor each time, so that nothing can be restored."""
        return self._own()[place.name.removeprefix("task/")] is not place.now


class Moving:
    """The tensors of a model and a task that may change during a step.

    Args:
        model: the plain module.
        own: returns the task's own tensors by name; None: it has none.
        exact: refuse tensors that a forward writes, since their values then depend on which rank computes what.
        shared: buffers that forwards write get rank 0's values after each step; the task's own always do.
    """

    def __init__(self, model: nn.Module, own: Own | None, world: World, exact: bool, shared: bool) -> None:
        self._world, self._exact, self._share_buffers = world, exact, shared
        self._places = [
            _MovingTensor(
                f"{prefix}.{key}".lstrip("."),
                partial(owner._buffers.get, key),
                replayed=isinstance(owner, Recording),
                silent=isinstance(owner, nn.modules.batchnorm._NormBase),
            )
            for prefix, owner in model.named_modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]
        self._own = _OwnTensors(own) if own is not None else None
        if self._own:
            self._places += self._own.places()
        self._forward = [place for place in self._places if not place.replayed]  # those that a forward itself may write
        self._resting: list[_MovingTensor] = []  # the task's tensors that `loss` did not write in the checked steps
        self._steps = 0
        self._shared: list[_MovingTensor] = []  # written by forwards; broadcast from rank 0 after each step
        self._before: set[str] = set()  # names of those written in the checked steps

    def __len__(self) -> int:
        return len(self._places)

    def kinds(self) -> dict[str, str]:
        """Map the state's name to a description, for every tensor that forwards have written."""
        return {p.name if p.own else f"model/{p.name}": p.shown for p in self._places if self._is_moved(p)}

    def _is_moved(self, place: _MovingTensor) -> bool:
        later = place.first is not None and place.first != (id(place.now), place.now._version)
        return place.replayed or place.silent or place.name in self._before or later

    def _look(self) -> None:
        """Refresh the task's tensors, if any of them is tracked."""
        if self._own and (self._steps < _CHECKED or self._resting or any(place.own for place in self._places)):
            self._own.look()

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the values of the tensors that may have changed since the last copy."""
        self._look()
        every = self._steps < _CHECKED
        changed = [place for place in self._places if every or place.written]
        fitting = [place for place in changed if place.fits]
        _copy([(place.kept, place.now) for place in fitting if place.kept is not None])
        for place in changed:
            if not place.fits:
                place.kept = place.now.detach().clone()
            place.seen = (place.now, place.now._version)
            if not self._steps:
                place.first = (id(place.now), place.now._version)
        for place in self._resting:
            place.seen = (place.now, place.now._version)

    @torch.no_grad()
    def begin_slot(self) -> None:
        """Copy what a forward may change, in case its micro-batch is an empty slot."""
        self._look()
        every = self._steps < _CHECKED
        for place in self._forward:
            place.before = place.now.detach().clone() if every or place.written else None

    @torch.no_grad()
    def undo_slot(self) -> None:
        """Undo the forward of an empty slot."""
        self._look()
        moved = self._moved(self._forward, [p.kept if p.before is None else p.before for p in self._forward])
        moved = [(place, before) for place, before in moved if _alike(place.now, before)]
        uncounted = [place for place, _ in moved if not place.counted]
        _copy([(place.now, before) for place, before in moved])
        for place in uncounted:  # this write is not a forward's
            place.seen = (place.now, place.now._version)

    def check(self) -> None:
        """In the first two steps, find the tensors that forwards write. Collective in these steps.

        All ranks agree on the result. A tensor written in the first step only, such as a table built on first use,
        does not count. Later steps check the task's tensors without a collective.

        Raises:
            ConfigError: in exact mode, a forward writes a tensor in both steps; or a tensor of the task changes its
                shape, or `state_dict()` returns a copy of it.
        """
        self._look()
        if self._steps == _CHECKED:
            self._check_later()
            return
        counted = {place.name for place in self._forward if place.counted and not place.own and not place.silent}
        found = [place for place, _ in self._moved(self._forward, [place.kept for place in self._forward])]
        self._steps += 1
        moved = counted | {place.name for place in found}
        for place in found:
            place.silent = place.silent or (not place.counted)
            if place.own:
                self._check_own(place)
        names = {name for each in self._world.gather(sorted(moved)) for name in each}  # collective
        again = names & self._before
        if self._steps == 1:
            self._before = names
        elif self._exact and again:
            raise self._inexact(next(place for place in self._places if place.name == min(again)))
        self._choose_shared(names)
        if self._steps == _CHECKED:
            self._before |= names
            self._rest()

    def _choose_shared(self, names: set[str]) -> None:
        if self._world.size == 1:
            return
        chosen = [p for p in self._places if p.name in names and (p.own or self._share_buffers)]
        shapes = self._world.gather({p.name: list(p.now.shape) for p in chosen})  # collective
        alike = [p for p in chosen if all(shape.get(p.name) == list(p.now.shape) for shape in shapes)]
        odd = next((p for p in chosen if p.own and p not in alike), None)
        if odd:
            raise ConfigError(f"{odd.shown}, has another shape on each rank: keep one shape everywhere")
        self._shared = alike

    def _rest(self) -> None:
        """Stop copying the task's tensors that forwards do not write."""
        self._resting = [p for p in self._places if p.own and p.name not in self._before] if self._exact else []
        self._places = [p for p in self._places if not p.own or p.name in self._before]
        self._forward = [place for place in self._places if not place.replayed]
        for place in self._resting:
            place.kept = place.before = None

    def _check_later(self) -> None:
        """Check the task's tensors after the first steps, by their version counters."""
        for place in self._places:
            if place.own and place.written:
                self._check_own(place)
        for place in self._resting:
            if place.seen and place.now is place.seen[0] and place.now._version != place.seen[1]:
                raise self._inexact(place)

    def _check_own(self, place: _MovingTensor) -> None:
        if place.kept is not None and not place.fits:
            raise ConfigError(
                f"{place.shown}, had the shape {list(place.kept.shape)} and now has {list(place.now.shape)}: make it "
                "as large as it will be, and write into it in place"
            )
        if self._own and self._own.is_copy(place):
            raise ConfigError(
                f"{place.shown}, is a copy in the task's state_dict(): give the tensor itself, which can be put back"
            )

    @staticmethod
    def _inexact(place: _MovingTensor) -> ConfigError:
        return ConfigError(
            f"--exact cannot hold with {place.shown}: its values depend on which rank computes what; write it in the "
            "loop's body, or leave --exact out"
        )

    def _moved(
        self, places: list[_MovingTensor], before: Iterable[Tensor | None]
    ) -> list[tuple[_MovingTensor, Tensor]]:
        """Return the tensors that may differ from `before`, with that; exact in the checked steps."""
        pairs = [(place, each) for place, each in zip(places, before, strict=True) if each is not None]
        if self._steps == _CHECKED:
            return [(place, each) for place, each in pairs if place.written]
        fitting = [(place.now, each) for place, each in pairs if _alike(place.now, each)]
        flags = iter(differing(fitting))  # waits for the device, in the checked steps
        return [(place, each) for place, each in pairs if not _alike(place.now, each) or next(flags)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the values from the beginning of the step."""
        self._look()
        _copy(self._pairs())

    @torch.no_grad()
    def end(self, result: StepResult, limit: float) -> None:
        """Restore what a skipped step changed."""
        if result.applied is False:
            self.put_back()
        elif result.applied is None:
            self._look()
            _copy(_chosen(self._pairs(), result.norm < limit))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        moved = self._moved(self._places, [place.kept for place in self._places])
        return [(place.now, kept) for place, kept in moved if place.fits]

    @torch.no_grad()
    def share(self) -> None:
        """Broadcast rank 0's values of the tensors that forwards write. Collective."""
        for place in self._shared:
            present = place.now
            if not place.fits:
                raise LockstepError(
                    f"{rank_label(self._world.rank)}: {place.shown}, has another shape or dtype now, so it cannot be "
                    "the same on all ranks; keep both"
                )
            sent = present.contiguous()
            dist.broadcast(sent, src=0)  # collective
            if sent is not present:
                present.copy_(sent)


def differing(pairs: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return whether each pair of tensors differs in any bit. Waits for the device, once.

    The two tensors of a pair have the same shape and dtype.
    """
    flags = [(_bits(one) != _bits(other)).any() for one, other in pairs]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj()
    plain = plain.int_repr() if plain.is_quantized else plain
    plain = plain if plain.layout is torch.strided else plain.to_dense()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, in few calls."""
    for group in _by_dtype(pairs):
        torch._foreach_copy_([target for target, _ in group], [source for _, source in group])


def _chosen(pairs: list[tuple[Tensor, Tensor]], applied: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pair each present tensor with itself where `applied`, else with the kept one."""
    found = []
    for group in _by_dtype(pairs):
        presents, kepts = (torch.cat([tensor.reshape(-1) for tensor in column]) for column in zip(*group, strict=True))
        values = torch.where(applied.to(presents.device), presents, kepts)
        parts = values.split_with_sizes([present.numel() for present, _ in group])
        found += [(present, part.view(present.shape)) for (present, _), part in zip(group, parts, strict=True)]
    return found


def _by_dtype(pairs: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        groups.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
    return list(groups.values())
