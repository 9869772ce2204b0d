"""Run a training from start to end: join, build, lock, load, train, leave.

    for step in training(session): ...      # None once all is ready, then a Step for each step

What follows each step, and its order, is in `_follow`; rollbacks and recovery from lost ranks are around it.
"""

import gc
import json
import logging
import traceback
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Self

from lockstep.distributed import failures
from lockstep.distributed.exchange import CONTINUE, REGROUP, STOP
from lockstep.distributed.launcher import end_with_launcher
from lockstep.distributed.membership import Member, translate_errors
from lockstep.distributed.progress import COMPUTING, IN_BODY, mark_running
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.memory import explained
from lockstep.errors import CheckpointError, LockstepError, PeerError, RankLost, StorageError
from lockstep.guards.nonfinite import Rollback
from lockstep.guards.preemption import Preemption
from lockstep.guards.watchdog import HangWatchdog, all_do
from lockstep.logging import Sinks
from lockstep.logging.log import close_log, open_log
from lockstep.loop import steps
from lockstep.records import Step
from lockstep.report.goodput import BODY, ENDING, RECOVERY, START, TRAINING
from lockstep.report.page import write
from lockstep.training.build import Built, announce, build, notify
from lockstep.training.components import (
    after_first_step,
    end_of,
    handed_on,
    leave_early,
    note_best,
    note_change,
    reader,
    recorded,
    save,
    saved_and_evaluated,
    settle,
    taken,
    tell_evaluated,
    works,
)
from lockstep.training.open_run import claimed, count_restarts, load_state, open_sinks
from lockstep.training.profiler import check_range
from lockstep.training.recovery import (
    Anew,
    built_to_join,
    digest,
    is_lost,
    member_of,
    note_lost,
    regroup,
    regroup_to_build,
    why_not,
)
from lockstep.training.run_dir import RunFolder
from lockstep.training.selection import out_of_patience, shown
from lockstep.training.session import HookContext, Session

__all__ = [
    "Training",
    "training",
]


_ENOUGH = 50_000  # objects; a collection visits so many in some hundredths of a second


class Frozen:
    """Objects of the first step, exempt from garbage collection until the loop ends.

    Nothing changes if the caller has turned collections off, or if there is little to visit, as after the caller's own
    `gc.freeze()`. At the end everything is unfrozen: engine and hooks form cycles with the model, which only a
    collection can free, and another run may follow in this process. Python cannot unfreeze a part, so objects that the
    caller froze earlier are visited again too.
    """

    def __init__(self) -> None:
        self._frozen = False

    def begin(self) -> None:
        """Collect once, and exempt what survives from later collections."""
        if not gc.isenabled():
            return
        gc.collect()
        if len(gc.get_objects(generation=2)) > _ENOUGH:
            gc.freeze()
            self._frozen = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._frozen:
            gc.unfreeze()


_LOG = logging.getLogger("lockstep")


def _write_report(session: Session, built: Built, left: BaseException | None) -> None:
    """Write report.html into the folder of a run that has ended.

    An interrupted or preempted run goes on, and has no time; if one of several ranks failed, the launcher ends the
    others and restarts.

    Args:
        left: the exception that ended the run, if there was one.
    """
    ended = session.status in ("finished", "stopped") and (left is None or isinstance(left, GeneratorExit))
    failed = isinstance(left, Exception) and built.world.size == 1 and session.global_step > 0
    if not (built.world.is_main and built.config.report and (ended or failed)):
        return
    try:
        write([built.folder.path], built.folder.path / "report.html")
    except Exception as error:
        _LOG.warning("report.html was not written: %s: %s", type(error).__name__, str(error).split("\n", 1)[0])


def _nothing_left(built: Built) -> str:
    """Describe a run that is started again and has nothing to do."""
    path, whole = built.folder.path, built.run_plan.step_plan.steps
    if built.start < built.last:
        return (
            f"{path} stopped early at step {built.start} of {whole}: the best was "
            f"{shown(built.state.selection.best)}; a larger --patience goes on"
        )
    if built.start < whole:
        return (
            f"{path} is at step {built.start} of {whole}, and --stop-at {built.last} ends it there; raise it to go on"
        )
    return (
        f"{path} is finished after {whole} steps; to train on: --extend-to with more steps, or another "
        f"--experiment-name with --init-from {path}"
    )


