"""Write a run's records, evaluations, checkpoints and summary.

    recorder = RunRecorder(built, meter, outputs, exchange)
    recorder.expect(record)         # the step's numbers are still on the device
    recorder.log(record)            # writes a record if a window ends with this step
    recorder.evaluate(done)
    recorder.save(done)

A window is `--log-freq` steps. `Meter` collects their numbers.
"""

import dataclasses
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from lockstep import checkpoint
from lockstep.checkpoint.check import not_finite_line
from lockstep.checkpoint.layout import Share
from lockstep.checkpoint.read import AVERAGE, EVALUATED
from lockstep.clock import Clock, trace_mark
from lockstep.diagnose.profile.tracing import local_ranks, peak_memory
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.cpus import usable_cores
from lockstep.distributed.exchange import SAVE_FAILED, StepExchange
from lockstep.distributed.progress import ENDING, EVALUATING, SAVING
from lockstep.distributed.world import World
from lockstep.engines.base import at_rest
from lockstep.engines.ema import use_average
from lockstep.engines.registry import name_of
from lockstep.errors import SETTINGS, LockstepError, PeerError, StorageError, name_settings
from lockstep.guards.nonfinite import ReadStep
from lockstep.guards.samples import loading_failures
from lockstep.records import TRAIN, EvaluationRecord, StepRecord, exact_sums, mean_numbers, merge_sums
from lockstep.report.goodput import advise_workers, waits
from lockstep.run_state import RunningSums, RunState
from lockstep.timeline import EVALUATION, SAVES
from lockstep.training.evaluation import all_numbers, evaluate_all
from lockstep.training.state.finite import describe_ranks, exempt_names, find_bad_tensors
from lockstep.training.state.outputs import RunOutputs, settle_uploads
from lockstep.training.state.parts import RunParts
from lockstep.training.state.plan import describe_replicas
from lockstep.training.state.run_dir import RunFolder
from lockstep.training.state.selection import (
    abbreviate_best,
    describe_best,
    explain_early_stop,
    out_of_patience,
    select_best,
    update_plateau,
)
from lockstep.training.state.trained_set import store_trained_set
from lockstep.training.step.ending import next_command
from lockstep.transforms.precision import eager

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_SAVED",
    "Meter",
    "RunRecorder",
    "peak_memory",
]


# --- losses and numbers of a window


class _PendingStep(NamedTuple):
    """Numbers of a step until its window is recorded.

    They are floats, since small tensors would fragment the heap.
    """

    losses: list[float]
    norm: float
    items: float
    numbers: Mapping[str, Sequence[tuple[float, float]]]
    gradients: Mapping[str, float]


