"""A run from a Config: the parts are put together, then each step is followed by what has to happen after it.

    for record in lockstep.train(config, task): ...

`lockstep train` does the same (train_command.py).
"""

import gc
import inspect
import json
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep import checkpoint, environment, options
from lockstep.bookkeeper import EXIT_INTERRUPTED, EXIT_SAVED, Bookkeeper
from lockstep.clock import make_clock
from lockstep.config import Config
from lockstep.engines import name_of
from lockstep.engines.footprint import described, footprint
from lockstep.engines.shortage import explained
from lockstep.errors import CheckpointError, DataError, LockstepError, UsageError
from lockstep.guarded import Guards
from lockstep.guards.hang import Watch
from lockstep.guards.preemption import Preemption
from lockstep.guards.skips import Rollback
from lockstep.heartbeat import INTERRUPT, SAVE_AND_END, Heartbeat, Vitals
from lockstep.launch import failure
from lockstep.loop import Plan, seeder, steps
from lockstep.meter import Meter
from lockstep.parts import Parts, assemble, say
from lockstep.progress import COMPUTING, IN_BODY
from lockstep.records import StepRecord
from lockstep.sinks import Sinks
from lockstep.sinks.console import Console
from lockstep.sinks.jsonl import JsonLines, read
from lockstep.sinks.log import close_log, open_log
from lockstep.sinks.remote import masked, remote_sinks
from lockstep.world import World, together

__all__ = ["train"]

_LOG = logging.getLogger("lockstep")
_LAST: "list[weakref.ref[Generator[StepRecord, None, int]]]" = []  # the run that began last in this process
_EXIT_CODES = {INTERRUPT: EXIT_INTERRUPTED, SAVE_AND_END: EXIT_SAVED}


def train(config: Config, task: Any = None, world: World | None = None) -> Generator[StepRecord, None, int]:
    """Trains `task` (default: the one that the config names), yielding a record after each step and what follows it.

    Records, evaluations, checkpoints and the resume of an earlier run happen as under the command. Leaving the loop
    early ends the run without a further checkpoint; every rank must leave it at the same step. The generator's value
    is the command's exit code.

    A process trains one run at a time, and as many as it likes one after the other. A run that was left in the middle
    and is still there (an error in a notebook's cell keeps it) is ended when the next one begins, but for runs in a
    world that the caller joined.

    Args:
        config: everything but the task.
        task: what is trained; None: what the config names.
        world: one that this process joined already, and will leave itself; None: joined here, and left at the end.

    Raises:
        UsageError: what was asked for cannot be done; nothing was written.
        LockstepError: the run failed.
    """
    own: list[weakref.ref[Generator[StepRecord, None, int]]] = []  # no reference, or `break` would not close it
    run = _train(config, task, world, own)
    own.append(weakref.ref(run))
    return run


def _train(config: Config, task: Any, world: World | None, own: list[Any]) -> Generator[StepRecord, None, int]:
    if world is None:  # who joined one keeps count of what runs in it
        _take_turn(own[0])
    joined = world or World.join(config.device, config.timeout)
    code: int | None = None
    try:
        while code is None:
            with explained(None, joined):
                parts = assemble(config, task, joined)
            if parts.start >= parts.last:
                say(joined)(_finished(parts))
                code = 0
            else:
                with suppress(Rollback):  # a guard went back: everything is made anew, as after a restart
                    code = yield from _in_folder(parts)
            del parts  # its engine, before the next one or the groups: see World.leave
            gc.collect()  # hooks make cycles of a model and what is around it
    except GeneratorExit as left:
        traceback.clear_frames(left.__traceback__)  # they hold the engine too
        del parts
        if world is None:
            joined.leave()
        raise
    except BaseException:
        if world is None:
            joined.abandon()
        raise
    if world is None:
        joined.leave()
    return code


def _take_turn(run: "weakref.ref[Generator[StepRecord, None, int]]") -> None:
    """Ends the run of this process that was begun before and left in the middle: it holds lock, log and groups."""
    earlier = _LAST[-1]() if _LAST else None
    state = inspect.getgeneratorstate(earlier) if earlier else inspect.GEN_CLOSED
    if state == inspect.GEN_RUNNING:
        raise UsageError("this process trains already, in another thread or around this call: one run at a time")
    _LAST[:] = [run]
    if earlier and state == inspect.GEN_SUSPENDED:
        if os.environ.get("RANK", "0") == "0":
            print("the run that this process left in the middle is ended: one at a time", file=sys.stderr, flush=True)
        earlier.close()


