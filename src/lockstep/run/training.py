"""What happens in a run, in its order: join, build, claim, load; then after each step what follows it; then leave.

for step in training(session): ...      # None once all is ready, then a Step for each step
"""

import gc
import json
import logging
import math
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

from lockstep import checkpoint
from lockstep.clock import make_clock
from lockstep.data.batches import StepLoader, StepPlan
from lockstep.distributed.progress import COMPUTING, IN_BODY, READING, note_end
from lockstep.distributed.step_exchange import INTERRUPT, SAVE_AND_END, STOP, BusySeconds, StepExchange
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.make import name_of
from lockstep.engines.shared.memory import described, footprint
from lockstep.engines.shared.oom import explained
from lockstep.errors import LockstepError, PeerError, UsageError
from lockstep.guards.hang_watchdog import HangWatchdog
from lockstep.guards.preemption import Preemption
from lockstep.guards.skips import Rollback
from lockstep.guards.told import Told, all_do, read_alone, waited_for
from lockstep.launch import failure
from lockstep.launch.exit_with_launcher import tie
from lockstep.loop import StepControl, seeder, steps
from lockstep.records import Best, Step, StepRecord
from lockstep.run import extending
from lockstep.run.best import out_of_patience, shown
from lockstep.run.build import Built, build, notify
from lockstep.run.defaults import described_optimizer, described_step, warnings
from lockstep.run.guarding import Guards
from lockstep.run.meter import Meter
from lockstep.run.opening import claimed, count_restarts, load_state, open_sinks
from lockstep.run.recorder import EXIT_INTERRUPTED, EXIT_SAVED, RunRecorder
from lockstep.run.session import Session
from lockstep.sinks import Sinks
from lockstep.sinks.log import close_log, open_log
from lockstep.task import has_own, items_of_a_sample

__all__ = ["Training", "training"]

_LOG = logging.getLogger("lockstep")
_EXIT_CODES = {INTERRUPT: EXIT_INTERRUPTED, SAVE_AND_END: EXIT_SAVED}
_STATUS = {INTERRUPT: "interrupted", SAVE_AND_END: "preempted"}
_PATIENCE = 10.0  # seconds for the others to leave the loop too

Training = Generator[Step | None, None, None]


def training(session: Session) -> Training:
    """The whole run. Closing it in a step's body saves and ends, where all ranks do so in the same step.

    Raises:
        UsageError: what was asked for cannot be done; nothing was written.
        LockstepError: the run failed.
        KeyboardInterrupt: Ctrl-C; all is saved.
    """
    tie()
    world = session.world or World.join(session.config.device, session.config.timeout)
    session.is_main = world.is_main
    try:
        yield from _attempts(session, world)
    except GeneratorExit as left:
        traceback.clear_frames(left.__traceback__)  # they hold the engine too
        _drop(session)
        session.status = "stopped" if session.status == "running" else session.status
        if session.world is None:
            if session.status == "stopped":
                world.leave()
            else:  # the others may never come
                world.abandon()
        raise
    except BaseException as error:
        session.status = "failed"
        failure.note(error)
        if session.world is None:
            world.abandon()
        raise
    _drop(session)
    if session.world is None:
        world.leave()
    if session.status == "interrupted":
        raise KeyboardInterrupt(f"saved after step {session.global_step}")


def _attempts(session: Session, world: World) -> Training:
    """Once, and again after each rollback: everything is made anew, as after a restart."""
    while session.status in ("new", "running"):
        _drop(session)
        session.model = None  # not beside the next one
        with explained(None, world):
            built = build(session.config, session.given, world, session.kept)
        session.built, session.model, session.config = built, built.model, built.config
        session.global_step = built.start
        if built.source is None and session.status == "running":
            session.go_back_to_first(built)
        elif built.source is None:
            session.note_first(built.own)
        _note_best(session)
        over = built.start >= built.last or out_of_patience(built.config, built.state)
        if over and not built.state.get("evaluation_due"):
            load_state(built)  # collective
            notify(world)(_finished(built))
            session.status = "finished" if built.start >= built.run_plan.step_plan.steps else "stopped"
            yield None
        else:
            with suppress(Rollback):
                yield from _in_folder(session, built)
        del built


def _drop(session: Session) -> None:
    """Lets go of engine and groups: before the next ones, and before the world is left (see World.leave)."""
    session.built = session.present = session.reader = None
    session.sinks = Sinks([])
    gc.collect()  # hooks make cycles of a model and what is around it


