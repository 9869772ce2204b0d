"""Recover from a lost rank with the state in memory, and let its replacement join.

    member = register_member(world)         # None: a lost rank ends the run
    ...                                     # a collective fails, and `is_rank_loss(error)`
    regroup(status, built, member)         # the survivors have new groups and one state

The update is the last part of a step: when a rank is lost, each of the others has either applied it or not. The rank
with the highest step broadcasts its state. Where the states are split over the ranks of a replica, this holds for each
part: it comes from a rank with the same part in another replica, and the step is the highest that every part has. The
micro-batches of the next step are divided among the present ranks, so none is lost and none is computed twice.
"""

import dataclasses
import gc
import hashlib
import json
import logging
import time
import traceback

from torch import Tensor

from lockstep import checkpoint
from lockstep.config import cli
from lockstep.config.engine_options import ENGINES
from lockstep.config.schema import Config
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.exchange import REGROUP, StepExchange
from lockstep.distributed.membership import Generation, LeaveReport, Member, translate_errors
from lockstep.distributed.world import World
from lockstep.engines.registry import engine_class, explain_no_replica, name_of, undo_step
from lockstep.errors import PeerError
from lockstep.guards.startup import program
from lockstep.logging.log import open_log
from lockstep.run_state import RunningSums, RunState
from lockstep.training.evaluation import build_evaluation_batches
from lockstep.training.start.build import divide_joiner
from lockstep.training.start.build_engine import build_engine, build_optimizer
from lockstep.training.start.load import broadcast_state, load_broadcast
from lockstep.training.start.open_run import lock_folder, open_sinks
from lockstep.training.start.replicas import form_replicas
from lockstep.training.start.shared_folder import find_folders
from lockstep.training.start.sharing import shares_for
from lockstep.training.start.training_batches import build_batches
from lockstep.training.state.outputs import RunOutputs, open_uploads
from lockstep.training.state.parts import RunParts, notify
from lockstep.training.state.status import Rebuild, RunRanks, RunStatus
from lockstep.training.state.trained_set import restore_initial_set, store_trained_set
from lockstep.training.trial.task_check import restore_findings

__all__ = [
    "explain_no_recovery",
    "is_rank_loss",
    "leave_to_build",
    "ranks_per_replica",
    "record_loss",
    "register_member",
    "regroup",
    "regroup_to_build",
    "run_digest",
]


_LOG = logging.getLogger("lockstep")
# Not empty once this process has started a run.
_STARTED: list[bool] = []
# How long to wait for the survivors: multiples of `--timeout`, plus seconds.
_MAX_TIMEOUTS = 2
_SLACK = 30.0
# Share of `--timeout`: a rank that was blocked for so long has waited for the others.
_BLOCKED_SHARE = 0.9
# Reported in place of a step.
_REBUILDING = -1
_NO_STATE = -2


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
    if obstacle := explain_no_replica(name, built.config.engine_options, built.groups.optimizer):
        return obstacle
    if built.world.device.type == "cuda":
        return "a collective on CUDA devices cannot be aborted yet when a rank fails"
    if built.task.state_dict():
        return "the task has tensors of its own, which its loss may have changed in the step that failed"
    if built.task.hooks or built.task.own_steps:
        return "the task's hooks have state of their own, which a new process lacks"
    return ""


def ranks_per_replica(config: Config, world: World) -> int:
    """Return the number of ranks that together have one copy of the states."""
    engine = engine_class(name_of(config.engine, world))
    return config.parallel.size * engine.replica_size(config.engine_options, world.data_parallel)


