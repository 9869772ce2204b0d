"""Build the components that accompany a run's steps, and process each step with them.

    components = build_components(status, built)
    components.record(status, step)
    saves = components.save_and_evaluate(status, step, ending)

The order of records, guards, checkpoints and evaluations is set here, the same on every rank; so are the early exit
from a caller's loop and the end of a run.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lockstep.clock import Clock, make_clock, trace_mark
from lockstep.data.batches import StepLoader
from lockstep.distributed.exchange import INTERRUPT, SAVE_AND_END, BusySeconds, StepExchange
from lockstep.distributed.progress import IN_BODY, READING, note_end
from lockstep.distributed.world import World
from lockstep.engines.memory import describe, footprint
from lockstep.engines.registry import name_of
from lockstep.errors import LockstepError, PeerError
from lockstep.guards.nonfinite import Rollback, floats
from lockstep.guards.watchdog import Heartbeats, all_do, read_alone, waited_for
from lockstep.hooks import Due
from lockstep.logging import Sinks
from lockstep.loop import StepControl, StepOutOfMemory, seeder
from lockstep.records import Step, StepRecord, exact_sums, fill_numbers, flatten_numbers, mean_numbers, merge_sums
from lockstep.task import items_of_a_sample
from lockstep.training.evaluation import all_numbers
from lockstep.training.state.parts import RunParts
from lockstep.training.state.status import HookContext, ReadNumbers, RunStatus, update_best
from lockstep.training.step.empty_batches import EmptyBatchCheck
from lockstep.training.step.ending import describe_lost_ranks
from lockstep.training.step.guards import RunGuards, ShareReporter
from lockstep.training.step.loss_watch import LossWatch
from lockstep.training.step.profiler import StepProfiler
from lockstep.training.step.recorder import EXIT_INTERRUPTED, EXIT_SAVED, Meter, RunRecorder
from lockstep.training.trial.compilation import choose_kernels

__all__ = [
    "StepComponents",
    "build_components",
    "finish_evaluation",
    "make_number_reader",
]


_LOG = logging.getLogger("lockstep")
_EXIT_CODES = {INTERRUPT: EXIT_INTERRUPTED, SAVE_AND_END: EXIT_SAVED}
_STATUSES = {INTERRUPT: "interrupted", SAVE_AND_END: "preempted"}
# Seconds to wait for the other ranks to leave the loop.
_LEAVE_TIMEOUT = 10.0


@dataclass(frozen=True)
class StepComponents:
    """The components that accompany a run's steps, and what they do after each.

    Attributes:
        plan_steps: length of the plan.
        last_step: number of steps after which this start ends.
        epochs: number of steps -> passes over the training data.
    """

    built: RunParts
    step_loader: StepLoader
    exchange: StepExchange
    meter: Meter
    recorder: RunRecorder
    guards: RunGuards
    share_reporter: ShareReporter
    control: StepControl
    profiler: StepProfiler
    plan_steps: int
    last_step: int
    epochs: Callable[[int], float]

    def iterate(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield the steps, and write the records before an error that ends the run.

        Only a run of one rank writes them: on several ranks a record is collective.
        """
        try:
            yield from records
        except Exception as error:
            goes_on = isinstance(error, StepOutOfMemory) and self.built.config.on_oom == "smaller"
            if self.built.world.size == 1 and not goes_on:
                # The device itself may have failed.
                with suppress(Exception):
                    for step in self.guards.flush(check=False):
                        self.meter.add(step)
                        self.recorder.log(step.record)
            raise

    def record(self, status: RunStatus, current: Step) -> None:
        """Record a step and run the guards."""
        record = current.record
        # Numbers of a device arrive after the step; its record waits for them.
        late = self.guards.late
        status.current_step = current
        status.global_step = current.global_step
        status.outputs.sinks.progress(current.global_step)
        self.share_reporter.update(self.exchange)
        if late:
            self.recorder.expect(record)
        for step in self.guards.read(record):
            self.meter.add(step)
            # Every rank logs a record in the same step, whenever its device delivers the numbers.
            if late:
                self.recorder.log(step.record)
        self.guards.after_step(record, saves=self.recorder.save_due(current.global_step))
        if not late:
            self.recorder.log(record)

    def save_and_evaluate(self, status: RunStatus, step: Step, ending: bool) -> bool:
        """Save and evaluate, if they are due.

        Returns:
            Whether a save is due after the loop's body and the hooks, which may write what it stores. Without either it
            is made here, before the evaluation.
        """
        built = self.built
        config = built.config
        state = built.state
        global_step = step.global_step
        due = global_step == self.plan_steps or bool(config.eval_freq and global_step % config.eval_freq == 0)
        saves = ending or self.recorder.save_due(global_step)
        if hooks := built.task.hooks:
            ends_window = hooks.reads_steps and self.recorder.ends_window(step.record)
            if ends_window:
                self.flush()
            record = self.recorder.window if ends_window else None
            due, saves = hooks.before_evaluation(HookContext(status, built), step, record, Due(due, saves))
            saves = saves or ending
        # The body and the hooks may change what is saved, so the save follows them.
        save_later = status.has_body or built.task.hooks is not None
        if due and built.evaluation:
            state.evaluation_due = True
        if saves and not save_later:
            self.save(global_step, final=ending)
        # A signal must not wait for an evaluation: the next start makes it.
        cut_short = ending and global_step < self.last_step
        if state.evaluation_due and not cut_short:
            self.flush()
            state.evaluation_due = False
            with trace_mark("evaluate"):
                step.evaluation = status.evaluation = self.recorder.evaluate(global_step)
            wants_save = finish_evaluation(status, built, global_step)
            saves = saves or self.recorder.is_best or wants_save
            if saves and not save_later:
                self.save(global_step, final=ending)
            update_best(status)
        return saves

    def save(self, global_step: int, *, final: bool = False) -> None:
        """Write the step's checkpoint, unless it is written already. Collective."""
        if self.recorder.saved_step != global_step:
            self.flush()
            with trace_mark("save"):
                self.guards.compare(global_step)  # collective
                self.guards.store_state()
                self.recorder.save(global_step, final=final)

    def flush(self) -> None:
        """Read, check and record all steps so far. Collective if a device delays them."""
        # Waits for the device, if steps were not read yet.
        for step in self.guards.flush():
            self.meter.add(step)
            self.recorder.log(step.record)

    def after_first_step(self) -> None:
        """Log memory and prepare saves, once step 1 has made the optimizer's states. Collective."""
        if self.built.world.is_first:
            self._log_memory()
        self.recorder.prepare()

    def _log_memory(self) -> None:
        """Log each rank's memory. Collective."""
        # One line has the memory of all ranks; once, after step 1.
        footprints = self.built.world.gather(footprint(self.built.engine))
        line = describe(name_of(self.built.config.engine, self.built.world), footprints)
        _LOG.info(line, extra={"only_file": True})

    def leave_early(self, status: RunStatus, heartbeats: Heartbeats | None, now: bool) -> None:
        """End a run whose loop the caller left in the body of a step.

        The run is saved unless the caller abandoned it. It fails if the ranks leave after different steps.

        Args:
            heartbeats: of the ranks; None without other processes.
            now: end at once, without a save, as after a second Ctrl-C.
        """
        built = status.built
        status.name = "interrupted" if now else status.early_name
        if built is None or now or sys.is_finalizing():
            return
        action = "abandon" if status.abandoned else "leave"
        if all_do(heartbeats, action, status.global_step - 1, lambda: _LEAVE_TIMEOUT):
            if status.abandoned:
                return
            self.save(status.global_step, final=True)
            self.recorder.finish()  # collective
            self.recorder.close(0, sample=False)
            # The sinks are closed with a summary. A later failure would close them without one.
            status.outputs.sinks = Sinks([])
        else:
            status.name = "failed"
            _LOG.warning("only some ranks left the loop after step %d; not saved", status.global_step)

    @contextmanager
    def prepare_recovery(self) -> Iterator[None]:
        """Prepare for a rollback or a recovery: close the exchange, or store the guards' state."""
        try:
            yield
        except Rollback:
            self.exchange.close()
            raise
        except PeerError:
            self.guards.store_state()
            raise

    def finish_run(self, stop_request: int, saved: int, losses: str = "") -> tuple[str, int]:
        """Write the run's status and exit code into its folder, and return them.

        A code other than 0 is reported to the launcher too.

        Args:
            saved: step of the last checkpoint.
            losses: describes the ranks that were lost.
        """
        code = _EXIT_CODES.get(stop_request, 0)
        if code:
            note_end(code)
        complete = saved >= self.plan_steps
        status = _STATUSES.get(stop_request, "finished" if complete else "stopped")
        if self.built.world.is_main:
            # A stop request of this run must not end the next start.
            self.built.setup.folder.stop_file.unlink(missing_ok=True)
            self.built.setup.folder.write_end(code, saved, status, losses)
        return status, code


