"""From a Config to the parts of a run, every rank alike.

    built = build(config, task, world)

Nothing is written into the run's folder here.
"""

import dataclasses
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.config import options
from lockstep.config.config import Config, is_auto, lookup
from lockstep.data.batches import Batches
from lockstep.data.sampler import order_of
from lockstep.distributed.balance import Balancer
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import Engine
from lockstep.engines.deepspeed_file import hold, read_json
from lockstep.engines.shared.gradient_norms import GradientNorms
from lockstep.engines.shared.oom import explained
from lockstep.errors import UsageError, said
from lockstep.guards.start import check_programs, check_weights
from lockstep.optim.schedule import cycled_momentum, factor
from lockstep.run.adapters import left_out
from lockstep.run.auditing import check_auditable, check_auditable_loss
from lockstep.run.best import JUDGED, check_evaluated, judges
from lockstep.run.compiling import compiled_or_not
from lockstep.run.datasets import check_samples, datasets_of, guarded
from lockstep.run.defaults import settled
from lockstep.run.device_defaults import on_device
from lockstep.run.evaluation_sets import batches_of
from lockstep.run.extending import check_longer, extended, plan_before
from lockstep.run.fitting import fitted
from lockstep.run.folder import RunFolder
from lockstep.run.model import model_of
from lockstep.run.own_optimizer import own_factor, own_momentum
from lockstep.run.placing import Groups, engine_of
from lockstep.run.plan import RunPlan, origin_of, plan_of
from lockstep.run.plan_check import check_plan
from lockstep.run.plateau import fallen
from lockstep.run.shared_folder import check_shared
from lockstep.run.sharing import check_cut
from lockstep.run.stream import TrainingSet, stream_of
from lockstep.run.task_check import Trial, check_task, recall
from lockstep.run.trained import begin_as_made, check_held, overlay
from lockstep.sinks.remote import check
from lockstep.task import Task, adapted, has_own
from lockstep.tasks.named import named_task
from lockstep.tasks.options import OWN, kind_of
from lockstep.transforms.determinism import check_precision, pin