Training = Generator[Step | None, None, None]


def training(session: Session) -> Training:
    """Run the whole training.

    Yields None once everything is ready, then each step. Closing it in a step's body saves, unless the run is
    abandoned, and ends, if all ranks do so in the same step.

    Raises:
        UsageError: the configuration cannot be run; nothing was written.
        LockstepError: the run failed.
        KeyboardInterrupt: Ctrl-C; everything is saved.
    """
    end_with_launcher()
    failures.note_uncaught()
    session.timeline.begin()
    session.member = member_of(session.world)
    joins = session.member is not None and session.member.is_new
    join = World.alone if joins else World.join
    session.joined = session.world or join(session.config.device, session.config.timeout)
    session.is_main = session.joined.is_main and not joins
    try:
        with mark_running(stays=lambda: session.status == "failed"):  # only this rank left the loop
            yield from _attempts(session)
    except GeneratorExit as left:
        traceback.clear_frames(left.__traceback__)  # the frames hold the engine too
        _drop(session)
        if session.member:
            with suppress(RuntimeError):  # the launcher is gone
                session.member.report_end("its own loop was left, by an error or a break, so the others do not go on")
        session.status = session.status_when_left if session.status == "running" else session.status
        if session.world is None:
            if session.status == session.status_when_left:
                session.joined.leave()
            else:  # the other ranks may never leave
                session.joined.abandon()
        raise
    except BaseException as error:
        session.status = "failed"
        failures.note(error)
        if session.world is None:
            session.joined.abandon()
        raise
    _drop(session)
    if session.world is None:
        session.joined.leave()
    if session.status == "interrupted":
        saved = "saved" if session.config.checkpoint.mode != "none" else "ended, and not saved,"
        raise KeyboardInterrupt(f"{saved} after step {session.global_step}")


def _attempts(session: Session) -> Training:
    """Build and train, and again after each rollback: everything is rebuilt, as after a restart."""
    if session.member and session.member.is_new:
        yield from _join(session, session.member)
    elif session.joined and session.status == "new":
        on_all_ranks(session.joined, lambda: _check_free(session))  # collective; before anything is built
    while session.status in ("new", "running"):
        _drop(session)
        session.model = None  # freed before the next one is made
        world = session.joined
        assert world is not None
        try:
            with explained(None, world), translate_errors():
                built = build(session.config, session.given, world, session.kept, least=session.least_steps)
        except CheckpointError as error:
            if session.status == "new":
                raise
            raise LockstepError(f"there is no checkpoint to go back to: {error}") from error
        except PeerError as error:
            if session.member is None or session.status == "new" or not is_lost(error):
                raise
            note_lost(session, error)
            regroup_to_build(session, session.member)  # a rank was lost during a rollback
            continue
        session.built, session.model, session.config = built, built.model, built.config
        session.global_step, session.is_main = built.start, world.is_main
        if built.source is None and session.status == "running":
            session.go_back_to_first(built)
        elif built.source is None:
            session.note_first(built.own)
        note_best(session)
        over = built.start >= built.last or out_of_patience(built.config, built.state.selection)
        if over and not built.state.evaluation_due:
            load_state(built)  # collective
            notify(world)(_nothing_left(built))
            session.status = "finished" if built.start >= built.run_plan.step_plan.steps else "stopped"
            yield None
        else:
            with suppress(Rollback, Anew):
                yield from _in_folder(session, built)
        del built


def _check_free(session: Session) -> None:
    """Refuse a folder that another run holds, on the rank that will lock it."""
    if session.joined and session.joined.is_main:
        RunFolder(session.config.save_dir, session.config.experiment_name).check_free()


def _join(session: Session, member: Member) -> Training:
    """Replace a lost process: build the parts alone, and join between two steps."""
    assert session.joined is not None
    with explained(None, session.joined), translate_errors():
        built = built_to_join(session, session.joined, member)
    session.built, session.model, session.config = built, built.model, built.config
    session.status, session.digest = "running", digest(built)
    session.note_first(built.own)
    yield None
    with suppress(Rollback, Anew), _left_in_order(session, built):
        yield from _going_on(session, built)


