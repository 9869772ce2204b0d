"""Recover from a lost rank with the state in memory, and take in its replacement.

    member = member_of(world)               # None where a loss ends the run
    ...                                     # a collective fails: `is_lost` of its error
    regroup(session, built, member)         # those who are left have formed new groups, and stand at one step

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
from lockstep.training.build import Built, build, notify, stream_of
from lockstep.training.build_engine import engine_of, optimizer_of
from lockstep.training.evaluation import batches_of
from lockstep.training.open_run import claimed, open_sinks
from lockstep.training.session import Session
from lockstep.training.sharing import shares_for
from lockstep.training.task_check import recall
from lockstep.training.trainable import begin_as_made, note, train_now

__all__ = [
    "Anew",
    "built_to_join",
    "digest",
    "is_lost",
    "member_of",
    "note_lost",
    "regroup",
    "regroup_to_build",
    "why_not",
]


_LOG = logging.getLogger("lockstep")
_BEGUN: list[bool] = []  # whether this process has begun a run
_LONGEST, _SLACK = 2, 30.0  # multiples of `--timeout`, and seconds, to wait for the survivors
_WAITED = 0.9  # share of `--timeout`: a rank blocked that long before the loss has waited for the others
_TOGETHER = 64 << 20  # bytes per broadcast
_BUILDING, _EMPTY = -1, -2  # reported instead of a step: the run is being rebuilt; it has no state yet


class Anew(RankLost):
    """A rank was lost during a rollback: the survivors rebuild the whole run."""


def member_of(world: World | None) -> Member | None:
    """Register this process as a member; None if a lost rank ends the run.

    That is so without lockstep's launcher, or if the caller joined the world. Only the first run of a script survives
    losses: a replacement process begins with that one.
    """
    if world is not None or _BEGUN:
        return None
    _BEGUN.append(True)
    return Member.of_this_process()


def why_not(built: Built) -> str:
    """Return why this run cannot survive a lost rank; "" if it can."""
    name = name_of(built.config.engine, built.world)
    if not ENGINES[name].survives_loss:
        return f"--engine {name} splits the states over the ranks, so they are lost with one; ddp goes on without it"
    if built.world.device.type == "cuda":
        return "collectives of CUDA devices are not left yet where a rank is lost"
    if built.task.state_dict():
        return "the task keeps tensors of its own, which its loss may have moved in the step that was lost"
    if built.task.hooks or built.task.own_steps:
        return "the task's hooks keep what they have seen, which a new process would lack"
    return ""


def built_to_join(session: Session, world: World, member: Member) -> Built:
    """Build the parts that this process needs to join a running run.

    It builds everything but state and groups, by itself.
    """
    config = session.config
    config = dataclasses.replace(config, experiment_name=member.experiment() or config.experiment_name)
    alone = dataclasses.replace(config, engine="auto", shares="equal")
    built = build(alone, session.given, world, session.kept, joins=True, least=session.least_steps)
    built.config = dataclasses.replace(built.config, engine=config.engine, shares=config.shares)
    return built


def regroup(session: Session, built: Built, member: Member) -> None:
    """Form new groups with the survivors, and bring all to one state. Changes `built`.

    Raises:
        Anew: another member is rebuilding the run; this process must do so too.
        PeerError: the run does not go on.
    """
    began, before = time.monotonic(), (built.world.rank, built.world.is_main) if not member.is_new else (-1, False)
    taken = _EMPTY if member.is_new else session.exchange.engine_steps if session.exchange else built.start
    if session.exchange and session.exchange.stop_request != REGROUP:
        session.wishes.stop(session.exchange.stop_request)
    undo_step(built.engine)
    note(built.engine, built.state)
    for parameter in built.model.parameters():
        parameter.grad = None
    state = built.tensors()
    report = _report_of(session, built.world, taken)
    lost: list[str] = []
    while True:
        _let_go(session, built)
        found = member.regroup(report, _LONGEST * built.world.timeout + _SLACK)
        lost += found.lost
        session.losses += found.lost
        session.began_on = session.began_on or built.world.size
        built.state.losses = (built.state.losses or 0) + len(found.lost)
        best = _furthest(found)
        try:
            rank = found.members.index(member.name)
            tries, session.tries = session.tries, session.tries + 1
            built.world = session.joined = built.world.regroup(rank, len(found.members), found.number, tries)
            if best is None:
                raise Anew("another rank was lost while the run went back to its newest checkpoint")
            with translate_errors():
                _place(session, built, found, best, state)
                _take_over(session, built, *before)
            break
        except PeerError as error:
            if not is_lost(error):
                raise
            note_lost(session, error)
            if report[:2] != found.reports[best or member.name][:2]:
                report = report._replace(steps=_EMPTY)  # its state is partly overwritten by now
    session.is_main = built.world.is_main
    if built.world.is_main:
        _say(found._replace(lost=lost), session.lost, built, time.monotonic() - began)


def regroup_to_build(session: Session, member: Member) -> None:
    """Form new groups for a process that is rebuilding the run. Changes `session.joined`.

    Raises:
        PeerError: the run does not go on.
    """
    world = session.joined
    assert world is not None
    while True:
        gc.collect()
        world.drop_groups([])
        found = member.regroup(_report_of(session, world, _BUILDING), _LONGEST * world.timeout + _SLACK)
        try:
            rank, tries = found.members.index(member.name), session.tries
            session.tries += 1
            session.joined = world.regroup(rank, len(found.members), found.number, tries)
            session.is_main = session.joined.is_main
            return
        except PeerError as error:
            note_lost(session, error)


def is_lost(error: PeerError) -> bool:
    """Whether the error means only that another rank is gone."""
    return not error.relayed and not isinstance(error, Anew)


def note_lost(session: Session, lost: PeerError) -> None:
    """Record a lost-rank error, and free the engines and groups that its frames hold."""
    session.lost = str(lost)
    stood = time.monotonic() - session.exchange.progress.since if session.exchange else 0.0
    session.waited = session.joined is not None and stood > _WAITED * session.joined.timeout
    _LOG.warning("left the other ranks: %s", session.lost, extra={"only_file": True})
    error: BaseException | None = lost
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _report_of(session: Session, world: World, taken: int) -> LeaveReport:
    return LeaveReport(taken, session.evaluated, session.digest, session.waited, world.timeout)


def _furthest(found: Generation) -> str | None:
    """Return the member whose state all load.

    None if one is rebuilding, or none has any.
    """
    reports = found.reports
    if any(report.steps == _BUILDING for report in reports.values()):
        return None
    best = max(found.members, key=lambda name: (*reports[name][:2], -found.members.index(name)))
    return best if reports[best].steps >= 0 else None


def digest(built: Built) -> str:
    """Hash everything that must be equal on processes that train together."""
    config = cli.flatten(built.config)
    del config["experiment_name"]  # may contain the time; the others' is used
    same = [built.plan, config, dict(built.task.sources), program(built.task)]
    return hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _let_go(session: Session, built: Built) -> None:
    """Free the engine and all groups; DDP's reducer must be freed before its group."""
    groups = [
        session.exchange.release_group() if session.exchange else None,
        session.saver.release_group() if session.saver else None,
    ]
    session.exchange = session.saver = session.reader = None
    built.engine = None  # type: ignore[assignment]
    gc.collect()
    built.world.drop_groups(groups)


