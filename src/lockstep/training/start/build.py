"""Build all parts of a run from its configuration and task.

    built = build(config, task, world)      # collective

`build` compares the configuration between the ranks, looks for a checkpoint, makes data and model, resolves every
"auto" from these (training/start/resolve.py), and makes the engine.
"""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lockstep import checkpoint
from lockstep.checkpoint.remote import RemoteRun
from lockstep.config.deepspeed import check_settings, read_json
from lockstep.config.engine_options import ENGINES, EngineOptions
from lockstep.config.fields import is_url
from lockstep.config.parallel_options import Parallel
from lockstep.config.schema import Config, has_fixed_cut, is_auto, lookup
from lockstep.config.task_options import OWN, kind_of
from lockstep.data.batches import Batches
from lockstep.data.groups import GroupOrder, TokenGroups, grouped_order
from lockstep.data.sampler import SizedOrder
from lockstep.data.shard_order import training_order
from lockstep.data.stream_batches import StreamData
from lockstep.distributed.membership import Member
from lockstep.distributed.world import World
from lockstep.engines.gradient_norms import GradientNorms
from lockstep.engines.memory import explain_out_of_memory
from lockstep.engines.registry import name_of
from lockstep.errors import ConfigError
from lockstep.guards.startup import check_programs, check_weights
from lockstep.logging.trackers import check
from lockstep.run_state import RunState, Selection
from lockstep.task import Task, as_task, has_step_loss, needs_graph, set_detected
from lockstep.training.evaluation import build_evaluation_batches
from lockstep.training.staged_task import stage_task
from lockstep.training.start.build_engine import build_engine, build_model
from lockstep.training.start.consistency import FirstFacts, exchange_first_facts
from lockstep.training.start.cutting import check_cuttable, cut_trial, is_additive
from lockstep.training.start.datasets import check_samples, check_stream, make_datasets, with_retries
from lockstep.training.start.defaults import (
    all_devices_fast,
    batchnorm_names,
    find_largest_micro_batch,
    is_device_default,
)
from lockstep.training.start.lora_base import base_tensor_names
from lockstep.training.start.named_task import make_task
from lockstep.training.start.replicas import cut_pipeline, divide_sequences, form_replicas
from lockstep.training.start.resolve import Facts, Resolution, StartFacts, checkpoint_facts, draft_of, resolve
from lockstep.training.start.resume import (
    accept_contents,
    check_extension,
    check_longer,
    check_plan,
    checkpoint_plan,
    plan_of,
)
from lockstep.training.start.shared_folder import check_shared_folder, find_folders
from lockstep.training.start.sharing import check_division
from lockstep.training.start.training_batches import build_batches
from lockstep.training.state.optimizer_groups import OptimizerGroups
from lockstep.training.state.parts import RunParts, RunSetup, TrainingSet, notify, task_tensors
from lockstep.training.state.plan import BY_RANKS, FIXED, RunPlan
from lockstep.training.state.run_dir import RunFolder
from lockstep.training.state.selection import check_criteria, depends_on_evaluations
from lockstep.training.state.status import BuildInputs, RunSpec
from lockstep.training.state.trained_set import check_in_optimizer, restore_initial_set
from lockstep.training.trial.compilation import try_compile
from lockstep.training.trial.evidence import HalvedSamples
from lockstep.training.trial.loss_check import check_loss, is_cut, load_places_together
from lockstep.training.trial.task_check import (
    TrialSamples,
    check_auditable,
    check_auditable_loss,
    check_task,
    load_trial_samples,
    restore_findings,
)
from lockstep.training.trial.trial import Trial
from lockstep.transforms.batchnorm import resolve_batchnorm
from lockstep.transforms.determinism import check_precision, pin
from lockstep.transforms.precision import is_double, task_in_precision

__all__ = [
    "BuildRequest",
    "build",
    "build_joiner",
    "build_together",
    "divide_joiner",
    "remote_run",
]


