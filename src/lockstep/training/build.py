"""Build all parts of a run from its configuration and task, and announce it.

    lockstep train --show-groups        # trains and writes nothing; prints a table of the optimizer's groups:
    group  tensors  parameters  lr     weight decay  names

`build` compares the configuration between the ranks, looks for a checkpoint, makes data and model, resolves every
"auto" from these (training/resolve.py), and makes the engine. It returns `Built`, which everything that trains uses.
"""

import dataclasses
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.config import cli
from lockstep.config.deepspeed import hold, read_json
from lockstep.config.fields import AUTO
from lockstep.config.schema import Config, is_auto, lookup
from lockstep.config.task_options import OWN, kind_of
from lockstep.data.batches import Batches, Loading, MicroBatchCosts
from lockstep.data.sampler import Begun, SizedOrder, order_of
from lockstep.distributed.balance import Balancer
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import Engine
from lockstep.engines.memory import explained
from lockstep.engines.optimizers import GradientNorms
from lockstep.errors import UsageError, said
from lockstep.guards.startup import check_programs, check_weights
from lockstep.logging.trackers import check
from lockstep.optim.schedule import cycled_momentum, factor
from lockstep.run_state import RunState, Selection
from lockstep.task import Order, Task, adapted, has_own
from lockstep.training import resume
from lockstep.training.agreement import check_samples, check_shared, datasets_of, guarded, log_ranks
from lockstep.training.build_engine import (
    Groups,
    compiled_or_not,
    engine_of,
    model_of,
    optimizer_of,
    own_factor,
    own_momentum,
)
from lockstep.training.defaults import (
    all_fast,
    described_loss,
    described_optimizer,
    described_step,
    largest_micro_batch,
    warnings,
)
from lockstep.training.evaluation import batches_of
from lockstep.training.named_task import make_task
from lockstep.training.resolve import Facts, StartFacts, checkpoint_facts, draft_of, resolve
from lockstep.training.resume import RunPlan, check_extension, check_longer, check_plan, checkpoint_plan, plan_of
from lockstep.training.run_dir import RunFolder
from lockstep.training.selection import check_criteria, depends_on_evaluations, plateau_drops
from lockstep.training.sharing import balancer_of, check_division, sharing_of
from lockstep.training.task_check import Trial, check_auditable, check_auditable_loss, check_task, restore_findings
from lockstep.training.trainable import apply_body_changes, base_tensor_names, check_in_optimizer, restore_initial_set
from lockstep.transforms.determinism import check_precision, pin

__all__ = [
    "Built",
    "announce",
    "build",
    "notify",
    "show_groups",
    "stream_of",
]


class TrainingSet(NamedTuple):
    """The training set as the task made it, wrapped for loading, and its order."""

    plain: Any
    loaded: Any
    order: SizedOrder


def stream_of(
    config: Config, task: Task, training: TrainingSet, run_plan: RunPlan, world: World, state: RunState
) -> tuple[Batches, Balancer | None]:
    """Make the training batches, and the balancer of `--shares auto`. Collective."""
    plain, dataset, whole = training
    order: Order = Begun(whole, whole.size, run_plan.samples) if run_plan.samples < whole.size else whole
    works = MicroBatchCosts(task, plain, order, run_plan.step_plan)
    told = config.shares == AUTO and on_all_ranks(world, works.known)  # collective
    balancer = balancer_of(config, world, works if told else None, state)
    loading = Loading(config.data.workers, config.data.prefetch, config.guards.retries)
    sharing = sharing_of(config, balancer)
    made = Batches(task, dataset, order, run_plan.step_plan, world, seed=config.seed, loading=loading, sharing=sharing)
    return made, balancer


