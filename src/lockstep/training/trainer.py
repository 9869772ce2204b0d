"""Run a training: join the ranks, build, lock the folder, load, train, leave.

    for step in run_training(spec, status): ...    # None once all is ready, then a Step for each step

`_train_steps` trains, and has what follows each step, in order. `_build_and_train` builds again after each rollback;
`_train_to_end` continues after a lost rank.
"""

import gc
import json
import logging
import math
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, Self

from lockstep.checkpoint.store import list_steps
from lockstep.config.schema import Config
from lockstep.distributed import failures
from lockstep.distributed.agreement import LONG, gather_results, on_all_ranks
from lockstep.distributed.exchange import CONTINUE, REGROUP, STOP
from lockstep.distributed.launcher import die_with_launcher, end_with_launcher
from lockstep.distributed.membership import Member, translate_errors
from lockstep.distributed.progress import COMPUTING, IN_BODY, mark_running
from lockstep.distributed.world import World
from lockstep.engines.memory import explain_out_of_memory
from lockstep.errors import CheckpointError, LockstepError, PeerError, RankLost, StorageError
from lockstep.guards.nonfinite import Rollback, read_skips
from lockstep.guards.preemption import Preemption
from lockstep.guards.watchdog import HangWatchdog, Heartbeats, all_do
from lockstep.logging import Sinks
from lockstep.logging.jsonl import tail
from lockstep.logging.log import close_log, open_log
from lockstep.loop import steps
from lockstep.records import EvaluationRecord, Step
from lockstep.report.page import write
from lockstep.task import Task
from lockstep.timeline import BODY, ENDING, RECOVERY, START, TRAINING, Timeline
from lockstep.training.recovery.out_of_memory import cut_step, free_frames, record_size
from lockstep.training.recovery.regroup import (
    explain_no_recovery,
    is_rank_loss,
    leave_to_build,
    ranks_per_replica,
    record_loss,
    register_member,
    regroup,
    regroup_to_build,
    run_digest,
)
from lockstep.training.start.build import BuildRequest, build_joiner, build_together, remote_run
from lockstep.training.start.load import check_init_from, load_state
from lockstep.training.start.open_run import announce, count_restarts, lock_folder, open_sinks
from lockstep.training.start.resolve import with_micro_batch_size
from lockstep.training.state.outputs import RunOutputs, close_uploads, open_uploads, upload_rest
from lockstep.training.state.parts import LockFacts, RunParts, notify
from lockstep.training.state.plan import FIXED
from lockstep.training.state.run_dir import RunFolder
from lockstep.training.state.selection import describe_best, out_of_patience
from lockstep.training.state.status import (
    BuildInputs,
    HookContext,
    MicroBatchCut,
    Rebuild,
    RunSpec,
    RunStatus,
    update_best,
)
from lockstep.training.step.components import (
    StepComponents,
    build_components,
    finish_evaluation,
    make_number_reader,
)
from lockstep.training.step.guards import name_and_memory, skips_file
from lockstep.training.step.profiler import check_range
from lockstep.training.step.recorder import EXIT_INTERRUPTED, RunRecorder
from lockstep.training.trial.trial_state import describe_unsaved

__all__ = [
    "Training",
    "run_training",
]


# Objects: a collection of fewer takes at most a few hundredths of a second.
_MIN_OBJECTS = 50_000


class CollectorFreeze:
    """Exemption of the first step's objects from garbage collection, until the loop ends.

    Nothing is frozen if the caller has turned collections off, or if there is little to visit, as after the caller's
    own `gc.freeze()`. At the end everything is unfrozen: engine and hooks form cycles with the model, which only a
    collection can free, and another run may follow in this process. Python cannot unfreeze a part, so objects that the
    caller froze earlier are visited again too.
    """

    def __init__(self) -> None:
        self._is_frozen = False

    def freeze(self) -> None:
        """Collect once, and exempt the surviving objects from later collections."""
        if not gc.isenabled():
            return
        gc.collect()
        if len(gc.get_objects(generation=2)) > _MIN_OBJECTS:
            gc.freeze()
            self._is_frozen = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_frozen:
            gc.unfreeze()


_LOG = logging.getLogger("lockstep")