def _in_folder(session: Session, built: Built) -> Training:
    """Trains with the folder claimed and the sinks open, and leaves both closed."""
    world = built.world
    on_all_ranks(world, lambda: claimed(built))
    try:
        on_all_ranks(world, lambda: open_log(built.folder.path, world.rank))
        if built.folder.cleared:
            _LOG.warning("cleared the lock of %s, which ended without giving it back", built.folder.cleared)
        count_restarts(built.state)
        _announce(built)
        _LOG.info("arguments: %s", json.dumps(built.arguments), extra={"only_file": True})
        if world.is_main:
            session.sinks = open_sinks(built)
        load_state(built)
        if session.status == "new":
            session.status = "running"
            yield None
        yield from _follow(session, built)
    except BaseException as error:
        session.sinks.close(None)
        if not isinstance(error, Rollback):
            _note_left(session, built, error)
        if isinstance(error, Rollback):
            _LOG.warning("%s", error)
        elif isinstance(error, Exception):
            once = {"only_file": isinstance(error, UsageError)}  # bad input is one line, which the command prints
            _LOG.error("%s", error, exc_info=not isinstance(error, LockstepError), extra=once)
        raise
    finally:
        close_log()
        built.folder.release()


class _Works(NamedTuple):
    """What goes on beside the steps."""

    step_loader: StepLoader
    exchange: StepExchange
    meter: Meter
    recorder: RunRecorder
    guards: Guards
    control: StepControl
    step_plan: StepPlan
    whole: int  # steps of the plan
    last: int  # of this start


def _works(session: Session, built: Built) -> _Works:
    config, world, state, step_plan = built.config, built.world, built.state, built.run_plan.step_plan
    step_loader = built.batches.from_step(built.start)
    each = items_of_a_sample(built.task)
    clock, seed = make_clock(world.device), seeder(config.seed, "micro", world.device)

    def busy() -> BusySeconds:
        spent = clock.spent()
        return BusySeconds(spent.get("data", 0.0), spent.get("forward", 0.0), recorder.saver.blocked)

    constant = (lambda step: each * step_plan.samples(step)) if each else None
    exchange = StepExchange(world, step_loader.items, constant, step_plan.steps, busy)
    meter = Meter(exchange, clock, world.device, state["running_loss"], state.get("running_missed", 0))
    recorder = RunRecorder(built, meter, session.sinks, exchange)
    guards = Guards(built, exchange, step_loader, seed)
    control = StepControl(built.rate, seed, clock, guards.limit, built.momentum)
    return _Works(step_loader, exchange, meter, recorder, guards, control, step_plan, step_plan.steps, built.last)


def _follow(session: Session, built: Built) -> Training:
    """The run itself: after each step, in this order, the record, the checkpoint, the evaluation, the caller's body."""
    first, world, works = built.start, built.world, _works(session, built)  # a save moves the start
    exchange, recorder, stop_request = works.exchange, works.recorder, 0
    watchdog, signals = HangWatchdog(world, exchange, built.folder.path, failure.note), Preemption(exchange)
    rolled_back, loading = _rolled_back(exchange), closing(works.step_loader)
    with signals, loading, rolled_back, watchdog, recorder, explained(built.engine, world):
        told = watchdog.connect()
        session.reader = _reader(exchange, world, told)
        if built.state.pop("evaluation_due", False):  # a signal came before it, or a kill
            session.evaluation = recorder.evaluate(first)
            _note_best(session)
        over = out_of_patience(built.config, built.state)
        for record in () if over else steps(built.engine, built.task, works.step_loader, exchange, works.control):
            stop_request = record.stop_agreed
            ending = record.step + 1 == works.last or bool(stop_request)
            step = _recorded(session, built, works, record)
            if record.step == first:
                _report(built)
            saves = _saved_and_evaluated(session, built, works, step, ending)
            exchange.progress.at(record.step, IN_BODY)
            try:
                yield step
            except GeneratorExit:
                _leave_early(session, works, told, signals.ends_now)
                raise
            exchange.progress.at(record.step, COMPUTING)
            if saves:
                _save(works, step.global_step)
            if ending:
                break
            if step.evaluation and out_of_patience(built.config, built.state):  # alike on every rank
                _save(works, step.global_step)
                break
            if session.wants_stop:
                session.wants_stop, stop_request = False, STOP
                if all_do(told, world.rank, "stop", record.step, lambda: world.timeout):
                    _save(works, step.global_step)
                    break
                exchange.stop(STOP)  # others go on: all end after the next exchange
        session.status, session.exit_code = _end(built, stop_request, recorder.saved)
        recorder.close(_EXIT_CODES.get(stop_request, 0))


def _recorded(session: Session, built: Built, works: _Works, record: StepRecord) -> Step:
    """The step as the caller gets it, once it has been recorded and looked at."""
    done = record.step + 1
    works.meter.add(record)
    session.sinks.progress(done)
    works.guards.after(record)
    if done % built.config.log_freq == 0:
        works.recorder.log(record)
    return Step(
        record, works.step_plan.start(done) / built.run_plan.samples, built.lr * record.factor, session.read_loss
    )


def _saved_and_evaluated(session: Session, built: Built, works: _Works, step: Step, ending: bool) -> bool:
    """The checkpoint, then the evaluation, where they are due. Whether a save is, perhaps after the caller's body."""
    config, state, done = built.config, built.state, step.global_step
    due = done == works.whole or bool(config.eval_freq and done % config.eval_freq == 0)
    saves = ending or bool(config.ckpt_freq and done % config.ckpt_freq == 0)
    late = bool(session.kept)  # the body of this step has yet to bring them up to it
    if due and built.evaluation:
        state["evaluation_due"] = True
    if saves and not late:
        _save(works, done)
    cut_short = ending and done < works.last  # whoever sent a signal waits for no evaluation: the next start makes it
    if "evaluation_due" in state and not cut_short:
        del state["evaluation_due"]
        step.evaluation = session.evaluation = works.recorder.evaluate(done)
        saves = saves or works.recorder.is_best
        if saves and not late:
            _save(works, done)
        _note_best(session)
    session.present, session.global_step = step, done
    return saves