def regroup(status: RunStatus, built: RunParts, member: Member) -> None:
    """Form new groups with the survivors, and bring all to one state. Changes `built`.

    Raises:
        Rebuild: another member rebuilds the run, so this process must too.
        PeerError: the run cannot continue.
    """
    start = time.monotonic()
    before = (built.world.rank, built.world.is_main) if not member.is_new else (-1, False)
    ranks = status.ranks
    exchange = built.exchange
    if member.is_new:
        step = _NO_STATE
    elif exchange:
        step = exchange.engine_steps
    else:
        step = built.start
    if exchange and exchange.stop_request != REGROUP:
        ranks.pending_stop.stop(exchange.stop_request)
    # `_free_engine` must drop the last reference to the exchange.
    del exchange
    # The step in progress is lost: drop its gradients, and keep the state before it.
    undo_step(built.engine)
    store_trained_set(built.engine, built.state)
    for parameter in built.model.parameters():
        parameter.grad = None
    state = built.tensors()
    divides = member.is_new and built.config.parallel.size > 1
    if divides or (member.is_new and ENGINES[name_of(built.config.engine, built.world)].places_model):
        # The parameters that these tensors belong to will be replaced.
        state = {}
        built.groups.optimizer = None
    # The launcher and the other members need to know which state this rank has.
    report = _leave_report(ranks, built.world, step)
    lost: list[str] = []
    # Another rank may fail during the recovery; then it starts again.
    while True:
        _free_engine(status, built)
        generation = member.regroup(report, _MAX_TIMEOUTS * built.world.timeout + _SLACK)
        lost += generation.lost
        ranks.lost += generation.lost
        ranks.initial_size = ranks.initial_size or built.world.size
        built.state.losses = ranks.losses = (built.state.losses or 0) + len(generation.lost)
        size = ranks_per_replica(built.config, built.world)
        sources = _sources(generation, size)
        try:
            built.world = _regroup_world(ranks, built.world, member, generation)
            if not sources:
                raise Rebuild(_explain_rebuild(generation))
            with translate_errors():
                _form_replicas(status, built, divides=divides)  # collective
                # Where another rank fails from here on, this process has its part already.
                divides = False
                _restore(status, built, generation, sources, state)
                _take_over(status.outputs, built, *before)
            break
        except PeerError as error:
            if not is_rank_loss(error):
                raise
            record_loss(ranks, error)
            source = sources[generation.members.index(member.name) % size] if sources else member.name
            if report[:2] != generation.reports[source][:2]:
                # This rank's state is partly overwritten, so no rank may continue from it.
                report = report._replace(steps=_NO_STATE)
    ranks.is_main = built.world.is_main
    if built.world.is_main:
        _log_regroup(generation._replace(lost=lost), ranks.last_error, built.start, time.monotonic() - start)


def _form_replicas(status: RunStatus, built: RunParts, *, divides: bool) -> None:
    """Form the replicas of a new world, whose ranks keep their parts of the model. Collective.

    Args:
        divides: this process joins with a complete model, and keeps its part of it now.
    """
    form_replicas(built.config, built.world)  # collective
    if divides:
        divide_joiner(built, built.world)
        status.hold(built)
    if built.pipeline:
        built.pipeline.stages = built.world.part("pp")
    if built.config.parallel.size > 1:
        # A model may take longer to make and divide than the next groups have to form.
        built.world.barrier()  # collective


def _regroup_world(ranks: RunRanks, world: World, member: Member, generation: Generation) -> World:
    """Return the process groups of a generation. Collective."""
    rank = generation.members.index(member.name)
    tries = ranks.regroup_tries
    ranks.regroup_tries += 1
    ranks.world = world.regroup(rank, len(generation.members), generation.number, tries)
    return ranks.world


def regroup_to_build(ranks: RunRanks, member: Member) -> None:
    """Form new groups for a process that rebuilds the run. Changes `ranks.world`.

    Raises:
        PeerError: the run cannot continue.
    """
    world = ranks.world
    assert world is not None
    while True:
        gc.collect()
        world.drop_groups([])
        generation = member.regroup(_leave_report(ranks, world, _REBUILDING), _MAX_TIMEOUTS * world.timeout + _SLACK)
        try:
            ranks.lost += generation.lost
            ranks.losses += len(generation.lost)
            ranks.is_main = _regroup_world(ranks, world, member, generation).is_main
            return
        except PeerError as error:
            record_loss(ranks, error)


def leave_to_build(status: RunStatus, built: RunParts, member: Member, reason: PeerError) -> None:
    """Leave the groups, and form new ones to rebuild the run.

    The other ranks notice it, and do the same.

    Args:
        reason: why this rank leaves.

    Raises:
        PeerError: the run cannot continue.
    """
    record_loss(status.ranks, reason, built.exchange)
    _free_engine(status, built)
    regroup_to_build(status.ranks, member)