def build_components(status: RunStatus, built: RunParts) -> StepComponents:
    """Build the components, from the step after the last one trained. Collective."""
    world = built.world
    ranks = status.ranks
    survives_losses = bool(ranks.member)
    step_loader = built.batches.from_step(built.start)
    profiler = StepProfiler(built, make_clock(world.device, world.size), step_loader)
    clock = profiler.clock
    seed = seeder(built.config.seed, "micro", world.device)

    def busy() -> BusySeconds:
        seconds = clock.spent()
        return BusySeconds(seconds.get("data", 0.0), seconds.get("forward", 0.0), recorder.saver.blocked)

    share_reporter = ShareReporter(built, clock)
    exchange = StepExchange(
        world,
        step_loader.items,
        built.batches.known_items(items_of_a_sample(built.task)),
        built.run_plan.step_plan.steps,
        busy,
        share_reporter.report,
        survives_loss=survives_losses,
        timed_steps=lambda: clock.steps,
    )
    exchange.take_turns(step_loader.turns)
    exchange.limit_reading(step_loader.readable_before)
    exchange.engine_steps = built.start
    built.exchange = exchange
    sums = built.state.running
    steps = built.start % built.config.log_freq if sums.steps is None else sums.steps
    meter = Meter(exchange, clock, world.device, sums.loss, sums.missed, sums.numbers, steps)
    status.outputs.timeline.measures(lambda: clock.spent().get("data", 0.0))
    losses = describe_lost_ranks(ranks.lost, world.size, ranks.initial_size)
    recorder = RunRecorder(built, meter, status.outputs, exchange, survives_loss=survives_losses, lost_ranks=losses)
    built.saver = recorder.saver
    guards = RunGuards(built, exchange, step_loader, seed, clock)
    watch = LossWatch(built, lambda done: components.save(done))
    components = StepComponents(
        built=built,
        step_loader=step_loader,
        exchange=exchange,
        meter=meter,
        recorder=recorder,
        guards=guards,
        share_reporter=share_reporter,
        control=_make_control(built, seed, clock, guards, recorder, watch),
        profiler=profiler,
        plan_steps=built.run_plan.step_plan.steps,
        last_step=built.last_step,
        epochs=built.epochs,
    )
    return components