def _save(works: _Works, done: int) -> None:
    if works.recorder.saved != done:
        works.guards.settle()
        works.recorder.save(done)


def _leave_early(session: Session, works: _Works, told: Told | None, now: bool) -> None:
    """The caller left the loop in the body of a step. It is saved, where all ranks do so after the same step."""
    built, session.status = session.built, "interrupted" if now else "stopped"
    if built is None or now or sys.is_finalizing():
        return
    if all_do(told, built.world.rank, "leave", session.global_step - 1, lambda: _PATIENCE):
        _save(works, session.global_step)
        works.recorder.close(0, sample=False)
        session.sinks = Sinks([])  # closed with a summary, and not once more as after a failure
    else:
        session.status = "failed"
        _LOG.warning("the loop was left after step %d on some ranks alone; not saved", session.global_step)


def _reader(exchange: StepExchange, world: World, told: Told | None) -> Callable[[Step], float]:
    """What reads a step's loss while its body runs."""

    def read(step: Step) -> float:
        own = math.fsum(float(loss) for loss in step.record.losses)  # waits for the device
        exchange.progress.at(step.record.step, READING)
        try:
            (total,) = exchange.totals([own])  # collective
        except PeerError as error:  # its exchange met another one, if the others went on
            others = waited_for(told, step.record.step) if told else []
            if others:
                raise LockstepError(read_alone(world.rank, step.global_step, others)) from error
            raise
        exchange.progress.at(step.record.step, IN_BODY)
        return total / max(step.items, 1)

    return read


@contextmanager
def _rolled_back(exchange: StepExchange) -> Iterator[None]:
    """Gives the exchange's group back where the run goes back, since the next start makes its own."""
    try:
        yield
    except Rollback:
        exchange.close()
        raise


def _end(built: Built, stop_request: int, saved: int) -> tuple[str, int]:
    """The run's status and exit code, which the run's folder keeps; where it was cut short the launcher does too."""
    code = _EXIT_CODES.get(stop_request, 0)
    if code:
        note_end(code)
    whole = saved >= built.run_plan.step_plan.steps
    status = _STATUS.get(stop_request, "finished" if whole else "stopped")
    if built.world.is_main:
        built.folder.stop_file.unlink(missing_ok=True)  # heeded, or come too late: the next start must not find it
        built.folder.write_end(code, saved, status)
    return status, code


def _note_left(session: Session, built: Built, error: BaseException) -> None:
    """Leaves word in the folder of a run that failed, or whose loop was left."""
    if built.world.is_main:
        left = isinstance(error, GeneratorExit) and session.status != "failed"
        status = "failed" if not left else "stopped" if session.status == "running" else session.status
        with suppress(OSError):  # the disk that is full, and why it failed
            built.folder.write_end(0 if left else 1, int(built.state.get("global_step", 0)), status)


def _announce(built: Built) -> None:
    """What a step is, what takes it, and what is worth a warning."""
    _LOG.info(described_step(built.run_plan, built.world.size))
    if not has_own(built.task, "optimizer"):
        _LOG.info(described_optimizer(built.run_plan))
    if line := extending.described(built.state, built.run_plan.step_plan.steps, built.lr * built.rate(built.start)):
        _LOG.info(line)
    for line in warnings(built.run_plan, built.model) if built.world.is_main else ():
        _LOG.warning(line)


def _report(built: Built) -> None:
    """Once the first step has made the optimizer's states: what each rank holds."""
    held = built.world.gather(footprint(built.engine))  # collective
    _LOG.info(described(name_of(built.config.engine, built.world), held))


def _note_best(session: Session) -> None:
    built = session.built
    best = built.state.get("best") if built else None
    if built and best:
        path = str(checkpoint.path_of(built.folder.path, best["step"]))
        metric, value = best.get("metric", "loss"), best.get("value", best["loss"])
        session.best = Best(best["step"], best["loss"], path, metric, value)


def _finished(built: Built) -> str:
    """What a person reads who starts again what has nothing left to do."""
    path, whole = built.folder.path, built.run_plan.step_plan.steps
    if built.start < built.last:
        return (
            f"{path} stopped early at step {built.start} of {whole}: the best was {shown(built.state)}; a larger "
            "--patience goes on"
        )
    if built.start < whole:
        return (
            f"{path} is at step {built.start} of {whole}, and --stop-at {built.last} ends it there; raise it to go on"
        )
    return (
        f"{path} is finished after {whole} steps; to train on: --extend-to with more steps, or another "
        f"--experiment-name with --init-from {path}"
    )