def _write_report(status: RunStatus, built: RunParts, error: BaseException | None) -> None:
    """Write report.html into the folder of a run that has ended.

    Not after a signal: the run will continue, and must exit in time. Not if one of several ranks failed: the launcher
    ends the others and restarts.

    Args:
        error: the exception that ended the run; None: there was none.
    """
    ended = status.name in ("finished", "stopped") and (error is None or isinstance(error, GeneratorExit))
    failed = isinstance(error, Exception) and built.world.size == 1 and status.global_step > 0
    if not (built.world.is_main and built.config.report and (ended or failed)):
        return
    try:
        write([built.setup.folder.path], built.setup.folder.path / "report.html")
    except Exception as problem:
        _LOG.warning("report.html was not written: %s: %s", type(problem).__name__, str(problem).split("\n", 1)[0])


def _describe_interrupt(config: Config) -> str:
    """Describe what is saved of a run that Ctrl-C ended before it could save."""
    folder = RunFolder(config.local_dir, config.experiment_name)
    newest = max(list_steps(folder.path), default=0)
    if newest:
        return f"interrupted: the newest checkpoint is of step {newest}; to continue from it, run the same command"
    return "interrupted before anything was saved; the same command starts over"


def _describe_no_steps(built: RunParts) -> str:
    """Describe why a restarted run has no steps to train, and how to continue it."""
    path = built.setup.folder.path
    total = built.run_plan.step_plan.steps
    if built.start < built.last_step:
        return (
            f"{path} stopped early at step {built.start} of {total}: the best was "
            f"{describe_best(built.state.selection.best)}; to continue, raise --patience"
        )
    if built.start < total:
        return (
            f"{path} is at step {built.start} of {total}, where --stop-at {built.last_step} ends it; to continue, give "
            "a larger one"
        )
    return (
        f"{path} is finished after {total} steps; to train on, give --extend-to with more steps, or start another "
        "--experiment-name with --init-from this folder"
    )


Training = Generator[Step | None, None, None]


def run_training(spec: RunSpec, status: RunStatus) -> Training:
    """Run a training from start to end.

    Closing the generator in the body of a step saves and ends the run, if all ranks do so in the same step. An
    abandoned run is not saved.

    Yields:
        None once everything is ready, then each step.

    Raises:
        UsageError: the configuration cannot be run; nothing was written.
        LockstepError: the run failed.
        KeyboardInterrupt: Ctrl-C; everything is saved.
    """
    end_with_launcher()
    failures.note_interrupt(None)
    ranks = status.ranks
    status.outputs.timeline.begin()
    ranks.member = register_member(spec.world)
    joins = ranks.member is not None and ranks.member.is_new
    if ranks.member and not joins:
        ranks.member.report_start()
    # The device check travels with the first exchange of the build (`_build_and_lock`).
    join = World.alone if joins else partial(World.join, check_devices=False)
    try:
        # If only this rank has left the loop, a later end of its process still counts as a loss.
        with mark_running(stays=lambda: status.name == "failed"), translate_errors():
            ranks.world = spec.world or join(spec.config.device, spec.config.timeout)
            ranks.is_main = ranks.world.is_main and not joins
            yield from _build_and_train(spec, status)
    except GeneratorExit as exit_request:
        # The frames of the generators hold the engine too.
        traceback.clear_frames(exit_request.__traceback__)
        _free_parts(status)
        die_with_launcher(False)
        # A Ctrl-C in the loop's body arrives here as GeneratorExit, and is reported later.
        failures.note_interrupt(_describe_interrupt(status.inputs.config))
        if ranks.member:
            # The launcher may have ended already.
            with suppress(RuntimeError):
                ranks.member.report_end("its own loop was left, by an error or a break, so the others stop too")
        status.name = status.early_name if status.name == "running" else status.name
        if spec.world is None and ranks.world:
            if status.name == status.early_name:
                ranks.world.leave()
            else:
                # The other ranks may never leave, so this one does not wait for them.
                ranks.world.abandon()
        raise
    except BaseException as error:
        status.name = "failed"
        # The second Ctrl-C, or one before the steps: nothing is saved after it.
        if isinstance(error, KeyboardInterrupt):
            failures.note_interrupt(_describe_interrupt(status.inputs.config))
        else:
            failures.note(error)
        if spec.world is None and ranks.world:
            ranks.world.abandon()
        raise
    _free_parts(status)
    if spec.world is None and ranks.world:
        ranks.world.leave()
    if status.name == "interrupted":
        # The summary has the line already.
        failures.note_interrupt("")
        end = "saved" if status.inputs.config.checkpoint.mode != "none" else "ended, and not saved,"
        raise KeyboardInterrupt(f"{end} after step {status.global_step}")


