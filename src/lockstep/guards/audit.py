"""Audit devices during training: recompute micro-batches elsewhere, and compare bit for bit.

    audit = Audit(share, seed, first, world, batches, model, again, clock, kept)
    with audit.watch(step, batch) as seen:          # around each micro-batch's forward and backward
        engine.backward(seen(loss), weight)
    audit.compare(step)                             # before the update: raises if a device computes wrongly

(seed, step) and the ranks' shares determine which rank recomputes which micro-batches, the same on every rank. In an
audited step each rank recomputes a micro-batch of another rank, so that none waits; a single rank recomputes its own.
Results are compared only if they start from the same data, buffers and task state. A majority vote over further
recomputations settles a difference. The first step of each start is audited, so that a nondeterministic gradient shows
at once.
"""

import logging
import math
import platform
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.clock import Clock
from lockstep.data.batches import Batches, MicroBatch
from lockstep.distributed.progress import rank_label
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError, LockstepError, error_origin
from lockstep.guards import desync
from lockstep.guards.desync import Digests, of_batch, of_digests
from lockstep.seeds import derive
from lockstep.task import Task

__all__ = [
    "Audit",
    "Recomputer",
    "choose_audits",
]


# --- recomputation

# The loss's name among those of the parameters.
_LOSS = ""
# Private to torch: the base of BatchNorm layers, whose running statistics do not affect the output in training.
_OUTPUT_NEUTRAL = nn.modules.batchnorm._NormBase


class Recomputation(NamedTuple):
    """Digests of a rank's result for a micro-batch.

    Attributes:
        root: gradient that its backward started from; NaN if the loss was not finite.
        data: digest of the batch.
        state: digest of the buffers and the task's own tensors before the forward.
        names: digest of the names of the parameters that had a gradient.
        bits: digest of loss and gradients.
    """

    root: float
    data: str
    state: str
    names: str
    bits: str


class _PendingResult(NamedTuple):
    """A recomputation whose values are still on the device."""

    data: str
    state: Digests
    bits: Digests
    roots: list[Tensor]


