"""Proof while it runs: now and then a rank computes another rank's micro-batch again, and compares bit for bit.

    audit = Audit(share, seed, first, world, batches, model, again, clock, kept)
    with audit.watch(step, batch) as seen:          # around each micro-batch's forward and backward
        engine.backward(seen(loss), weight)
    audit.compare(step)                             # before the update: raises where a device computes wrongly

Which micro-batches, and who computes them again, follows from (seed, step) and the ranks' runs, alike on every rank. In
an audited step each rank computes one micro-batch of another rank, so that none waits for the others; alone in its
world it computes its own again. What was watched and what is computed again are compared only where they begin alike:
with the same data, buffers and state of the task. The first step of each start is audited, which shows at once a model
whose gradient is not the same bits when it is computed twice.
"""

import logging
import math
import platform
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.clock import Clock
from lockstep.data.batches import Batches, MicroBatch
from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.world import World
from lockstep.errors import DataError, LockstepError
from lockstep.guards import desync
from lockstep.guards.again import Again, Told, named
from lockstep.guards.culprit import BY_OTHERS, EVERYBODY, ONE_OF_TWO, judged
from lockstep.guards.digests import of_digests
from lockstep.seeds import derive

__all__ = ["Audit", "Audited", "audited"]

_LOG = logging.getLogger("lockstep")
_TRIES = 3  # times that each rank computes a micro-batch again of which two ranks found other bits
_UNLIKE = {
    "data": "its data are not the same when they are loaded again; make each sample depend on its index alone",
    "buffers": "the model's buffers, or the task's own tensors, are not the same on the rank that computes it again",
}


class Audited(NamedTuple):
    """A micro-batch that is computed again, and the rank that does so."""

    auditor: int
    micro: int


class _Found(NamedTuple):
    """What a rank found of the micro-batches that it computed again: by their numbers, and why not compared."""

    alike: list[int]
    wrong: list[int]
    unlike: list[tuple[int, str]]


def audited(
    seed: int, step: int, share: float, runs: tuple[tuple[int, int], ...], *, first_only: bool = False, least: int = 0
) -> list[Audited]:
    """Which of a step's micro-batches are computed again, and by whom: of each rank's run by one other rank.

    Each micro-batch is with probability `share`; where ranks have equally many, they are audited in the same steps.

    Args:
        runs: by rank, the first and the past-the-last of its micro-batches.
        first_only: of each run only the first one, once at most.
        least: of each run so many at least.
    """
    drawn = (derive(seed, "audit", step) >> 11) * 2.0**-53  # from 0 to below 1
    if not least and share * max(stop - start for start, stop in runs) + drawn < 1.0:
        return []
    shift = 1 + derive(seed, "audit", step, len(runs)) % (len(runs) - 1) if len(runs) > 1 else 0
    found = []
    for owner, (start, stop) in enumerate(runs):
        size = stop - start
        count = min(max(math.floor(share * size + drawn), least), size)
        begin = derive(seed, "audit", step, owner) % size if size else 0
        places = [0] * bool(count) if first_only else [(begin + k) % size for k in range(count)]
        found += [Audited((owner - shift) % len(runs), start + place) for place in places]
    return found