def _build_and_train(spec: RunSpec, status: RunStatus) -> Training:
    """Build the run and train; after a rollback do so again, as after a restart."""
    ranks = status.ranks
    if ranks.member and ranks.member.is_new:
        yield from _join(spec, status, ranks.member)
    while status.name in ("new", "running"):
        # Before the collection: hooks of an engine make cycles of the model, which must go before the next one is made.
        status.model = None
        _free_parts(status)
        world = ranks.world
        assert world is not None
        try:
            # The build's exchanges travel with those of the lock.
            with world.together():
                built = _build_and_lock(spec, status, world)
        except LockstepError as error:
            if error.smaller:
                _take_smaller(status.inputs, world, error)
                continue
            if ranks.member is None or status.name == "new":
                raise
            if not (isinstance(error, PeerError) and is_rank_loss(error)):
                raise
            record_loss(ranks, error)
            # A rank failed during a rollback: build again with the others.
            regroup_to_build(ranks, ranks.member)
            continue
        if built.is_over:
            notify(world)(_describe_no_steps(built))
            if built.start >= built.run_plan.step_plan.steps:
                status.name = "finished"
            else:
                status.name = "stopped"
            yield None
        else:
            with suppress(Rollback, Rebuild):
                yield from _train_in_folder(status, built)
        del built


def _take_smaller(inputs: BuildInputs, world: World, error: LockstepError) -> None:
    """Choose smaller micro-batches for the next build, the same on all ranks.

    The trial of a rank ran out of memory.
    """
    free_frames(error)
    inputs.trial_cut = str(error)
    notify(world)(inputs.trial_cut)
    inputs.cut = FIXED
    inputs.config = with_micro_batch_size(inputs.config, error.smaller)


def _build_and_lock(spec: RunSpec, status: RunStatus, world: World) -> RunParts:
    """Build the run, and lock its folder. Collective.

    Of a run that is over it only loads the state.

    All errors that one rank alone may have are exchanged before anything is written.
    """
    inputs = status.inputs
    is_new = status.name == "new"
    if is_new and spec.world is None:
        world.defer_device_check()
    request = BuildRequest(
        min_steps=spec.min_steps,
        cut=inputs.cut,
        proves=is_new,
        check_first=partial(_check_free, inputs.config, world) if is_new else lambda: None,
        check_last=_check_before_lock,
    )
    try:
        with explain_out_of_memory(None, world), translate_errors():
            built = build_together(inputs.config, spec.task, world, inputs.user_objects, request)
    except CheckpointError as error:
        if is_new:
            raise
        raise LockstepError(f"the rollback has no checkpoint to resume from: {error}") from error
    if is_new and built.config.on_oom == "smaller" and built.config.micro_size < inputs.config.micro_batch_size:
        notify(world)(
            f"--micro-batch-size {built.config.micro_size} in place of {inputs.config.micro_batch_size}: the run ran "
            "out of memory before (micro-batch.json in its folder), or was started so"
        )
    status.hold(built)
    status.global_step = built.start
    status.ranks.is_main = world.is_main
    if built.setup.source is None and status.name == "running":
        inputs.restore_tensors(built)
    elif built.setup.source is None:
        inputs.copy_tensors(built.own_tensors, survives_loss=status.ranks.member is not None)
    update_best(status)
    # A run that is over only loads its state, to return the model and its last evaluation. It needs no lock.
    if built.is_over:
        load_state(built)  # collective
        status.evaluation = _read_evaluation(built.setup.folder, built.world)  # collective
        upload_rest(status.outputs, built)  # collective
    else:
        _lock(status.outputs, built)  # collective
    return built


