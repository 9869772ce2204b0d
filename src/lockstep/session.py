"""What happens in a run, in its order: join, assemble, claim, load; then after each step what follows it; then leave.

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
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lockstep import checkpoint, options
from lockstep.bookkeeper import EXIT_INTERRUPTED, EXIT_SAVED, Bookkeeper
from lockstep.clock import make_clock
from lockstep.config import Config
from lockstep.defaults import described_optimizer, described_step, warnings
from lockstep.engines import name_of
from lockstep.engines.footprint import described, footprint
from lockstep.engines.shortage import explained
from lockstep.errors import DataError, LockstepError, PeerError, UsageError
from lockstep.guarded import Guards
from lockstep.guards.hang import Watch
from lockstep.guards.preemption import Preemption
from lockstep.guards.skips import Rollback
from lockstep.guards.told import Told, all_do, read_alone, waited_for
from lockstep.heartbeat import INTERRUPT, SAVE_AND_END, STOP, Heartbeat, Vitals
from lockstep.launch import failure
from lockstep.launch.leash import tie
from lockstep.loop import Plan, seeder, steps
from lockstep.meter import Meter
from lockstep.opening import claimed, count_restarts, load_state, open_sinks
from lockstep.parts import Parts, assemble, say
from lockstep.progress import COMPUTING, IN_BODY, READING, note_end
from lockstep.records import Best, EvaluationRecord, Step
from lockstep.sinks import Sinks
from lockstep.sinks.log import close_log, open_log
from lockstep.task import has_own, items_of_a_sample
from lockstep.world import World, together

__all__ = ["Session", "training"]

_LOG = logging.getLogger("lockstep")
_EXIT_CODES = {INTERRUPT: EXIT_INTERRUPTED, SAVE_AND_END: EXIT_SAVED}
_STATUS = {INTERRUPT: "interrupted", SAVE_AND_END: "preempted", STOP: "stopped"}
_PATIENCE = 10.0  # seconds for the others to leave the loop too

Training = Generator[Step | None, None, None]


@dataclass
class Session:
    """What a run knows of itself while it goes on, and what is left of it.

    Attributes:
        given, world: the task and the world that the caller gave, or None.
        parts: of the run as it is assembled now; None before and after.
        kept: the caller's own objects with tensors that a checkpoint keeps, by name.
        present: the step whose body runs.
        wants_stop: the caller asked for the end in the present body.
    """

    config: Config
    given: Any
    world: World | None
    status: str = "new"
    exit_code: int = 0
    parts: Parts | None = None
    sinks: Sinks = field(default_factory=lambda: Sinks([]))
    model: nn.Module | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    present: Step | None = None
    wants_stop: bool = False
    is_main: bool = True
    global_step: int = 0
    evaluation: EvaluationRecord | None = None
    best: Best | None = None


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
        with explained(None, world):
            parts = assemble(session.config, session.given, world, session.kept)
        session.parts, session.model, session.config = parts, parts.model, parts.config
        session.global_step = parts.start
        _note_best(session)
        if parts.start >= parts.last and not parts.state.get("evaluation_due"):
            load_state(parts)  # collective
            say(world)(_finished(parts))
            session.status = "finished" if parts.start >= parts.horizon.cut.steps else "stopped"
            yield None
        else:
            with suppress(Rollback):
                yield from _in_folder(session, parts)
        del parts


def _drop(session: Session) -> None:
    """Lets go of engine and groups: before the next ones, and before the world is left (see World.leave)."""
    session.parts = session.present = None
    session.sinks = Sinks([])
    gc.collect()  # hooks make cycles of a model and what is around it


def _in_folder(session: Session, parts: Parts) -> Training:
    """Trains with the folder claimed and the sinks open, and leaves both closed."""
    world = parts.world
    together(world, lambda: claimed(parts))
    try:
        together(world, lambda: open_log(parts.folder.path, world.rank))
        if parts.folder.cleared:
            _LOG.warning("cleared the lock of %s, which ended without giving it back", parts.folder.cleared)
        count_restarts(parts.state)
        _announce(parts)
        _LOG.info("arguments: %s", json.dumps(options.flat(parts.config)), extra={"only_file": True})
        if world.is_main:
            session.sinks = open_sinks(parts)
        load_state(parts)
        if session.status == "new":
            session.status = "running"
            yield None
        yield from _follow(session, parts)
    except BaseException as error:
        session.sinks.close(None)
        if isinstance(error, Rollback):
            _LOG.warning("%s", error)
        elif isinstance(error, Exception):
            once = {"only_file": isinstance(error, UsageError)}  # bad input is one line, which the command prints
            _LOG.error("%s", error, exc_info=not isinstance(error, LockstepError), extra=once)
        raise
    finally:
        close_log()
        parts.folder.release()


def _follow(session: Session, parts: Parts) -> Training:
    """The run itself: after each step, in this order, the record, the checkpoint, the evaluation, the caller's body."""
    config, world, state, cut = parts.config, parts.world, parts.state, parts.horizon.cut
    first = parts.start  # a save moves it
    feed = parts.batches.from_step(first)
    each = items_of_a_sample(parts.task)
    if each is None and first < cut.steps and not sum(world.gather(feed.items(first))):  # collective
        raise DataError("every label of the first step is masked: there is nothing to learn from; check the labels")
    clock, seed = make_clock(world.device), seeder(config.seed, "micro", world.device)

    def busy() -> Vitals:
        spent = clock.spent()
        return Vitals(spent.get("data", 0.0), spent.get("forward", 0.0), books.saver.blocked)

    beat = Heartbeat(world, feed.items, (lambda step: each * cut.samples(step)) if each else None, cut.steps, busy)
    meter = Meter(beat, clock, world.device, state["running_loss"], state.get("running_missed", 0))
    books = Bookkeeper(parts, meter, session.sinks, beat)
    guards = Guards(parts, beat, feed, seed)
    plan = Plan(parts.rate, seed, clock, guards.limit)
    wish = 0
    watch = Watch(world, beat, parts.folder.path, failure.note)
    signals = Preemption(beat)
    with signals, closing(feed), _rolled_back(beat), watch, books, explained(parts.engine, world):
        told = watch.connect()
        read_loss = _reader(session, beat, world, told)
        if state.pop("evaluation_due", False):  # a signal came before it, or a kill
            session.evaluation = books.evaluate(first)
            _note_best(session)
        for record in steps(parts.engine, parts.task, feed, beat, plan):
            done, wish = record.step + 1, record.agreed
            ending = done == parts.last or bool(wish)
            meter.add(record)
            session.sinks.progress(done)
            guards.after(record)
            if record.step == first:
                _report(parts)
            if done % config.log_freq == 0:
                books.log(record)
            step = Step(record, parts.horizon.epochs(done), parts.lr * record.factor, read_loss)
            due = done == cut.steps or bool(config.eval_freq and done % config.eval_freq == 0)
            due = due and parts.evaluation is not None
            saves = ending or bool(config.ckpt_freq and done % config.ckpt_freq == 0)
            if due:
                state["evaluation_due"] = True
            late = bool(session.kept)  # the body of this step has yet to bring them up to it
            if saves and not late:
                _save(guards, books, done)
            if due and (
                not wish or done == parts.last
            ):  # whoever sent a signal waits for none: the next start makes it
                del state["evaluation_due"]
                step.evaluation = session.evaluation = books.evaluate(done)
                saves = saves or books.is_best
                if saves and not late:
                    _save(guards, books, done)
            session.present, session.global_step = step, done
            _note_best(session)
            beat.progress.at(record.step, IN_BODY)
            try:
                yield step
            except GeneratorExit:
                _leave_early(session, guards, books, told, signals.ends_now)
                raise
            beat.progress.at(record.step, COMPUTING)
            if saves:
                _save(guards, books, done)
            if ending:
                break
            if session.wants_stop:
                session.wants_stop, wish = False, STOP
                if all_do(told, world.rank, "stop", record.step, lambda: world.timeout):
                    _save(guards, books, done)
                    break
                beat.stop(STOP)  # others go on: all end after the next exchange
        session.status, session.exit_code = _end(parts, wish, books.saved)
        books.close(_EXIT_CODES.get(wish, 0))