def _going_on(session: Session, built: Built) -> Training:
    """Train to the end, and continue with the surviving ranks after a loss."""
    if session.member and not session.member.is_new:
        session.digest, why = digest(built), why_not(built)
        session.member.report_ready(why, built.config.experiment_name)
        session.member = None if why else session.member
        session.evaluated = -1 if built.state.evaluation_due else built.start
    if session.member is None:
        yield from _follow(session, built)
        return
    with Preemption(session.wishes):
        while True:
            try:
                if not session.member.is_new:
                    yield from _follow(session, built)
                    return
            except PeerError as error:
                if not is_lost(error):
                    raise
                note_lost(session, error)
                session.timeline.enter(RECOVERY)
            if session.member.is_new:  # from now on the others survive its loss too
                session.member.report_ready("", built.config.experiment_name)
            regroup(session, built, session.member)
            _note_regrouped(session, built)


def _drop(session: Session) -> None:
    """Free engine and groups, before new ones are made or the world is left.

    See World.leave.
    """
    session.built = session.present = session.reader = session.exchange = session.saver = None
    session.sinks = Sinks([])
    gc.collect()  # hooks form cycles with the model


def _in_folder(session: Session, built: Built) -> Training:
    """Train with the folder locked and the sinks open, and close both."""
    world = built.world
    on_all_ranks(world, lambda: check_range(built))
    on_all_ranks(world, lambda: claimed(built))
    with _left_in_order(session, built):
        on_all_ranks(world, lambda: open_log(built.folder.path, world.rank))
        if built.folder.cleared:
            _LOG.warning("cleared the lock of %s, which ended without giving it back", built.folder.cleared)
        count_restarts(built.state)
        announce(built)
        for line in built.notes:
            _LOG.info("%s", line, extra={"only_file": True})
        _LOG.info("arguments: %s", json.dumps(built.arguments), extra={"only_file": True})
        session.sinks = on_all_ranks(world, lambda: open_sinks(built) if world.is_main else Sinks([]))  # collective
        if world.is_main:
            session.timeline.open(built.folder.timeline, built.start, world.size)
        load_state(built)
        if session.status == "new":
            session.status = "running"
            session.timeline.enter(BODY)
            yield None
            session.timeline.enter(START)
        yield from _going_on(session, built)


@contextmanager
def _left_in_order(session: Session, built: Built) -> Iterator[None]:
    """Close sinks, log and folder at the end, and record any error in them."""
    left: BaseException | None = None
    try:
        yield
    except BaseException as error:
        left = error
        session.sinks.close(None)
        if isinstance(error, Rollback | Anew):
            _LOG.warning("%s", error)
        else:
            _note_left(session, built, error)
        if isinstance(error, Exception) and not isinstance(error, Rollback | Anew):
            is_one_line = isinstance(error, LockstepError)  # the command prints it
            once = {"only_file": is_one_line}
            _LOG.error("%s", failures.describe_error(error), exc_info=not is_one_line, extra=once)
            failures.note_log(built.folder.path / "logs" / f"rank-{built.world.rank:05d}.log")
        raise
    finally:
        session.timeline.close(_ended(session, left))
        if not isinstance(left, Rollback | Anew):
            _write_report(session, built, left)
        close_log()
        built.folder.release()