def _read_evaluation(folder: RunFolder, world: World) -> EvaluationRecord | None:
    """Read the last evaluation of a run that is over; None without one. Collective."""

    def read() -> dict[str, Any]:
        with suppress(OSError):
            records = tail(folder.metrics) if world.is_main else []
            return next((record for record in reversed(records) if "evaluation/loss" in record), {})
        return {}

    record = gather_results(world, read, signs=LONG)[0]  # collective
    if not record:
        return None
    prefix = "evaluation/"
    numbers = {
        # A set without a loss has no number.
        name.removeprefix(prefix): math.nan if value is None else value
        for name, value in record.items()
        if name.startswith(prefix)
    }
    loss = numbers.pop("loss")
    items = numbers.pop("items")
    return EvaluationRecord(int(record["global_step"]), loss, items, numbers)


def _check_before_lock(built: RunParts) -> None:
    """Check what is written and read once the folder is locked. Collective with --init-from."""
    if not built.is_over:
        on_all_ranks(built.world, lambda: check_range(built))
        if built.config.init_from:
            check_init_from(built)  # collective


def _lock(outputs: RunOutputs, built: RunParts) -> None:
    """Start uploads, lock each local folder, and exchange what the first steps need. Collective.

    Raises:
        ConfigError: another run has the folder or the URL, or it cannot be written.
        StorageError: the store does not answer.
    """

    def lock() -> list[Any]:
        skipped: list[int] = []
        lock_folder(built)
        if built.world.is_main:
            skipped = read_skips(skips_file(built.setup.folder), built.setup.plan)
        return [name_and_memory(built.world.device), skipped]

    try:
        # Collective with a URL: the store is checked before the folder is made.
        open_uploads(outputs, built)
        devices, skipped = zip(*gather_results(built.world, lock, signs=LONG), strict=True)  # collective
    except BaseException as error:
        close_uploads(outputs, error)
        built.setup.folder.release()
        raise
    built.world.close_together()
    built.lock_facts = LockFacts(list(devices), skipped[0])


def _check_free(config: Config, world: World) -> None:
    """Refuse a locked folder, or a URL that cannot be written. On rank 0."""
    if world.is_main:
        RunFolder(config.local_dir, config.experiment_name).check_free()
        if remote := remote_run(config):
            remote.check()


def _join(spec: RunSpec, status: RunStatus, member: Member) -> Training:
    """Replace a lost process: build alone, then join the others between two steps."""
    assert status.ranks.world is not None
    with explain_out_of_memory(None, status.ranks.world), translate_errors():
        built = build_joiner(spec, status.inputs, status.ranks.world, member)
    status.hold(built)
    status.name = "running"
    status.ranks.digest = run_digest(built)
    status.inputs.copy_tensors(built.own_tensors, survives_loss=True)
    yield None
    with suppress(Rollback, Rebuild), _close_at_end(status, built):
        yield from _train_to_end(status, built)


def _train_to_end(status: RunStatus, built: RunParts) -> Training:
    """Train to the end; after a lost rank continue with the others."""
    ranks = status.ranks
    report = _report_nothing
    if ranks.member and not ranks.member.is_new:
        ranks.digest = run_digest(built)
        obstacle = explain_no_recovery(built)
        report = partial(
            ranks.member.report_ready,
            obstacle,
            built.config.experiment_name,
            ranks_per_replica(built.config, built.world),
        )
        ranks.member = None if obstacle else ranks.member
        die_with_launcher(not obstacle)
        if built.state.evaluation_due:
            ranks.evaluated_step = -1
        else:
            ranks.evaluated_step = built.start
    if ranks.member is None:
        yield from _train_steps(status, built, report)
        return
    with Preemption(ranks.pending_stop):
        while True:
            try:
                if not ranks.member.is_new:
                    # The groups that are made before the steps may fail too.
                    with translate_errors():
                        yield from _train_steps(status, built, report)
                    return
            except Rebuild as error:
                # This rank needs smaller micro-batches.
                status.outputs.timeline.enter(RECOVERY)
                leave_to_build(status, built, ranks.member, error)
                raise
            except PeerError as error:
                if not is_rank_loss(error):
                    raise
                record_loss(ranks, error, built.exchange)
                status.outputs.timeline.enter(RECOVERY)
            # From now on the run survives the failure of this process too.
            if ranks.member.is_new:
                ranks.member.report_ready(
                    "", built.config.experiment_name, ranks_per_replica(built.config, built.world)
                )
                die_with_launcher(True)
            regroup(status, built, ranks.member)
            _record_regroup(status.outputs.timeline, built)