def _place(session: Session, built: Built, found: Generation, best: str, state: dict[str, Tensor]) -> None:
    """Load the state of member `best` everywhere, and rebuild what depends on ranks. Collective.

    Args:
        state: what the previous engine, the task and the caller hold, in place; the weights come first, since a new
            engine would copy rank 0's.
    """
    world, task, optimizer = built.world, built.task, built.groups.optimizer
    source, furthest = found.members.index(best), found.reports[best]
    if any(report[:2] != furthest[:2] for report in found.reports.values()):
        state = _handed_out(state, source, world)
        if optimizer is not None and found.reports[found.members[world.rank]][:2] != furthest[:2]:
            optimizer.state.clear()  # it may hold states of other parameters
    theirs = world.gather(built.state.to_json() if world.rank == source else None)[source]  # collective
    built.state = RunState.from_json(theirs)
    recall(task, built.state)  # a new process has not detected it
    _stand(session, built, furthest)
    shares = shares_for(name_of(built.config.engine, world), world.size, built.config.shares)
    config = dataclasses.replace(built.config, shares=shares)
    built.batches, built.balancer = stream_of(config, task, built.training, built.run_plan, world, built.state)
    built.evaluation = batches_of(config, task, built.sets, world)  # collective
    built.loading = [built.loading[0], built.batches.loader, *(each.loader for each in built.evaluation.values())]
    if built.state.trained:  # a new process made its optimizer for another set, so all make theirs again
        begin_as_made(built.model, built.state)
        built.groups.renewed(optimizer_of(config, task, built.model))
    parts = (config, task, built.model, world, built.groups, built.batches)
    built.engine = engine_of(*parts, notify(world), built.state)
    built.load_state_dict(state)  # most of it is in place already
    train_now(built.model, built.state)
    optimizer = built.groups.optimizer
    if furthest.steps == 0 and optimizer is not None:
        optimizer.state.clear()  # made to be loaded into: a first step makes its own


