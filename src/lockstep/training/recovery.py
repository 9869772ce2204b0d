"""Recover from a lost rank with the state in memory, and let its replacement join.

    member = register_member(world)         # None: a lost rank ends the run
    ...                                     # a collective fails, and `is_rank_loss(error)`
    regroup(session, built, member)         # the survivors have new groups and one state

Every rank of the engine holds the whole state, and the update is the last part of a step: when a rank is lost, each of
the others has either applied it or not. The rank with the highest step broadcasts its state. The micro-batches of the
next step are divided among the present ranks, so none is lost and none is computed twice.
"""

import dataclasses
import gc
import hashlib
import json
import logging
import time
import traceback

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import checkpoint
from lockstep.config import cli
from lockstep.config.engine_options import ENGINES
from lockstep.distributed.exchange import REGROUP
from lockstep.distributed.membership import Generation, LeaveReport, Member, translate_errors
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.registry import name_of, undo_step
from lockstep.errors import PeerError, RankLost
from lockstep.guards.startup import program
from lockstep.logging.log import open_log
from lockstep.run_state import RunningSums, RunState
from lockstep.training.build import RunParts, build, build_batches, notify
from lockstep.training.build_engine import build_engine, build_optimizer
from lockstep.training.evaluation import build_evaluation_batches
from lockstep.training.open_run import lock_folder, open_sinks, open_uploads
from lockstep.training.session import Session
from lockstep.training.sharing import shares_for
from lockstep.training.task_check import restore_findings
from lockstep.training.trainable import restore_initial_set, restore_trained_set, store_trained_set

__all__ = [
    "Rebuild",
    "build_joiner",
    "explain_no_recovery",
    "is_rank_loss",
    "record_loss",
    "register_member",
    "regroup",
    "regroup_to_build",
    "run_digest",
]


_LOG = logging.getLogger("lockstep")
_STARTED: list[bool] = []  # not empty once this process has started a run
_MAX_TIMEOUTS, _SLACK = 2, 30.0  # how long to wait for the survivors: multiples of `--timeout`, plus seconds
_BLOCKED_SHARE = 0.9  # of `--timeout`: a rank that was blocked so long before the loss has waited for the others
_BUCKET_BYTES = 64 << 20  # bytes per broadcast
_REBUILDING, _NO_STATE = -1, -2  # reported in place of a step


class Rebuild(RankLost):
    """A rank was lost during a rollback: the survivors rebuild the whole run."""


def register_member(world: World | None) -> Member | None:
    """Register this process as a member; None if a lost rank ends the run.

    A lost rank ends the run without lockstep's launcher, and in a world that the caller joined. Only the first run of a
    script survives losses: a replacement process starts with that one.
    """
    if world is not None or _STARTED:
        return None
    _STARTED.append(True)
    return Member.of_this_process()


def explain_no_recovery(built: RunParts) -> str:
    """Return why a lost rank ends this run; "" if the run survives it."""
    name = name_of(built.config.engine, built.world)
    if not ENGINES[name].survives_loss:
        return f"--engine {name} splits the states over the ranks, so a lost rank takes its part along; ddp survives"
    if built.world.device.type == "cuda":
        return "a collective on CUDA devices cannot be aborted yet when a rank is lost"
    if built.task.state_dict():
        return "the task has tensors of its own, which its loss may have changed in the lost step"
    if built.task.hooks or built.task.own_steps:
        return "the task's hooks have state of their own, which a new process lacks"
    return ""


def build_joiner(session: Session, world: World, member: Member) -> RunParts:
    """Build, without the other ranks, what this process needs to join a run."""
    config = session.config
    config = dataclasses.replace(config, experiment_name=member.experiment() or config.experiment_name)
    alone = dataclasses.replace(config, engine="auto", shares="equal")
    built = build(alone, session.caller_task, world, session.caller_objects, joining=True, min_steps=session.min_steps)
    built.config = dataclasses.replace(built.config, engine=config.engine, shares=config.shares)
    return built