def build(
    config: Config,
    user_task: Any,
    world: World,
    user_objects: dict[str, Any] | None = None,
    *,
    resume: bool = True,
    joining: bool = False,
    min_steps: int = 0,
) -> RunParts:
    """Build the parts of a run. Collective.

    Args:
        user_task: a task, or an object that an adapter makes one of; None: the task that the configuration names.
        user_objects: the caller's own objects to store in checkpoints, by name.
        resume: look for a checkpoint to resume from; False: start a new run, whatever the folder holds.
        joining: this process builds alone, to join a run in progress (see training/recovery/regroup.py).
        min_steps: minimum length of the plan; whole epochs are added to reach it.

    Raises:
        UsageError: the configuration cannot be run; the same on every rank.
    """
    request = BuildRequest(resume, joining, min_steps)
    with world.together():  # collective
        return build_together(config, user_task, world, user_objects, request)


class BuildRequest(NamedTuple):
    """Request for a build, with the caller's own checks.

    Attributes:
        cut: see `StartFacts`; for a rollback, a process that joins, and `verify`.
        proves: a resume proves the loss again; a rollback in the same process need not.
        check_first: raises LockstepError before anything is made; may take any time.
        check_last: raises LockstepError before anything is written; may be collective, the same on every rank.
    """

    resume: bool = True
    joining: bool = False
    min_steps: int = 0
    cut: str = ""
    proves: bool = True
    check_first: Callable[[], None] = lambda: None
    check_last: Callable[[RunParts], None] = lambda built: None


def build_together(
    config: Config, user_task: Any, world: World, user_objects: dict[str, Any] | None, request: BuildRequest
) -> RunParts:
    """Build as `build`, in the caller's `World.together`. Collective.

    Agreements wait for the next gather, which raises an error of one rank on the others too. `agree` comes before code
    that may have collectives of its own: the user's, or an engine's.
    """
    opening = _open_folder(config, world, request)  # collective
    if opening.requested.parallel.size > 1 and not request.joining:
        # Ranks with other degrees would form other groups.
        world.agree()
        form_replicas(opening.requested, world)  # collective
    draft = _make_draft(opening, user_task, world, request)  # collective
    settings = draft.resolved.config
    task = draft.task
    model = draft.model
    state = opening.state
    # Files, model, plan and checkpoint must agree before an engine is made.
    _check_settings(draft, world)
    plan = _check_plan(draft, world)
    batches, balancer = build_batches(settings, task, draft.training, draft.resolved.run_plan, world, state)
    notes = _check_data(draft, batches, world, request)  # collective
    evaluation = build_evaluation_batches(settings, task, draft.evaluation_sets, world)
    trial_data = _load_trial_data(draft, batches, evaluation, world, request)  # collective
    # An error that one rank has with the samples ends all of them before the engine is built.
    world.agree()
    groups = OptimizerGroups(gradients=GradientNorms(opening.requested.log_gradients, settings.log_freq))
    unfrozen = restore_initial_set(model, state)
    pipeline = None if request.joining else cut_pipeline(settings, task, model, world, batches)
    if pipeline:
        task = stage_task(task, pipeline)
    engine = build_engine(settings, task, model, world, groups, batches, notify(world), state, pipeline)
    built = RunParts(
        setup=_make_setup(draft, plan, notes),
        config=settings,
        task=task,
        run_plan=draft.resolved.run_plan,
        model=model,
        groups=groups,
        user_objects={} if user_objects is None else user_objects,
        world=world,
        engine=engine,
        batches=batches,
        evaluation=evaluation,
        balancer=balancer,
        state=state,
        pipeline=pipeline,
    )
    # Most runs that do not fit end in the first forward.
    with explain_out_of_memory(engine, world), cut_trial(settings, world, is_open=built.run_plan.cut == BY_RANKS):
        check_in_optimizer(engine.model, groups.optimizer, unfrozen)
        if pipeline:
            # Each stage made an optimizer of its own; in the trial the others would wait for one that failed.
            world.agree()
        _try_task(built, trial_data)  # collective
        # Free the samples before the model is compiled.
        del trial_data
        compiles = request.joining or _can_compile(built, opening.requested)  # collective
    # `--compile auto` trains uncompiled if the trial could not compile.
    if not compiles:
        built.run_plan = draft.resolved.without_compile().run_plan
        built.config = built.run_plan.config
    state.compile = built.config.compile
    # Errors of the task's own schedule show before step 1.
    built.check_rates()
    request.check_last(built)
    return built


