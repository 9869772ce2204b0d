"""The guards of a run, put together: what run.py asks after each step.

guards = Guards(parts, beat, feed, seed)
for record in steps(guards.engine, ...):
    guards.after(record)
    ...
    guards.settle()                 # before a checkpoint
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.clock import Clock
from lockstep.data.batches import Feed
from lockstep.engines import Engine
from lockstep.errors import LockstepError
from lockstep.guards import desync
from lockstep.guards.nonfinite import Buffers, is_bad, origin
from lockstep.guards.reading import Reader, ReadStep
from lockstep.guards.skips import Rollback, Skips
from lockstep.guards.spike import Spike
from lockstep.guards.straggler import Straggler
from lockstep.heartbeat import Heartbeat, Vitals
from lockstep.loop import loss_of
from lockstep.parts import Parts
from lockstep.records import StepRecord

__all__ = ["Guards", "Pulse"]

_LOG = logging.getLogger("lockstep")


class Pulse:
    """This rank's own busy seconds a step since the last time that it was asked: what the heartbeat carries.

    Attributes:
        beat: set once there is one; its waiting is no work.
        written: seconds spent in saves so far.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.beat: Heartbeat | None = None
        self.written: Callable[[], float] = float
        self._before, self._step = Vitals(), 0

    def __call__(self) -> Vitals:
        if self.beat is None:
            return Vitals()
        spent, step = self._clock.spent(), self.beat.progress.step
        now = Vitals(spent.get("data", 0.0) - self.beat.waited, spent.get("forward", 0.0), self.written())
        steps = max(1, step - self._step)
        found = Vitals(*(max(0.0, new - old) / steps for new, old in zip(now, self._before, strict=True)))
        self._before, self._step = now, step
        return found


class Guards:
    """What watches the steps. Every rank calls each method at the same steps.

    Attributes:
        engine: to be stepped; leaves out the steps that an earlier start has found bad.
    """

    def __init__(self, parts: Parts, beat: Heartbeat, feed: Feed, seed: Callable[[int, int], None]) -> None:
        self._parts, self._beat, self._feed, self._seed = parts, beat, feed, seed
        self._config = parts.config.guards
        self._skips = Skips(parts.folder.path / "skips.json", self._config.limit, parts.world.is_main)
        self._dropped = frozenset(self._skips.steps)
        if self._dropped:  # the checkpoint may be older than the list
            parts.state["steps_left_out"] = len(self._dropped)
        self.engine: Engine = self._skips.around(parts.engine, parts.start)
        self._reader, self._spike = Reader(parts.world.device), Spike()
        self._straggler = Straggler(self._config.straggler if parts.world.size > 1 else 0.0)
        self._buffers = Buffers(parts.model)
        self._fp16 = parts.config.precision == "fp16"
        self._loss = loss_of(parts.task)
        desync.check(parts.engine.state(), parts.world, parts.start)  # collective

    def after(self, record: StepRecord) -> None:
        """Looks at a step.

        Raises:
            LockstepError: a guard stops the run.
            Rollback: the run goes back.
        """
        for step in self._reader.add(record, self._feed.present):
            self._look(step)
        slow = self._straggler.after(record.step, self._beat)
        if slow and self._parts.world.is_main:
            _LOG.warning(slow)
        freq, done = self._config.desync_freq, record.step + 1
        replicas = freq and self._parts.world.size > 1
        if replicas and (done % freq == 0 or done == self._parts.last):  # what is kept at the end is compared too
            desync.check(self._parts.engine.state(), self._parts.world, done)  # collective

    def settle(self) -> None:
        """Looks at every step that was taken, before a checkpoint keeps what they did. Raises as `after`."""
        for step in self._reader.rest():
            self._look(step)

    def _look(self, step: ReadStep) -> None:
        if step.record.step in self._dropped:  # its update is left out, but its forward moved the buffers
            self._buffers.put_back()
            return
        if is_bad(step) and not (self._fp16 and not step.record.applied):  # fp16's own skips are no fault
            self._bad(step)
        elif self._config.spike != "off" and self._spike.sees(step.norm):
            self._spiked(step)
        else:
            self._buffers.keep()
        if self._config.spike == "skip":
            self._parts.limit.value = self._spike.limit

    def _bad(self, step: ReadStep) -> None:
        self._buffers.put_back()
        parts = self._parts
        found = origin(step, parts.model, self._loss_of, self._seed, parts.batches.samples, parts.world)  # collective
        self._buffers.put_back()  # the second forward moved them again
        what = f"step {step.record.step}: the gradient is not finite (norm {step.norm}) and was not applied; {found}"
        self._left_out(step.record.step, what, self._config.nonfinite)

    def _loss_of(self, batch: Any) -> Tensor:
        return self._loss(self._parts.engine.model, batch)

    def _spiked(self, step: ReadStep) -> None:
        number = step.record.step
        what = f"step {number}: the gradient's norm {step.norm:.4g} is far above the usual, {self._spike.limit:.4g}"
        if self._config.spike != "warn":
            self._left_out(number, what, self._config.spike)
        elif self._parts.world.is_main:
            _LOG.warning("%s; --guards.spike skip or rollback would leave it out", what)

    def _left_out(self, step: int, what: str, action: str) -> None:
        if action == "stop":
            raise LockstepError(
                f"{what}; lower --lr, look at these samples, or leave such steps out: --guards.nonfinite skip"
            )
        self._skips.add(step, what)
        self._parts.state["steps_left_out"] = len(self._skips.steps)
        if self._parts.world.is_main:
            _LOG.warning("%s; left out (%d so far)", what, len(self._skips.steps))
        if action == "rollback":
            raise Rollback(f"{what}; back to the newest checkpoint")