_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass
class Built:
    """The parts of a run, as `build` makes them.

    Attributes:
        own_task: `task` is the user's own, not a built-in one that the configuration names.
        model: the plain module that `engine` wraps.
        batches: the training stream.
        evaluation: the evaluation sets by name (see training/evaluation.py).
        plan: what a resume must find unchanged.
        source: the checkpoint to resume from, if there is one.
        state: everything in that checkpoint except tensors.
        kept: the caller's own objects that have tensors, by name.
        base: names of the tensors that checkpoints of adapters leave out; see `lockstep.adapters`.
        balancer: decides who computes what, with --shares auto.
        loading: counts retries and skips of data loading (see guards/samples.py); the first is the training set's.
        groups: the optimizer's groups.
        sets: the evaluation's datasets.
        training: the training set and its order. If the ranks change, engine and batches are rebuilt from these.
        notes: lines for the log, written once it is open.
    """

    config: Config
    world: World
    folder: RunFolder
    task: Task
    own_task: bool
    run_plan: RunPlan
    model: nn.Module
    engine: Engine
    batches: Batches
    evaluation: dict[str, Batches]
    plan: dict[str, Any]
    source: Path | None
    state: RunState
    loading: list[Any]
    kept: dict[str, Any]
    base: frozenset[str] = frozenset()
    balancer: Balancer | None = None
    groups: Groups = field(default_factory=Groups)
    sets: dict[str, Any] = field(default_factory=dict)
    training: TrainingSet = field(kw_only=True)
    notes: list[str] = field(default_factory=list)

    def keep(self, name: str, what: Any) -> None:
        """Store the caller's own object in the checkpoints.

        Raises:
            UsageError: the name or the object cannot be stored.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(f"run.keep: the name '{name}' must be of letters, digits, '-' and '_'")
        if not (hasattr(what, "state_dict") and hasattr(what, "load_state_dict")):
            raise UsageError(
                f"run.keep('{name}', ...): {type(what).__name__} has no state_dict() and load_state_dict()"
            )
        state = what.state_dict()
        plain = next((key for key, value in state.items() if not isinstance(value, Tensor)), None)
        if plain is not None:
            raise UsageError(f"run.keep('{name}', ...): '{plain}' of its state_dict() is no tensor; make it one")
        self.kept[name] = what
        checkpoint.check_keepable(self.own_of(name))

    def own_of(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the object that is stored as `name`, as `kept.NAME/KEY`."""
        return {f"kept.{name}/{key}": tensor for key, tensor in self.kept[name].state_dict().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores.

        These are the engine's state without the base of adapters, the task's own tensors as `task/NAME` and the
        caller's as `kept.NAME/KEY`. The task's are the same on every rank, and not copies: a resume fills them in place
        and then calls its `load_state_dict` with them.
        """
        return {name: tensor for name, tensor in self.all_tensors().items() if name not in self.base}

    def all_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of `tensors()` and those of the adapters' base."""
        return self.engine.state_dict() | self.own

    @property
    def own(self) -> dict[str, Tensor]:
        """The task's own tensors, as `task/KEY`, and the caller's, as `kept.NAME/KEY`."""
        found = _own(self.task)
        for name in self.kept:
            found |= self.own_of(name)
        return found

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors that `tensors()` returned and a checkpoint filled."""
        owners = {"task": self.task} | {f"kept.{name}": what for name, what in self.kept.items()}
        engine, own = {}, dict[str, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            group, _, key = name.partition("/")
            if group in owners:
                own.setdefault(group, {})[key] = tensor
            else:
                engine[name] = tensor
        if engine:
            if self.base:  # the base's tensors are loaded already
                engine |= {name: tensor for name, tensor in self.engine.state_dict().items() if name in self.base}
            self.engine.load_state_dict(engine)
        for group, state in own.items():
            owners[group].load_state_dict(state)

    @property
    def arguments(self) -> dict[str, Any]:
        """The configuration by dotted name, as it is shown and stored."""
        return cli.flat(self.config, own_task=self.own_task)

    @property
    def lr(self) -> float:
        """Base learning rate of the optimizer's first group."""
        return self.groups.rates[0]

    @property
    def start(self) -> int:
        """Number of steps trained before this start."""
        return self.state.global_step

    @property
    def last(self) -> int:
        """Step after which this start of the run ends."""
        whole = self.run_plan.step_plan.steps
        return min(whole, self.config.stop_at or whole)

    @property
    def rate(self) -> Callable[[int], float]:
        """The schedule: step -> factor of the base learning rate."""
        optim, whole = self.config.optim, self.run_plan.step_plan.steps
        horizon = (optim.schedule == "cosine-periodic" and optim.period) or whole
        said = lambda step: factor(  # noqa: E731
            step,
            horizon=horizon,
            warmup=optim.warmup_steps,
            floor=optim.floor,
            shape=optim.schedule,
            cooldown=optim.cooldown,
            power=optim.power,
            period=optim.period,
            gamma=optim.gamma,
            drops=plateau_drops(self.state.selection),
        )
        return (lambda step: own_factor(self.task, step, whole, said)) if has_own(self.task, "schedule") else said

    @property
    def momentum(self) -> Callable[[int], float | None]:
        """The momentum's schedule: step -> momentum of every parameter group.

        None leaves the groups' own momentum; only a one-cycle schedule changes it.
        """
        optim, whole = self.config.optim, self.run_plan.step_plan.steps
        if optim.schedule != "one-cycle":
            return lambda step: None
        said = lambda step: cycled_momentum(step, whole, optim.warmup_steps)  # noqa: E731
        return (lambda step: own_momentum(self.task, step, whole, said)) if has_own(self.task, "schedule") else said


def build(
    config: Config,
    given: Any,
    world: World,
    kept: dict[str, Any] | None = None,
    *,
    resume: bool = True,
    steps: int = 0,
    joins: bool = False,
    least: int = 0,
) -> Built:
    """Build the parts of a run. Collective.

    Args:
        given: the task to train, or an object that can be adapted to one; None: the task that the configuration names.
        kept: the caller's own objects to store in checkpoints, see `Built.kept`.
        resume: look for a checkpoint to resume from; False starts a new run, whatever the folder holds.
        steps: length of the plan, in place of the configuration's; 0: the configuration's.
        joins: this process alone builds its parts, to join a run that is going on (see training/recovery.py).
        least: minimum length of the plan in steps; further epochs are added to reach it.

    Raises:
        UsageError: the configuration cannot be run; the same on every rank.
    """
    asked, say = _agreed(config, world), notify(world)
    folder = RunFolder(asked.save_dir, asked.experiment_name)
    if resume:
        check_shared(folder, world)  # collective
    source, state = _found(folder, world) if resume and not joins else (None, RunState())
    state = _glimpsed(folder) if joins else state
    start = _start_facts(
        asked, StartFacts(checkpoint=checkpoint_facts(state), steps=steps, min_steps=least), world, given
    )  # collective
    draft = draft_of(asked, start)
    for line in draft.notices:
        say(line)
    task = _task_of(draft.config, given, world, state)
    training, evaluation, samples = _data_of(draft.config, task, world)
    check_extension(asked, resumes=start.checkpoint is not None)
    model = model_of(draft.config, task, world, state, say)
    resolved = resolve(asked, Facts.of(task, model, samples, training.order.size, start))
    config_file = on_all_ranks(world, lambda: read_json(asked.engine_options.config))
    # Compare max_steps as the user set it: an extended plan, or `steps`, is not what the file contradicts.
    hold(config_file, lambda name: lookup(asked if name == "max_steps" else resolved.config, name), world.size)
    resolved.record(state)
    check_longer(resolved.config, state, resolved.run_plan.step_plan.steps)
    if not draft.config.micro_batch_size:  # it depended on the model
        check_division(resolved.config, world, say)
    on_all_ranks(world, lambda: checkpoint.check_keepable(model.state_dict() | _own(task)))
    check_weights(world, model)
    own_task = given is not None or kind_of(asked.task) == OWN
    plan = plan_of(resolved.config, resolved.run_plan, task, model, own_task=own_task)
    _check_plan(folder, state, plan, resolved.config, asked, world)
    stream, balancer = stream_of(resolved.config, task, training, resolved.run_plan, world, state)
    first = min(state.global_step, resolved.run_plan.step_plan.steps - 1)
    check_programs(world, task, stream.samples(first, 0))
    notes = check_samples(resolved.config, training.plain, evaluation, world)  # collective
    groups = Groups(gradients=GradientNorms(asked.log_gradients, resolved.config.log_freq))
    unfrozen = restore_initial_set(model, state)
    engine = engine_of(resolved.config, task, model, world, groups, stream, say, state)
    with explained(engine, world):  # the first forward is where most runs that do not fit end
        on_all_ranks(world, lambda: check_in_optimizer(engine.model, groups.optimizer, unfrozen))
        held_out = batches_of(resolved.config, task, evaluation, world)
        # A resume may change the metrics, and an older checkpoint may lack what the trial detects.
        if not joins and (source is None or depends_on_evaluations(asked) or task.reduction == "auto"):
            trial = Trial(engine, model, task, world, resolved.config, say)
            check_criteria(resolved.config, check_task(trial, stream, held_out, state))  # collective
        compiles = joins or _compiles(resolved.config, asked, task, model, engine, stream, world)  # collective
    trained = resolved if compiles else resolved.without_compile()
    state.compile = trained.config.compile
    built = Built(
        trained.config,
        world,
        folder,
        task,
        own_task,
        trained.run_plan,
        model,
        engine,
        stream,
        held_out,
        plan,
        source,
        state,
        [training.loaded, stream.loader, *(each.loader for each in held_out.values())],
        {} if kept is None else kept,
        base_tensor_names(model, state),
        balancer,
        groups,
        evaluation,
        training=training,
        notes=notes,
    )
    on_all_ranks(
        world, lambda: [built.rate(step) for step in (0, trained.run_plan.step_plan.steps - 1)]
    )  # errors of the task's own schedule show before step 1
    return built


def _start_facts(asked: Config, facts: StartFacts, world: World, given: Any) -> StartFacts:
    """Add what the devices can do to the other facts, where the configuration leaves it to them. Collective."""
    facts = dataclasses.replace(facts, fast=all_fast(asked, world))  # collective
    draft = draft_of(asked, facts).config
    begun = facts.checkpoint is not None and facts.checkpoint.plan
    if begun or draft.micro_batch_size or given is not None:  # no other process could make the task `given`
        return facts
    return dataclasses.replace(facts, max_micro_batch=largest_micro_batch(draft, world, notify(world)))  # collective


def _task_of(draft: Config, given: Any, world: World, state: RunState) -> Task:
    """Make the task, once the settings that it cannot change are checked. Collective."""
    check_auditable(draft, world)
    pin(exact=draft.exact or bool(draft.guards.audit), matmul=draft.matmul_precision, device=world.device)
    check_precision(draft.precision, world.device)
    if draft.micro_batch_size:  # else it depends on the model, and is checked once that is made
        check_division(draft, world, notify(world))
    on_all_ranks(world, lambda: check(draft))
    task = on_all_ranks(world, lambda: make_task(draft, notify(world)) if given is None else adapted(given))
    check_auditable_loss(draft, task)
    if state.reduction != "micro-batch":  # "micro-batch" depends on how a step is cut: detect it again
        restore_findings(task, state)
    world.check_same("source", dict(task.sources))
    return task


def _data_of(draft: Config, task: Task, world: World) -> tuple[TrainingSet, dict[str, Any], int]:
    """Make the training set, the evaluation sets, and the number of training samples. Collective."""
    plain, evaluation, samples = datasets_of(task, world)  # collective
    order = on_all_ranks(world, lambda: order_of(task, samples, draft.seed))
    return TrainingSet(plain, guarded(draft, plain, world), order), evaluation, samples


def _check_plan(
    folder: RunFolder, state: RunState, plan: dict[str, Any], config: Config, asked: Config, world: World
) -> None:
    """Compare the plan between the ranks, and with the checkpoint's. Collective."""
    world.check_same("plan", plan)
    for line in on_all_ranks(world, lambda: check_plan(folder.path, checkpoint_plan(state, plan), plan, config, asked)):
        notify(world)(line)


def _compiles(
    config: Config, asked: Config, task: Task, model: nn.Module, engine: Engine, stream: Batches, world: World
) -> bool:
    """Whether the model compiles, if it is to be compiled. Only --compile auto may fail. Collective."""
    if not config.compile:
        return True
    may_fail = is_auto(asked, "compile")
    reason = compiled_or_not(config, task, model, engine, stream, world, may_fail=may_fail)  # collective
    if reason:
        notify(world)(f"--compile auto: the model cannot be compiled ({reason}); it is trained without")
    return not reason


def _agreed(config: Config, world: World) -> Config:
    """Replace the experiment name by rank 0's, and require the rest to be equal. Collective.

    A name that contains the time differs between ranks.
    """
    name = world.gather(config.experiment_name)[0]
    config = dataclasses.replace(config, experiment_name=name)
    world.check_same("configuration", cli.flat(config))
    return config


def _found(folder: RunFolder, world: World) -> tuple[Path | None, RunState]:
    """Find the newest complete checkpoint and its state; (None, a new run's state) without one. Collective."""
    found = checkpoint.find_resume(folder.path, world, notify(world))
    if found is None:
        return None, RunState()
    source, state = found[0], RunState.from_json(found[1], f"{found[0].name}/state.json")
    apply_body_changes(folder, state, world)  # collective
    if state.evaluation_due:  # the checkpoint was written before its evaluation, which may have finished
        step, selection = folder.read_evaluated() if world.is_main else (-1, Selection())
        step, noted = world.gather([step, selection.to_json()])[0]  # collective
        if step == state.global_step:
            state.selection, state.evaluation_due = Selection.from_json(noted), False
    return source, state


def _glimpsed(folder: RunFolder) -> RunState:
    """Read the newest checkpoint's state, which records the plan's start, without its tensors."""
    steps = checkpoint.list_steps(folder.path)
    return checkpoint.read_run_state(checkpoint.path_of(folder.path, steps[-1])) if steps else RunState()


def _own(task: Task) -> dict[str, Tensor]:
    """Return the task's `state_dict()`, its names prefixed by `task/`."""
    return {f"task/{name}": tensor for name, tensor in task.state_dict().items()}


def notify(world: World) -> Callable[[str], None]:
    """Return a function that prints a line to stderr on rank 0 only.

    It is for messages before the log is open, and can be pickled, so that a task may use it in another process.
    """
    return partial(_tell, world.is_main and not world.quiet)


def _tell(is_main: bool, line: str) -> None:
    if is_main:
        print(said(line), file=sys.stderr, flush=True)


# --- log

_LOG = logging.getLogger("lockstep")


def announce(built: Built) -> None:
    """Log each rank's device, the size of a step, and warnings. Collective."""
    log_ranks(built.world)  # collective
    _LOG.info(described_step(built.run_plan, built.world.size))
    if line := described_loss(built.run_plan, built.task):
        _LOG.info(line)
    if not has_own(built.task, "optimizer"):
        _LOG.info(described_optimizer(built.run_plan))
    if built.config.checkpoint.mode == "none" and built.world.is_main:
        _LOG.warning(
            "--checkpoint.mode none: no checkpoint is written; what this start trains cannot be resumed or loaded"
        )
    if line := resume.describe_extension(
        built.state, built.run_plan.step_plan.steps, built.lr * built.rate(built.start)
    ):
        _LOG.info(line)
    for line in warnings(built.run_plan, built.model) if built.world.is_main else ():
        _LOG.warning(line)


# --- lockstep train --show-groups

_WIDE = 120  # minimum columns, so that names are not cut


def show_groups(config: Config) -> None:
    """Print the optimizer's groups of the configured run. Raises what `build` raises."""
    world = World.join(config.device, config.timeout)
    try:
        built = build(config, None, world, resume=False)  # an existing run in the folder does not matter
        made = optimizer_of(built.config, built.task, built.model)
        table = Table("group", "tensors", "parameters", "lr", "weight decay", box=None, pad_edge=False)
        table.add_column("names", overflow="fold")
        for row in groups_of(built.model, made):
            table.add_row(*row)
        if world.is_main:
            console = Console()
            console.width = max(console.width, _WIDE)
            console.print(table)
    finally:
        world.leave()


def groups_of(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, ...]]:
    """Return a table row for each group, and one for the frozen parameters.

    Returns:
        (number, tensors, parameters, learning rate, weight decay, names) of each.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows: list[tuple[str, ...]] = []
    left = dict(names)
    for number, group in enumerate(optimizer.param_groups):
        own = [(left.pop(parameter), parameter) for parameter in group["params"]]
        rates = (f"{group['lr']:g}", f"{group.get('weight_decay', 0.0):g}")
        kind = " muon" if group.get("muon") else ""
        rows.append((f"{number}{kind}", *_counted(own), *rates, _shown([name for name, _ in own])))
    if left:
        own = [(name, parameter) for parameter, name in left.items()]
        rows.append(("frozen", *_counted(own), "", "", _shown([name for name, _ in own])))
    return rows


def _counted(own: list[tuple[str, nn.Parameter]]) -> tuple[str, str]:
    return str(len(own)), f"{sum(parameter.numel() for _, parameter in own):,}"


def _shown(names: list[str]) -> str:
    return "\n".join(names if len(names) < 4 else [names[0], "...", names[-1]])