def _make_control(
    built: RunParts,
    seed: Callable[[int, int], None],
    clock: Clock,
    guards: RunGuards,
    recorder: RunRecorder,
    watch: LossWatch,
) -> StepControl:
    """Make the settings of the loop from the run's schedules, guards and checks."""
    step_plan = built.run_plan.step_plan
    return StepControl(
        built.lr_factor,
        seed,
        clock,
        guards.limit,
        built.momentum,
        guards.audit,
        before_passes=watch,
        before_update=recorder.saver.order,
        check_empty=EmptyBatchCheck(built, seed),
        kernels=choose_kernels(built.config.compile, step_plan),
        world=built.world,
        micro_batches=step_plan.micro_batches,
        sharing=built.batches.sharing,
        gradients=built.groups.gradients,
        rate=lambda: built.rate,
        after_update=live.drive_to if (live := built.task.live_rates) else lambda done: None,
        pipeline=built.pipeline,
    )


def finish_evaluation(status: RunStatus, built: RunParts, global_step: int) -> bool:
    """Mark the step as evaluated, and return whether the task's hooks want a save."""
    status.ranks.evaluated_step = global_step
    if not built.task.hooks or not status.evaluation:
        return False
    numbers = all_numbers(status.evaluation)
    return built.task.hooks.after_evaluation(HookContext(status, built), global_step, numbers)


def make_number_reader(
    exchange: StepExchange, world: World, heartbeats: Heartbeats | None, survives_losses: bool
) -> ReadNumbers:
    """Return a function that reads a step's loss and numbers during its body.

    Args:
        survives_losses: report NaN if a rank is lost, rather than fail.
    """

    def read(step: Step) -> tuple[float, dict[str, float]]:
        losses = step.record.losses
        numbers = step.record.numbers
        # Waits for the device, when the body reads the numbers of a step.
        values = floats([*losses, *flatten_numbers(numbers)])
        own_sums = []
        for parts in fill_numbers(numbers, values[len(losses) :]).values():
            own_sums.append(exact_sums(parts))
        exchange.progress.at(step.record.step, READING)
        try:
            rows = exchange.rows(
                [math.fsum(values[: len(losses)]), *(x for sums_of_one in own_sums for x in sums_of_one)], losses=1
            )  # collective
        except PeerError as error:
            # The others may have continued to another exchange.
            ahead = waited_for(heartbeats, step.record.step) if heartbeats else []
            if ahead:
                raise LockstepError(read_alone(world.rank, step.global_step, ahead)) from error
            if not survives_losses:
                raise
            _LOG.warning("the loss of step %d is unknown: a rank that failed had a part of it", step.global_step)
            return math.nan, dict.fromkeys(numbers, math.nan)
        exchange.progress.at(step.record.step, IN_BODY)
        total = math.fsum(row[0] for row in rows)
        sums = {}
        # A number takes six columns of a row: its exact sums.
        for k, name in enumerate(numbers):
            sums[name] = merge_sums([row[6 * k + 1 : 6 * k + 7] for row in rows])
        return total / (step.items or 1), mean_numbers(sums)

    return read