def _follow(session: Session, built: Built) -> Training:  # noqa: C901
    """Train, and after each step record, check, evaluate, save and run the caller's body."""
    first, world, ongoing = built.start, built.world, works(session, built)  # read now: a save moves `built.start`
    timeline = session.timeline
    exchange, recorder, stop_request = ongoing.exchange, ongoing.recorder, 0
    watchdog = HangWatchdog(world, exchange, built.folder.path, failures.note, session.member)
    signals = Preemption(exchange)
    kept, loading, auditing = handed_on(ongoing), closing(ongoing.step_loader), closing(ongoing.guards.audit)
    profiling, frozen = ongoing.profiling, Frozen()
    explaining, typing = explained(built.engine, world), translate_errors()
    with frozen, signals, loading, auditing, kept, watchdog, recorder, profiling, explaining, typing:
        exchange.stop(session.wishes.request)  # from a signal that came while the ranks changed
        session.wishes.request = CONTINUE
        told = watchdog.connect()
        session.reader = reader(exchange, world, told, outlives=bool(session.member))
        hooks = built.task.hooks
        context = HookContext(session, built) if hooks else None  # with its own part of the run's state
        if hooks and context:
            hooks.before_run(context, first)
        if built.state.evaluation_due:  # a signal or a kill came before it
            built.state.evaluation_due = False
            session.evaluation = recorder.evaluate(first)
            tell_evaluated(session, built, first)
            note_best(session)
        if session.save_due:  # the save that was in progress when a rank was lost
            session.save_due = False
            recorder.save(first)
        over = out_of_patience(built.config, built.state.selection)
        timeline.enter(TRAINING)
        trained = steps(built.engine, built.task, ongoing.step_loader, exchange, ongoing.control)
        profiling.after(first)
        for record in () if over else taken(ongoing, world, trained):
            regroups, stop_request = record.stop_agreed == REGROUP, record.stop_agreed
            stop_request = CONTINUE if regroups else stop_request
            ending = record.step + 1 == ongoing.last or bool(stop_request)
            step, session.tries = recorded(session, built, ongoing, record), 0
            timeline.at(step.global_step)
            if record.step == first:
                after_first_step(built, ongoing)  # collective
                frozen.begin()
            saves = saved_and_evaluated(session, built, ongoing, step, ending)
            if hooks and context:
                hooks.after_step(context, step.global_step)
            if session.has_body:  # the body may write what is being copied
                recorder.saver.order()
            exchange.progress.at(record.step, IN_BODY)
            if session.has_body:
                timeline.enter(BODY)
            try:
                yield step
            except GeneratorExit:
                timeline.enter(ENDING)
                note_change(ongoing, built, step.global_step)
                leave_early(session, ongoing, told, signals.ends_now)
                raise
            exchange.progress.at(record.step, COMPUTING)
            timeline.enter(TRAINING)
            note_change(ongoing, built, step.global_step)
            if saves:
                save(ongoing, step.global_step)
            if spent := profiling.after(step.global_step):  # collective, if a trace ends
                ongoing.meter.pause(spent)
            if ending:
                break
            if step.evaluation and out_of_patience(built.config, built.state.selection):  # the same on every rank
                save(ongoing, step.global_step)
                break
            if session.wants_stop:
                session.wants_stop, stop_request = False, STOP
                if all_do(told, world.rank, "stop", record.step, lambda: world.timeout):
                    save(ongoing, step.global_step)
                    break
                exchange.stop(STOP)  # other ranks go on: all end after the next exchange
            if regroups:
                settle(ongoing)
                recorder.saver.settle()  # collective
                raise RankLost("a new process waits to be taken in")
        timeline.enter(ENDING)
        profiling.end()  # collective, if a trace is in progress
        if hooks and context:
            hooks.after_run(context, recorder.saved)
        if session.member:
            session.member.report_end()
        recorder.settle()  # collective
        session.status, session.exit_code = end_of(built, stop_request, recorder.saved, recorder.losses)
        recorder.close(session.exit_code)


def _note_regrouped(session: Session, built: Built) -> None:
    """Record new groups in the timeline; a new rank 0 continues its file."""
    if built.world.is_main and not session.timeline.is_open:
        session.timeline.open(built.folder.timeline, built.start, built.world.size, recovered=True)
    else:
        session.timeline.regrouped(built.start, built.world.size)


def _ended(session: Session, left: BaseException | None) -> str:
    """Return how this start of the run ended, for the timeline."""
    if isinstance(left, Rollback | Anew):
        return "rolled back" if isinstance(left, Rollback) else "built anew"
    return session.status if left is None or isinstance(left, GeneratorExit) else "failed"


def _note_left(session: Session, built: Built, error: BaseException) -> None:
    """Record the end of a run that failed, or whose loop was left."""
    if built.world.is_main:
        left = isinstance(error, GeneratorExit) and session.status != "failed"
        status = "failed" if not left else session.status_when_left if session.status == "running" else session.status
        with suppress(OSError, StorageError):  # the disk may be full, which may be the error itself
            built.folder.write_end(0 if left else 1, built.state.global_step, status)