def _report_nothing() -> None:
    """Replace the report to the launcher, if there is none or it was made."""


def _free_parts(status: RunStatus) -> None:
    """Free engine and groups before new ones are made, or before `World.leave`."""
    status.built = status.current_step = status.reader = None
    status.outputs.sinks = Sinks([])
    # Hooks form cycles with the model, which only a collection frees.
    gc.collect()


def _train_in_folder(status: RunStatus, built: RunParts) -> Training:
    """Open log and sinks in the locked folder, load the state, and train."""
    world = built.world
    outputs = status.outputs
    with _close_at_end(status, built):
        with world.together():  # collective
            open_log(built.setup.folder.path, world.rank)
            if built.setup.folder.dead_owner:
                _LOG.warning("cleared the lock of %s, which ended without releasing it", built.setup.folder.dead_owner)
            count_restarts(built.state)
            # The checkpoint of a rollback may be older than these failures.
            if status.ranks.losses:
                built.state.losses = max(built.state.losses or 0, status.ranks.losses)
            announce(built)
            for line in built.setup.notes:
                _LOG.info("%s", line, extra={"only_file": True})
            _LOG.info("arguments: %s", json.dumps(built.arguments), extra={"only_file": True})
            if world.is_main:
                outputs.sinks = open_sinks(built)
                outputs.timeline.open(built.setup.folder.timeline, built.start, world.size)
                record_size(status.inputs, outputs.sinks, built)
            load_state(built)  # collective
            if built.setup.source is None:
                # `load_state` ended with a gather, so nothing is deferred.
                world.close_together()
        if status.name == "new":
            status.name = "running"
            outputs.timeline.enter(BODY)
            yield None
            outputs.timeline.enter(START)
            _tell_unsaved(built)
        yield from _train_to_end(status, built)


def _tell_unsaved(built: RunParts) -> None:
    """Name what the loss changes and a resume does not have."""
    if built.config.checkpoint.mode != "none":
        names = built.state.unsaved
    else:
        names = None
    line = describe_unsaved(
        names or (), built.task, built.user_objects.values(), resumes=built.setup.source is not None
    )
    if line and built.world.is_main:
        _LOG.warning("%s", line)


@contextmanager
def _close_at_end(status: RunStatus, built: RunParts) -> Iterator[None]:
    """Close sinks, log and folder at the end, and record any error in them."""
    reason: BaseException | None = None
    try:
        yield
    except BaseException as error:
        reason = error
        status.outputs.sinks.close(None)
        if isinstance(error, Rollback | Rebuild):
            _LOG.warning("%s", error)
        else:
            _tell_hooks(built.task, error)
            _write_exit(status, built, error)
        if isinstance(error, Exception) and not isinstance(error, Rollback | Rebuild):
            is_one_line = isinstance(error, LockstepError) and error.__cause__ is None
            # Whoever catches the error prints it, so here only the log file gets it.
            _LOG.error("%s", failures.describe_error(error), exc_info=not is_one_line, extra={"only_file": True})
            failures.add_place(error)
            failures.note_log(built.setup.folder.path / "logs" / f"rank-{built.world.rank:05d}.log")
        raise
    finally:
        status.outputs.timeline.close(_end_status(status, reason))
        if not isinstance(reason, Rollback | Rebuild):
            _write_report(status, built, reason)
            close_uploads(status.outputs, reason)
        close_log()
        built.setup.folder.release()


def _tell_hooks(task: Task, error: BaseException) -> None:
    """Pass the run's error to the task's hooks; their own errors are only logged."""
    if not task.hooks or isinstance(error, GeneratorExit):
        return
    try:
        task.hooks.after_failure(error)
    except Exception:
        _LOG.exception("a hook failed while the run ended with %s", type(error).__name__)