# --- the folder, and facts that are known without the task


class _Opening(NamedTuple):
    """The run's folder and state before the task is made.

    Attributes:
        facts: what the ranks exchanged first.
        remote: the run in an object store; None without one.
        source: the checkpoint to resume from; None for a new run.
        state: the checkpoint's, or a new one.
    """

    facts: FirstFacts
    folder: RunFolder
    remote: RemoteRun | None
    source: Path | None
    state: RunState

    @property
    def requested(self) -> Config:
        """The configuration as the user gave it."""
        return self.facts.config


def _open_folder(config: Config, world: World, request: BuildRequest) -> _Opening:
    """Compare the configurations, and look for a checkpoint in the run's folder. Collective."""
    with ExitStack() as stack:
        # With a URL each node has its own folder; otherwise all ranks share one.
        shares = request.resume and not is_url(config.save_dir)
        facts = exchange_first_facts(config, world, stack if shares else None, request.check_first)  # collective
        folder = RunFolder(facts.config.local_dir, facts.config.experiment_name)
        remote = remote_run(facts.config)
        source = None
        state = _read_newest_state(folder) if request.joining else RunState()
        if request.resume and not request.joining:
            if shares:
                check_shared_folder(folder, world, facts.token)
            else:
                find_folders(folder, world)  # collective
            source, state = _find_checkpoint(folder, world, remote)  # collective
        state.run_id = state.run_id or facts.run_id
    return _Opening(facts, folder, remote, source, state)


def _collect_start_facts(opening: _Opening, user_task: Any, world: World, request: BuildRequest) -> StartFacts:
    """Collect what is known before the task is made. Collective if the configuration leaves the micro-batch open."""
    start = StartFacts(
        fast=all_devices_fast(opening.requested, world, opening.facts.fast),
        checkpoint=checkpoint_facts(opening.state),
        min_steps=request.min_steps,
        micro_batch=opening.facts.micro_batch if request.resume else 0,
        ranks=world.data_parallel.size,
        cut=request.cut,
    )
    return _add_device_memory(opening.requested, start, world, user_task)  # collective if left open


# --- task, data and model, and the configuration that they decide


class _ModelDraft(NamedTuple):
    """A run's task, data and model, and the configuration that is resolved with them.

    Attributes:
        own_task: see `RunSetup`.
        resolved: the configuration with every "auto" resolved, and the plan.
        first_config: the configuration that the task was made from.
        notes: lines of the model for the log.
    """

    opening: _Opening
    task: Task
    own_task: bool
    training: TrainingSet
    evaluation_sets: dict[str, Any]
    model: nn.Module
    resolved: Resolution
    first_config: Config
    notes: list[str]