__all__ = ["Built", "build", "notify"]

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass
class Built:
    """What a run is made of.

    Attributes:
        own_task: `task` is the user's own, and not one of the built-in ones that the configuration names.
        model: the plain module that `engine` holds.
        batches, evaluation: the training stream, and the evaluation's sets by name (see evaluation_sets.py).
        plan: what a resume must find unchanged.
        source: the checkpoint to resume from, if there is one, and `state`, what it said besides tensors.
        kept: the caller's own objects that have tensors, by name.
        base: what the checkpoints of adapters do without, by name; see `lockstep.run.adapters`.
        balancer: decides who computes what, with --shares auto.
        loading: what counts retries and skips of the loading (see guards/loader.py); the first is the training set.
        groups: the optimizer's; `sets`: the evaluation's datasets; `training`: the training set and its order. Of
            these engine and batches are made anew where the ranks change.
        notes: lines for the log, once it is open.
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
    state: dict[str, Any]
    loading: list[Any]
    kept: dict[str, Any]
    base: frozenset[str] = frozenset()
    balancer: Balancer | None = None
    groups: Groups = field(default_factory=Groups)
    sets: dict[str, Any] = field(default_factory=dict)
    training: TrainingSet = field(kw_only=True)
    notes: list[str] = field(default_factory=list)

    def keep(self, name: str, what: Any) -> None:
        """Keeps the caller's own object in the checkpoints. Raises UsageError for what cannot be kept."""
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
        """The tensors of what is kept as `name`."""
        return {f"kept.{name}/{key}": tensor for key, tensor in self.kept[name].state_dict().items()}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the engine's state but for the base of adapters, and the task's own as `task/NAME`.

        The task's tensors are the same on every rank, and not copies: a resume fills them in place and then calls its
        `load_state_dict` with them.
        """
        return {name: tensor for name, tensor in self.all_tensors().items() if name not in self.base}

    def all_tensors(self) -> dict[str, Tensor]:
        """The same, with the base of adapters."""
        return self.engine.state_dict() | self.own

    @property
    def own(self) -> dict[str, Tensor]:
        """The task's own tensors, as `task/KEY`, and the caller's, as `kept.NAME/KEY`."""
        found = _own(self.task)
        for name in self.kept:
            found |= self.own_of(name)
        return found

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what `tensors` gave and a checkpoint filled."""
        owners = {"task": self.task} | {f"kept.{name}": what for name, what in self.kept.items()}
        engine, own = {}, dict[str, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            group, _, key = name.partition("/")
            if group in owners:
                own.setdefault(group, {})[key] = tensor
            else:
                engine[name] = tensor
        if engine:
            if self.base:  # which is in place
                engine |= {name: tensor for name, tensor in self.engine.state_dict().items() if name in self.base}
            self.engine.load_state_dict(engine)
        for group, state in own.items():
            owners[group].load_state_dict(state)

    @property
    def arguments(self) -> dict[str, Any]:
        """The configuration as it is shown and kept, by dotted name."""
        return options.flat(self.config, own_task=self.own_task)

    @property
    def lr(self) -> float:
        """Base learning rate of the optimizer's first group."""
        return self.groups.rates[0]

    @property
    def start(self) -> int:
        """Steps that were taken before."""
        return int(self.state.get("global_step", 0))

    @property
    def last(self) -> int:
        """Steps after which this start of the run ends."""
        whole = self.run_plan.step_plan.steps
        return min(whole, self.config.stop_at or whole)

    @property
    def rate(self) -> Callable[[int], float]:
        """step -> what the base learning rate is multiplied by."""
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
            fallen=fallen(self.state),
        )
        return (lambda step: own_factor(self.task, step, whole, said)) if has_own(self.task, "schedule") else said

    @property
    def momentum(self) -> Callable[[int], float | None]:
        """step -> the momentum of every parameter group where the schedule cycles it too; None: as it is."""
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
    """The parts of a run that trains the task `given`; None: the one that the config names.

    Args:
        kept: what `Built.kept` is.
        resume: look for a checkpoint to resume from; False: a new run, whatever lies in its folder.
        steps: of the plan, in place of those that the config says; 0: as it says.
        least: steps that the plan has at least, by going on through further epochs.
        joins: this process alone makes what it is to take part with in a run that goes on already (see recovery.py).

    Raises:
        UsageError: what was asked for cannot be done; the same on every rank.
    """
    asked = config = _agreed(config, world)
    if steps:
        config = dataclasses.replace(config, max_steps=steps, stop_at=0)
    folder = RunFolder(config.save_dir, config.experiment_name)
    if resume:
        check_shared(folder, world)  # collective
    source, state = _found(folder, world) if resume and not joins else (None, _new_state())
    state |= _glimpsed(folder) if joins else {}
    config = on_device(config, state, world, notify(world))
    config = fitted(config, state, world, given is not None, notify(world))
    check_auditable(config, world)
    same_kernels = config.exact or bool(config.guards.audit)
    pin(exact=same_kernels, matmul=config.matmul_precision, device=world.device)
    check_precision(config.precision, world.device)
    cut_known = bool(config.micro_batch_size)  # else it depends on the model
    if cut_known:
        check_cut(config, world, notify(world))
    on_all_ranks(world, lambda: check(config))
    task = on_all_ranks(world, lambda: named_task(config, notify(world)) if given is None else adapted(given))
    check_auditable_loss(config, task)
    if state.get("reduction") != "micro-batch":  # which was found in one cut, and is looked for again
        recall(task, state)
    world.check_same("source", dict(task.sources))
    plain, evaluation, samples = datasets_of(task, world)  # collective
    order = on_all_ranks(world, lambda: order_of(task, samples, config.seed))
    training = TrainingSet(plain, guarded(config, plain, world), order)
    config = extended(config, state)
    model = model_of(config, task, world, state, notify(world))
    run_plan = settled(config, task, model, samples, origin_of(state, config), order.size)
    if run_plan.step_plan.steps < least:
        longer = dataclasses.replace(config, max_steps=least)
        run_plan = settled(longer, task, model, samples, origin_of(state, config), order.size)
    config = run_plan.config
    file = on_all_ranks(world, lambda: read_json(config.engine_options.config))
    # The length of the plan as it was asked for: that of an extended one, or of `steps`, contradicts nobody.
    hold(file, lambda name: lookup(asked if name == "max_steps" else config, name), world.size)
    state["origin"] = list(run_plan.origin)
    check_longer(config, state, run_plan.step_plan.steps)
    if not cut_known:
        check_cut(config, world, notify(world))
    on_all_ranks(world, lambda: checkpoint.check_keepable(model.state_dict() | _own(task)))
    check_weights(world, model)
    own_task = given is not None or kind_of(config.task) == OWN
    plan = plan_of(config, run_plan, task, model, own_task=own_task)
    world.check_same("plan", plan)
    for line in on_all_ranks(world, lambda: check_plan(folder.path, plan_before(state, plan), plan, config, asked)):
        notify(world)(line)
    stream, balancer = stream_of(config, task, training, run_plan, world, state)
    check_programs(world, task, stream.samples(min(int(state.get("global_step", 0)), run_plan.step_plan.steps - 1), 0))
    notes = check_samples(config, plain, evaluation, world)  # collective
    groups = Groups(gradients=GradientNorms(config.log_gradients, config.log_freq))
    unfrozen = begin_as_made(model, state)
    made = engine_of(config, task, model, world, groups, stream, notify(world), state)
    with explained(made, world):  # the first forward is where most runs that do not fit end
        on_all_ranks(world, lambda: check_held(made.model, groups.optimizer, unfrozen))
        held_out = batches_of(config, task, evaluation, world)
        # A resume may bring other metrics, and the checkpoint may be older than what is found in the trial.
        if not joins and (source is None or judges(config) or task.reduction == "auto"):
            trial = Trial(made, model, task, world, config, notify(world))
            check_evaluated(config, check_task(trial, stream, held_out, state))  # collective
        if config.compile and not joins:
            may_fail = is_auto(asked, "compile")
            reason = compiled_or_not(config, task, model, made, stream, world, may_fail=may_fail)  # collective
            if reason:
                notify(world)(f"--compile auto: the model cannot be compiled ({reason}); it is trained without")
                config = dataclasses.replace(config, compile=False)
                run_plan = dataclasses.replace(run_plan, config=config)
    state["compile"] = config.compile
    built = Built(
        config,
        world,
        folder,
        task,
        own_task,
        run_plan,
        model,
        made,
        stream,
        held_out,
        plan,
        source,
        state,
        [training.loaded, stream.loader, *(each.loader for each in held_out.values())],
        {} if kept is None else kept,
        left_out(model, state),
        balancer,
        groups,
        evaluation,
        training=training,
        notes=notes,
    )
    on_all_ranks(
        world, lambda: [built.rate(step) for step in (0, run_plan.step_plan.steps - 1)]
    )  # an own schedule's mistakes
    return built