def _train_steps(status: RunStatus, built: RunParts, report: Callable[[], None]) -> Training:
    """Train; after each step record, check, evaluate, run the loop's body and save.

    Args:
        report: notifies the launcher that the others can continue without this rank, once all groups are made.
    """
    # A save moves `built.start`, so keep its value.
    start_step = built.start
    components = build_components(status, built)
    report()
    timeline = status.outputs.timeline
    exchange = components.exchange
    profiler = components.profiler
    watchdog = HangWatchdog(built.world, exchange, built.setup.folder.path, failures.report, status.ranks.member)
    signals = Preemption(exchange)
    garbage = CollectorFreeze()
    stop_request = CONTINUE
    with ExitStack() as contexts:
        _enter_contexts(contexts, status, components, garbage, signals, watchdog)
        heartbeats = watchdog.connect()
        context = _begin(status, components, heartbeats)  # collective
        is_over = out_of_patience(built.config, built.state.selection)
        timeline.enter(TRAINING)
        records = steps(built.engine, built.task, components.step_loader, exchange, components.control)
        profiler.after(start_step)
        for record in () if is_over else components.iterate(records):
            # REGROUP lets a new process join; it does not stop the run.
            regroups = record.stop_agreed == REGROUP
            stop_request = CONTINUE if regroups else record.stop_agreed
            is_last = record.step + 1 == components.last_step or bool(stop_request)
            step = Step(record, components.epochs, record.rate, status.read_numbers)
            saves, loss = _follow_up(
                status, components, context, step, is_first=record.step == start_step, ends=is_last
            )
            if record.step == start_step:
                garbage.freeze()
            if status.has_body:
                timeline.enter(BODY)
            exchange.progress.at(record.step, IN_BODY)
            try:
                yield step
            except GeneratorExit:
                timeline.enter(ENDING)
                components.leave_early(status, heartbeats, signals.ends_now)
                raise
            exchange.progress.at(record.step, COMPUTING)
            timeline.enter(TRAINING)
            # A rank failed in the follow-up. The body has seen the step by now, so handle it.
            if loss:
                raise loss
            if saves:
                components.save(step.global_step, final=is_last)
                # A save may take longer than a step: mark progress for the watchdog.
                exchange.progress.at(record.step, COMPUTING)
            # Collective, if a trace ends.
            if spent := profiler.after(step.global_step):
                components.meter.pause(spent)
            if is_last or _ends_early(status, components, step, heartbeats):
                break
            if regroups:
                _leave_to_regroup(components)  # collective
        _finish(status, components, context, stop_request)


def _enter_contexts(
    contexts: ExitStack,
    status: RunStatus,
    components: StepComponents,
    garbage: CollectorFreeze,
    signals: Preemption,
    watchdog: HangWatchdog,
) -> None:
    """Enter the contexts of the steps.

    They are left in the reverse order: an error is explained first, and the collector runs again last.
    """
    built = components.built
    contexts.enter_context(garbage)
    contexts.enter_context(signals)
    # Loader processes, and the audit's, end with the steps.
    contexts.enter_context(closing(components.step_loader))
    contexts.enter_context(closing(components.guards.audit))
    contexts.enter_context(components.prepare_recovery())
    contexts.enter_context(watchdog)
    contexts.enter_context(components.recorder)
    contexts.enter_context(components.profiler)
    contexts.enter_context(explain_out_of_memory(built.engine, built.world))
    contexts.enter_context(translate_errors())
    contexts.enter_context(cut_step(status.ranks, built, components.exchange, components.save))


def _begin(status: RunStatus, components: StepComponents, heartbeats: Heartbeats | None) -> HookContext | None:
    """Connect signals, loop body and hooks to the steps, and make up for what the last step lacks. Collective.

    Returns:
        The hooks' access to the run; None without hooks.
    """
    built = components.built
    ranks = status.ranks
    exchange = components.exchange
    # A signal may have arrived while the ranks changed.
    exchange.stop(ranks.pending_stop.request)
    ranks.pending_stop.request = CONTINUE
    status.reader = make_number_reader(exchange, built.world, heartbeats, survives_losses=bool(ranks.member))
    hooks = built.task.hooks
    # Hooks read and store their own part of the run's state.
    context = HookContext(status, built) if hooks else None
    if hooks and context:
        hooks.before_run(context, built.start)
    _catch_up(status, built, components.recorder, built.start)
    return context


def _leave_to_regroup(components: StepComponents) -> NoReturn:
    """Leave the steps, so that a new process joins. Collective.

    All ranks agreed in the same step: they leave as after a failure, with the saves complete.
    """
    components.flush()
    components.recorder.saver.settle()  # collective
    raise RankLost("a new process waits to join the run")