def _make_draft(opening: _Opening, user_task: Any, world: World, request: BuildRequest) -> _ModelDraft:
    """Make task, data and model, and resolve the configuration. Collective."""
    requested = opening.requested
    state = opening.state
    say = notify(world)
    start = _collect_start_facts(opening, user_task, world, request)  # collective if the configuration leaves it open
    # What is known without the task: the task and its data are made from this draft.
    draft = draft_of(requested, start)
    for line in draft.notices:
        say(line)
    task = _make_task(draft.config, user_task, world, state)
    training, evaluation_sets, samples = _load_datasets(draft.config, task, world)
    # An error that one rank has with its task or data ends all of them here.
    world.agree()
    check_extension(requested, resumes=start.checkpoint is not None)
    fixed_cut = _fixes_cut(draft.config, training, request)
    keeps_double = is_device_default(requested, "precision") and start.checkpoint is None and not requested.lora.rank
    notes = list[str]()
    options: dict[str, Any] = {"note": notes.append, "fixed_cut": fixed_cut, "keeps_double": keeps_double}
    of_ranks = _config_of_ranks(draft.config, fixed_cut=fixed_cut) if request.joining else draft.config
    model = build_model(of_ranks, task, world, state, say, **options)
    if keeps_double and is_double(model):
        say("the model is in double precision: trained as it is, with --precision float64")
        start = dataclasses.replace(start, double=True)
        task = task_in_precision(task, "float64", world.device.type, say)
    if not request.joining:
        # After the precision, whose context is inside.
        task = divide_sequences(requested, task, model, world)
    # Now task, model and data decide the remaining values and the plan.
    facts = _task_facts(task, model, samples, training.order, start)
    sizes = tuple(len(dataset) for dataset in evaluation_sets.values())
    resolved = resolve(requested, dataclasses.replace(facts, evaluation=sizes))
    own_task = user_task is not None or kind_of(requested.task) == OWN
    return _ModelDraft(opening, task, own_task, training, evaluation_sets, model, resolved, draft.config, notes)


def _fixes_cut(draft: Config, training: TrainingSet, request: BuildRequest) -> bool:
    """Whether the number of ranks does not decide how a step is cut."""
    # A stream or a batch sampler fixes the cut, because its micro-batches are not made of single samples.
    open_data = training.order is not None and not isinstance(training.order, GroupOrder)
    return request.cut != BY_RANKS and (has_fixed_cut(draft) or request.cut == FIXED or not open_data)


def _config_of_ranks(draft: Config, *, fixed_cut: bool) -> Config:
    """Return the configuration of a process that builds alone, for a run of several ranks."""
    # `divide_joiner` divides model and task, once the process has its replica.
    draft = dataclasses.replace(draft, parallel=Parallel())
    if fixed_cut:
        return draft
    draft = dataclasses.replace(draft, micro_batch_size=0)
    return dataclasses.replace(draft, batchnorm=resolve_batchnorm(draft, world_size=2).kind)


def _start_epoch(task: Task, batches: Batches, step: int | None = None) -> None:
    """Begin the epoch of a step, or the first one, on every rank.

    A framework's task begins it later, because its hook needs an optimizer.
    """
    if (starts := batches.epoch_starts) and not task.framework:
        epoch = 0 if step is None else starts.epoch(batches.step_plan, step)
        starts.call(epoch)


def _add_device_memory(requested: Config, facts: StartFacts, world: World, user_task: Any) -> StartFacts:
    """Add the largest micro-batch, if the configuration leaves it to the devices. Collective then."""
    draft = draft_of(requested, facts).config
    plan = facts.checkpoint.plan if facts.checkpoint else {}
    resumes = bool(plan) and plan.get("cut", FIXED) == FIXED
    # Memory is measured in a process of `lockstep plan`, which cannot make a task from an object.
    if resumes or draft.micro_batch_size or user_task is not None:
        return facts
    # Collective: the device with the least memory decides.
    return dataclasses.replace(facts, max_micro_batch=find_largest_micro_batch(draft, world, notify(world)))


def _make_task(draft: Config, user_task: Any, world: World, state: RunState) -> Task:
    """Check the settings that no task changes, then make the task. Collective."""
    say = notify(world)
    check_auditable(draft, world)
    pin(exact=draft.exact or bool(draft.guards.audit), matmul=draft.matmul_precision, device=world.device)
    check_precision(draft.precision, world.device)
    # A division that depends on the model is checked once the model is made.
    if draft.micro_batch_size:
        check_division(draft, world, say)
    check(draft, is_main=world.is_main)
    if user_task is None:
        made = make_task(draft, say)
    else:
        made = as_task(user_task)
    task = task_in_precision(made, draft.precision, world.device.type, say)
    check_auditable_loss(draft, task)
    # "micro-batch" depends on how a step is cut: detect it again.
    if state.reduction != "micro-batch":
        restore_findings(task, state)
    # Ranks with different versions of the task would train different models.
    world.check_same("source", dict(task.sources))
    return task