def is_rank_loss(error: PeerError) -> bool:
    """Whether the error means that another rank is lost, and nothing else."""
    return not error.relayed and not isinstance(error, Rebuild)


def record_loss(ranks: RunRanks, loss: PeerError, exchange: StepExchange | None = None) -> None:
    """Record a lost rank, and free the engines and groups in the error's frames.

    Args:
        exchange: of the run's steps; None: there is none.
    """
    ranks.last_error = str(loss)
    if exchange:
        blocked = time.monotonic() - exchange.progress.since
    else:
        blocked = 0.0
    ranks.timed_out = ranks.world is not None and blocked > _BLOCKED_SHARE * ranks.world.timeout
    _LOG.warning("left the other ranks: %s", ranks.last_error, extra={"only_file": True})
    error: BaseException | None = loss
    visited = set[int]()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _leave_report(ranks: RunRanks, world: World, step: int) -> LeaveReport:
    return LeaveReport(step, ranks.evaluated_step, ranks.digest, ranks.timed_out, world.timeout)


def _sources(generation: Generation, size: int = 1) -> list[str]:
    """Return, for each part of the states, the member that has it for all.

    [] if the members have no state in common, or one of them rebuilds the run.

    Args:
        size: parts of the states; the rank with number r has part r % `size`.
    """
    reports = generation.reports
    members = generation.members
    if any(report.steps == _REBUILDING for report in reports.values()):
        return []
    parts = [members[part::size] for part in range(size)]
    common = set[int].intersection(*({reports[name].steps for name in part} for part in parts))
    # The latest step that every part of the states has on some member.
    step = max(common, default=_NO_STATE)
    if step < 0:
        return []
    holders = []
    for part in parts:
        holders.append([name for name in part if reports[name].steps == step])
    return [max(part, key=lambda name: (reports[name].evaluated, -members.index(name))) for part in holders]


def _explain_rebuild(generation: Generation) -> str:
    steps = {report.steps for report in generation.reports.values()}
    if _REBUILDING in steps or steps == {_NO_STATE}:
        return "another rank goes back to the newest checkpoint, so this one does too"
    which = " and ".join(map(str, sorted(steps - {_NO_STATE})))
    return f"the ranks that are left do not have all parts of the states of one step ({which})"


