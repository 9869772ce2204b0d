"""Run one combination on one rank with the real parts and loop, and record it.

    run_rank(world, say, specs)       in each of N processes; a trace of each run goes to disk

The run is resumed on the way. The loop itself is not copied here. A planted fault wraps a part before the recorder
does.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep import checkpoint
from lockstep.clock import make_clock
from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config
from lockstep.data.batches import StepLoader
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.registry import options_for
from lockstep.errors import LockstepError
from lockstep.files import write_whole
from lockstep.loop import StepControl, seeder, steps
from lockstep.passes import loss_of
from lockstep.records import StepRecord
from lockstep.task import Task, as_task, has_step_loss, items_of_a_sample
from lockstep.training.evaluation import evaluate_all
from lockstep.training.start.build import BuildRequest, build_together
from lockstep.training.start.named_task import make_task
from lockstep.training.start.replicas import form_replicas
from lockstep.training.start.sharing import shares_for
from lockstep.training.state.parts import RunParts
from lockstep.training.state.plan import FIXED
from lockstep.training.trial.compilation import choose_kernels
from lockstep.training.trial.trial_state import marks_of, preserve_state, unsaved_marks
from lockstep.verify.operations import OperationLog
from lockstep.verify.recorder import StepRecorder
from lockstep.verify.reference import ReferenceComparer, ReferenceWriter, TensorStore
from lockstep.verify.request import FaultContext, Seed, TrainingSpec
from lockstep.verify.wrappers import Disturbed, PreparedTask, reversed_steps

__all__ = ["log_operations", "read_trace", "run_rank"]


def run_rank(world: World, say: Callable[..., None], specs: Sequence[TrainingSpec]) -> None:
    """Run the specs in order, and write this rank's trace of each."""
    (specs[0].folder / "traces").mkdir(exist_ok=True)
    # A world of its own for each degree, since the ranks of a world are divided into replicas once.
    worlds: dict[Parallel, World] = {}
    for spec in specs:
        own = worlds.setdefault(spec.combination.parallel, dataclasses.replace(world))
        with _eager_random_numbers(spec):
            trace = _trace(own, say, spec)
        path = _path(spec.folder, spec.key, world.rank)
        # A trace is written completely or not at all: its existence shows that the run ended on this rank.
        write_whole(path, json.dumps(trace), lasting=False)
        say()