class Recomputer:
    """Records the results of this rank's micro-batches, and recomputes those of any rank.

    Args:
        model: the plain module: its forward needs no other rank.
        loss: the loss of a micro-batch, a sum over its items.
        seed: as in the loop, so that dropout is the same.
        kernels: as in the loop.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        loss: Callable[[nn.Module, MicroBatch], Tensor],
        seed: Callable[[int, int], None],
        device: torch.device,
        kernels: Callable[[int, int], AbstractContextManager[Any]] = lambda step, index: nullcontext(),
    ) -> None:
        self._model = model
        self._task = task
        self._loss = loss
        self._seed = seed
        self._device = device
        self._kernels = kernels
        self._trained = _trainable_parameters(model)
        self._pending: dict[int, _PendingResult] = {}
        self._start_state = _StateCopy(model, task)
        self._state = Digests()

    @property
    def names(self) -> list[str]:
        """The loss's name, then those of the trained parameters in the model's order."""
        return [_LOSS, *self._trained]

    def begin(self) -> None:
        """Begin an audited step: copy what its forwards may change."""
        self._pending = {}
        # Parameters may have been frozen or unfrozen since the last step.
        self._trained = _trainable_parameters(self._model)
        self._start_state = _StateCopy(self._model, self._task)
        self._state = _digest_state(self._model, self._task)

    @contextmanager
    def watch(self, batch: MicroBatch) -> Iterator[Callable[[Tensor], Tensor]]:
        """Record a micro-batch's loss and gradients, around forward and backward.

        Yields:
            A function that is called with the loss between the two, and returns it.
        """
        pending = _PendingResult(of_batch(batch.held), _digest_state(self._model, self._task), Digests(), [])
        handles = []

        def record_loss(loss: Tensor) -> Tensor:
            pending.bits.add(_LOSS, loss)
            # torch gives the method no types.
            handles.append(loss.register_hook(pending.roots.append))  # type: ignore[no-untyped-call]
            # These hooks are called before a gradient is added to the others'.
            for name, parameter in self._trained.items():
                # As above: no types.
                handles.append(parameter.register_hook(partial(pending.bits.add, name)))  # type: ignore[no-untyped-call]
            return loss

        try:
            yield record_loss
        finally:
            for handle in handles:
                handle.remove()
        self._pending[batch.index] = pending

    def read_results(self) -> dict[int, Recomputation]:
        """Return the result of each micro-batch recorded since `begin`."""
        return {index: _read_result(pending) for index, pending in self._pending.items()}

    def own(self, index: int) -> dict[str, str]:
        """Return the digests of a recorded micro-batch; {} if it was not recorded."""
        if index in self._pending:
            return self._pending[index].bits.read()
        return {}

    def has_moved(self) -> bool:
        """Whether forwards have changed, since `begin`, state that affects a forward."""
        # Waits for the device, once per audited step.
        return _digest_state(self._model, self._task).read() != self._state.read()

    def unlike(self, batch: MicroBatch, result: Recomputation) -> str:
        """Return why this rank cannot recompute a result: "data", "buffers", or "" if it can."""
        if of_batch(batch.held) != result.data:
            return "data"
        # Waits for the device, once per recomputed micro-batch.
        if of_digests(self._state.read()) == result.state:
            return ""
        return "buffers"

    def bits(self, step: int, batch: MicroBatch, result: Recomputation) -> dict[str, str]:
        """Recompute a micro-batch from the state at the step's start, without side effects.

        Gradients, buffers, the task's own tensors and the generators are restored.

        Args:
            result: the result to compare with.

        Returns:
            The digests of loss and gradients by name.

        Raises:
            ConfigError: the model's gradient can only be computed in a full backward.
        """
        state_now = _StateCopy(self._model, self._task)
        digests = Digests()
        with _preserve_generators(self._device):
            try:
                self._start_state.put_back()
                self._seed(step, batch.index)
                with self._kernels(step, batch.index):
                    loss = self._loss(self._model, batch)
                digests.add(_LOSS, loss)
                for name, gradient in zip(self._trained, self._gradients(loss, result.root), strict=True):
                    if gradient is not None:
                        digests.add(name, gradient)
            finally:
                state_now.put_back()
        # Waits for the device.
        bits = digests.read()
        if _digest_names(bits) != result.names:
            raise ConfigError(_REENTRANT)
        return bits

    def _gradients(self, loss: Tensor, root: float) -> tuple[Tensor | None, ...]:
        """Compute gradients without touching `.grad` or the engine's accumulation hooks."""
        parameters = list(self._trained.values())
        try:
            # `grad` instead of `backward`: the engine's hooks must not count or exchange these gradients.
            return torch.autograd.grad(loss, parameters, torch.full_like(loss, root).detach(), allow_unused=True)
        except RuntimeError as error:
            if error_origin(error) != _REENTRANT_SOURCE:
                raise
            raise ConfigError(_REENTRANT) from error


# The origin of the error of checkpoint(use_reentrant=True). Errors within its recomputation come from deeper functions.
_REENTRANT_SOURCE = "torch.utils.checkpoint:backward"
_REENTRANT = (
    "--guards.audit: a recomputation gives gradients to other parameters: call the model's activation checkpoint() "
    "with use_reentrant=False, or drop --guards.audit"
)


def _read_result(pending: _PendingResult) -> Recomputation:
    """Read a record. Waits for the device."""
    bits = pending.bits.read()
    return Recomputation(
        float(pending.roots[0]), pending.data, of_digests(pending.state.read()), _digest_names(bits), of_digests(bits)
    )


def _digest_names(bits: dict[str, str]) -> str:
    return of_digests(dict.fromkeys(bits, ""))