def run_digest(built: RunParts) -> str:
    """Hash what must be equal on processes that train together."""
    config = cli.flatten(built.config)
    # The name may contain the time; a new process adopts that of the others.
    del config["experiment_name"]
    parts = [built.setup.plan, config, dict(built.task.sources), program(built.task)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _free_engine(status: RunStatus, built: RunParts) -> None:
    """Free the engine and all groups: DDP's reducer must go before its group."""
    groups = [
        built.exchange.release_group() if built.exchange else None,
        built.saver.release_group() if built.saver else None,
        *engine_class(name_of(built.config.engine, built.world)).leave_groups(built.model),
    ]
    built.exchange = built.saver = status.reader = None
    # No other code sees the gap, so the field's type has no None.
    built.engine = None  # type: ignore[assignment]
    gc.collect()
    built.world.drop_groups(groups)


def _restore(
    status: RunStatus, built: RunParts, generation: Generation, sources: list[str], state: dict[str, Tensor]
) -> None:
    """Load the state of the members `sources` everywhere, and rebuild what depends on ranks. Collective.

    Args:
        sources: of each part of the states.
        state: tensors of the previous engine, the task and the caller. They get the new values before an engine is
            made, which would copy rank 0's weights.
    """
    world = built.world
    task = built.task
    optimizer = built.groups.optimizer
    reports = generation.reports
    # Whether each member lacks the state from which all continue.
    takes = []
    for rank, name in enumerate(generation.members):
        takes.append(reports[name][:2] != reports[sources[rank % len(sources)]][:2])
    if any(takes):
        state = broadcast_state(state, [generation.members.index(name) for name in sources], world)
        if optimizer is not None and takes[world.rank]:
            # It may hold states of other parameters.
            optimizer.state.clear()
    # Among equal states prefer one whose step was evaluated.
    best = max(sources, key=lambda name: reports[name].evaluated)
    source = generation.members.index(best)
    newest = reports[best]
    if built.groups.optimizer is not None:
        built.store_groups()
    # Every rank continues with the run's state of the survivor that evaluated last.
    values = world.gather(built.state.to_json() if world.rank == source else None)[source]
    built.state = RunState.from_json(values)
    built.state.stream = built.batches.stream_state(newest.steps, world)  # collective for a stream
    # A new process has not tried the task.
    restore_findings(task, built.state)
    _set_position(status, built, newest)
    shares = shares_for(name_of(built.config.engine, world), world.data_parallel.size, built.config.shares)
    config = dataclasses.replace(built.config, shares=shares)
    built.batches, built.balancer = build_batches(
        config, task, built.setup.training, built.run_plan, world, built.state
    )
    built.evaluation = build_evaluation_batches(config, task, built.setup.evaluation_sets, world)  # collective
    # A new process made its optimizer for another set of parameters, so every rank makes a new one.
    if built.state.trained:
        restore_initial_set(built.model, built.state)
    if built.state.trained and optimizer is not None:
        built.groups.replace_optimizer(build_optimizer(config, task, built.model, built.pipeline))
    parts = (config, task, built.model, world, built.groups, built.batches)
    built.engine = build_engine(*parts, notify(world), built.state, built.pipeline)
    load_broadcast(built, state, newest.steps)


def _set_position(status: RunStatus, built: RunParts, best: LeaveReport) -> None:
    """Set status and state to the step from which the run continues. Collective.

    The values are those that a checkpoint of the step would have.
    """
    config = built.config
    step = best.steps
    state = built.state
    state.place = built.run_plan.place(step)
    # The failed rank's losses since the last record are unknown.
    state.running = RunningSums(missed=step % config.log_freq)
    is_last = step == built.run_plan.step_plan.steps
    due = step > 0 and (is_last or bool(config.eval_freq and step % config.eval_freq == 0))
    state.evaluation_due = due and bool(built.evaluation) and best.evaluated != step
    status.global_step = step
    status.ranks.evaluated_step = best.evaluated
    status.current_step = None
    if step == built.last_step:
        last_due = step
    else:
        last_due = step - step % config.ckpt_freq if config.ckpt_freq else 0
    if built.world.is_main:
        checkpoints = checkpoint.list_steps(built.setup.folder.path)
    else:
        checkpoints = []
    # Rank 0 lists the checkpoints, so that all ranks decide the same.
    status.save_due = bool(last_due) and max(built.world.gather(checkpoints)[0], default=0) < last_due


def _take_over(outputs: RunOutputs, built: RunParts, rank: int, was_main: bool) -> None:
    """Open this process's log, and what the lost rank had open. Collective.

    The latter only on a new first rank of a folder.
    """
    if built.world.rank != rank:
        open_log(built.setup.folder.path, built.world.rank)
    if built.setup.remote:
        find_folders(built.setup.folder, built.world)  # collective
    takes_over = built.world.is_main and not was_main

    def lock() -> None:
        if built.world.leads_folder and not built.setup.folder.is_locked:
            lock_folder(built)

    on_all_ranks(built.world, lock)  # collective
    open_uploads(outputs, built, force=takes_over)  # collective; in place of a lost rank
    on_all_ranks(built.world, lambda: _open_sinks(outputs, built) if takes_over else None)  # collective


def _open_sinks(outputs: RunOutputs, built: RunParts) -> None:
    outputs.sinks = open_sinks(built)


def _log_regroup(generation: Generation, reason: str, step: int, seconds: float) -> None:
    for line in generation.lost:
        _LOG.warning("%s; the others continue", line)
    if not generation.lost and not generation.fresh:
        _LOG.warning("the ranks have formed their groups again and continue; none has failed: %s", reason)
    if generation.fresh:
        new = f", {len(generation.fresh)} of them new"
    else:
        new = ""
    if len(generation.members) == 1:
        ranks = "1 rank continues"
    else:
        ranks = f"{len(generation.members)} ranks continue"
    _LOG.info("%s after step %d%s (after %.2f s)", ranks, step, new, seconds)