def regroup(session: Session, built: RunParts, member: Member) -> None:
    """Form new groups with the survivors, and bring all to one state. Changes `built`.

    Raises:
        Rebuild: another member rebuilds the run, so this process must too.
        PeerError: the run cannot continue.
    """
    start, before = time.monotonic(), (built.world.rank, built.world.is_main) if not member.is_new else (-1, False)
    step = _NO_STATE if member.is_new else session.exchange.engine_steps if session.exchange else built.start
    if session.exchange and session.exchange.stop_request != REGROUP:
        session.pending_stop.stop(session.exchange.stop_request)
    undo_step(built.engine)
    store_trained_set(built.engine, built.state)
    for parameter in built.model.parameters():
        parameter.grad = None
    state = built.tensors()
    report = _leave_report(session, built.world, step)
    lost: list[str] = []
    while True:
        _free_engine(session, built)
        generation = member.regroup(report, _MAX_TIMEOUTS * built.world.timeout + _SLACK)
        lost += generation.lost
        session.lost_ranks += generation.lost
        session.initial_ranks = session.initial_ranks or built.world.size
        built.state.losses = (built.state.losses or 0) + len(generation.lost)
        best = _most_advanced(generation)
        try:
            rank = generation.members.index(member.name)
            tries, session.regroup_tries = session.regroup_tries, session.regroup_tries + 1
            built.world = session.world = built.world.regroup(rank, len(generation.members), generation.number, tries)
            if best is None:
                raise Rebuild("another rank was lost while the run went back to its newest checkpoint")
            with translate_errors():
                _restore(session, built, generation, best, state)
                _take_over(session, built, *before)
            break
        except PeerError as error:
            if not is_rank_loss(error):
                raise
            record_loss(session, error)
            if report[:2] != generation.reports[best or member.name][:2]:
                report = report._replace(steps=_NO_STATE)  # its state is partly overwritten by now
    session.is_main = built.world.is_main
    if built.world.is_main:
        _log_regroup(generation._replace(lost=lost), session.last_rank_loss, built, time.monotonic() - start)


def regroup_to_build(session: Session, member: Member) -> None:
    """Form new groups for a process that rebuilds the run. Changes `session.world`.

    Raises:
        PeerError: the run cannot continue.
    """
    world = session.world
    assert world is not None
    while True:
        gc.collect()
        world.drop_groups([])
        generation = member.regroup(_leave_report(session, world, _REBUILDING), _MAX_TIMEOUTS * world.timeout + _SLACK)
        try:
            rank, tries = generation.members.index(member.name), session.regroup_tries
            session.regroup_tries += 1
            session.world = world.regroup(rank, len(generation.members), generation.number, tries)
            session.is_main = session.world.is_main
            return
        except PeerError as error:
            record_loss(session, error)


def is_rank_loss(error: PeerError) -> bool:
    """Whether the error means that another rank is lost, and nothing else."""
    return not error.relayed and not isinstance(error, Rebuild)


def record_loss(session: Session, loss: PeerError) -> None:
    """Record a lost rank, and free the engines and groups in the error's frames."""
    session.last_rank_loss = str(loss)
    blocked = time.monotonic() - session.exchange.progress.since if session.exchange else 0.0
    session.timed_out = session.world is not None and blocked > _BLOCKED_SHARE * session.world.timeout
    _LOG.warning("left the other ranks: %s", session.last_rank_loss, extra={"only_file": True})
    error: BaseException | None = loss
    visited = set[int]()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _leave_report(session: Session, world: World, step: int) -> LeaveReport:
    return LeaveReport(step, session.evaluated_step, session.digest, session.timed_out, world.timeout)


def _most_advanced(generation: Generation) -> str | None:
    """Return the member with the newest state; None if there is none, or one rebuilds."""
    reports = generation.reports
    if any(report.steps == _REBUILDING for report in reports.values()):
        return None
    best = max(generation.members, key=lambda name: (*reports[name][:2], -generation.members.index(name)))
    return best if reports[best].steps >= 0 else None