def read_trace(folder: Path, key: str, ranks: int) -> list[dict[str, Any]] | None:
    """Read the traces of all ranks of a run; None unless it ended on each."""
    paths = [_path(folder, key, rank) for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return None
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def log_operations(world: World, say: Callable[..., None], spec: TrainingSpec, step: int, name: str) -> None:
    """Write every operation of `step`, in order, to `folder/name.json`.

    It locates the cause if a task is nondeterministic.
    """
    built = _build(spec, world, FaultContext(world, spec.request.config, 0, 0), name)
    step_loader = built.batches.from_step(0)
    training = _training(built, built.engine, step_loader, step_loader, _seed(built))
    for _ in range(step):
        next(training)
        say()
    with OperationLog(built.model) as log:
        next(training)
    (spec.folder / f"{name}.json").write_text(json.dumps(log.lines), encoding="utf-8")


def _path(folder: Path, key: str, rank: int) -> Path:
    return folder / "traces" / f"{key}-{rank}.json"


@contextlib.contextmanager
def _eager_random_numbers(spec: TrainingSpec) -> Iterator[None]:
    """Make compiled code draw eager random numbers, if compared with an eager run."""
    if not spec.combination.compiled or spec.reference != "reference":
        yield
        return
    # Inductor's own random numbers differ from eager ones. The private setting (the same since torch 2.11) makes it
    # draw those.
    with importlib.import_module("torch._inductor.config").patch(fallback_random=True):
        yield
    # Runs compared with compiled ones use Inductor's own random numbers: forget this compilation.
    torch.compiler.reset()


def _trace(world: World, say: Callable[..., None], spec: TrainingSpec) -> dict[str, Any]:
    """Run one spec and return this rank's trace."""
    request = spec.request
    fault = spec.fault
    ends = [spec.resume, request.steps] if spec.resume else [request.steps]
    form_replicas(_config(spec, world, spec.key), world)  # collective
    trace: dict[str, Any] = {"rank": world.rank, "steps": [], "resumed": ends[:-1]}
    trace["coordinate"] = world.replica.rank
    before: dict[str, Any] | None = None
    for begin, end in zip([0, *ends], ends, strict=False):
        context = FaultContext(world, request.config, request.fault_step, begin)
        built = _build(spec, world, context, spec.key)
        if built.setup.source:
            tensors = built.tensors()
            # All ranks read the checkpoint that they wrote together.
            checkpoint.load(built.setup.source, tensors, world, leave=built.is_elsewhere)  # collective
            built.load_state_dict(tensors)
            del tensors
        context.model = built.model
        context.step_loader = built.batches.from_step(built.start)
        recorder = StepRecorder(
            fault.inside(built.engine, context),
            built.model,
            _reference(spec),
            world.device,
            before,
            tracks_dtypes=not spec.reference and not built.config.compile,
            one_update=built.task.own_steps is None,
            # They name the first layer that computes something else.
            tracks_outputs=max(request.tensor, default=1) > 1 and not built.config.compile,
        )
        with contextlib.closing(context.step_loader):
            _run_steps(built, recorder, spec, context, end, say)
        before = recorder.ended
        trace["steps"] += recorder.steps
        trace.setdefault("coarsest", recorder.dtypes.name)
        # The model may have chosen the number of micro-batches.
        trace["micro_batches"] = built.config.micro_batches
        if end < request.steps:
            position = built.place(end)
            engine = spec.combination.engine
            # All ranks, and only for a stream: where its readers are.
            stream = built.batches.stream_state(end, world)  # collective
            state = dataclasses.replace(
                built.state, place=position, plan=built.setup.plan, world_size=world.size, stream=stream
            )
            # All ranks write their shards.
            checkpoint.save(built.setup.folder.path, end, built.tensors(), state.to_json(), world, engine=engine)
        elif built.evaluation:
            sets = {}
            for name, batches in built.evaluation.items():
                sets[name] = fault.evaluation(batches, context)
            result = evaluate_all(built.engine, built.task, sets, world, step=end, seed=built.config.seed)
            trace["evaluation"] = {"step": end, "loss": result.loss, "items": result.items, "metrics": result.metrics}
        if end == request.steps and world.size == 1 and not built.config.compile:
            trace["kept"] = _find_kept(built)
        del built, context, recorder
        # Free the engine before the next one is built, or before the groups are left.
        gc.collect()
    return trace


def _find_kept(built: RunParts) -> list[str]:
    """Return the names of values that `loss` keeps from call to call outside checkpoints.

    Returns [] if the loss cannot be tried.
    """
    task = built.task
    device = built.world.device
    if has_step_loss(task) or task.own_steps is not None:
        return []

    def call() -> None:
        seeder(0, "check", device)(0, 0)
        loss_of(task)(built.engine.model, batch)

    names = list[str]()
    # The trial may fail for any reason; it only adds a note to the table.
    with contextlib.suppress(Exception), preserve_state(built.model, task, device, training=True):
        ((batch, _),) = built.batches.parts(0, [(0, built.batches.own_samples(0))])
        names = unsaved_marks(marks_of(built.model, task, call), built.model, task)
    return names


def _run_steps(
    built: RunParts,
    recorder: StepRecorder,
    spec: TrainingSpec,
    context: FaultContext,
    end: int,
    say: Callable[..., None],
) -> None:
    """Run and record the steps up to `end`."""
    assert context.step_loader is not None
    seed = recorder.seeding(spec.fault.seed(_seed(built), context))
    engine = spec.fault.outside(recorder.engine, context)
    if spec.disturbed:
        engine = Disturbed(engine)
    batches: Any = reversed_steps(context.step_loader) if spec.disturbed else context.step_loader
    with recorder.hook():
        for record in _training(built, engine, context.step_loader, recorder.watch(batches), seed):
            recorder.close(record)
            say()
            if record.step + 1 == end:
                break
    spec.fault.close()


def _training(
    built: RunParts, engine: Engine, step_loader: StepLoader, watched: Any, seed: Seed
) -> Iterator[StepRecord]:
    """Start the real loop over `watched`, as `training/` does."""
    step_plan = built.run_plan.step_plan
    known = built.batches.known_items(items_of_a_sample(built.task))
    exchange = StepExchange(built.world, step_loader.items, known)
    exchange.take_turns(step_loader.turns)
    exchange.limit_reading(step_loader.readable_before)
    kernels = choose_kernels(built.config.compile, step_plan)
    clock = make_clock(built.world.device)
    control = StepControl(
        built.lr_factor,
        seed,
        clock,
        momentum=built.momentum,
        kernels=kernels,
        world=built.world,
        micro_batches=step_plan.micro_batches,
        sharing=built.batches.sharing,
        after_update=live.drive_to if (live := built.task.live_rates) else lambda done: None,
        pipeline=built.pipeline,
    )
    return steps(engine, built.task, watched, exchange, control)


def _seed(built: RunParts) -> Seed:
    return seeder(built.config.seed, "micro", built.world.device)


def _build(spec: TrainingSpec, world: World, context: FaultContext, name: str) -> RunParts:
    """Build the parts of the run in a folder away from the user's."""
    config = _config(spec, world, name)
    # All ranks: an error in the user's code on one of them ends all.
    task = on_all_ranks(world, lambda: _task(spec, config))
    # The same cut in every run, so that the random draws are the same too.
    try:
        with world.together():
            return build_together(config, spec.fault.task(task, context), world, None, BuildRequest(cut=FIXED))
    except LockstepError as error:
        # The loss works in a single process, so its plan is wrong and not the request.
        if config.parallel.size > 1 and isinstance(error.__cause__, RuntimeError | IndexError):
            raise LockstepError(f"where the model is divided, {error}") from error
        raise


def _config(spec: TrainingSpec, world: World, name: str) -> Config:
    """Return the configuration of a spec's run."""
    base = spec.request.config
    engine = spec.combination.engine
    parallel = spec.combination.parallel
    if parallel.size > 1:
        parallel = base.parallel.with_degrees(parallel.degrees)
    return dataclasses.replace(
        base,
        engine=engine,
        compile=spec.combination.compiled,
        # Options of other engines would be refused.
        engine_options=options_for(engine, base.engine_options),
        shares=shares_for(engine, world.data_parallel.size, base.shares),
        # This run is compared in full anyway.
        guards=dataclasses.replace(base.guards, audit=0.0),
        experiment_name=name,
        save_dir=str(spec.folder / "runs"),
        # Undivided runs must not have the options of divided ones.
        parallel=parallel,
    )


def _task(spec: TrainingSpec, config: Config) -> Task:
    if spec.request.task is None:
        task = make_task(config, lambda _: None)
    else:
        task = spec.request.task
    # Two steps and one sample: with two ranks or more, one rank has a slot that must not count.
    return PreparedTask(as_task(task), wide=config.precision == "float64", samples=2 * config.batch_size + 1)


def _reference(spec: TrainingSpec) -> ReferenceWriter | ReferenceComparer:
    if not spec.reference:
        return ReferenceWriter(TensorStore(spec.folder / spec.key), spec.request.steps)
    trace = read_trace(spec.folder, spec.reference, 1)
    assert trace is not None, "the reference runs first"
    store = TensorStore(spec.folder / spec.reference)
    config = spec.request.config
    return ReferenceComparer(store, trace[0]["steps"], spec.tolerance, config)
