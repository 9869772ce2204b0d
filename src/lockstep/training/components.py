"""The objects that work alongside a run's steps, and what follows each step.

    ongoing = works(session, built)
    step = recorded(session, built, ongoing, record)
    saves = saved_and_evaluated(session, built, ongoing, step, ending)

Records, guards, checkpoints and evaluations of a step are ordered here, the same on every rank; so are the early exit
from a caller's loop and the end of a run.
"""

import logging
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from lockstep import checkpoint
from lockstep.clock import make_clock, marked
from lockstep.data.batches import StepLoader, StepPlan
from lockstep.distributed.exchange import INTERRUPT, SAVE_AND_END, BusySeconds, StepExchange
from lockstep.distributed.progress import IN_BODY, READING, note_end
from lockstep.distributed.world import World
from lockstep.engines.memory import described, footprint
from lockstep.engines.registry import name_of
from lockstep.errors import LockstepError, PeerError
from lockstep.guards.nonfinite import Rollback, floats
from lockstep.guards.watchdog import Heartbeats, all_do, read_alone, waited_for
from lockstep.logging import Sinks
from lockstep.loop import StepControl, seeder
from lockstep.records import Best, Step, StepRecord, expanded, filled, flat, mean_numbers, merged_sums
from lockstep.task import items_of_a_sample
from lockstep.training.build import Built
from lockstep.training.build_engine import kernels_of
from lockstep.training.evaluation import numbered
from lockstep.training.guards import Balancing, RunGuards
from lockstep.training.profiler import StepProfiler
from lockstep.training.recorder import EXIT_INTERRUPTED, EXIT_SAVED, Meter, RunRecorder, describe_lost_ranks
from lockstep.training.session import HookContext, ReadNumbers, Session
from lockstep.training.trainable import record_body_change

__all__ = [
    "StepComponents",
    "after_first_step",
    "end_of",
    "handed_on",
    "leave_early",
    "note_best",
    "note_change",
    "reader",
    "recorded",
    "save",
    "saved_and_evaluated",
    "settle",
    "taken",
    "tell_evaluated",
    "works",
]


_LOG = logging.getLogger("lockstep")
_EXIT_CODES = {INTERRUPT: EXIT_INTERRUPTED, SAVE_AND_END: EXIT_SAVED}
_STATUS = {INTERRUPT: "interrupted", SAVE_AND_END: "preempted"}
_PATIENCE = 10.0  # seconds to wait for the other ranks to leave the loop


class StepComponents(NamedTuple):
    """The objects that work alongside a run's steps."""

    step_loader: StepLoader
    exchange: StepExchange
    meter: Meter
    recorder: RunRecorder
    guards: RunGuards
    balancing: Balancing
    control: StepControl
    profiling: StepProfiler
    step_plan: StepPlan
    whole: int  # length of the plan, in steps
    last: int  # last step of this start


def works(session: Session, built: Built) -> StepComponents:
    config, world, state, step_plan = built.config, built.world, built.state, built.run_plan.step_plan
    step_loader = built.batches.from_step(built.start)
    each = items_of_a_sample(built.task)
    profiling = StepProfiler(built, make_clock(world.device, world.size), step_loader)
    clock, seed = profiling.clock, seeder(config.seed, "micro", world.device)

    def busy() -> BusySeconds:
        spent = clock.spent()
        return BusySeconds(spent.get("data", 0.0), spent.get("forward", 0.0), recorder.saver.blocked)

    constant = (lambda step: each * step_plan.samples(step)) if each else None
    balancing, outlives = Balancing(built, clock), bool(session.member)
    exchange = StepExchange(
        world,
        step_loader.items,
        constant,
        step_plan.steps,
        busy,
        balancing.told,
        outlives=outlives,
        measured=lambda: clock.steps,
    )
    exchange.taken = built.start
    session.exchange = exchange
    sums = state.running
    meter = Meter(exchange, clock, world.device, sums.loss, sums.missed, sums.numbers)
    session.timeline.measures(lambda: clock.spent().get("data", 0.0))
    losses = describe_lost_ranks(session.lost_ranks, world.size, session.initial_ranks)
    recorder = RunRecorder(
        built, meter, session.sinks, exchange, session.timeline, survives_loss=outlives, lost_ranks=losses
    )
    session.saver = recorder.saver
    guards = RunGuards(built, exchange, step_loader, seed, clock)
    control = StepControl(
        built.rate,
        seed,
        clock,
        guards.limit,
        built.momentum,
        guards.audit,
        before_update=recorder.saver.order,
        kernels=kernels_of(config.compile, step_plan),
        world=world,
        micro_batches=step_plan.micro_batches,
        sharing=built.batches.sharing,
        gradients=built.groups.gradients,
    )
    parts = (step_loader, exchange, meter, recorder, guards, balancing, control, profiling, step_plan)
    return StepComponents(*parts, step_plan.steps, built.last)