def _in_folder(parts: Parts) -> Generator[StepRecord, None, int]:
    """Trains with the folder claimed and the sinks open, and leaves both closed."""
    world, sinks = parts.world, Sinks([])
    together(world, lambda: _claim(parts))
    try:
        together(world, lambda: open_log(parts.folder.path, world.rank))
        if parts.folder.cleared:
            _LOG.warning("cleared the lock of %s, which ended without giving it back", parts.folder.cleared)
        _count_restarts(parts.state)
        _LOG.info("arguments: %s", json.dumps(options.flat(parts.config)), extra={"only_file": True})
        if world.is_main:
            sinks = _open(parts)
        _load(parts)
        return (yield from _follow(parts, sinks))
    except BaseException as error:
        sinks.close(None)
        if isinstance(error, Rollback):
            _LOG.warning("%s", error)
        elif isinstance(error, Exception):
            once = {"only_file": isinstance(error, UsageError)}  # bad input is one line, which the command prints
            _LOG.error("%s", error, exc_info=not isinstance(error, LockstepError), extra=once)
        raise
    finally:
        close_log()
        parts.folder.release()


def _follow(parts: Parts, sinks: Sinks) -> Generator[StepRecord, None, int]:
    """The run itself: after each step, in this order, the record, the evaluation, the checkpoint."""
    config, world, state = parts.config, parts.world, parts.state
    first = parts.start  # a save moves it
    feed = parts.batches.from_step(first)
    each = getattr(parts.task, "items_per_sample", None)
    cut = parts.horizon.cut
    if each is None and not sum(world.gather(feed.items(parts.start))):
        raise DataError("every label of the first step is masked: there is nothing to learn from; check the labels")
    clock, seed = make_clock(world.device), seeder(config.seed, "micro", world.device)

    def busy() -> Vitals:
        spent = clock.spent()
        return Vitals(spent.get("data", 0.0), spent.get("forward", 0.0), books.saver.blocked)

    beat = Heartbeat(world, feed.items, (lambda step: each * cut.samples(step)) if each else None, cut.steps, busy)
    meter = Meter(beat, clock, world.device, state["running_loss"], state.get("running_missed", 0))
    books = Bookkeeper(parts, meter, sinks, beat)
    guards = Guards(parts, beat, feed, seed)
    plan = Plan(parts.rate, seed, clock, guards.limit)
    wish = 0
    watch = Watch(world, beat, parts.folder.path, failure.note)
    with Preemption(beat), closing(feed), _rolled_back(beat), watch, books, explained(parts.engine, world):
        if state.pop("evaluation_due", False):  # a signal came before it
            books.evaluate(first)
        for record in steps(parts.engine, parts.task, feed, beat, plan):
            done, wish = record.step + 1, record.agreed
            ending = done == parts.last or bool(wish)
            meter.add(record)
            sinks.progress(done)
            guards.after(record)
            if record.step == first:
                _report(parts)
            if done % config.log_freq == 0:
                books.log(record)
            best = False
            if done == cut.steps or (config.eval_freq and done % config.eval_freq == 0):
                if wish and done < parts.last:  # whoever sent a signal waits for none: the next start makes it
                    state["evaluation_due"] = True
                else:
                    best = books.evaluate(done)
            if ending or best or (config.ckpt_freq and done % config.ckpt_freq == 0):
                guards.settle()
                books.save(done)
            beat.progress.at(record.step, IN_BODY)
            yield record
            beat.progress.at(record.step, COMPUTING)
            if ending:
                break
        code = _EXIT_CODES.get(wish, 0)
        books.close(code)
    return _left(parts, code, books.saved)


@contextmanager
def _rolled_back(beat: Heartbeat) -> Iterator[None]:
    """Gives the exchange's group back where the run goes back, since the next start makes its own."""
    try:
        yield
    except Rollback:
        beat.close()
        raise


