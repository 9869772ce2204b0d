"""The guards of a run, put together: what run.py asks after each step.

guards = Guards(parts, beat, feed, seed)
for record in steps(..., Plan(..., limit=guards.limit)):
    guards.after(record)
    ...
    guards.settle()                 # before a checkpoint
"""

import logging
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.data.batches import Feed
from lockstep.engines.buffers import unmoved
from lockstep.errors import LockstepError
from lockstep.guards import desync
from lockstep.guards.nonfinite import origin
from lockstep.guards.reading import Reader, ReadStep
from lockstep.guards.skips import Rollback, Skips
from lockstep.guards.spike import Spike
from lockstep.guards.straggler import Straggler
from lockstep.heartbeat import Heartbeat
from lockstep.loop import loss_of
from lockstep.parts import Parts
from lockstep.records import StepRecord

__all__ = ["Guards"]

_LOG = logging.getLogger("lockstep")


class Guards:
    """What watches the steps. Every rank calls each method at the same steps."""

    def __init__(self, parts: Parts, beat: Heartbeat, feed: Feed, seed: Callable[[int, int], None]) -> None:
        self._parts, self._beat, self._feed, self._seed = parts, beat, feed, seed
        self._config = parts.config.guards
        self._skips = Skips(parts.folder.checkpoints / "skips.json", self._config.limit, parts.world, parts.plan)
        self._dropped = frozenset(self._skips.steps)
        if self._dropped:  # the checkpoint may be older than the list
            parts.state["steps_left_out"] = len(self._dropped)
        self._reader, self._spike = Reader(parts.world.device), Spike()
        if "spike" in parts.state:
            self._spike.load_state_dict(parts.state["spike"])
        self._straggler = Straggler(self._config.straggler if parts.world.size > 1 else 0.0)
        self._fp16 = parts.config.precision == "fp16"
        self._loss = loss_of(parts.task)
        if parts.start:  # a new run's weights were compared when they were made
            desync.check(parts.tensors(), parts.world, parts.start)  # collective

    def limit(self, step: int) -> float:
        """What the norm of `step` must stay below to be applied."""
        if step in self._dropped:
            return -math.inf
        return self._spike.limit(step) if self._config.spike == "skip" else math.inf

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
            desync.check(self._parts.tensors(), self._parts.world, done)  # collective

    def settle(self) -> None:
        """Looks at every step that was taken, before a checkpoint keeps what they did. Raises as `after`."""
        for step in self._reader.rest():
            self._look(step)
        if self._config.spike != "off":
            self._parts.state["spike"] = self._spike.state_dict()

    def _look(self, step: ReadStep) -> None:
        number = step.record.step
        if number in self._dropped:
            return
        if not math.isfinite(step.norm):  # the same on every rank
            if self._is_fault(step):
                self._bad(step)
        elif self._config.spike != "off" and self._spike.sees(number, step.norm):
            self._spiked(step)

    def _is_fault(self, step: ReadStep) -> bool:
        """Whether it is more than a loss scale that was too large for float16: then every loss is finite."""
        if not self._fp16:
            return True
        finite = all(math.isfinite(loss) for loss in step.losses)
        return not all(self._parts.world.gather(finite))  # collective

    def _bad(self, step: ReadStep) -> None:
        parts = self._parts
        with unmoved(parts.own.values()):  # which the loss may move
            found = origin(
                step, parts.model, self._loss_of, self._seed, parts.batches.samples, parts.world
            )  # collective
        what = f"step {step.record.step}: the gradient is not finite (norm {step.norm}) and was not applied; {found}"
        self._left_out(step.record.step, what, self._config.nonfinite)

    def _loss_of(self, batch: Any) -> Tensor:
        return self._loss(self._parts.engine.model, batch)

    def _spiked(self, step: ReadStep) -> None:
        number = step.record.step
        usual = self._spike.limit(number)
        what = f"step {number}: the gradient's norm {step.norm:.4g} is far above the usual, {usual:.4g}"
        if self._config.spike != "warn":
            self._left_out(number, what, self._config.spike)
        elif self._parts.world.is_main:
            _LOG.warning("%s; --guards.spike skip or rollback would leave it out", what)

    def _left_out(self, step: int, what: str, action: str) -> None:
        if action == "stop":
            raise LockstepError(
                f"{what}; lower --lr, look at these samples, or leave such steps out: --guards.nonfinite skip"
            )
        self._skips.add(step, what)  # collective
        self._parts.state["steps_left_out"] = len(self._skips.steps)
        if self._parts.world.is_main:
            _LOG.warning("%s; left out (%d so far)", what, len(self._skips.steps))
        if action == "rollback":
            raise Rollback(f"step {step}: back to the newest checkpoint")