def run_digest(built: RunParts) -> str:
    """Hash what must be equal on processes that train together."""
    config = cli.flatten(built.config)
    del config["experiment_name"]  # may contain the time; a new process adopts the others'
    parts = [built.plan, config, dict(built.task.sources), program(built.task)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _free_engine(session: Session, built: RunParts) -> None:
    """Free the engine and all groups: DDP's reducer must go before its group."""
    groups = [
        session.exchange.release_group() if session.exchange else None,
        session.saver.release_group() if session.saver else None,
    ]
    session.exchange = session.saver = session.reader = None
    built.engine = None  # type: ignore[assignment]
    gc.collect()
    built.world.drop_groups(groups)


def _restore(session: Session, built: RunParts, generation: Generation, best: str, state: dict[str, Tensor]) -> None:
    """Load the state of member `best` everywhere, and rebuild what depends on ranks. Collective.

    Args:
        state: tensors of the previous engine, the task and the caller. They get the new values before an engine is
            made, which would copy rank 0's weights.
    """
    world, task, optimizer = built.world, built.task, built.groups.optimizer
    source, newest = generation.members.index(best), generation.reports[best]
    if any(report[:2] != newest[:2] for report in generation.reports.values()):
        state = _broadcast_state(state, source, world)
        if optimizer is not None and generation.reports[generation.members[world.rank]][:2] != newest[:2]:
            optimizer.state.clear()  # it may hold states of other parameters
    values = world.gather(built.state.to_json() if world.rank == source else None)[source]  # collective
    built.state = RunState.from_json(values)
    built.state.stream = built.batches.stream_state(newest.steps, world)  # collective for a stream
    restore_findings(task, built.state)  # a new process has not tried the task
    _set_position(session, built, newest)
    shares = shares_for(name_of(built.config.engine, world), world.size, built.config.shares)
    config = dataclasses.replace(built.config, shares=shares)
    built.batches, built.balancer = build_batches(config, task, built.training, built.run_plan, world, built.state)
    built.evaluation = build_evaluation_batches(config, task, built.evaluation_sets, world)  # collective
    built.loaders = [built.loaders[0], built.batches.loader, *(each.loader for each in built.evaluation.values())]
    if built.state.trained:  # a new process made its optimizer for another set, so all make a new one
        restore_initial_set(built.model, built.state)
        built.groups.replace_optimizer(build_optimizer(config, task, built.model))
    parts = (config, task, built.model, world, built.groups, built.batches)
    built.engine = build_engine(*parts, notify(world), built.state)
    built.load_state_dict(state)  # most tensors have their values already
    restore_trained_set(built.model, built.state)
    optimizer = built.groups.optimizer
    if newest.steps == 0 and optimizer is not None:
        optimizer.state.clear()  # only a place to load into; the first step makes it


def _broadcast_state(state: dict[str, Tensor], source: int, world: World) -> dict[str, Tensor]:
    """Broadcast one rank's state, into existing tensors where there are any. Collective.

    Tensors are sent as bytes, many in a bucket: most are small, each broadcast has a latency, and gloo does not support
    every dtype.
    """
    own = [[name, list(tensor.shape), str(tensor.dtype)[6:]] for name, tensor in state.items()]
    layout = world.gather(own if world.rank == source else None)[source]  # collective
    received, bucket, size = dict[str, Tensor](), list[Tensor](), 0
    for name, shape, dtype in layout:
        tensor = state.get(name)
        tensor = torch.empty(shape, dtype=getattr(torch, dtype)) if tensor is None else tensor
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            _broadcast(bucket, source, world)
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
        received[name] = tensor
    if bucket:
        _broadcast(bucket, source, world)
    return received


@torch.no_grad()
def _broadcast(tensors: list[Tensor], source: int, world: World) -> None:
    """Broadcast the tensors of rank `source`. Collective."""
    if world.rank == source:
        flat = torch.cat([tensor.resolve_conj().reshape(-1).view(torch.uint8) for tensor in tensors])
    else:
        flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    dist.broadcast(flat, src=source)  # collective
    if world.rank != source:
        parts = flat.split_with_sizes([tensor.nbytes for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # the clone is aligned for its dtype


def _set_position(session: Session, built: RunParts, best: LeaveReport) -> None:
    """Set session and state to the step from which the run continues. Collective.

    The values are those that a checkpoint of the step would have.
    """
    config, step, state = built.config, best.steps, built.state
    state.place = built.run_plan.place(step)
    # The lost rank's losses since the last record are unknown.
    state.running = RunningSums(missed=step % config.log_freq)
    is_last = step == built.run_plan.step_plan.steps
    due = step > 0 and (is_last or bool(config.eval_freq and step % config.eval_freq == 0))
    state.evaluation_due = due and bool(built.evaluation) and best.evaluated != step
    session.global_step, session.evaluated_step, session.current_step = step, best.evaluated, None
    last = step if step == built.last_step else step - step % config.ckpt_freq if config.ckpt_freq else 0
    checkpoints = checkpoint.list_steps(built.folder.path) if built.world.is_main else []
    session.save_due = bool(last) and max(built.world.gather(checkpoints)[0], default=0) < last  # collective


def _take_over(session: Session, built: RunParts, rank: int, was_main: bool) -> None:
    """Open this process's log, and on a new rank 0 the folder and the sinks. Collective."""
    if built.world.rank != rank:
        open_log(built.folder.path, built.world.rank)

    def open_as_main() -> None:
        if built.world.is_main and not was_main:
            lock_folder(built)
            open_uploads(session, built, force=True)  # in place of the lost rank 0
            session.sinks = open_sinks(built)

    on_all_ranks(built.world, open_as_main)  # collective


def _log_regroup(generation: Generation, reason: str, built: RunParts, seconds: float) -> None:
    for line in generation.lost:
        _LOG.warning("%s; the others go on", line)
    if not generation.lost and not generation.fresh:
        _LOG.warning("the ranks lost their connections, though all are alive, and go on: %s", reason)
    new = f", {len(generation.fresh)} of them new" if generation.fresh else ""
    ranks = "1 rank goes" if len(generation.members) == 1 else f"{len(generation.members)} ranks go"
    _LOG.info("%s on from step %d%s (after %.2f s)", ranks, built.start, new, seconds)