def _save(guards: Guards, books: Bookkeeper, done: int) -> None:
    if books.saved != done:
        guards.settle()
        books.save(done)


def _leave_early(session: Session, guards: Guards, books: Bookkeeper, told: Told | None, now: bool) -> None:
    """The caller left the loop in the body of a step. It is saved, where all ranks do so after the same step."""
    parts, session.status = session.parts, "interrupted" if now else "stopped"
    if parts is None or now or sys.is_finalizing():
        return
    if all_do(told, parts.world.rank, "leave", session.global_step - 1, lambda: _PATIENCE):
        _save(guards, books, session.global_step)
        books.close(0, sample=False)
    else:
        session.status = "failed"
        _LOG.warning("the loop was left after step %d on some ranks alone; not saved", session.global_step)


def _reader(session: Session, beat: Heartbeat, world: World, told: Told | None) -> Callable[[Step], float]:
    """What reads a step's loss while its body runs."""

    def read(step: Step) -> float:
        if session.present is not step:
            raise LockstepError(
                f"the loss of step {step.global_step} was not read before the next step began, and is not kept; read "
                "step.loss in the body of its own step"
            )
        own = math.fsum(float(loss) for loss in step.record.losses)  # waits for the device
        beat.progress.at(step.record.step, READING)
        try:
            (total,) = beat.totals([own])  # collective
        except PeerError as error:  # its exchange met another one, if the others went on
            others = waited_for(told, step.record.step) if told else []
            if others:
                raise LockstepError(read_alone(world.rank, step.global_step, others)) from error
            raise
        beat.progress.at(step.record.step, IN_BODY)
        return total / max(step.items, 1)

    return read