class Audit:
    """Watches and computes again. Every rank calls each method at the same steps.

    Args:
        share: of the micro-batches that are computed again.
        first: the first step of this start.
        again: sees and computes this rank's part.
        kept: the steps of the checkpoints; asked of rank 0 alone.
    """

    def __init__(
        self,
        share: float,
        seed: int,
        first: int,
        world: World,
        batches: Batches,
        model: nn.Module,
        again: Again,
        clock: Clock,
        kept: Callable[[], list[int]],
    ) -> None:
        self._share, self._seed, self._first, self._world, self._batches = share, seed, first, world, batches
        self._model, self._again, self._clock, self._kept = model, again, clock, kept
        self._first_only = False  # forwards move what decides the next one: known at a step's begin alone
        self._step, self._plan = -1, list[Audited]()
        self._stream: Generator[tuple[int, MicroBatch], None, None] | None = None
        self._odd: dict[int, dict[str, str]] = {}  # what this rank found otherwise
        self._held: dict[int, int] = {}  # rank -> the step of its last micro-batch that was found alike
        self._warned: set[str] = set()

    def watch(self, step: int, batch: MicroBatch) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Around forward and backward of each micro-batch; what it gives takes the loss between the two."""
        if step != self._step:
            self._step, self._plan = step, self._planned(step)
            if self._plan:
                self._again.begin()
        if batch.weight and any(batch.index == each.micro for each in self._plan):
            return self._again.watched(batch)
        return _UNWATCHED

    def compare(self, step: int) -> None:
        """After the step's last micro-batch, before its update. Collective in audited steps: two small exchanges.

        Raises:
            LockstepError: a device computes wrongly: rank, host and device are named, on every rank.
            DifferenceError: it does not, but the ranks' parameters differ.
        """
        if not self._plan:
            return
        mine = {index: [*told] for index, told in self._again.told().items()}
        gathered = self._world.gather([sorted(mine.items()), self._again.moved()])  # collective
        owners = {micro: rank for rank, (found, _) in enumerate(gathered) for micro, _ in found}
        told = {micro: Told(*values) for found, _ in gathered for micro, values in found}
        found = self._computed(step, told)
        ranks = [_Found(*each) for each in self._world.gather([found.alike, found.wrong, found.unlike])]  # collective
        disputed = [Audited(rank, micro) for rank, each in enumerate(ranks) for micro in each.wrong]
        if disputed:
            first = min(disputed, key=lambda each: each.micro)
            raise LockstepError(self._named(step, first, owners[first.micro], told[first.micro]))  # collective
        self._held |= {owners[micro]: step for each in ranks for micro in each.alike}
        self._warn(step, [(micro, reason) for each in ranks for micro, reason in each.unlike])
        if any(moved for _, moved in gathered) and not self._first_only:
            self._first_only = True
            self.close()
        self._clock.lap("audit")

    def close(self) -> None:
        """Ends the loader process, where there is one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _planned(self, step: int) -> list[Audited]:
        present, begins = self._batches.step_plan.present(step), step == self._first
        runs = self._batches.runs_of(step)
        found = audited(
            *(self._seed, step, self._share, runs), first_only=self._first_only or begins, least=int(begins)
        )
        return [each for each in found if each.micro < present]

    def _computed(self, step: int, told: dict[int, Told]) -> "_Found":
        """What this rank finds of the micro-batches that it computes again."""
        found, self._odd = _Found([], [], []), {}
        for _, micro in [each for each in self._plan if each.auditor == self._world.rank]:
            batch, of = self._load(step, micro), told.get(micro)
            if of is None or not math.isfinite(of.root):  # an empty slot, without items, or left out anyway
                continue
            reason = self._again.unlike(batch, of)
            if reason:
                found.unlike.append((micro, reason))
                continue
            bits = self._again.bits(step, batch, of)
            if of_digests(bits) == of.bits:
                found.alike.append(micro)
            else:
                found.wrong.append(micro)
                self._odd[micro] = bits
        return found

    def _load(self, step: int, micro: int) -> MicroBatch:
        """The next micro-batch that this rank computes again.

        It is loaded ahead. Where the steps are shared out otherwise since then (`--shares auto`), another may come:
        then the loading begins anew.
        """
        for _ in range(2):
            self._stream = self._stream or self._batches.again(self._places(step, micro))
            key, batch = next(self._stream, (-1, None))
            if batch is not None and (key, batch.index) == (step, micro):
                return batch
            self.close()
        raise LockstepError(f"--guards.audit: micro-batch {micro} of step {step} did not come from the loading")

    def _places(self, start: int, first: int) -> Iterator[tuple[int, int]]:
        """What this rank computes again, from the micro-batch `first` of the step `start` on."""
        for step in range(start, self._batches.step_plan.steps):
            mine = [each.micro for each in self._planned(step) if each.auditor == self._world.rank]
            yield from ((step, micro) for micro in (mine[mine.index(first) :] if step == start else mine))

    def _warn(self, step: int, unlike: list[tuple[int, str]]) -> None:
        for micro, reason in unlike:
            if reason not in self._warned and self._world.is_main:
                _LOG.warning(
                    "--guards.audit: micro-batch %d of step %d was not compared: %s", micro, step, _UNLIKE[reason]
                )
            self._warned.add(reason)

    def _named(self, step: int, disputed: Audited, owner: int, told: Told) -> str:
        """What is known of the device that is wrong, in one line. Collective; every rank computes the micro-batch."""
        parameters = {f"model/{name}": p.detach() for name, p in self._model.named_parameters()}
        desync.check(parameters, self._world, step)  # collective
        before = (self._again.own(disputed.micro), self._odd.get(disputed.micro))
        mine = [bits for bits in before if bits]
        with suppress(DataError):  # who cannot load it has no voice
            for _ in range(_TRIES):
                batch = self._batches.alone(step, disputed.micro)
                if self._again.unlike(batch, told):
                    break
                mine.append(self._again.bits(step, batch, told))
        newest = max(self._kept(), default=0) if self._world.is_main else 0
        gathered = self._world.gather([mine, _here(self._world.device), newest])  # collective
        results = [found for found, _, _ in gathered]
        ranks, why = judged([[of_digests(each) for each in found] for found in results])
        where = ", ".join(f"{rank_label(rank)} ({gathered[rank][1]})" for rank in ranks)
        names = self._differing(results, ranks)
        by = f", computed again by {rank_label(disputed.auditor)}," if self._world.size > 1 else ", computed twice,"
        what = f"micro-batch {disputed.micro} of {rank_label(owner)}{by}"
        if why == EVERYBODY:
            return (
                f"step {step}: {what} has other bits nearly each time and on most ranks ({names}): an operation that "
                "is not deterministic, or a state outside of buffers and state_dict(), rather than a device; mend it, "
                "or leave --guards.audit out"
            )
        newest = gathered[0][2]
        saved = f"the newest checkpoint is of step {newest}" if newest else "there is no checkpoint yet"
        after = f"the step was not applied; {saved}{self._since(ranks)}"
        if why == ONE_OF_TWO:
            return (
                f"step {step}: one of {where} computes wrongly: {what} has other bits ({names}), and each stays with "
                f"what it found, so a third rank alone would tell which; {after}; test both devices before they go on"
            )
        than = "on most other ranks" if why == BY_OTHERS else "when it is computed there once more"
        if self._world.size == 1:
            than += ": the device, or a model that is not deterministic"
        return (
            f"step {step}: {where} computes wrongly: {what} had other bits there ({names}) than {than}; {after}; take "
            "the device out of service and start again"
        )

    def _differing(self, results: list[list[dict[str, str]]], ranks: list[int]) -> str:
        """What first differs between the results of these ranks and those that most found, in the model's order."""
        every = [each for found in results for each in found]
        usual = max(every, key=lambda each: sum(each == other for other in every))
        odd = next((each for rank in ranks for each in results[rank] if each != usual), usual)
        return named([name for name in self._again.names if odd.get(name) != usual.get(name)])

    def _since(self, ranks: list[int]) -> str:
        steps = [self._held[rank] for rank in ranks if rank in self._held]
        last = f"in step {min(steps)}" if len(steps) == len(ranks) else "none in this start"
        return f", and the last audit that held there was {last}"


def _here(device: torch.device) -> str:
    name = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
    return f"{platform.node()}, {name}"


def _as_is(loss: Tensor) -> Tensor:
    return loss


_UNWATCHED: AbstractContextManager[Callable[[Tensor], Tensor]] = nullcontext(_as_is)