class Meter:
    """Losses and numbers of the steps since the last record. Never waits for the device.

    Args:
        exchange: sums them over the ranks.
        clock: measures the parts of a step.
        device: its memory is reported.
        running_loss: sum of the losses of steps that an earlier process trained in this window.
        non_finite: number of those steps whose loss is not finite, and so not in the sum.
        numbers: exact sums of the task's own numbers in those steps, by name.
        steps: number of those steps.

    Attributes:
        spikes: gradient spikes since this start of the run.
    """

    def __init__(
        self,
        exchange: StepExchange,
        clock: Clock,
        device: torch.device,
        running_loss: float = 0.0,
        non_finite: int = 0,
        numbers: Mapping[str, Sequence[float]] | None = None,
        steps: int = 0,
    ) -> None:
        self._exchange = exchange
        self._clock = clock
        self._device = device
        self.running_loss = running_loss
        self.non_finite = non_finite
        self.steps = steps
        self.numbers = {name: list(sums) for name, sums in (numbers or {}).items()}
        self._pending: list[_PendingStep] = []
        # Since this start of the run.
        self.skipped_steps = 0
        self.spikes = 0
        # Seconds by activity, without the first window, which includes the start.
        self._seconds: dict[str, float] | None = None
        self._items = 0.0
        self._window_start = time.perf_counter()

    def add(self, step: ReadStep) -> None:
        """Add a step whose numbers have been read."""
        self._pending.append(_PendingStep(step.losses, step.norm, step.record.items, step.numbers, step.gradients))
        self._items += step.record.items
        self.spikes += step.is_spike
        applied = step.record.applied
        limit = step.record.limit
        # None: the device decided, by the norm.
        self.skipped_steps += not (step.norm < limit if applied is None else applied)

    def flush(self, *counts: float) -> tuple[dict[str, float], list[float]]:
        """Add the pending steps to `running_loss` and `numbers`. Collective.

        The losses are means over all ranks. A step's sum is formed in float64, where the order of a few float32 terms
        does not matter. A step whose loss is not finite is left out and counted in `non_finite`: the guards report it,
        and it must not make the window's mean NaN.

        Args:
            counts: other numbers of this rank; they travel with the losses, since each exchange costs a wait.

        Returns:
            grad_norm of the last step, and gradients/NAME if the step measured them; and the counts over all ranks.
        """
        steps = self._pending
        self._pending = []
        sums = [math.fsum(step.losses) for step in steps]
        finite = list[_PendingStep]()
        if steps or counts:
            totals = self._exchange.totals([*sums, *counts], losses=len(sums))
        else:
            totals = []
        if not steps:
            return {"grad_norm": math.nan}, totals
        self.steps += len(steps)
        for step, total in zip(steps, totals, strict=False):
            loss = total / (step.items or 1)
            if math.isfinite(loss):
                self.running_loss += loss
                finite.append(step)
            else:
                self.non_finite += 1
        # All ranks have the same names, so all of them exchange, or none.
        if names := list(dict.fromkeys(name for step in steps for name in step.numbers)):
            self._add_numbers(names, finite)
        last_step = steps[-1]
        gradients = {f"gradients/{name}": norm for name, norm in last_step.gradients.items()}
        return {"grad_norm": last_step.norm, **gradients}, totals[len(steps) :]

    def _add_numbers(self, names: list[str], steps: list[_PendingStep]) -> None:
        """Add the numbers of these steps, summed over all ranks. Collective."""
        sums = [exact_sums([pair for step in steps for pair in step.numbers.get(name, ())]) for name in names]
        rows = self._exchange.rows([value for six in sums for value in six])  # collective
        for index, name in enumerate(names):
            # The exact sums of a number take six columns.
            at = 6 * index
            parts = [self.numbers.get(name, [0.0] * 6), *(row[at : at + 6] for row in rows)]
            self.numbers[name] = merge_sums(parts)

    @property
    def mean_loss(self) -> float:
        """Mean loss of the flushed steps since the last record; NaN without a step that has a finite one."""
        count = self.steps - self.non_finite
        return self.running_loss / count if count > 0 else math.nan

    def read(
        self, log_freq: int, counts: Sequence[float] = (), *, ends_window: bool = True
    ) -> tuple[dict[str, Any], list[float]]:
        """Return the window's record and the summed counts, and begin another window. Collective.

        Args:
            log_freq: steps of the window.
            counts: see `flush`.
            ends_window: False: the run ends within the window; an extension of the run continues it.

        Returns:
            The record has running_loss, grad_norm, items_per_second, memory (bytes), time/PART (milliseconds),
            skipped_steps and spikes if any, and where there are any train/NAME (the task's own numbers) and
            gradients/NAME.
        """
        norms, counted = self.flush(*counts)
        laps = self._clock.read()
        if self._seconds is None:
            self._seconds = {}
        else:
            self._add_seconds("steps", 1e-3 * log_freq * sum(laps.values()))
            for name in ("data", "exchange"):
                self._add_seconds(name, 1e-3 * log_freq * laps.get(name, 0.0))
        window_end = time.perf_counter()
        record = {
            "running_loss": self.mean_loss,
            "grad_norm": norms.pop("grad_norm"),
            "items_per_second": self._items / max(window_end - self._window_start, 1e-9),
            "memory": peak_memory(self._device),
            **{f"time/{name}": milliseconds for name, milliseconds in laps.items()},
            "time/total": sum(laps.values()),
        }
        if self.skipped_steps:
            record["skipped_steps"] = self.skipped_steps
        if self.spikes:
            record["spikes"] = self.spikes
        record |= {f"{TRAIN}{name}": value for name, value in mean_numbers(self.numbers).items()} | norms
        self._items = 0
        self._window_start = window_end
        if ends_window:
            self.running_loss = 0.0
            self.non_finite = 0
            self.steps = 0
            self.numbers = {}
        return record, counted

    def pause(self, seconds: float, part: str = "") -> None:
        """Exclude `seconds` from the throughput.

        Args:
            part: "evaluation" or "saves", which are summed in `seconds`; "": anything else.
        """
        self._window_start += seconds
        self._add_seconds(part, seconds)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds since the first record: `steps` (with `data` and `exchange`), `evaluation` and `saves`."""
        return dict(self._seconds or {})

    def _add_seconds(self, part: str, seconds: float) -> None:
        if self._seconds is not None and part:
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds


# --- records, evaluations, checkpoints

_LOG = logging.getLogger("lockstep")
# 128 + SIGINT, as a shell reports a program that Ctrl-C ended.
EXIT_INTERRUPTED = 130
# EX_TEMPFAIL of sysexits.h: the same command continues the run.
EXIT_SAVED = 75
# Steps after which the time of loading samples is judged.
_FIRST_STEPS = 20
_LOADING_COUNTS = ("loading/retries", "loading/left_out", "loading/restarts", "loading/fetched", "steps_left_out")


class RunRecorder:
    """Writer of a run's records, evaluations, checkpoints and summary.

    All ranks call each method at the same steps; only rank 0 writes records.

    Args:
        survives_loss: the run continues without a lost rank.
        lost_ranks: a description of the ranks lost so far, for the summary; "": none.

    Attributes:
        saved_step: step of the newest save, begun or complete; with `--checkpoint.mode none` the step of the run's
            state.
        saver: writes the checkpoints.
        is_best: the last evaluation is the run's best.
        window: the numbers of the last record, see `Meter.read`.
    """

    def __init__(
        self,
        built: RunParts,
        meter: Meter,
        outputs: RunOutputs,
        exchange: StepExchange,
        *,
        survives_loss: bool = False,
        lost_ranks: str = "",
    ) -> None:
        self._timeline = outputs.timeline
        self._built = built
        self._meter = meter
        self._sinks = outputs.sinks
        self._uploader = outputs.uploader
        self._exchange = exchange
        self._survives_loss = survives_loss
        self.lost_ranks = lost_ranks
        options = built.config.checkpoint
        self._saves = options.mode != "none"
        self._every = built.config.log_freq
        self.saver = checkpoint.Saver(
            built.world,
            background=options.mode == "async",
            policy=options.on_failure,
            on_failure=partial(exchange.stop, SAVE_FAILED),
        )  # collective
        # Records that the failure of a rank has delayed.
        self._sinks.flush()
        self._start = time.perf_counter()
        self._engine_name = name_of(built.config.engine, built.world)
        self.saved_step = built.start
        self.is_best = False
        self.window: dict[str, Any] = {}
        # The user has chosen the number of loader processes, or one line has proposed it.
        self._workers_known = built.config.data.workers > 0 or "data.workers" in SETTINGS.typed

    def ends_window(self, record: StepRecord) -> bool:
        """Whether a window ends with this step."""
        return (record.step + 1) % self._every == 0

    def record_due(self, record: StepRecord) -> bool:
        """Whether a record is due with this step: a window ends, or the run.

        A stop before the run's end writes none, so that a resumed run has the records of an undisturbed one.
        """
        return self.ends_window(record) or record.step + 1 == self._built.run_plan.step_plan.steps

    def expect(self, record: StepRecord) -> None:
        """Hold back other records until the delayed record of this step is written."""
        if self.record_due(record) and self._built.world.is_main:
            self._sinks.expect()

    def log(self, record: StepRecord) -> None:
        """Write a record if it is due with this step. Collective."""
        if self.record_due(record):
            with trace_mark("record"):
                self._log(record)

    def _log(self, record: StepRecord) -> None:
        built = self._built
        failures = [*loading_failures(built.loaders), float(built.setup.training.retry_dataset.fetches)]
        done = record.step + 1
        steps = done % self._every or self._every
        numbers, totals = self._meter.read(steps, failures, ends_window=self.ends_window(record))
        self.window = numbers
        totals.append(float(built.state.steps_left_out or 0))
        repairs = {}
        for name, count in zip(_LOADING_COUNTS, totals, strict=True):
            if count:
                repairs[name] = count
        if built.balancer:
            numbers["shares"] = ",".join(map(str, built.batches.sharing.at(record.step).slots))
        if built.world.is_main:
            progress = built.place(done)
            shares = built.batches.shares(done - steps, done)
            numbers |= {f"data/share/{name}": share for name, share in shares.items()}
            position = {
                "global_step": progress.global_step,
                "epoch": progress.epoch,
                "epoch_progress": progress.epoch_progress,
                "num_batches_remaining": progress.num_batches_remaining,
            }
            self._sinks.write_expected({**_drop_unknown(position), "lr": record.rate, **numbers, **repairs})
            if not self._workers_known and record.step + 1 - built.start >= _FIRST_STEPS:
                self._workers_known = True
                self._advise_workers(numbers)

    def _advise_workers(self, numbers: Mapping[str, Any]) -> None:
        laps = {}
        for name, value in numbers.items():
            if name.startswith("time/") and name != "time/total":
                laps[name.removeprefix("time/")] = value
        cores = usable_cores(os.environ) // local_ranks(self._built.world.size)
        if line := advise_workers(laps, cores):
            _LOG.warning(name_settings(line))

    def evaluate(self, done: int) -> EvaluationRecord | None:
        """Evaluate after `done` steps, and update `is_best`. Collective.

        Returns:
            The record; None if the task has no evaluation set.
        """
        built = self._built
        start = time.perf_counter()
        if not built.evaluation:
            return None
        self._exchange.progress.at(done, EVALUATING)
        # Averaged weights replace the model's, so a running save must copy those first.
        self.saver.order()
        with self._timeline.during(EVALUATION), use_average(built.engine, built.switched):
            evaluation = evaluate_all(
                built.engine,
                built.task,
                built.evaluation,
                built.world,
                step=done,
                seed=built.config.seed,
                progress=lambda *evaluated: self._sinks.progress(done, evaluated),
            )
        if built.world.is_main:
            numbers: dict[str, float | None] = dict(all_numbers(evaluation))
            if not built.task.evaluates_loss:
                losses = [name for name in numbers if name.rpartition("/")[2] == "loss"]
                numbers |= {name: None for name in losses if math.isnan(numbers[name] or 0.0)}
            numbers = {f"evaluation/{name}": value for name, value in numbers.items()}
            self._sinks.log({"global_step": done, **numbers})
        self._meter.pause(time.perf_counter() - start, "evaluation")
        selection = built.state.selection
        # Every rank has the same evaluation, so all of them choose the same.
        self.is_best = select_best(built.config, selection, evaluation)
        update_plateau(built.config, selection, better=self.is_best)
        if built.world.is_main:
            self._sinks.best(abbreviate_best(selection.best))
            built.setup.folder.write_evaluated(done, selection)
        return evaluation

    def prepare(self) -> None:
        """Allocate the host memory of the first save in the background. All ranks call it."""
        if self._built.config.checkpoint.mode == "async" and self._built.world.device.type == "cuda":
            self.saver.prepare(self._built.tensors())

    def save_due(self, done: int) -> bool:
        """Whether a periodic checkpoint is due after `done` steps."""
        every = self._built.config.ckpt_freq
        return self._saves and bool(every) and done % every == 0

    def save(self, done: int, *, final: bool = False) -> None:
        """Begin a checkpoint after `done` steps; it is written while training continues.

        Older checkpoints are removed once it is complete, by `--checkpoint.keep`. With `--checkpoint.mode none` only
        the run's state is updated.

        Args:
            final: the run ends after this save.

        Raises:
            LockstepError: saves fail, and --checkpoint.on-failure ends the run.
        """
        if not self._saves:
            self._update_state(done)
            self.saved_step = done
            return
        start = time.perf_counter()
        self._exchange.progress.at(done, SAVING)
        with self._timeline.during(SAVES):
            self._begin_save(done, final)
        self.saved_step = done
        if self._built.task.hooks:
            self._built.task.hooks.after_save(done)
        self._meter.pause(time.perf_counter() - start, "saves")

    def _update_state(self, done: int) -> None:
        """Update the run's state to `done` steps. Collective."""
        built = self._built
        state = self._built.state
        meter = self._meter
        meter.flush()
        state.place = built.place(done)
        state.plan = built.setup.plan
        state.world_size = built.world.size
        state.stream = built.batches.stream_state(done, built.world)  # collective for a stream
        state.running = RunningSums(meter.running_loss, meter.non_finite, meter.numbers, meter.steps)
        store_trained_set(built.engine, state)
        built.store_groups()

    def _begin_save(self, done: int, final: bool) -> None:
        self._update_state(done)
        built = self._built
        if built.task.hooks:
            built.task.hooks.before_save(built.hook_state, done)
        # The saver's thread writes it later, when the run's state has changed.
        state = built.state.copy()
        tensors = built.tensors()
        # A forward may write parameters, buffers, and tensors of the task or the caller, but not these.
        constant = set()
        for name in tensors:
            if name.startswith(("optimizer/", AVERAGE, EVALUATED)):
                constant.add(name)
        self.saver.begin(tensors, partial(self._write_share, done, state), done, constant, final=final)  # collective

    def _write_share(self, done: int, state: RunState, share: Share, world: World) -> None:
        """Write this rank's part of a checkpoint, in the saver's thread and process group."""
        folder = self._built.setup.folder
        names = exempt_names(state, (piece.name for piece in share.pieces))
        checkpoint.write_share(
            folder.path, done, share, state.to_json(), world, engine=self._engine_name, exempt=names
        )  # collective
        if world.leads_folder:
            self._write_state_and_prune(state)

    def _write_state_and_prune(self, state: RunState) -> None:
        """Write `state.json`, and remove old checkpoints by `--checkpoint.keep`. On the first rank of a folder."""
        if self._built.world.is_main:
            _write_state(self._built.setup.folder, state)
        self._prune(state)
        if self._uploader:
            self._uploader.submit(state.selection.best.step if state.selection.best else None)

    def _prune(self, state: RunState) -> None:
        """Remove old checkpoints, but not the one that is being uploaded."""
        options = self._built.config.checkpoint
        best = state.selection.best.step if state.selection.best else None
        if self._saves:
            sending = self._uploader.sending if self._uploader else None
            folder = self._built.setup.folder.path
            checkpoint.retain(folder, last=options.keep, best=best, every=options.every, sending=sending)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Let a running save finish; after a lost rank it cannot, and is abandoned."""
        is_rank_lost = isinstance(error, PeerError)
        if is_rank_lost:
            seconds = 0.2 if self._survives_loss else 1.0
        else:
            seconds = self._built.world.timeout
        self.saver.abandon(seconds, leave=not (is_rank_lost and self._survives_loss))

    def finish(self) -> None:
        """Wait for the run's last save. Collective.

        Raises:
            LockstepError: the save failed, so its step is lost; or tensors are not finite.
        """
        built = self._built
        self.saver.settle(last=True)  # collective
        # Collective. A save checks its own tensors.
        if not self._saves and (bad := find_bad_tensors(built)):
            line = not_finite_line([*bad], describe_ranks(bad, built.world))
            raise LockstepError(f"after step {self.saved_step} {line}; lower --lr, or look at what updates it")

    def close(self, code: int, *, sample: bool = True) -> None:
        """Write the summary. All ranks call it, after `finish`.

        Args:
            code: the run's exit code.
            sample: show a sample of the model's output, if `code` is 0. All ranks compute it, since the forward of a
                sharded model needs them all.
        """
        built = self._built
        steps = built.run_plan.step_plan.steps
        complete = self.saved_step >= steps or out_of_patience(built.config, built.state.selection)
        # The last evaluation ended after the save had begun, so the files lack its result.
        if built.world.leads_folder and self.is_best:
            self._write_state_and_prune(built.state)
        elif built.world.is_main and self.saved_step:
            # No new best checkpoint: only the file for users changes.
            _write_state(built.setup.folder, built.state)
        self._exchange.progress.at(self.saved_step, ENDING)
        with use_average(built.engine, built.switched):
            # A user's task runs uncompiled too.
            with eager():
                # A stage of a pipeline is no model that could show something.
                if sample and not code and not built.pipeline:
                    # Collective: with a sharded model every rank takes part in the forwards.
                    text = on_all_ranks(built.world, self._sample)
                else:
                    text = ""
            at_rest(built.engine.model)
        unsent = settle_uploads(self._uploader, built)  # collective
        # A checkpoint that was being uploaded at the last save could not be removed then.
        if self._uploader:
            self._prune(built.state)
        self._sinks.close(
            {
                "experiment": built.config.experiment_name,
                "complete": complete,
                **_drop_unknown(dataclasses.asdict(built.place(self.saved_step))),
                # Of the steps since the last record, if there are any.
                **({} if math.isnan(loss := self._meter.mean_loss) else {"running_loss": loss}),
                "spikes": self._meter.spikes or None,
                "seconds": time.perf_counter() - self._start,
                "world_size": built.world.size,
                "replicas": describe_replicas(built.world.size, built.world.replica.size),
                "engine": self._engine_name,
                "best": describe_best(best) if (best := built.state.selection.best) else None,
                "sample": text,
                "files": {
                    **(
                        {"checkpoint": checkpoint.path_of(built.setup.folder.path, self.saved_step)}
                        if self._saves
                        else {}
                    ),
                    "records": built.setup.folder.metrics,
                    "log": built.setup.folder.path / "logs",
                    **({"report": built.setup.folder.path / "report.html"} if built.config.report and not code else {}),
                    **({"store": built.setup.remote.url} if built.setup.remote else {}),
                },
                "waits": name_settings(
                    waits(self._meter.seconds, workers=built.config.data.workers, ranks=built.world.size)
                ),
                "next": "; ".join(line for line in (self._next(code), unsent) if line),
            }
        )

    def _sample(self) -> str:
        return self._built.task.sample(self._built.engine.model, self._built.world.device)

    def _next(self, code: int) -> str:
        """Return the summary's last line: how the run ended, and what to do next."""
        step = self.saved_step
        total = self._built.run_plan.step_plan.steps
        config = self._built.config
        selection = self._built.state.selection
        if step < total and out_of_patience(config, selection):
            return f"stopped early after step {step} of {total}: {explain_early_stop(config, selection)}"
        if not self._saves and (code or step < total):
            return f"ended after step {step} of {total}; nothing was saved (--checkpoint.mode none)"
        if not self._saves:
            return "finished; nothing was saved (--checkpoint.mode none)"
        if step >= total:
            end = f"finished {self.lost_ranks}" if self.lost_ranks else "finished"
            return f"{end}; next: {next_command(self._built)}"
        end = {EXIT_INTERRUPTED: "interrupted", EXIT_SAVED: "ended by a signal"}.get(code, "stopped")
        return f"{end}: saved after step {step} of {total}; to continue, run the same command"


def _drop_unknown(position: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a stream does not know: how long its epoch is."""
    return {name: value for name, value in position.items() if value is not None}


def _write_state(folder: RunFolder, state: RunState) -> None:
    """Write `state.json` for users and scripts; warn if that fails, since no resume reads it."""
    try:
        folder.write_state(state)
    except (OSError, StorageError) as error:
        _LOG.warning("state.json was not written: %s; the checkpoint holds the same state", error)