def _load_datasets(draft: Config, task: Task, world: World) -> tuple[TrainingSet, dict[str, Any], int]:
    """Make the training set and the evaluation sets, and count the training samples. Collective."""
    dataset, evaluation, samples = make_datasets(task, world, draft.seed)  # collective
    loaded = with_retries(draft, dataset, world)
    if isinstance(loaded, StreamData):
        check_stream(draft, task, loaded.source)
        return TrainingSet(dataset, loaded, None), evaluation, 0
    order = _order(draft, task, dataset)
    return TrainingSet(dataset, loaded, order), evaluation, samples


def _task_facts(task: Task, model: nn.Module, samples: int, order: SizedOrder | None, start: StartFacts) -> Facts:
    """Collect what the configuration is resolved by.

    Raises:
        ConfigError: BatchNorm would get a micro-batch of one sample.
    """
    facts = Facts.of(task, model, samples, order.size if order else 0, start)
    if not isinstance(order, GroupOrder):
        return facts
    longest = order.longest if isinstance(order, TokenGroups) else 0
    if isinstance(order, TokenGroups) and order.smallest < 2 and batchnorm_names(model):
        raise ConfigError(
            f"--micro-batch-tokens {order.bound}: some micro-batches have one sample (the longest has {longest} "
            "tokens), which BatchNorm cannot learn from; raise it, or use another norm"
        )
    return dataclasses.replace(facts, grouped=True, longest=longest)


def _order(draft: Config, task: Task, dataset: Any) -> SizedOrder:
    """Make the order of the training samples, or of groups of them."""
    groups = grouped_order(task, dataset, draft.seed, draft.micro_batch_tokens, draft.data.shuffle_shards)
    return groups or training_order(task, dataset, len(dataset), draft.seed, draft.data.shuffle_shards)


# --- checks before the engine is made


def _check_settings(draft: _ModelDraft, world: World) -> None:
    """Check the resolved configuration against its files, the checkpoint and the ranks, and record its plan."""
    requested = draft.opening.requested
    state = draft.opening.state
    settings = draft.resolved.config
    config_file = read_json(requested.engine_options.config)
    # Compare max_steps as the user set it: an extended plan is not what the file contradicts.
    check_settings(config_file, lambda name: lookup(requested if name == "max_steps" else settings, name), world.size)
    draft.resolved.record(state)
    check_longer(settings, state, draft.resolved.run_plan.step_plan.steps)
    sizes = [(item.batch_size, item.micro_batch_size) for item in (draft.first_config, settings)]
    # The sizes depended on the model or its data.
    if sizes[0] != sizes[1]:
        check_division(settings, world, notify(world))


def _check_plan(draft: _ModelDraft, world: World) -> dict[str, Any]:
    """Check the model and the plan, between the ranks and with the checkpoint, and return the plan."""
    opening = draft.opening
    task = draft.task
    model = draft.model
    settings = draft.resolved.config
    run_plan = draft.resolved.run_plan
    checkpoint.check_storable(model.state_dict() | task_tensors(task))
    check_weights(world, {"model": model, **task.fixed_models})
    data = task.fingerprint or getattr(draft.training.dataset, "fingerprint", "")
    plan = plan_of(settings, run_plan, task, model, own_task=draft.own_task) | {"data": data} | draft.training.plan
    _check_cuttable(settings, task, model, draft.training, run_plan)
    before = checkpoint_plan(opening.state, plan)
    # Ranks with different plans would train different models.
    world.check_same("plan", plan)
    additive = is_additive(task, model)
    for line in check_plan(opening.folder.path, before, plan, settings, opening.requested, is_additive=additive):
        notify(world)(line)
    return plan


