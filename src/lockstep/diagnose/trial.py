"""One combination, as one rank runs it: the product's own parts and loop, watched, with a resume on the way.

    run(world, say, jobs)           in each of N processes; a trace of each job goes to disk

Nothing of the loop is repeated here. A fault, where one is planted, wraps a part before the recorder does.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep import checkpoint
from lockstep.clock import make_clock
from lockstep.config import Config, EngineOptions
from lockstep.diagnose.combination import Combination
from lockstep.diagnose.fault import Fault, Site
from lockstep.diagnose.keepers import Comparing, Writing
from lockstep.diagnose.operations import Journal
from lockstep.diagnose.recorder import Keeper, Recorder
from lockstep.diagnose.shelf import Shelf
from lockstep.diagnose.tasks import Prepared
from lockstep.diagnose.tolerance import EXACT, Allowance
from lockstep.engines import ENGINES
from lockstep.evaluate import evaluate
from lockstep.heartbeat import Heartbeat
from lockstep.loop import Plan, seeder, steps
from lockstep.parts import Parts, assemble
from lockstep.task import adapted, load_task
from lockstep.tasks.named import named_task
from lockstep.world import World, together

__all__ = ["Job", "journal", "read_trace", "run"]


@dataclass(frozen=True)
class Job:
    """What one combination is to do.

    Attributes:
        key: names its traces; the reference's is "reference".
        config: of the run that is proved; the engine is the combination's.
        task: an object, or None for the one that `named` or the config names.
        named: FILE.py:Class, or "".
        steps: how many.
        resume: the step before which the run is saved, ended and begun again; 0: never.
        folder: where traces, checkpoints and the reference's tensors lie.
        reference: the key of the trace that is compared with; "" writes one.
        allowance: what may differ from it.
        fault: what is planted, if anything.
        fault_step: the step at which.
    """

    key: str
    combination: Combination
    config: Config
    task: Any
    named: str
    steps: int
    resume: int
    folder: Path
    reference: str
    allowance: Allowance = EXACT
    fault: Fault = dataclasses.field(default_factory=Fault)
    fault_step: int = 0


def run(world: World, say: Callable[..., None], jobs: Sequence[Job]) -> None:
    """Runs the jobs one after another and writes this rank's trace of each."""
    (jobs[0].folder / "traces").mkdir(exist_ok=True)
    for job in jobs:
        with _eager_numbers(job):
            trace = _trial(world, say, job)
        path = _path(job.folder, job.key, world.rank)
        path.with_suffix(".part").write_text(json.dumps(trace), encoding="utf-8")
        path.with_suffix(".part").replace(path)  # a trace is there whole, or the trial failed
        say()