def _follow_up(
    status: RunStatus,
    components: StepComponents,
    context: HookContext | None,
    step: Step,
    *,
    is_first: bool,
    ends: bool,
) -> tuple[bool, PeerError | None]:
    """Record, evaluate and call hooks after a step, up to the loop's body. Collective.

    Returns:
        Whether a save is due after the body; and the loss of a rank, to be raised then: the step is trained, so its
        body runs before the others continue without that rank.
    """
    try:
        status.ranks.regroup_tries = 0
        components.record(status, step)
        status.outputs.timeline.at(step.global_step)
        if is_first:
            components.after_first_step()  # collective
        saves = components.save_and_evaluate(status, step, ends)
        hooks = components.built.task.hooks
        if hooks and context:
            saves = hooks.after_step(context, step.global_step) or saves
    except PeerError as error:
        if status.ranks.member and status.has_body and is_rank_loss(error):
            return False, error
        raise
    return saves, None


def _catch_up(status: RunStatus, built: RunParts, recorder: RunRecorder, done: int) -> None:
    """Make up for the evaluation and the save that step `done` lacks. Collective."""
    if built.state.evaluation_due:
        built.state.evaluation_due = False
        status.evaluation = recorder.evaluate(done)
        finish_evaluation(status, built, done)
        update_best(status)
    if status.save_due:
        status.save_due = False
        recorder.save(done)


def _finish(status: RunStatus, components: StepComponents, context: HookContext | None, stop_request: int) -> None:
    """End profile, hooks, membership and saves, and write the summary. Collective."""
    built = components.built
    recorder = components.recorder
    status.outputs.timeline.enter(ENDING)
    # Collective, if a trace is in progress.
    components.profiler.end()
    if built.task.hooks and context:
        built.task.hooks.after_run(context, recorder.saved_step)
    if status.ranks.member:
        status.ranks.member.report_end()
        die_with_launcher(False)
    recorder.finish()  # collective
    status.name, status.exit_code = components.finish_run(stop_request, recorder.saved_step, recorder.lost_ranks)
    recorder.close(status.exit_code)
    built.end_training()


def _ends_early(status: RunStatus, components: StepComponents, step: Step, heartbeats: Heartbeats | None) -> bool:
    """Save and return True if patience or `run.stop()` ends the run after this step."""
    built = components.built
    # Evaluations and limits are the same on every rank, so all of them end here.
    if step.evaluation and out_of_patience(built.config, built.state.selection):
        components.save(step.global_step, final=True)
        return True
    if status.wants_stop:
        status.wants_stop = False
        world = built.world
        if all_do(heartbeats, "stop", step.record.step, lambda: world.timeout):
            components.save(step.global_step, final=True)
            return True
        # Not all ranks asked to stop: all stop together after the next exchange.
        components.exchange.stop(STOP)
    return False


def _record_regroup(timeline: Timeline, built: RunParts) -> None:
    """Record new groups in the timeline; a new rank 0 opens the file."""
    if built.world.is_main and not timeline.is_open:
        timeline.open(built.setup.folder.timeline, built.start, built.world.size, recovered=True)
    else:
        timeline.record_regroup(built.start, built.world.size)


def _end_status(status: RunStatus, reason: BaseException | None) -> str:
    """Return how this start of the run ended, for the timeline.

    Args:
        reason: the exception that ended it; None: there was none.
    """
    if isinstance(reason, Rollback | Rebuild):
        if isinstance(reason, MicroBatchCut):
            return "out of memory"
        if isinstance(reason, Rollback):
            return "rolled back"
        return "rebuilt"
    if isinstance(reason, KeyboardInterrupt):
        return "interrupted"
    if reason is None or isinstance(reason, GeneratorExit):
        return status.name
    return "failed"


def _write_exit(status: RunStatus, built: RunParts, error: BaseException) -> None:
    """Record the end of a run that failed, or that its caller left early."""
    if not built.world.is_main:
        return
    code = 1
    name = "failed"
    # The second Ctrl-C, or one before the steps.
    if isinstance(error, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
        name = "interrupted"
    elif isinstance(error, GeneratorExit) and status.name != "failed":
        code = 0
        if status.name == "running":
            name = status.early_name
        else:
            name = status.name
    # The disk may be full, and that may be the error itself.
    with suppress(OSError, StorageError):
        built.setup.folder.write_end(code, built.state.global_step, name)