def _check_cuttable(config: Config, task: Task, model: nn.Module, training: TrainingSet, run_plan: RunPlan) -> None:
    check_cuttable(config, task, model, is_stream=training.order is None, is_grouped=run_plan.grouped)


def _check_data(draft: _ModelDraft, batches: Batches, world: World, request: BuildRequest) -> list[str]:
    """Compare programs and samples between the ranks and with the checkpoint. Collective.

    Returns:
        Lines for the log. The list grows when the next gather delivers the digests.
    """
    task = draft.task
    state = draft.opening.state
    settings = draft.resolved.config
    first_step = min(state.global_step, draft.resolved.run_plan.step_plan.steps - 1)
    # `check_programs` reads samples of the first epoch.
    _start_epoch(task, batches)
    check_programs(world, task, batches.samples(first_step, 0))
    # A dataset that this process has trained on may have changed with the epochs.
    folder = draft.opening.folder.path
    contents_check = partial(accept_contents, folder, state, settings, compares=request.proves)
    notes = check_samples(settings, draft.training.dataset, draft.evaluation_sets, world, batches, contents_check)
    if first_step:
        _start_epoch(task, batches, first_step)
    notes[:0] = draft.notes
    return notes


def _make_setup(draft: _ModelDraft, plan: dict[str, Any], notes: list[str]) -> RunSetup:
    opening = draft.opening
    return RunSetup(
        folder=opening.folder,
        own_task=draft.own_task,
        plan=plan,
        source=opening.source,
        remote=opening.remote,
        base_names=base_tensor_names(draft.model, opening.state),
        training=draft.training,
        evaluation_sets=draft.evaluation_sets,
        notes=notes,
        places=opening.facts.places,
    )


# --- the trial


class _TrialData(NamedTuple):
    """Samples of the trial; without any, the run is not tried.

    Attributes:
        samples: to try the whole task with; None: it is not tried.
        places: to prove the loss again with; None: it is not proved.
    """

    samples: TrialSamples | None = None
    places: list[HalvedSamples] | None = None


def _load_trial_data(
    draft: _ModelDraft, batches: Batches, evaluation: dict[str, Batches], world: World, request: BuildRequest
) -> _TrialData:
    """Load the samples of the trial that the run needs. Collective."""
    task = draft.task
    requested = draft.opening.requested
    cut = is_cut(draft.resolved.config, batches)
    # The run needed no proof of its loss so far, and needs one now.
    if task.reduction == "whole" and cut:
        set_detected(task, "auto", needs_graph(task))
    # This process joins a run that has tried its task.
    if request.joining:
        return _TrialData()
    # A resume may change the metrics, and an older checkpoint may lack what the trial detects.
    if draft.opening.source is None or depends_on_evaluations(requested) or task.reduction == "auto":
        return _TrialData(samples=load_trial_samples(task, world, batches, evaluation))
    # The code of the loss may have changed since the checkpoint.
    if request.proves and cut and not has_step_loss(task):
        return _TrialData(places=load_places_together(batches, task, world))
    return _TrialData()


def _try_task(built: RunParts, data: _TrialData) -> None:
    """Try the task, or prove its loss again, on the samples that are loaded. Collective."""
    if data.samples is None and data.places is None:
        return
    recorded = (built.state.reduction or "") if built.setup.source else ""
    trial = Trial(built.engine, built.model, built.task, built.world, built.config, notify(built.world))
    if data.samples:
        names = check_task(trial, data.samples, built.batches, built.evaluation, built.state, recorded)  # collective
        check_criteria(built.config, names)
        # The trial has found out whether the loss adds up, which decides whether a step may be cut.
        _check_cuttable(built.config, built.task, built.model, built.setup.training, built.run_plan)
    elif data.places is not None:
        check_loss(trial, built.batches, data.places, recorded)  # collective