def recorded(session: Session, built: Built, works: StepComponents, record: StepRecord) -> Step:
    """Record a step, run the guards, and return it as the caller gets it."""
    done, late = record.step + 1, works.guards.late
    session.sinks.progress(done)
    works.balancing.after(works.exchange)
    if late:
        works.recorder.expect(record)
    for step in works.guards.read(record):
        works.meter.add(step)
        if late:  # logged in the same step on every rank, whenever its device delivers the numbers
            works.recorder.log(step.record)
    works.guards.after(record)
    if not late:
        works.recorder.log(record)
    return Step(
        record, works.step_plan.start(done) / built.run_plan.samples, built.lr * record.factor, session.read_numbers
    )


def saved_and_evaluated(session: Session, built: Built, works: StepComponents, step: Step, ending: bool) -> bool:
    """Save and evaluate where they are due.

    Returns:
        Whether a save is due. If the caller keeps objects of their own or the task has hooks, it is left to after the
        body.
    """
    config, state, done = built.config, built.state, step.global_step
    due = done == works.whole or bool(config.eval_freq and done % config.eval_freq == 0)
    saves = ending or works.recorder.save_due(done)
    late = bool(session.caller_objects or built.task.hooks)  # their state is updated after this step, so the save waits
    if due and built.evaluation:
        state.evaluation_due = True
    if saves and not late:
        save(works, done)
    cut_short = ending and done < works.last  # a signal must not wait for an evaluation: the next start makes it
    if state.evaluation_due and not cut_short:
        settle(works)
        state.evaluation_due = False
        with marked("evaluate"):
            step.evaluation = session.evaluation = works.recorder.evaluate(done)
        tell_evaluated(session, built, done)
        saves = saves or works.recorder.is_best
        if saves and not late:
            save(works, done)
        note_best(session)
    session.current_step, session.global_step = step, done
    return saves


def tell_evaluated(session: Session, built: Built, done: int) -> None:
    """Mark the step as evaluated, and run the task's hooks."""
    session.evaluated_step = done
    if built.task.hooks and session.evaluation:
        built.task.hooks.evaluated(HookContext(session, built), done, numbered(session.evaluation))


def save(works: StepComponents, done: int) -> None:
    if works.recorder.saved_step != done:
        settle(works)
        with marked("save"):
            works.guards.keep()
            works.recorder.save(done)


def note_change(works: StepComponents, built: Built, done: int) -> None:
    """Record that the loop's body changed what is trained, after the step's checkpoint was begun."""
    if works.recorder.saved_step == done and built.config.checkpoint.mode != "none":
        record_body_change(built.engine, built.state, built.folder, done, built.world)


def settle(works: StepComponents) -> None:
    """Read and check every step taken so far, and write its record. Collective if a device delays them."""
    for step in works.guards.rest():  # waits for the device, if steps were not read yet
        works.meter.add(step)
        works.recorder.log(step.record)