def _left(parts: Parts, code: int, step: int) -> int:
    """The exit code. Under torchrun a run that saved itself ends with 0, or it would be started again or called failed:
    what it ended with stands in its folder, and `lockstep launch` returns it."""
    if parts.world.is_main:
        parts.folder.stop_file.unlink(missing_ok=True)  # heeded, or come too late: the next start must not find it
        if code:
            parts.folder.write_end(code, step)
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else code


def _report(parts: Parts) -> None:
    """Once the first step has made the optimizer's states: what each rank holds."""
    held = parts.world.gather(footprint(parts.engine))  # collective
    _LOG.info(described(name_of(parts.config.engine, parts.world), held))


def _count_restarts(state: dict[str, Any]) -> None:
    """`restarts` of the state: how often a launcher started this run again after a failure, in all its starts."""
    job, now = os.environ.get("TORCHELASTIC_RUN_ID", ""), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    known = state.get("job", {})
    before = known["restarts_before"] if job and known.get("id") == job else state.get("restarts", 0)
    state |= {"restarts": before + now, "job": {"id": job, "restarts_before": before}}


def _claim(parts: Parts) -> None:
    if parts.world.is_main:
        size = sum(p.numel() * p.element_size() for p in parts.model.parameters())
        parts.folder.check_writable(3 * size)  # the parameters and AdamW's two moments
        parts.folder.claim()


def _open(parts: Parts) -> Sinks:
    """What stands in the folder besides checkpoints, and where records go. On rank 0."""
    config, folder = parts.config, parts.folder
    checkpoint.clean(folder.path)
    folder.forget_end()
    folder.write("config.toml", options.to_toml(config))
    environment.write(folder.environment, environment.describe() | {"sources": _sources(parts)})
    metrics = JsonLines(folder.metrics, parts.start)
    earlier = read(folder.metrics) if parts.start else []
    unit = getattr(parts.task, "item_name", "items")
    remote = remote_sinks(config, folder.path, parts.start)
    sinks = Sinks([metrics, Console(parts.last, parts.start, unit, earlier), *remote])
    sinks.start(_described(parts))
    return sinks


def _sources(parts: Parts) -> dict[str, str]:
    """The revision of whatever came from a hub."""
    return dict(getattr(parts.task, "sources", {}))


def _described(parts: Parts) -> dict[str, Any]:
    """What a sink may keep of the run's configuration: no secret is in it."""
    config, samples = parts.config, parts.horizon.samples
    return masked(
        {
            "experiment": config.experiment_name,
            "args": options.flat(config),
            "training_data_size": samples,
            "num_batches": -(-samples // config.batch_size),
            "world_size": parts.world.size,
            "sources": _sources(parts),
        }
    )


def _load(parts: Parts) -> None:
    """The state of the checkpoint to resume from, or the weights of --init-from."""
    world = parts.world
    if parts.source:
        state = parts.tensors()
        checkpoint.load(parts.source, state, world, verified=True)  # collective
        parts.restore(state)
        _LOG.info("resumed from %s, step %d of %d", parts.source, parts.start, parts.horizon.cut.steps)
    elif parts.config.init_from:
        source, verified = _weights_in(Path(parts.config.init_from), world)
        state = parts.engine.state()
        weights = {name: tensor for name, tensor in state.items() if name.startswith("model/")}
        checkpoint.load(source, weights, world, verified=verified)  # collective
        parts.engine.restore(state)
        _LOG.info("a new run with the weights of %s", source)


def _weights_in(path: Path, world: World) -> tuple[Path, bool]:
    """The checkpoint that --init-from names, and whether it was verified: itself, or the newest whole one of a run."""
    if any(world.gather(together(world, (path / "manifest.json").exists))):  # collective
        return path, False
    found = checkpoint.find_newest(path, world, _LOG.warning)  # collective
    if found is None:
        raise CheckpointError(f"--init-from {path}: no whole checkpoint there; give a run's folder or a checkpoint's")
    return found, True


def _finished(parts: Parts) -> str:
    """What a person reads who starts again what has nothing left to do."""
    path, whole = parts.folder.path, parts.horizon.cut.steps
    if parts.start < whole:
        return (
            f"{path} is at step {parts.start} of {whole}, and --stop-at {parts.last} ends it there; raise it to go on"
        )
    return f"{path} is finished after {whole} steps; to train on: another --experiment-name, with --init-from {path}"
