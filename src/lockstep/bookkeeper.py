"""What may follow a step: a record, an evaluation, a checkpoint, and at the end the summary.

books = Bookkeeper(parts, meter, sinks)
if done % config.log_freq == 0:
    books.log(record)
"""

import math
import time

from lockstep import checkpoint
from lockstep.evaluate import evaluate
from lockstep.meter import Meter
from lockstep.parts import Parts
from lockstep.records import StepRecord
from lockstep.sinks import Sinks

__all__ = ["EXIT_INTERRUPTED", "EXIT_SAVED", "Bookkeeper"]

EXIT_INTERRUPTED, EXIT_SAVED = 130, 75


class Bookkeeper:
    """Every rank calls each method at the same steps; rank 0 alone writes.

    Attributes:
        saved: the step of the newest checkpoint.
    """

    def __init__(self, parts: Parts, meter: Meter, sinks: Sinks) -> None:
        self._parts, self._meter, self._sinks = parts, meter, sinks
        self._began = time.perf_counter()
        self._engine_name = type(parts.engine).__name__.lower()
        self.saved = parts.start

    def log(self, record: StepRecord) -> None:
        """One record of the steps since the last."""
        parts = self._parts
        place = parts.horizon.place(record.step + 1)
        found = self._meter.read(parts.config.log_freq)
        if parts.world.is_main:
            names = ("global_step", "epoch", "epoch_progress", "num_batches_remaining")
            self._sinks.log({**{k: place[k] for k in names}, "lr": parts.config.lr * record.factor, **found})

    def evaluate(self, done: int) -> bool:
        """Evaluates after `done` steps, and says whether the loss is the lowest so far."""
        parts, began = self._parts, time.perf_counter()
        if parts.evaluation is None:
            return False
        found = evaluate(parts.engine, parts.task, parts.evaluation, parts.world, step=done, seed=parts.config.seed)
        if parts.world.is_main:
            metrics = {f"evaluation/{name}": value for name, value in found.metrics.items()}
            shown = {"evaluation/loss": found.loss, "evaluation/items": found.items, **metrics}
            self._sinks.log({"global_step": done, **shown})
        self._meter.pause(time.perf_counter() - began)
        best = parts.state["best"]
        if not math.isfinite(found.loss) or (best and best["loss"] <= found.loss):
            return False
        parts.state["best"] = {"step": done, "loss": found.loss}
        return True

    def save(self, done: int) -> None:
        """A checkpoint after `done` steps; what need not be kept any more goes."""
        parts, began = self._parts, time.perf_counter()
        self._meter.settle()
        parts.state |= parts.horizon.place(done) | {
            "running_loss": self._meter.running_loss,
            "plan": parts.plan,
            "world_size": parts.world.size,
        }
        folder = parts.folder
        checkpoint.save(
            folder.path, done, parts.engine.state(), parts.state, parts.world, engine=self._engine_name
        )  # collective
        if parts.world.is_main:
            folder.write_state(parts.state)
            keep, best = parts.config.checkpoint, parts.state["best"]
            checkpoint.retain(folder.path, last=keep.keep, best=best and best["step"], every=keep.every)
        self.saved = done
        self._meter.pause(time.perf_counter() - began)

    def close(self, code: int) -> None:
        """The summary. Every rank takes part in the sample, since the forward of a split model needs them all."""
        parts = self._parts
        sample = getattr(parts.task, "sample", None)
        text = sample(parts.engine.model, parts.world.device) if sample and not code else ""
        self._sinks.close(
            {
                "experiment": parts.config.experiment_name,
                **parts.horizon.place(self.saved),
                "seconds": time.perf_counter() - self._began,
                "world_size": parts.world.size,
                "engine": self._engine_name,
                "sample": text,
                "files": {
                    "checkpoint": checkpoint.path_of(parts.folder.path, self.saved),
                    "records": parts.folder.metrics,
                    "log": parts.folder.path / "logs",
                },
                "next": self._next(code),
            }
        )

    def _next(self, code: int) -> str:
        """The last line on the screen: what to do now."""
        whole, path = self._parts.horizon.cut.steps, self._parts.folder.path
        if self.saved >= whole:
            return f"finished; see what was saved with: lockstep checkpoint inspect {path}"
        why = {EXIT_INTERRUPTED: "interrupted", EXIT_SAVED: "ended by a signal"}.get(code, "stopped")
        return f"{why}: saved after step {self.saved} of {whole}; the same command goes on from there"