def _agreed(config: Config, world: World) -> Config:
    """The config with rank 0's experiment name (a name with the time in it differs by rank); the rest must be equal."""
    name = world.gather(config.experiment_name)[0]
    config = dataclasses.replace(config, experiment_name=name)
    world.check_same("configuration", options.flat(config))
    return config


def _new_state() -> dict[str, Any]:
    return {"running_loss": 0.0, "best": None}


def _found(folder: RunFolder, world: World) -> tuple[Path | None, dict[str, Any]]:
    """The newest whole checkpoint and its state; (None, the state of a new run) without one. Collective."""
    found = checkpoint.find_resume(folder.path, world, notify(world))
    if found is None:
        return None, _new_state()
    source, state = found
    overlay(folder, state, world)  # collective
    if state.get("evaluation_due"):  # the checkpoint is older than its evaluation, if that was made
        noted = world.gather(folder.read_evaluated() if world.is_main else {})[0]  # collective
        if noted.get("step") == state["global_step"]:
            state |= {name: noted[name] for name in JUDGED if name in noted}
            del state["evaluation_due"]
    return source, state


def _glimpsed(folder: RunFolder) -> dict[str, Any]:
    """The state in the newest checkpoint, whose tensors are not read: it says where the run's plan began."""
    steps = checkpoint.list_steps(folder.path)
    return checkpoint.read_state(checkpoint.path_of(folder.path, steps[-1])) if steps else {}


def _own(task: Task) -> dict[str, Tensor]:
    """What the task's `state_dict()` names, as `task/NAME`."""
    return {f"task/{name}": tensor for name, tensor in task.state_dict().items()}


def notify(world: World) -> Callable[[str], None]:
    """Rank 0's word to the person, before the log is open. It can be sent to another process, as a task's part."""
    return partial(_tell, world.is_main and not world.quiet)


def _tell(is_main: bool, line: str) -> None:
    if is_main:
        print(said(line), file=sys.stderr, flush=True)
