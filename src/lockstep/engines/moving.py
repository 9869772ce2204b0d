"""Tensors that a forward may write besides gradients, through a step: a model's buffers, and a task's own.

    moving = Moving(places_of(model), own, world, exact=False, shared=True)
    moving.begin()                      # a step begins
    moving.begin_slot(); moving.undo_slot()
    moving.check(); moving.share()      # before the update
    moving.end(result, limit)           # after it

Which of them a forward writes is found in the first two steps, by value: what is written through `.data` or numpy does
not move torch's count of writes. One that moves without that count is taken to move in every step from then on.
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
_CHECKED = 2  # steps in which is found what forwards write


class _MovingTensor:
    """One tensor that a forward may write or replace.

    Attributes:
        name: as a checkpoint has it; `shown`, as a message has it.
        own: it is the task's, and not the model's.
        replayed: BatchNorm's replay alone writes it.
        silent: it may be written without torch's count of writes knowing.
        kept, before: its values at the step's begin; at the micro-batch's, None where they are still the same.
        seen: the tensor that was there then, and torch's count of its writes; `first`, the same in the first step.
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
        """Whether torch counted a write since the step's begin, or another tensor is in its place."""
        present = self.now
        return self.seen is None or present is not self.seen[0] or present._version != self.seen[1]

    @property
    def written(self) -> bool:
        """Whether it may have changed since the step's begin."""
        return self.silent or self.counted

    @property
    def fits(self) -> bool:
        """Whether the present tensor can take what was kept."""
        return self.kept is not None and (self.kept.shape, self.kept.dtype) == (self.now.shape, self.now.dtype)


class _OwnTensors:
    """The task's tensors as its `state_dict()` gave them last."""

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
        """Whether `state_dict()` gives another tensor each time, so that nothing can be put back."""
        return self._own()[place.name.removeprefix("task/")] is not place.now


class Moving:
    """The tensors of a model and a task through a step.

    Args:
        model: the plain module.
        own: gives the task's own tensors by name; None: it has none.
        exact: refuse what a forward writes, whose values then depend on who computed what.
        shared: buffers that forwards write are rank 0's after each step; the task's own always are.
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
        self._forward = [place for place in self._places if not place.replayed]  # which a forward itself may write
        self._resting: list[_MovingTensor] = []  # of the task's: what `loss` did not write in the checked steps
        self._steps = 0
        self._shared: list[_MovingTensor] = []  # written by forwards, and rank 0's after each step
        self._before: set[str] = set()  # those that were written in the first step

    def __len__(self) -> int:
        return len(self._places)

    def kinds(self) -> dict[str, str]:
        """Name in a state -> what it is, of all that forwards were seen to write."""
        return {p.name if p.own else f"model/{p.name}": p.shown for p in self._places if self._is_moved(p)}

    def _is_moved(self, place: _MovingTensor) -> bool:
        later = place.first is not None and place.first != (id(place.now), place.now._version)
        return place.replayed or place.silent or place.name in self._before or later

    def _look(self) -> None:
        """Takes the task's tensors as they are now, where one of them is followed."""
        if self._own and (self._steps < _CHECKED or self._resting or any(place.own for place in self._places)):
            self._own.look()

    @torch.no_grad()
    def begin(self) -> None:
        """Keeps the values of those that may have changed since they were kept."""
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
        """Keeps what a forward may move now, should its micro-batch turn out to be an empty slot."""
        self._look()
        every = self._steps < _CHECKED
        for place in self._forward:
            place.before = place.now.detach().clone() if every or place.written else None

    @torch.no_grad()
    def undo_slot(self) -> None:
        """The forward was an empty slot's, which moves nothing."""
        self._look()
        moved = self._moved(self._forward, [p.kept if p.before is None else p.before for p in self._forward])
        moved = [(place, before) for place, before in moved if _alike(place.now, before)]
        uncounted = [place for place, _ in moved if not place.counted]
        _copy([(place.now, before) for place, before in moved])
        for place in uncounted:  # this write is no forward's
            place.seen = (place.now, place.now._version)

    def check(self) -> None:
        """Sees what the forwards of the first two steps write, the same on every rank. Collective, in these steps.

        What is written in the first step alone, such as a table that is made when it is first needed, is no matter.

        Raises:
            ConfigError: in exact mode, where a forward writes one in both; a tensor of the task's that changes its
                shape, or that `state_dict()` only copies.
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
        """Stop copying the task's tensors that only the loop's body writes."""
        self._resting = [p for p in self._places if p.own and p.name not in self._before] if self._exact else []
        self._places = [p for p in self._places if not p.own or p.name in self._before]
        self._forward = [place for place in self._places if not place.replayed]
        for place in self._resting:
            place.kept = place.before = None

    def _check_later(self) -> None:
        """Check the task's tensors after the first steps, by torch's counts of their writes."""
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
        """Those that may differ from what they were `before`, with that; in the checked steps those that do."""
        pairs = [(place, each) for place, each in zip(places, before, strict=True) if each is not None]
        if self._steps == _CHECKED:
            return [(place, each) for place, each in pairs if place.written]
        fitting = [(place.now, each) for place, each in pairs if _alike(place.now, each)]
        flags = iter(differing(fitting))  # waits for the device, in the checked steps
        return [(place, each) for place, each in pairs if not _alike(place.now, each) or next(flags)]

    @torch.no_grad()
    def put_back(self) -> None:
        """As they were at the step's begin."""
        self._look()
        _copy(self._pairs())

    @torch.no_grad()
    def end(self, result: StepResult, limit: float) -> None:
        """Puts back what a step moved that was not applied."""
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
        """Gives all ranks rank 0's values. Collective."""
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
    """Whether the bits of each two tensors of one shape and dtype differ. Waits for the device, once."""
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
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        groups.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
    return list(groups.values())