def taken(works: StepComponents, world: World, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
    """Yield the steps. If one fails, write the records before it, if no other rank is needed."""
    try:
        yield from records
    except Exception:
        if world.size == 1:
            with suppress(Exception):  # the device itself may have failed
                for step in works.guards.rest(look=False):
                    works.meter.add(step)
                    works.recorder.log(step.record)
        raise


def leave_early(session: Session, works: StepComponents, told: Heartbeats | None, now: bool) -> None:
    """End a run whose loop the caller left in the body of a step.

    The run is saved unless the caller abandoned it. All ranks must leave after the same step in the same way; otherwise
    the run failed.

    Args:
        told: the ranks' heartbeats; None without other processes.
        now: end at once, without a save, as after a second Ctrl-C.
    """
    built, session.status = session.built, "interrupted" if now else session.early_status
    if built is None or now or sys.is_finalizing():
        return
    what = "abandon" if session.abandoned else "leave"
    if all_do(told, built.world.rank, what, session.global_step - 1, lambda: _PATIENCE):
        if session.abandoned:
            return
        save(works, session.global_step)
        works.recorder.finish()  # collective
        works.recorder.close(0, sample=False)
        session.sinks = Sinks([])  # already closed with a summary; not closed again as after a failure
    else:
        session.status = "failed"
        _LOG.warning("the loop was left after step %d on some ranks alone; not saved", session.global_step)


def reader(exchange: StepExchange, world: World, told: Heartbeats | None, outlives: bool) -> ReadNumbers:
    """Return a function that reads a step's loss and own numbers during its body."""

    def read(step: Step) -> tuple[float, dict[str, float]]:
        losses, numbers = step.record.losses, step.record.numbers
        values = floats([*losses, *flat(numbers)])  # waits for the device
        own = [expanded(parts) for parts in filled(numbers, values[len(losses) :]).values()]
        exchange.progress.at(step.record.step, READING)
        try:
            rows = exchange.rows([math.fsum(values[: len(losses)]), *(x for six in own for x in six)])  # collective
        except PeerError as error:  # if the others went on, this exchange met a different one
            others = waited_for(told, step.record.step) if told else []
            if others:
                raise LockstepError(read_alone(world.rank, step.global_step, others)) from error
            if not outlives:
                raise
            _LOG.warning("the loss of step %d is not known: a rank was lost with its part of it", step.global_step)
            return math.nan, dict.fromkeys(numbers, math.nan)
        exchange.progress.at(step.record.step, IN_BODY)
        total = math.fsum(row[0] for row in rows)
        sums = {name: merged_sums([row[6 * k + 1 : 6 * k + 7] for row in rows]) for k, name in enumerate(numbers)}
        return total / (step.items or 1), mean_numbers(sums)

    return read


@contextmanager
def handed_on(works: StepComponents) -> Iterator[None]:
    """Prepare a rollback or a recovery: close the exchange, or save what the guards know."""
    try:
        yield
    except Rollback:
        works.exchange.close()
        raise
    except PeerError:
        works.guards.keep()
        raise


def end_of(built: Built, stop_request: int, saved: int, losses: str = "") -> tuple[str, int]:
    """Return the run's status and exit code, and write them into the run's folder.

    A code that is not 0 is reported to the launcher too.
    """
    code = _EXIT_CODES.get(stop_request, 0)
    if code:
        note_end(code)
    whole = saved >= built.run_plan.step_plan.steps
    status = _STATUS.get(stop_request, "finished" if whole else "stopped")
    if built.world.is_main:
        built.folder.stop_file.unlink(missing_ok=True)  # obeyed, or too late: the next start must not find it
        built.folder.write_end(code, saved, status, losses)
    return status, code


def after_first_step(built: Built, works: StepComponents) -> None:
    """Report memory and prepare saves, once step 1 has made the optimizer's states. Collective."""
    if built.world.is_first:
        _report(built)
    works.recorder.prepare()


def _report(built: Built) -> None:
    """Log the memory that each rank holds. Collective."""
    held = built.world.gather(footprint(built.engine))  # collective
    _LOG.info(described(name_of(built.config.engine, built.world), held))


def note_best(session: Session) -> None:
    built = session.built
    best = built.state.selection.best if built else None
    if built and best:
        path = checkpoint.path_of(built.folder.path, best.step)
        kept = built.config.checkpoint.mode != "none" or path.is_dir()  # an earlier start wrote it
        session.best = Best(best.step, best.loss, str(path) if kept else "", best.metric, best.judged_value)