def read_trace(folder: Path, key: str, ranks: int) -> list[dict[str, Any]] | None:
    """The traces of all ranks of a trial; None unless it ended on every one."""
    paths = [_path(folder, key, rank) for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return None
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def journal(world: World, say: Callable[..., None], job: Job, step: int, name: str) -> None:
    """Writes every operation of `step`, in order, to `folder/name.json`: for a task that is not deterministic."""
    parts = _assembled(job, world, Site(world, job.config, 0, 0), name)
    feed = parts.batches.from_step(0)
    training = _training(parts, parts.engine, feed, lambda seed: seed, feed)
    for _ in range(step):
        next(training)
        say()
    with Journal(parts.model) as noted:
        next(training)
    (job.folder / f"{name}.json").write_text(json.dumps(noted.lines), encoding="utf-8")


def _path(folder: Path, key: str, rank: int) -> Path:
    return folder / "traces" / f"{key}-{rank}.json"


@contextlib.contextmanager
def _eager_numbers(job: Job) -> Iterator[None]:
    """Compiled code draws other random numbers than eager; where the two are compared, it is to draw eager's."""
    if not job.combination.compiled or job.reference != "reference":
        yield
        return
    with importlib.import_module("torch._inductor.config").patch(fallback_random=True):
        yield
    torch.compiler.reset()  # what is compared with compiled runs is compiled as it is


def _trial(world: World, say: Callable[..., None], job: Job) -> dict[str, Any]:
    """The trace of this rank."""
    ends = [job.resume, job.steps] if 0 < job.resume < job.steps else [job.steps]
    trace: dict[str, Any] = {"rank": world.rank, "steps": [], "resumed": ends[:-1]}
    ended: dict[str, Any] | None = None
    for begin, end in zip([0, *ends], ends, strict=False):
        site = Site(world, job.config, job.fault_step, begin)
        parts = _assembled(job, world, site, job.key)
        if parts.source:
            state = parts.engine.state()
            checkpoint.load(parts.source, state, world)  # collective
            parts.engine.restore(state)
            del state
        ended = _span(parts, job, site, trace, ended, end, say)
        del parts, site
        gc.collect()  # engines, before the next is made or the groups are left
    return trace


def _span(
    parts: Parts, job: Job, site: Site, trace: dict[str, Any], ended: dict[str, Any] | None, end: int, say: Any
) -> dict[str, Any] | None:
    """The steps up to `end`, and what follows them: a checkpoint, or the evaluation. Returns the last digests."""
    fault, config, world = job.fault, parts.config, parts.world
    site.model = parts.model
    recorder = Recorder(fault.inside(parts.engine, site), parts.model, _keeper(job), world.device, ended)
    recorder.survey = not job.reference and not config.compile
    site.feed = feed = parts.batches.from_step(parts.start)
    outer = fault.outside(recorder.engine, site)
    reseed = lambda seed: recorder.seeding(fault.seed(seed, site))  # noqa: E731
    with recorder.hooked():
        for record in _training(parts, outer, feed, reseed, recorder.watch(feed)):
            recorder.close(record)
            say()
            if record.step + 1 == end:
                break
    fault.close()
    trace["steps"] += recorder.steps
    trace.setdefault("coarsest", recorder.coarsest.name)
    if end < job.steps:
        state = parts.state | parts.horizon.place(end) | {"plan": parts.plan, "world_size": world.size}
        checkpoint.save(parts.folder.path, end, parts.engine.state(), state, world, engine=job.combination.engine)
    elif parts.evaluation is not None:
        batches = fault.evaluation(parts.evaluation, site)
        found = evaluate(parts.engine, parts.task, batches, world, step=end, seed=config.seed)
        trace["evaluation"] = {"step": end, "loss": found.loss, "items": found.items, "metrics": found.metrics}
    return recorder.ended


def _training(parts: Parts, engine: Any, feed: Any, seeding: Any, watched: Any) -> Any:
    """The product's loop over `watched`, as run.py starts it."""
    config, world, cut = parts.config, parts.world, parts.horizon.cut
    each = getattr(parts.task, "items_per_sample", None)
    beat = Heartbeat(world, feed.items, (lambda step: each * cut.samples(step)) if each else None)
    seed = seeding(seeder(config.seed, "micro", world.device))
    return steps(engine, parts.task, watched, beat, Plan(parts.rate, seed, make_clock(world.device)))


def _assembled(job: Job, world: World, site: Site, name: str) -> Parts:
    """The parts of the run in a folder of its own, so that nothing of the user's is read or written."""
    config = dataclasses.replace(
        job.config,
        engine=job.combination.engine,
        compile=job.combination.compiled,
        engine_options=_options(job.combination.engine, job.config.engine_options),
        experiment_name=name,
        save_dir=str(job.folder / "runs"),
    )
    task = together(world, lambda: _task(job, config, world))
    return assemble(config, job.fault.task(task, site), world)


def _task(job: Job, config: Config, world: World) -> Any:
    task = job.task if job.task is not None else load_task(job.named) if job.named else None
    quiet = lambda line: None  # noqa: E731
    task = named_task(config, quiet) if task is None else adapted(task)
    # Two steps and one micro-batch: at two ranks and more one of them has a slot that must not count.
    return Prepared(task, config.precision == "float64", 2 * config.batch_size + config.micro_batch_size)


def _options(engine: str, given: EngineOptions) -> EngineOptions:
    """The given options that this engine has; the others are for other engines."""
    module, name = ENGINES[engine]
    kind = getattr(importlib.import_module(module), name)
    return EngineOptions(**{option: getattr(given, option) for option in kind.options})


def _keeper(job: Job) -> Keeper:
    if not job.reference:
        return Writing(Shelf(job.folder / job.key), job.steps)
    trace = read_trace(job.folder, job.reference, 1)
    assert trace is not None, "the reference runs first"
    return Comparing(Shelf(job.folder / job.reference), trace[0]["steps"], job.allowance, job.config)
