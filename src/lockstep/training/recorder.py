"""Record, evaluate and save after a step, and write the summary at the end.

    books = RunRecorder(built, meter, sinks, exchange, timeline)
    books.expect(record)            # where its numbers are still on the device
    ...
    books.log(record)               # the window's record, where one ends with this step

`Meter` collects the steps of a window, whose record is written every `--log-freq` steps.
"""

import dataclasses
import logging
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from lockstep import checkpoint
from lockstep.checkpoint.check import not_finite_line
from lockstep.checkpoint.layout import Share
from lockstep.checkpoint.read import AVERAGE
from lockstep.clock import Clock, trace_mark
from lockstep.distributed.exchange import SAVE_FAILED, StepExchange
from lockstep.distributed.progress import ENDING, EVALUATING, SAVING
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import at_rest
from lockstep.engines.ema import averaged
from lockstep.engines.registry import name_of
from lockstep.errors import LockstepError, PeerError, StorageError, name_settings
from lockstep.guards.nonfinite import ReadStep
from lockstep.guards.samples import loading_failures
from lockstep.logging import Sinks
from lockstep.records import TRAIN, EvaluationRecord, StepRecord, exact_sums, mean_numbers, merge_sums
from lockstep.report.goodput import EVALUATION, SAVES, Timeline, waits
from lockstep.run_state import RunningSums, RunState
from lockstep.training.build import Built
from lockstep.training.evaluation import evaluate_all, numbered
from lockstep.training.open_run import exempt_names, not_finite_now, where_not_finite
from lockstep.training.run_dir import RunFolder
from lockstep.training.selection import brief, judged, looked_at, out_of_patience, shown, stopped_by
from lockstep.training.session import kept
from lockstep.training.trainable import note
from lockstep.transforms.precision import eager

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_SAVED",
    "Meter",
    "RunRecorder",
    "losses_text",
    "memory",
]


# --- losses and numbers of a window


class _PendingStep(NamedTuple):
    """Numbers of a step until it is recorded.

    They are floats, since small tensors would fragment the heap.
    """

    losses: list[float]
    norm: float
    items: float
    numbers: Mapping[str, Sequence[tuple[float, float]]]
    gradients: Mapping[str, float]