@contextmanager
def _rolled_back(beat: Heartbeat) -> Iterator[None]:
    """Gives the exchange's group back where the run goes back, since the next start makes its own."""
    try:
        yield
    except Rollback:
        beat.close()
        raise


def _end(parts: Parts, wish: int, saved: int) -> tuple[str, int]:
    """The run's status and exit code; where it was cut short the launcher, and the run's folder, keep the code."""
    code = _EXIT_CODES.get(wish, 0)
    if code:
        note_end(code)
    if parts.world.is_main:
        parts.folder.stop_file.unlink(missing_ok=True)  # heeded, or come too late: the next start must not find it
        if code:
            parts.folder.write_end(code, saved)
    whole = saved >= parts.horizon.cut.steps
    return _STATUS.get(wish, "finished" if whole else "stopped"), code


def _announce(parts: Parts) -> None:
    """What a step is, what takes it, and what is worth a warning."""
    _LOG.info(described_step(parts.horizon, parts.world.size))
    if not has_own(parts.task, "optimizer"):
        _LOG.info(described_optimizer(parts.horizon))
    for line in warnings(parts.horizon, parts.model):
        _LOG.warning(line)


def _report(parts: Parts) -> None:
    """Once the first step has made the optimizer's states: what each rank holds."""
    held = parts.world.gather(footprint(parts.engine))  # collective
    _LOG.info(described(name_of(parts.config.engine, parts.world), held))


def _note_best(session: Session) -> None:
    parts = session.parts
    best = parts.state.get("best") if parts else None
    if parts and best:
        session.best = Best(best["step"], best["loss"], str(checkpoint.path_of(parts.folder.path, best["step"])))


def _finished(parts: Parts) -> str:
    """What a person reads who starts again what has nothing left to do."""
    path, whole = parts.folder.path, parts.horizon.cut.steps
    if parts.start < whole:
        return (
            f"{path} is at step {parts.start} of {whole}, and --stop-at {parts.last} ends it there; raise it to go on"
        )
    return f"{path} is finished after {whole} steps; to train on: another --experiment-name, with --init-from {path}"
