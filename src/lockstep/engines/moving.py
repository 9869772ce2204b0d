"""Track the tensors that a forward may write: a model's buffers and a task's own.

    moving = Moving(model, OwnState(task.state_dict), world, exact=False, shared=True)
    moving.begin()                      # a step begins
    moving.begin_slot(); moving.undo_slot()
    moving.end_slot(last)               # after the backward of a micro-batch that counts
    moving.check(); moving.share()      # before the update
    moving.end(result, limit)           # after it

The first two steps find by value which of them a forward writes: writes through `.data` or numpy do not increment
torch's version counter. A tensor that changes without the counter counts as written in every later step.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.distributed import collectives
from lockstep.distributed.world import World
from lockstep.engines.base import StepResult
from lockstep.engines.request import Own, OwnState
from lockstep.engines.sample_state import SampleState, changed_elements, is_by_rows
from lockstep.errors import ConfigError, LockstepError
from lockstep.tensors import as_bytes
from lockstep.transforms.batchnorm import Recording

__all__ = [
    "Moving",
    "differing",
]


_CHECKED = 2  # first steps, in which writes by forwards are detected


class _MovingTensor:
    """One tensor that a forward may write or replace.

    Attributes:
        name: its name in a checkpoint; `description`, its name in messages.
        own: it is the task's, not the model's.
        replayed: only BatchNorm's replay writes it.
        silent: it may be written without incrementing the version counter.
        step_value, slot_value: its values at the beginning of the step, and of the micro-batch; None while these are
            the same.
        step_version: the tensor at that time, and its version counter; `first_version`, its id and counter in the
            first step.
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
        self.name = name
        self._find = find
        self.own = own
        self.replayed = replayed
        self.silent = silent
        if own:
            self.description = f"{name}, which `loss` writes"
        else:
            self.description = f"the buffer {name}, which the forward writes"
        self.step_value: Tensor | None = None
        self.slot_value: Tensor | None = None
        self.step_version: tuple[Tensor, int] | None = None
        self.first_version: tuple[int, int] | None = None

    @property
    def now(self) -> Tensor:
        tensor = self._find()
        if tensor is None and self.own:
            raise LockstepError(f"the task's state_dict() no longer has {self.name}; keep it for the whole run")
        if tensor is None:
            raise LockstepError(f"the forward removed the buffer {self.name}; keep it, or make it a plain attribute")
        return tensor

    @property
    def is_counted(self) -> bool:
        """Whether the version counter moved, or the tensor was replaced, since the step began."""
        present = self.now
        return (
            self.step_version is None or present is not self.step_version[0] or present._version != self.step_version[1]
        )

    @property
    def is_written(self) -> bool:
        """Whether it may have changed since the step began."""
        return self.silent or self.is_counted

    @property
    def fits(self) -> bool:
        """Whether the current tensor has the shape and dtype of the step's value."""
        return self.step_value is not None and (self.step_value.shape, self.step_value.dtype) == (
            self.now.shape,
            self.now.dtype,
        )


class _OwnTensors:
    """The task's tensors from its last `state_dict()`."""

    def __init__(self, own: Own) -> None:
        self._own = own
        self.now = dict(own())

    def refresh(self) -> None:
        self.now = dict(self._own())

    def places(self) -> list[_MovingTensor]:
        tensors = []
        for name in self.now:
            tensors.append(_MovingTensor(f"task/{name}", partial(self._get, name), own=True))
        return tensors

    def _get(self, name: str) -> Tensor | None:
        return self.now.get(name)

    def is_copy(self, place: _MovingTensor) -> bool:
        """Whether `state_dict()` returns a new tensor each time, so that nothing can be restored."""
        return self._own()[place.name.removeprefix("task/")] is not place.now