def _buffers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (name, owning module, its name there, buffer)."""
    for prefix, owner in model.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                yield f"{prefix}.{key}".lstrip("."), owner, key, buffer


def _digest_state(model: nn.Module, task: Task) -> Digests:
    """Digest everything except parameters that affects a forward."""
    digests = Digests()
    for name, owner, _, buffer in _buffers_of(model):
        if not isinstance(owner, _OUTPUT_NEUTRAL):
            digests.add(name, buffer)
    for name, tensor in task.state_dict().items():
        digests.add(f"task/{name}", tensor)
    return digests


class _StateCopy:
    """Copies of a model's buffers and a task's own tensors."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._task = task
        self._buffers = [(owner, key, buffer, buffer.detach().clone()) for _, owner, key, buffer in _buffers_of(model)]
        self._own = [(tensor, tensor.detach().clone()) for tensor in task.state_dict().values()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore all values; an unchanged tensor is not written, so its version counter stays."""
        for owner, key, tensor, value in self._buffers:
            owner._buffers[key] = tensor
            _copy_if_changed(tensor, value)
        for tensor, value in self._own:
            _copy_if_changed(tensor, value)
        if self._own:
            self._task.load_state_dict(self._task.state_dict())


def _copy_if_changed(tensor: Tensor, value: Tensor) -> None:
    # Waits for the device.
    if not torch.equal(tensor, value):
        tensor.copy_(value)


@contextmanager
def _preserve_generators(device: torch.device) -> Iterator[None]:
    """Restore all generators at the end."""
    numpy = np.random.get_state()
    python = random.getstate()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    np.random.set_state(numpy)
    random.setstate(python)


def describe_tensors(names: list[str]) -> str:
    """Describe the differing tensors; "" if there are none.

    `the loss and the gradients of first.weight and 3 more parameters`.
    """
    parameters = [name for name in names if name != _LOSS]
    if len(parameters) > 1:
        more = f" and {len(parameters) - 1} more parameters"
    else:
        more = ""
    if parameters:
        gradient = f"the gradient{'s' * (len(parameters) > 1)} of {parameters[0]}{more}"
    else:
        gradient = ""
    return " and ".join(phrase for phrase in ("the loss" * (_LOSS in names), gradient) if phrase)


def _trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    parameters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameters[name] = parameter
    return parameters


# --- majority vote

# A rank's own results differ.
BY_ITSELF = "itself"
# A minority: most other ranks have another result.
BY_OTHERS = "others"
# Two ranks differ, and there is no third one.
ONE_OF_TWO = "two"
# No majority, or the results of most ranks differ among themselves: a nondeterministic operation, not a device.
EVERYBODY = "everybody"


class VoteVerdict(NamedTuple):
    """Result of the vote: which ranks are wrong, and on what evidence."""

    ranks: list[int]
    why: str


def vote(by_rank: Sequence[Sequence[str]]) -> VoteVerdict:
    """Vote over the ranks' results.

    Args:
        by_rank: by rank, its result each time; empty if it took no part.
    """
    took_part = []
    for rank, results in enumerate(by_rank):
        if results:
            took_part.append(rank)
    unsteady = []
    for rank in took_part:
        if len(set(by_rank[rank])) > 1:
            unsteady.append(rank)
    steady = {}
    for rank in took_part:
        if rank not in unsteady:
            steady[rank] = by_rank[rank][0]
    if len(unsteady) > 1 and 2 * len(unsteady) >= len(took_part):
        return VoteVerdict(unsteady, EVERYBODY)
    common, count = Counter(steady.values()).most_common(1)[0] if steady else ("", 0)
    if len(set(steady.values())) > 1:
        if 2 * count <= len(steady):
            return VoteVerdict(took_part, ONE_OF_TWO if len(took_part) == 2 else EVERYBODY)
        odd = []
        for rank, result in steady.items():
            if result != common:
                odd.append(rank)
        return VoteVerdict(sorted(unsteady + odd), BY_OTHERS)
    return VoteVerdict(unsteady, BY_ITSELF)


# --- audit of a run

_LOG = logging.getLogger("lockstep")
# Recomputations of a disputed micro-batch by each rank.
_TRIES = 3
_UNLIKE_TEXT = {
    "data": "loading its data again gives other values; make each sample depend only on its index",
    "buffers": "the buffers of the model or the task differ on the rank that recomputes it",
}


class Audited(NamedTuple):
    """A micro-batch to recompute, and the rank that does so."""

    auditor: int
    micro: int


class _Comparison(NamedTuple):
    """A rank's micro-batches that are equal, different, or not comparable (with the reason)."""

    alike: list[int]
    wrong: list[int]
    unlike: list[tuple[int, str]]


def choose_audits(
    seed: int, step: int, share: float, runs: tuple[tuple[int, int], ...], *, first_only: bool = False, least: int = 0
) -> list[Audited]:
    """Choose the micro-batches of a step to recompute, and the rank for each.

    Each rank's share is recomputed by one other rank. Each micro-batch is chosen with probability `share`; ranks with
    equal shares are audited in the same steps.

    Args:
        runs: by rank, the first of its micro-batches and the one after the last.
        first_only: choose at most the first of each rank.
        least: minimum number per rank.
    """
    # 53 random bits make a float in [0, 1).
    uniform = (derive(seed, "audit", step) >> 11) * 2.0**-53
    if not least and share * max(stop - start for start, stop in runs) + uniform < 1.0:
        return []
    if len(runs) > 1:
        shift = 1 + derive(seed, "audit", step, len(runs)) % (len(runs) - 1)
    else:
        shift = 0
    chosen = []
    for owner, (start, stop) in enumerate(runs):
        size = stop - start
        count = min(max(math.floor(share * size + uniform), least), size)
        begin = derive(seed, "audit", step, owner) % size if size else 0
        if first_only:
            offsets = [0] * bool(count)
        else:
            offsets = [(begin + k) % size for k in range(count)]
        for offset in offsets:
            chosen.append(Audited((owner - shift) % len(runs), start + offset))
    return chosen


class Audit:
    """The audit of a run. Every rank calls each method at the same steps.

    Args:
        share: share of the micro-batches to recompute.
        first: the first step of this start.
        again: records and recomputes this rank's part.
        kept: returns the steps of the checkpoints; called on rank 0 only.
    """

    # PLR0913: the parts of a run that the audit reads, made by `training`.
    def __init__(  # noqa: PLR0913
        self,
        share: float,
        seed: int,
        first: int,
        world: World,
        batches: Batches,
        model: nn.Module,
        again: Recomputer,
        clock: Clock,
        kept: Callable[[], list[int]],
    ) -> None:
        self._share = share
        self._seed = seed
        self._first = first
        self._world = world
        self._batches = batches
        self._model = model
        self._again = again
        self._clock = clock
        self._kept = kept
        # Set once forwards change state that affects the next forward. Then only a step's first micro-batch starts from
        # a known state.
        self._first_only = False
        self._step = -1
        self._plan = list[Audited]()
        self._stream: Generator[tuple[int, MicroBatch], None, None] | None = None
        # Digests of this rank's recomputations that differ.
        self._odd: dict[int, dict[str, str]] = {}
        # Rank -> step of its last micro-batch that matched.
        self._last_matched: dict[int, int] = {}
        self._warned: set[str] = set()

    def watch(self, step: int, batch: MicroBatch) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Return a context around a micro-batch's forward and backward.

        It yields a function that is called with the loss between the two.
        """
        if step != self._step:
            self._plan = self._plan_step(step)
            self._step = step
            if self._plan:
                self._again.begin()
        if batch.weight and any(batch.index == entry.micro for entry in self._plan):
            return self._again.watch(batch)
        return _NO_WATCH

    def compare(self, step: int) -> None:
        """Compare results after the step's last micro-batch, before its update.

        Collective in audited steps: two small exchanges.

        Raises:
            LockstepError: a device computes wrongly: rank, host and device are named, on every rank.
            DifferenceError: the ranks' parameters differ.
        """
        if not self._plan:
            return
        own_results = {index: [*results] for index, results in self._again.read_results().items()}
        # All ranks, in audited steps: the results of the audited micro-batches, and whether forwards changed state.
        gathered = self._world.gather([sorted(own_results.items()), self._again.has_moved()])  # collective
        owners = {micro: rank for rank, (comparison, _) in enumerate(gathered) for micro, _ in comparison}
        results = {micro: Recomputation(*values) for comparison, _ in gathered for micro, values in comparison}
        comparison = self._recompute(step, results)
        # All ranks: which micro-batches match.
        ranks = [
            _Comparison(*each) for each in self._world.gather([comparison.alike, comparison.wrong, comparison.unlike])
        ]  # collective
        disputed = [Audited(rank, micro) for rank, each in enumerate(ranks) for micro in each.wrong]
        if disputed:
            first = min(disputed, key=lambda each: each.micro)
            owner = owners[first.micro]
            result = results[first.micro]
            raise LockstepError(self._describe_fault(step, first, owner, result))  # collective
        self._last_matched |= {owners[micro]: step for each in ranks for micro in each.alike}
        self._warn(step, [(micro, reason) for each in ranks for micro, reason in each.unlike])
        if any(changed for _, changed in gathered) and not self._first_only:
            self._first_only = True
            self.close()
        self._clock.lap("audit")

    def close(self) -> None:
        """End the loader process, if there is one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _plan_step(self, step: int) -> list[Audited]:
        present = self._batches.step_plan.present(step)
        begins = step == self._first
        runs = self._batches.runs_of(step)
        audits = choose_audits(
            *(self._seed, step, self._share, runs), first_only=self._first_only or begins, least=int(begins)
        )
        return [entry for entry in audits if entry.micro < present]

    def _recompute(self, step: int, results: dict[int, Recomputation]) -> _Comparison:
        """Recompute this rank's part, and compare it."""
        comparison = _Comparison([], [], [])
        self._odd = {}
        for _, micro in [entry for entry in self._plan if entry.auditor == self._world.rank]:
            batch = self._load(step, micro)
            result = results.get(micro)
            # Not comparable: an empty slot, a micro-batch without items, or a skipped step.
            if result is None or not math.isfinite(result.root):
                continue
            reason = self._again.unlike(batch, result)
            if reason:
                comparison.unlike.append((micro, reason))
                continue
            bits = self._again.bits(step, batch, result)
            if of_digests(bits) == result.bits:
                comparison.alike.append(micro)
            else:
                comparison.wrong.append(micro)
                self._odd[micro] = bits
        return comparison

    def _load(self, step: int, micro: int) -> MicroBatch:
        """Return the next micro-batch that this rank recomputes, prefetched.

        If `--shares auto` changed the shares since then, prefetching restarts.
        """
        for _ in range(2):
            self._stream = self._stream or self._batches.again(self._own_audits(step, micro))
            key, batch = next(self._stream, (-1, None))
            if batch is not None and (key, batch.index) == (step, micro):
                return batch
            self.close()
        raise LockstepError(f"--guards.audit: micro-batch {micro} of step {step + 1} was not loaded")

    def _own_audits(self, start: int, first: int) -> Iterator[tuple[int, int]]:
        """Yield what this rank recomputes, from micro-batch `first` of step `start` on."""
        for step in range(start, self._batches.step_plan.steps):
            micro_batches = []
            for entry in self._plan_step(step):
                if entry.auditor == self._world.rank:
                    micro_batches.append(entry.micro)
            yield from (
                (step, micro)
                for micro in (micro_batches[micro_batches.index(first) :] if step == start else micro_batches)
            )

    def _warn(self, step: int, unlike: list[tuple[int, str]]) -> None:
        for micro, reason in unlike:
            if reason not in self._warned and self._world.is_main:
                _LOG.warning(
                    "--guards.audit: micro-batch %d of step %d was not compared: %s",
                    micro,
                    step + 1,
                    _UNLIKE_TEXT[reason],
                )
            self._warned.add(reason)

    def _describe_fault(self, step: int, disputed: Audited, owner: int, result: Recomputation) -> str:
        """Describe the faulty device in one line. Collective: every rank recomputes the micro-batch."""
        parameters = {}
        for name, p in self._model.named_parameters():
            parameters[f"model/{name}"] = p.detach()
        # All ranks: different parameters would explain the difference without a faulty device.
        desync.check(parameters, self._world, step)  # collective
        before = (self._again.own(disputed.micro), self._odd.get(disputed.micro))
        own_bits = [bits for bits in before if bits]
        with suppress(DataError):
            # A rank that cannot load the micro-batch does not vote.
            for _ in range(_TRIES):
                batch = self._batches.alone(step, disputed.micro)
                if self._again.unlike(batch, result):
                    break
                own_bits.append(self._again.bits(step, batch, result))
        newest = max(self._kept(), default=0) if self._world.is_main else 0
        # All ranks: each has recomputed the disputed micro-batch.
        gathered = self._world.gather([own_bits, _device_label(self._world.device), newest])  # collective
        results = [rank_bits for rank_bits, _, _ in gathered]
        ranks, why = vote([[of_digests(each) for each in rank_bits] for rank_bits in results])
        devices = ", ".join(f"{rank_label(rank)} ({gathered[rank][1]})" for rank in ranks)
        names = self._differing_names(results, ranks)
        if self._world.size > 1:
            by = f", recomputed by {rank_label(disputed.auditor)},"
        else:
            by = ", computed twice,"
        subject = f"micro-batch {disputed.micro} of {rank_label(owner)}{by}"
        if why == EVERYBODY:
            return (
                f"step {step + 1}: {subject} differs in nearly every recomputation and on most ranks ({names}): "
                "a nondeterministic operation, or state outside buffers and state_dict(), rather than a device; "
                "fix it, or drop --guards.audit"
            )
        newest = gathered[0][2]
        if newest:
            saved = f"the newest checkpoint is of step {newest}"
        else:
            saved = "there is no checkpoint"
        after = f"the step was not applied; {saved}{self._last_match(ranks)}"
        if why == ONE_OF_TWO:
            return (
                f"step {step + 1}: one of {devices} computes wrongly: {subject} differs ({names}), and each rank "
                f"repeats its result, so only a third rank could decide; {after}; test both devices before continuing"
            )
        if why == BY_OTHERS:
            than = "from most other ranks"
        else:
            than = "from its own recomputation there"
        if self._world.size == 1:
            than += ": a faulty device, or a nondeterministic model"
        return (
            f"step {step + 1}: {devices} computes wrongly: {subject} differs there ({names}) {than}; {after}; take the "
            "device out of service and restart"
        )

    def _differing_names(self, results: list[list[dict[str, str]]], ranks: list[int]) -> str:
        """Name what differs between these ranks' results and the most common ones.

        The names are in the model's order.
        """
        every = [each for rank_results in results for each in rank_results]
        usual = max(every, key=lambda each: sum(each == bits for bits in every))
        odd = next((each for rank in ranks for each in results[rank] if each != usual), usual)
        return describe_tensors([name for name in self._again.names if odd.get(name) != usual.get(name)])

    def _last_match(self, ranks: list[int]) -> str:
        steps = []
        for rank in ranks:
            if rank in self._last_matched:
                steps.append(self._last_matched[rank])
        if len(steps) == len(ranks):
            when = f"in step {min(steps) + 1}"
        else:
            when = "none in this start"
        return f", and the last matching audit there was {when}"


def _device_label(device: torch.device) -> str:
    if device.type == "cuda":
        name = f"{device} {torch.cuda.get_device_name(device)}"
    else:
        name = str(device)
    return f"{platform.node()}, {name}"


def _identity(loss: Tensor) -> Tensor:
    return loss


_NO_WATCH: AbstractContextManager[Callable[[Tensor], Tensor]] = nullcontext(_identity)