def _can_compile(built: RunParts, requested: Config) -> bool:
    """Whether the model can be compiled, or need not be. Collective.

    Raises:
        ConfigError: --compile is not auto, and the model cannot be compiled.
    """
    if not built.config.compile:
        return True
    world = built.world
    may_fail = is_auto(requested, "compile")
    reason = try_compile(
        built.config, built.task, built.model, built.engine, built.batches, world, may_fail=may_fail
    )  # collective
    if reason:
        notify(world)(f"--compile auto: the model cannot be compiled ({reason}); training it uncompiled")
    return not reason


# --- the run's folder and its checkpoints


def remote_run(config: Config) -> RemoteRun | None:
    """Return the run's folder in an object store; None if --save-dir is a path."""
    if is_url(config.save_dir):
        return RemoteRun(config.save_dir, config.experiment_name)
    return None


def _find_checkpoint(folder: RunFolder, world: World, remote: RemoteRun | None) -> tuple[Path | None, RunState]:
    """Return the newest complete checkpoint and its state. Collective.

    Returns:
        (None, a new run's state) without a checkpoint.
    """
    newest = checkpoint.find_resume(folder.path, world, notify(world), remote)
    if newest is None:
        return None, RunState()
    source = newest[0]
    state = RunState.from_json(newest[1], f"{newest[0].name}/state.json")
    record: list[Any] = []
    if world.is_main:
        evaluated, selection = folder.read_evaluated() if state.evaluation_due else (-1, Selection())
        record = [evaluated, selection.to_json()]
    # Only rank 0 reads the records; every rank needs the answer.
    evaluated, stored = world.gather(record)[0]
    # The checkpoint was written before its evaluation, which may have finished.
    if state.evaluation_due and evaluated == state.global_step:
        state.selection = Selection.from_json(stored)
        state.evaluation_due = False
    return source, state


def _read_newest_state(folder: RunFolder) -> RunState:
    """Read the newest checkpoint's state without its tensors, for where the plan starts."""
    steps = checkpoint.list_steps(folder.path)
    if steps:
        return checkpoint.read_run_state(checkpoint.path_of(folder.path, steps[-1]))
    return RunState()


def build_joiner(spec: RunSpec, inputs: BuildInputs, world: World, member: Member) -> RunParts:
    """Build, without the other ranks, what this process needs to join a run."""
    config = inputs.config
    config = dataclasses.replace(config, experiment_name=member.experiment() or config.experiment_name)
    alone = dataclasses.replace(config, engine="auto", shares="equal")
    if ENGINES[name_of(config.engine, world)].places_model:
        alone = dataclasses.replace(alone, engine_options=EngineOptions())
    # The run in progress chose its cut by the number of its ranks, which this process does not know.
    cut = "" if has_fixed_cut(config) else BY_RANKS
    size = RunFolder(config.local_dir, config.experiment_name).read_micro_size()
    alone = dataclasses.replace(alone, micro_batch_size=size or alone.micro_batch_size)
    request = BuildRequest(joining=True, min_steps=spec.min_steps, cut=cut)
    with world.together():
        built = build_together(alone, spec.task, world, inputs.user_objects, request)
    built.config = dataclasses.replace(
        built.config, engine=config.engine, shares=config.shares, engine_options=config.engine_options
    )
    return built


def divide_joiner(built: RunParts, world: World) -> None:
    """Make the model of a process that joins once more, and keep its part of model and task. Changes `built`.

    The first one was made complete, since this process had no replica yet. It is made again because preparing a model
    for training may hide layers that are to be divided.

    Args:
        world: all ranks of the run, with their replicas.
    """
    # The other ranks have their models, so nothing is compared with them.
    alone = World(0, world.local_rank, 1, world.device, world.timeout, quiet=True)
    alone.replicas = world.replicas
    built.model = build_model(built.config, built.task, alone, built.state, lambda line: None)
    built.task = divide_sequences(built.config, built.task, built.model, alone)
    built.pipeline = cut_pipeline(built.config, built.task, built.model, alone, built.batches)
    if built.pipeline:
        built.task = stage_task(built.task, built.pipeline)