class Moving:
    """The tensors of a model and a task that may change during a step.

    Args:
        model: the plain module.
        own: what the task has of its own.
        exact: refuse tensors that a forward writes, since their values then depend on which rank computes what.
        shared: buffers that forwards write get rank 0's values after each step; the task's own always do.

    Raises:
        ConfigError: a name of `own.by_sample` is no tensor of the model or the task.
    """

    def __init__(
        self,
        model: nn.Module,
        own: OwnState,
        world: World,
        exact: bool,
        shared: bool = True,
    ) -> None:
        self._world = world
        self._exact = exact
        self._share_buffers = shared
        self._own_alike = own.alike
        self._places = [
            _MovingTensor(
                f"{prefix}.{key}".lstrip("."),
                partial(owner._buffers.get, key),
                replayed=isinstance(owner, Recording),
                # Private to torch: `_NormBase` is the base of all BatchNorm layers, whose kernels write without the
                # counter.
                silent=isinstance(owner, nn.modules.batchnorm._NormBase),
            )
            for prefix, owner in model.named_modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]
        self._own = _OwnTensors(own.tensors) if own.tensors is not None else None
        if self._own:
            self._places += self._own.places()
        # The tensors that a forward itself may write, not only BatchNorm's replay.
        self._forward = [tensor for tensor in self._places if not tensor.replayed]
        self._by_sample = _find_declared(self._forward, own.by_sample)
        self._rows = SampleState([tensor for tensor in self._forward if tensor.name in self._by_sample], world)
        # The task's tensors that `loss` did not write in the checked steps; only exact mode watches them further.
        self._unwritten: list[_MovingTensor] = []
        self._steps = 0
        # Tensors that forwards write, and that get rank 0's values after each step.
        self._shared: list[_MovingTensor] = []
        # Names of the tensors that forwards wrote in the checked steps.
        self._written_names: set[str] = set()

    def __len__(self) -> int:
        return len(self._places)

    def kinds(self) -> dict[str, str]:
        """Map the state's name to a description, for every tensor that forwards have written."""
        descriptions = {}
        for p in self._places:
            if self._is_tracked(p):
                descriptions[p.name if p.own else f"model/{p.name}"] = p.description
        return descriptions

    def _is_tracked(self, place: _MovingTensor) -> bool:
        later = place.first_version is not None and place.first_version != (id(place.now), place.now._version)
        return place.replayed or place.silent or place.name in self._written_names or later

    def _refresh(self) -> None:
        """Refresh the task's tensors, if any of them is tracked."""
        if self._own and (self._steps < _CHECKED or self._unwritten or any(tensor.own for tensor in self._places)):
            self._own.refresh()

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the values of the tensors that may have changed since the last copy."""
        self._refresh()
        self._rows.begin()
        copies_all = self._steps < _CHECKED
        changed = []
        for tensor in self._places:
            if copies_all or tensor.is_written:
                changed.append(tensor)
        fitting = [tensor for tensor in changed if tensor.fits]
        _copy([(tensor.step_value, tensor.now) for tensor in fitting if tensor.step_value is not None])
        for tensor in changed:
            if not tensor.fits:
                tensor.step_value = tensor.now.detach().clone()
            tensor.step_version = (tensor.now, tensor.now._version)
            if not self._steps:
                tensor.first_version = (id(tensor.now), tensor.now._version)
        for tensor in self._unwritten:
            tensor.step_version = (tensor.now, tensor.now._version)

    @torch.no_grad()
    def begin_slot(self) -> None:
        """Copy what a forward may change, in case its micro-batch is an empty slot."""
        self._refresh()
        copies_all = self._steps < _CHECKED
        for tensor in self._forward:
            if copies_all or tensor.is_written:
                tensor.slot_value = tensor.now.detach().clone()
            else:
                tensor.slot_value = None
        self._rows.begin_slot()

    def end_slot(self, last: bool) -> None:
        """Record what a micro-batch wrote to state by sample.

        Args:
            last: it is this rank's last one in the step.

        Raises:
            ConfigError: it changes its shape.
        """
        if self._by_sample:
            self._refresh()
            for tensor in self._forward:
                if tensor.name in self._by_sample:
                    self._check_shape(tensor)
            self._rows.end_slot(last)

    @torch.no_grad()
    def undo_slot(self) -> None:
        """Undo the forward of an empty slot."""
        self._refresh()
        changes = self._changes(
            self._forward, [p.step_value if p.slot_value is None else p.slot_value for p in self._forward]
        )
        changes = [(tensor, before) for tensor, before in changes if _same_layout(tensor.now, before)]
        uncounted = []
        for tensor, _ in changes:
            if not tensor.is_counted:
                uncounted.append(tensor)
        _copy([(tensor.now, before) for tensor, before in changes])
        # This write is not a forward's, so it must not count as one.
        for tensor in uncounted:
            tensor.step_version = (tensor.now, tensor.now._version)

    def check(self) -> None:
        """In the first two steps, find the tensors that forwards write. Collective in these steps.

        All ranks agree on the result. A tensor written in the first step only, such as a table built on first use,
        does not count. Later steps check the task's tensors without a collective.

        Raises:
            ConfigError: in exact mode, a forward writes a tensor in both steps; the ranks write different rows of
                one; or a tensor of the task changes its shape, or `state_dict()` returns a copy of it.
        """
        self._refresh()
        if self._steps == _CHECKED:
            self._check_later()
            return
        # A write counts only from its version or its value; silent tensors need the value.
        counted = set()
        for tensor in self._forward:
            if tensor.is_counted and not tensor.own and not tensor.silent:
                counted.add(tensor.name)
        writes = []
        for tensor, _ in self._changes(self._forward, [tensor.step_value for tensor in self._forward]):
            writes.append(tensor)
        self._steps += 1
        local = counted | {tensor.name for tensor in writes}
        for tensor in writes:
            tensor.silent = tensor.silent or (not tensor.is_counted)
            if tensor.own:
                self._check_own(tensor)
        # All ranks, in the first two steps: a branch may write a tensor on some ranks only.
        by_rank = self._world.gather(sorted(local))  # collective
        names = set()
        for names_of_rank in by_rank:
            names.update(names_of_rank)
        alike = {tensor.name for tensor in self._places if tensor.own and self._own_alike} | self._by_sample
        # Written in both steps: a tensor that is built on first use is written once.
        repeats = (names & self._written_names) - alike
        if self._steps == 1:
            self._written_names = names
        elif self._exact and repeats:
            raise self._inexact_error(next(tensor for tensor in self._places if tensor.name == min(repeats)))
        self._choose_shared(names - self._by_sample)
        self._check_rows(by_rank)
        if self._steps == _CHECKED:
            self._written_names |= names
            self._drop_unwritten()

    def _choose_shared(self, names: set[str]) -> None:
        if self._world.size == 1:
            return
        chosen = []
        for tensor in self._places:
            if tensor.name in names and (tensor.own or self._share_buffers):
                chosen.append(tensor)
        # All ranks, in the first two steps: a broadcast needs the same shape on all.
        shapes = self._world.gather({tensor.name: list(tensor.now.shape) for tensor in chosen})  # collective
        alike = []
        for tensor in chosen:
            if all(shape.get(tensor.name) == list(tensor.now.shape) for shape in shapes):
                alike.append(tensor)
        odd = None
        for tensor in chosen:
            if tensor.own and tensor not in alike:
                odd = tensor
                break
        if odd:
            raise ConfigError(f"{odd.description}, has different shapes on the ranks: use one shape on all")
        self._shared = alike

    @torch.no_grad()
    def _check_rows(self, by_rank: list[list[str]]) -> None:
        """Refuse tensors whose rows are written by different ranks. Collective.

        Otherwise all ranks would get rank 0's rows.

        Args:
            by_rank: names of the tensors that each rank wrote.

        Raises:
            ConfigError: the same on every rank.
        """
        for tensor in self._shared:
            others_write = any(tensor.name in names for names in by_rank[1:])
            # `share` refuses a tensor that has changed its shape.
            if not others_write or tensor.step_value is None or not tensor.fits:
                continue
            writers = changed_elements(tensor.now, tensor.step_value).to(torch.int32)
            # All ranks, in the checked steps: how many ranks wrote each element?
            collectives.all_reduce(writers, group=self._world.group)  # collective, in the checked steps
            # Waits for the device, in the checked steps. A buffer that was written with the same values has no writer
            # at all.
            if writers.any() and is_by_rows(writers):
                raise ConfigError(
                    f"the ranks write different rows of {tensor.description}: if each sample or stream has rows of its "
                    "own, name it in the task's `sample_state`; else write it in `step_loss` or in the hook "
                    "`after_update`"
                )

    def _drop_unwritten(self) -> None:
        """Stop copying the task's tensors that forwards do not write."""
        if self._exact and not self._own_alike:
            self._unwritten = [
                candidate
                for candidate in self._places
                if candidate.own and candidate.name not in self._written_names | self._by_sample
            ]
        else:
            self._unwritten = []
        self._places = [
            candidate
            for candidate in self._places
            if not candidate.own or candidate.name in self._written_names | self._by_sample
        ]
        self._forward = [tensor for tensor in self._places if not tensor.replayed]
        for tensor in self._unwritten:
            tensor.step_value = tensor.slot_value = None

    def _check_later(self) -> None:
        """Check the task's tensors after the first steps, by their version counters."""
        for tensor in self._places:
            if tensor.own and tensor.is_written:
                self._check_own(tensor)
        for tensor in self._unwritten:
            if (
                tensor.step_version
                and tensor.now is tensor.step_version[0]
                and tensor.now._version != tensor.step_version[1]
            ):
                raise self._inexact_error(tensor)

    @staticmethod
    def _check_shape(place: _MovingTensor) -> None:
        if place.step_value is not None and not place.fits:
            raise ConfigError(
                f"{place.description}, changed its shape from {list(place.step_value.shape)} to "
                f"{list(place.now.shape)}: allocate it at full size, and write into it in place"
            )

    def _check_own(self, place: _MovingTensor) -> None:
        self._check_shape(place)
        if self._own and self._own.is_copy(place):
            raise ConfigError(
                f"{place.description}, is a copy in the task's state_dict(): return the tensor itself, to be restored"
            )

    @staticmethod
    def _inexact_error(place: _MovingTensor) -> ConfigError:
        return ConfigError(
            f"--exact does not work with {place.description}: its values depend on which rank computes what; write it "
            "in the loop, or drop --exact"
        )

    def _changes(
        self, places: list[_MovingTensor], before: Iterable[Tensor | None]
    ) -> list[tuple[_MovingTensor, Tensor]]:
        """Return the tensors that may differ from `before`, with that; exact in the checked steps."""
        pairs = []
        for tensor, former_value in zip(places, before, strict=True):
            if former_value is not None:
                pairs.append((tensor, former_value))
        if self._steps == _CHECKED:
            changes = []
            for tensor, former_value in pairs:
                if tensor.is_written:
                    changes.append((tensor, former_value))
            return changes
        fitting = []
        for tensor, former_value in pairs:
            if _same_layout(tensor.now, former_value):
                fitting.append((tensor.now, former_value))
        # Waits for the device, in the checked steps only.
        flags = iter(differing(fitting))
        changes = []
        for tensor, former_value in pairs:
            if not _same_layout(tensor.now, former_value) or next(flags):
                changes.append((tensor, former_value))
        return changes

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the values from the beginning of the step."""
        self._refresh()
        _copy(self._pairs())

    @torch.no_grad()
    def end(self, result: StepResult, limit: float) -> None:
        """Restore what a skipped step changed."""
        if result.applied is False:
            self.put_back()
        elif result.applied is None:
            self._refresh()
            _copy(_select(self._pairs(), result.norm < limit))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        changes = self._changes(self._places, [tensor.step_value for tensor in self._places])
        pairs = []
        for tensor, value in changes:
            if tensor.fits:
                pairs.append((tensor.now, value))
        return pairs

    @torch.no_grad()
    def share(self) -> None:
        """Broadcast rank 0's values of the written tensors, and merge state by sample. Collective."""
        self._rows.merge()
        for tensor in self._shared:
            present = tensor.now
            if not tensor.fits:
                raise LockstepError(
                    f"{self._world.label}: {tensor.description}, changed its shape or dtype, so it cannot "
                    "be the same on all ranks; keep both"
                )
            # All ranks, once a step for each of these tensors.
            collectives.broadcast(present, group_src=0, group=self._world.group)  # collective