class Meter:
    """Losses and numbers of the steps since the last record. Waits for no device.

    Args:
        exchange: sums them over the ranks.
        clock: measures where the time goes.
        device: whose memory is reported.
        running: sum of the losses of the window's steps that an earlier process took.
        missed: how many of those had no finite loss, and so are not in the sum.
        numbers: exact sums of the task's own numbers in those steps, by name.
    """

    def __init__(
        self,
        exchange: StepExchange,
        clock: Clock,
        device: torch.device,
        running: float = 0.0,
        missed: int = 0,
        numbers: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._exchange, self._clock, self._device = exchange, clock, device
        self.running_loss, self.missed = running, missed
        self.numbers = {name: list(sums) for name, sums in (numbers or {}).items()}
        self._kept: list[_PendingStep] = []
        self.skipped_steps = 0  # since this start
        self._spent: dict[str, float] | None = None  # seconds by part, without the first window, which has the start
        self._items, self._since = 0.0, time.perf_counter()

    def add(self, step: ReadStep) -> None:
        """Add a step whose numbers have been read."""
        self._kept.append(_PendingStep(step.losses, step.norm, step.record.items, step.numbers, step.gradients))
        self._items += step.record.items
        applied, limit = step.record.applied, step.record.limit
        self.skipped_steps += not (step.norm < limit if applied is None else applied)  # None: the device decided

    def settle(self) -> dict[str, float]:
        """Add the pending steps to `running_loss` and `numbers`. Collective.

        The losses are means over all ranks. Each step's sums are formed in float64, where the order of a few float32
        terms does not show. A step whose loss is not finite is counted in `missed` instead: the guards report it, and a
        step that is left out must not make the window's mean NaN. Its other numbers are left out with it.

        Returns:
            grad_norm of the last step, and gradients/NAME if it measured them.
        """
        steps, self._kept = self._kept, []
        if not steps:
            return {"grad_norm": math.nan}
        sums, counted = [math.fsum(step.losses) for step in steps], list[_PendingStep]()
        for step, total in zip(steps, self._exchange.totals(sums), strict=True):
            loss = total / (step.items or 1)
            if math.isfinite(loss):
                self.running_loss += loss
                counted.append(step)
            else:
                self.missed += 1
        if names := list(dict.fromkeys(name for step in steps for name in step.numbers)):  # the same on every rank
            self._add_numbers(names, counted)
        last = steps[-1]
        return {"grad_norm": last.norm, **{f"gradients/{name}": norm for name, norm in last.gradients.items()}}

    def _add_numbers(self, names: list[str], steps: list[_PendingStep]) -> None:
        """Add these steps' numbers over all ranks. Collective."""
        own = [exact_sums([part for step in steps for part in step.numbers.get(name, ())]) for name in names]
        rows = self._exchange.rows([value for six in own for value in six])  # collective
        for place, name in enumerate(names):
            at = 6 * place
            parts = [self.numbers.get(name, [0.0] * 6), *(row[at : at + 6] for row in rows)]
            self.numbers[name] = merge_sums(parts)

    def read(self, log_freq: int) -> dict[str, Any]:
        """Return the window's record, and begin a new window. Collective.

        Returns:
            running_loss, grad_norm, items_per_second, memory (bytes), time/... (milliseconds), skipped_steps if there
            were any, then train/NAME, the task's own numbers, and gradients/NAME, if there are any.
        """
        norms = self.settle()
        laps = self._clock.read()
        if self._spent is None:
            self._spent = {}
        else:
            self._took("steps", 1e-3 * log_freq * sum(laps.values()))
            for name in ("data", "exchange"):
                self._took(name, 1e-3 * log_freq * laps.get(name, 0.0))
        now = time.perf_counter()
        found = {
            "running_loss": self.running_loss / (log_freq - self.missed) if self.missed < log_freq else math.nan,
            "grad_norm": norms.pop("grad_norm"),
            "items_per_second": self._items / max(now - self._since, 1e-9),
            "memory": memory(self._device),
            **{f"time/{name}": spent for name, spent in laps.items()},
            "time/total": sum(laps.values()),
        }
        if self.skipped_steps:
            found["skipped_steps"] = self.skipped_steps
        found |= {f"{TRAIN}{name}": value for name, value in mean_numbers(self.numbers).items()} | norms
        self.running_loss, self.missed, self._items, self._since = 0.0, 0, 0, now
        self.numbers = {}
        return found

    def pause(self, seconds: float, part: str = "") -> None:
        """Exclude `seconds` from the throughput.

        Args:
            part: what they were spent on: "evaluation", "saves" or "".
        """
        self._since += seconds
        self._took(part, seconds)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds since the first record: `steps`, of them `data` and `exchange`, and `evaluation` and `saves`."""
        return dict(self._spent or {})

    def _took(self, part: str, seconds: float) -> None:
        if self._spent is not None and part:
            self._spent[part] = self._spent.get(part, 0.0) + seconds


def memory(device: torch.device) -> int:
    """Return peak bytes: allocated on a CUDA device, otherwise resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
    except (OSError, IndexError, ValueError):  # not Linux; there the peak may include the parent's
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


# --- records, evaluations, checkpoints

_LOG = logging.getLogger("lockstep")
EXIT_INTERRUPTED, EXIT_SAVED = 130, 75
_TROUBLES = ("loading/retries", "loading/left_out", "loading/restarts", "steps_left_out")


class RunRecorder:
    """Writer of a run's records, evaluations, checkpoints and summary.

    Every rank calls each method at the same steps; only rank 0 writes records.

    Attributes:
        saved: step of the newest checkpoint that was begun; without checkpoints, the step up to which the run's state
            is current.
        saver: writes the checkpoints.
        is_best: whether the last evaluation was the run's best.
    """

    def __init__(
        self,
        built: Built,
        meter: Meter,
        sinks: Sinks,
        exchange: StepExchange,
        timeline: Timeline,
        *,
        outlives: bool = False,
        losses: str = "",
    ) -> None:
        self._timeline = timeline
        self._built, self._meter, self._sinks, self._exchange = built, meter, sinks, exchange
        self._outlives = outlives  # the run continues without a lost rank
        self.losses = losses
        keep = built.config.checkpoint
        self._saves = keep.mode != "none"
        self.saver = checkpoint.Saver(
            built.world,
            background=keep.mode == "async",
            policy=keep.on_failure,
            on_failure=partial(exchange.stop, SAVE_FAILED),
        )  # collective
        sinks.flush()  # records that waited for steps of the lost ranks
        self._began = time.perf_counter()
        self._engine_name = name_of(built.config.engine, built.world)
        self.saved = built.start
        self.is_best = False

    def _due(self, record: StepRecord) -> bool:
        return (record.step + 1) % self._built.config.log_freq == 0

    def expect(self, record: StepRecord) -> None:
        """Hold back further records until the step's delayed record is written."""
        if self._due(record) and self._built.world.is_main:
            self._sinks.expect()

    def log(self, record: StepRecord) -> None:
        """Write a record of the window if it ends with this step. Collective."""
        if self._due(record):
            with trace_mark("record"):
                self._log(record)

    def _log(self, record: StepRecord) -> None:
        built = self._built
        place = built.run_plan.place(record.step + 1)
        found = self._meter.read(built.config.log_freq)
        bad = self._troubles()
        if built.balancer:
            found["shares"] = ",".join(map(str, built.batches.sharing.at(record.step).slots))
        if built.world.is_main:
            position = {
                "global_step": place.global_step,
                "epoch": place.epoch,
                "epoch_progress": place.epoch_progress,
                "num_batches_remaining": place.num_batches_remaining,
            }
            self._sinks.arrived({**position, "lr": built.lr * record.factor, **found, **bad})

    def _troubles(self) -> dict[str, float]:
        """Return counts of repaired failures so far, over all ranks; {} if there were none. Collective."""
        counts = [
            *self._exchange.totals(loading_failures(self._built.loading)),
            float(self._built.state.steps_left_out or 0),
        ]
        return {name: count for name, count in zip(_TROUBLES, counts, strict=True) if count}

    def evaluate(self, done: int) -> EvaluationRecord | None:
        """Evaluate after `done` steps, and update `is_best`. Collective.

        Returns:
            The record; None without an evaluation set.
        """
        built, began = self._built, time.perf_counter()
        if not built.evaluation:
            return None
        self._exchange.progress.at(done, EVALUATING)
        self.saver.order()  # the averaged weights replace the others: their copy must come first
        with self._timeline.during(EVALUATION), averaged(built.engine):
            found = evaluate_all(
                built.engine,
                built.task,
                built.evaluation,
                built.world,
                step=done,
                seed=built.config.seed,
                progress=lambda *evaluated: self._sinks.progress(done, evaluated),
            )
        if built.world.is_main:
            numbers = {f"evaluation/{name}": value for name, value in numbered(found).items()}
            self._sinks.log({"global_step": done, **numbers})
        self._meter.pause(time.perf_counter() - began, "evaluation")
        selection = built.state.selection
        self.is_best = judged(built.config, selection, found)  # the same on every rank, as the record is
        looked_at(built.config, selection, better=self.is_best)
        if built.world.is_main:
            self._sinks.best(brief(selection.best))
            built.folder.write_evaluated(done, selection)
        return found

    def prepare(self) -> None:
        """Allocate the host memory of the first save in the background. Every rank calls it."""
        if self._built.config.checkpoint.mode == "async" and self._built.world.device.type == "cuda":
            self.saver.prepare(self._built.tensors())

    def save_due(self, done: int) -> bool:
        """Return whether a periodic checkpoint follows `done` steps."""
        every = self._built.config.ckpt_freq
        return self._saves and bool(every) and done % every == 0

    def save(self, done: int) -> None:
        """Begin a checkpoint after `done` steps, which is written while training goes on.

        Checkpoints that need not be kept are removed afterwards. With `--checkpoint.mode none` only the run's state is
        updated to this step.

        Raises:
            LockstepError: saves fail, and --checkpoint.on-failure ends the run.
        """
        if not self._saves:
            self._note(done)
            self.saved = done
            return
        began = time.perf_counter()
        self._exchange.progress.at(done, SAVING)
        with self._timeline.during(SAVES):
            self._begin_save(done)
        self.saved = done
        self._meter.pause(time.perf_counter() - began, "saves")

    def _note(self, done: int) -> None:
        """Update the run's state to `done` steps."""
        built, state, meter = self._built, self._built.state, self._meter
        meter.settle()
        state.place, state.plan, state.world_size = built.run_plan.place(done), built.plan, built.world.size
        state.running = RunningSums(meter.running_loss, meter.missed, meter.numbers)
        note(built.engine, state)

    def _begin_save(self, done: int) -> None:
        self._note(done)
        built = self._built
        if built.task.hooks:
            built.task.hooks.before_save(kept(built.state), done)
        state = built.state.copy()  # the thread writes it later
        tensors = built.tensors()
        # A forward may write parameters, buffers, and tensors of the task or the caller; not these.
        resting = {name for name in tensors if name.startswith(("optimizer/", AVERAGE))}
        self.saver.begin(tensors, partial(self._write, done, state), done, resting)  # collective

    def _write(self, done: int, state: RunState, share: Share, world: World) -> None:
        """Write this rank's part of a checkpoint, in the saver's thread with its own group."""
        folder = self._built.folder
        names = exempt_names(state, (piece.name for piece in share.pieces))
        checkpoint.write_share(
            folder.path, done, share, state.to_json(), world, engine=self._engine_name, exempt=names
        )  # collective
        if world.is_main:
            self._tidy(state)

    def _tidy(self, state: RunState) -> None:
        """Write `state.json`, and remove checkpoints that need not be kept. On rank 0."""
        folder, keep, best = self._built.folder, self._built.config.checkpoint, state.selection.best
        _write_state(folder, state)
        if self._saves:
            checkpoint.retain(folder.path, last=keep.keep, best=best.step if best else None, every=keep.every)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Let a running save finish; after a lost rank it cannot, and is abandoned."""
        gone = isinstance(error, PeerError)
        seconds = (0.2 if self._outlives else 1.0) if gone else self._built.world.timeout
        self.saver.abandon(seconds, leave=not (gone and self._outlives))

    def settle(self) -> None:
        """Wait for the run's last save. Collective.

        Raises:
            LockstepError: the save failed, so its step is lost; or tensors are not finite.
        """
        built = self._built
        self.saver.settle(last=True)  # collective
        if not self._saves and (found := not_finite_now(built)):  # collective; else the saver has looked
            line = not_finite_line([*found], where_not_finite(found, built.world))
            raise LockstepError(f"after step {self.saved} {line}; lower --lr, or look at what updates it")

    def close(self, code: int, *, sample: bool = True) -> None:
        """Write the summary. Call it after `settle`, on every rank.

        Args:
            code: the run's exit code.
            sample: show a sample of the model's output, unless the run was cut short. Every rank takes part, since the
                forward of a sharded model needs them all.
        """
        built = self._built
        if built.world.is_main and self.is_best:  # found after the checkpoint was begun
            self._tidy(built.state)
        elif built.world.is_main and self.saved:  # includes its evaluation
            _write_state(built.folder, built.state)
        self._exchange.progress.at(self.saved, ENDING)
        with averaged(built.engine):
            with eager():  # of a user's task too
                asked = sample and not code
                text = on_all_ranks(built.world, self._sample) if asked else ""  # collective
            at_rest(built.engine.model)
        self._sinks.close(
            {
                "experiment": built.config.experiment_name,
                **dataclasses.asdict(built.run_plan.place(self.saved)),
                "seconds": time.perf_counter() - self._began,
                "world_size": built.world.size,
                "engine": self._engine_name,
                "best": shown(best) if (best := built.state.selection.best) else None,
                "sample": text,
                "files": {
                    **({"checkpoint": checkpoint.path_of(built.folder.path, self.saved)} if self._saves else {}),
                    "records": built.folder.metrics,
                    "log": built.folder.path / "logs",
                    **({"report": built.folder.path / "report.html"} if built.config.report and not code else {}),
                },
                "waits": name_settings(
                    waits(self._meter.spent, workers=built.config.data.workers, ranks=built.world.size)
                ),
                "next": self._next(code),
            }
        )

    def _sample(self) -> str:
        return self._built.task.sample(self._built.engine.model, self._built.world.device)

    def _next(self, code: int) -> str:
        """Return the last line on the screen: what to do next."""
        whole, path = self._built.run_plan.step_plan.steps, self._built.folder.path
        config, selection = self._built.config, self._built.state.selection
        if self.saved < whole and out_of_patience(config, selection):
            why = stopped_by(config, selection)
            return f"stopped early after step {self.saved} of {whole}: {why}"
        if not self._saves and (code or self.saved < whole):
            return f"ended after step {self.saved} of {whole}; nothing was saved (--checkpoint.mode none)"
        if not self._saves:
            return "finished; nothing was saved (--checkpoint.mode none)"
        if self.saved >= whole:
            finished = f"finished {self.losses}" if self.losses else "finished"
            return f"{finished}; see what was saved with: lockstep checkpoint inspect {path}"
        why = {EXIT_INTERRUPTED: "interrupted", EXIT_SAVED: "ended by a signal"}.get(code, "stopped")
        return f"{why}: saved after step {self.saved} of {whole}; the same command goes on from there"


def losses_text(losses: Sequence[str], size: int, began_on: int) -> str:
    """Describe the ranks that a run lost; "" for none.

    Args:
        losses: a line for each.
        size: number of ranks now.
        began_on: number of ranks before the first loss.
    """
    if not losses:
        return ""
    many = "1 rank was" if len(losses) == 1 else f"{len(losses)} ranks were"
    more = f" (the first of {len(losses)} losses)" if len(losses) > 1 else ""
    if size >= began_on:
        return f"after {many} lost and replaced: {losses[0]}{more}"
    return f"on {size} of {began_on} ranks: {losses[0]}{more}"


def _write_state(folder: RunFolder, state: RunState) -> None:
    """Write `state.json`, and only warn on failure.

    Users and scripts read it; a resume does not.
    """
    try:
        folder.write_state(state)
    except (OSError, StorageError) as error:
        _LOG.warning("state.json was not written: %s; the checkpoint has the same", error)