def _handed_out(state: dict[str, Tensor], source: int, world: World) -> dict[str, Tensor]:
    """Broadcast one rank's state, into tensors that exist already if possible. Collective.

    Tensors are sent as bytes, many together: most are small, each broadcast has its own delay, and gloo does not
    support every dtype.
    """
    mine = [[name, list(tensor.shape), str(tensor.dtype)[6:]] for name, tensor in state.items()]
    theirs = world.gather(mine if world.rank == source else None)[source]  # collective
    found, together, size = dict[str, Tensor](), list[Tensor](), 0
    for name, shape, dtype in theirs:
        held = state.get(name)
        held = torch.empty(shape, dtype=getattr(torch, dtype)) if held is None else held
        if together and size + held.nbytes > _TOGETHER:
            _send(together, source, world)
            together, size = [], 0
        together.append(held)
        size += held.nbytes
        found[name] = held
    if together:
        _send(together, source, world)
    return found


@torch.no_grad()
def _send(tensors: list[Tensor], source: int, world: World) -> None:
    """Broadcast one rank's values. Collective."""
    if world.rank == source:
        flat = torch.cat([tensor.resolve_conj().reshape(-1).view(torch.uint8) for tensor in tensors])
    else:
        flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    dist.broadcast(flat, src=source)  # collective
    if world.rank != source:
        parts = flat.split_with_sizes([tensor.nbytes for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # the clone is aligned for its dtype


def _stand(session: Session, built: Built, best: LeaveReport) -> None:
    """Set session and state to the step at which the run goes on.

    They are as a checkpoint of that step would have them.
    """
    config, taken, state = built.config, best.steps, built.state
    state.place = built.run_plan.place(taken)
    # The losses that the lost rank kept for the next record are unknown.
    state.running = RunningSums(missed=taken % config.log_freq)
    whole = built.run_plan.step_plan.steps
    due = taken > 0 and (taken == whole or bool(config.eval_freq and taken % config.eval_freq == 0))
    state.evaluation_due = due and bool(built.evaluation) and best.evaluated != taken
    session.global_step, session.evaluated, session.present = taken, best.evaluated, None
    last = taken if taken == built.last else taken - taken % config.ckpt_freq if config.ckpt_freq else 0
    kept = checkpoint.list_steps(built.folder.path) if built.world.is_main else []
    session.save_due = bool(last) and max(built.world.gather(kept)[0], default=0) < last  # collective


def _take_over(session: Session, built: Built, rank: int, was_main: bool) -> None:
    """Open this process's log, and on a new rank 0 the folder and the sinks. Collective."""
    if built.world.rank != rank:
        open_log(built.folder.path, built.world.rank)

    def lead() -> None:
        if built.world.is_main and not was_main:
            claimed(built)
            session.sinks = open_sinks(built)

    on_all_ranks(built.world, lead)  # collective


def _say(found: Generation, reason: str, built: Built, seconds: float) -> None:
    for line in found.lost:
        _LOG.warning("%s; the others go on", line)
    if not found.lost and not found.fresh:
        _LOG.warning("the ranks lost each other though all live, and go on: %s", reason)
    joined = f", {len(found.fresh)} of them new" if found.fresh else ""
    who = "1 rank goes" if len(found.members) == 1 else f"{len(found.members)} ranks go"
    _LOG.info("%s on from step %d%s (after %.2f s)", who, built.start, joined, seconds)