def _find_declared(places: list[_MovingTensor], names: Collection[str]) -> set[str]:
    """Return the names of the tensors that a task's `sample_state` declares.

    Raises ConfigError for an unknown name.
    """
    known = {tensor.name.removeprefix("task/"): tensor.name for tensor in places}
    for name in names:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"the task's sample_state has '{name}', which is no buffer of the model and no key of its "
                f"state_dict(): there is {there}"
            )
    return {known[name] for name in names}


def differing(pairs: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return whether each pair of tensors differs in any bit. Waits for the device, once.

    The two tensors of a pair have the same shape and dtype.
    """
    flags = [(as_bytes(left) != as_bytes(right)).any() for left, right in pairs]
    if flags:
        # Waits for the device, once for all pairs.
        return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return []


def _same_layout(left: Tensor, right: Tensor) -> bool:
    return (left.shape, left.dtype) == (right.shape, right.dtype)


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, in few calls."""
    for group in _by_kind(pairs):
        # Private to torch: copies a group in one kernel.
        torch._foreach_copy_([target for target, _ in group], [source for _, source in group])


def _select(pairs: list[tuple[Tensor, Tensor]], applied: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pair each present tensor with itself where `applied`, else with the kept one."""
    choices = []
    for group in _by_kind(pairs):
        # Concatenate a group, so that one kernel selects for all of its tensors.
        presents, kepts = (torch.cat([tensor.reshape(-1) for tensor in column]) for column in zip(*group, strict=True))
        values = torch.where(applied.to(presents.device), presents, kepts)
        selected = values.split_with_sizes([present.numel() for present, _ in group])
        for (present, _), values_of_tensor in zip(group, selected, strict=True):
            choices.append((present, values_of_tensor.view(present.shape)))
    return choices


def _by_kind(pairs: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    groups: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        target = pair[0]
        groups.setdefault((type(target), target.dtype, target.layout, target.device), []).append(pair)
    return list(groups.values())
