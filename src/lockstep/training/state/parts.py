"""Hold the parts of a run, as training/start/build.py makes them.

    built.tensors()                     # what a checkpoint stores
    built.load_state_dict(tensors)
    notify(world)("a line for the user")

The ranks of a run may change: then `recovery.regroup` replaces its engine, batches and groups of ranks.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.checkpoint import Saver
from lockstep.checkpoint.read import EVALUATED
from lockstep.checkpoint.remote import RemoteRun
from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.data.batches import Batches
from lockstep.data.sampler import SizedOrder
from lockstep.distributed.balance import Balancer
from lockstep.distributed.exchange import StepExchange
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.modes import evaluation_weights, has_modes, switch
from lockstep.errors import UsageError, name_settings
from lockstep.optim.schedule import NONE, cycled_momentum, factor
from lockstep.parallel.pipeline import Pipeline
from lockstep.run_state import Position, RunState
from lockstep.task import Task, has_own
from lockstep.training.state.optimizer_groups import OptimizerGroups, schedule_factor, schedule_momentum, set_groups
from lockstep.training.state.plan import RunPlan
from lockstep.training.state.run_dir import RunFolder
from lockstep.training.state.selection import out_of_patience, plateau_drops

__all__ = [
    "LockFacts",
    "RunParts",
    "RunSetup",
    "TrainingSet",
    "notify",
    "task_tensors",
]


class TrainingSet(NamedTuple):
    """The training set, and the order of its samples.

    Attributes:
        dataset: as the task made it.
        retry_dataset: the same with retries and skips, to load from.
        order: of the samples; None for a stream, which has its own.
    """

    dataset: Any
    retry_dataset: Any
    order: SizedOrder | None

    @property
    def plan(self) -> dict[str, Any]:
        """The settings of a stream that a resume must not change."""
        if self.order is None:
            return {"stream_parts": self.retry_dataset.source.plan}
        return {}


class LockFacts(NamedTuple):
    """Facts that the ranks exchange when rank 0 has locked the folder.

    Attributes:
        devices: by rank, `name_and_memory` of its device.
        skipped_steps: that rank 0 read from the folder.
    """

    devices: list[Any]
    skipped_steps: list[int]


_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class RunSetup:
    """Results of a build that a change of ranks does not affect.

    Attributes:
        own_task: the task is the user's own, not a built-in one that the configuration names.
        plan: the settings that a resume must not change.
        source: the checkpoint to resume from; None for a new run.
        remote: the run's folder in an object store, if --save-dir is a URL.
        base_names: names of the tensors that a checkpoint of adapters leaves out (see `lockstep.models.lora`).
        training: the training set. If the ranks change, engine and batches are rebuilt from it.
        evaluation_sets: the evaluation datasets by name.
        notes: lines for the log, written once it is open.
        places: [host, device] by rank.
    """

    folder: RunFolder
    own_task: bool
    plan: dict[str, Any]
    source: Path | None
    remote: RemoteRun | None
    base_names: frozenset[str]
    training: TrainingSet
    evaluation_sets: dict[str, Any]
    notes: list[str]
    places: list[list[str]]


@dataclass
class RunParts:
    """The parts of a run, as `build` makes them; a change of ranks replaces those that depend on them.

    Attributes:
        setup: what stays until the next build.
        model: the module that `engine` wraps.
        groups: the optimizer and its groups.
        user_objects: the caller's own objects with tensors to store in checkpoints, by name.
        world, engine: of the current ranks.
        batches: the training batches.
        evaluation: the evaluation batches of each set, by name.
        balancer: assigns micro-batches to ranks, with --shares auto.
        exchange, saver: of the current ranks; None before the first step, and between two groups.
        state: everything in a checkpoint except tensors.
        lock_facts: what the ranks exchanged with the lock, until the first steps use it.
        init_source: the checkpoint of --init-from, and whether it was verified; None: not found yet, or not lockstep's.
        pipeline: of which this rank's model is one stage; None: it is the whole model.
    """

    setup: RunSetup
    config: Config
    task: Task
    run_plan: RunPlan
    model: nn.Module
    groups: OptimizerGroups
    user_objects: dict[str, Any]
    world: World
    engine: Engine
    batches: Batches
    evaluation: dict[str, Batches]
    balancer: Balancer | None
    state: RunState
    exchange: StepExchange | None = None
    saver: Saver | None = None
    lock_facts: LockFacts | None = None
    init_source: tuple[Path, bool] | None = None
    pipeline: Pipeline | None = None

    def is_elsewhere(self, name: str) -> bool:
        """Whether another stage of the pipeline has a tensor of a checkpoint, and this one has not."""
        group, _, key = name.partition("/")
        if self.pipeline is None or group == "task":
            return False
        elsewhere = self.pipeline.stage.elsewhere
        if group.startswith("kept."):
            # An average over this stage's parameters has their names; another object may have all on every stage.
            return key in elsewhere and name not in self.object_tensors(group.removeprefix("kept."))
        # A parameter or buffer, or `PARAMETER/KEY` of an optimizer's state.
        return key in elsewhere or key.rpartition("/")[0] in elsewhere

    def keep(self, name: str, user_object: Any) -> None:
        """Store the caller's own object in the checkpoints.

        Raises:
            UsageError: the name or the object cannot be stored.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(f"run.keep('{name}', ...): use letters, digits, '-' and '_' in the name")
        if not (hasattr(user_object, "state_dict") and hasattr(user_object, "load_state_dict")):
            raise UsageError(
                f"run.keep('{name}', ...): {type(user_object).__name__} needs state_dict() and load_state_dict()"
            )
        state = user_object.state_dict()
        bad_key = None
        for key, value in state.items():
            if not isinstance(value, Tensor):
                bad_key = key
                break
        if bad_key is not None:
            raise UsageError(f"run.keep('{name}', ...): '{bad_key}' in its state_dict() is not a tensor; make it one")
        self.user_objects[name] = user_object
        checkpoint.check_storable(self.object_tensors(name))

    def object_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the caller's object `name`, as `kept.NAME/KEY`."""
        state = {}
        for key, tensor in self.user_objects[name].state_dict().items():
            state[f"kept.{name}/{key}"] = tensor
        return state

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores.

        These are the engine's state without the adapters' base, and the tensors of task and caller. The task's are the
        same on every rank, and not copies: a resume fills them in place, then passes them to `task.load_state_dict`.
        """
        tensors = {}
        for name, tensor in self.all_tensors().items():
            if name not in self.setup.base_names:
                tensors[name] = tensor
        return tensors | self._copy_evaluation_weights()

    def _copy_evaluation_weights(self) -> dict[str, Tensor]:
        """Return copies of the optimizer's weights for evaluation, if it has others for training."""
        optimizer = self.groups.optimizer
        if optimizer is None or not has_modes(optimizer):
            return {}
        members = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                members.add(id(parameter))
        with evaluation_weights(optimizer):
            state = {}
            for name, parameter in self.model.named_parameters():
                if id(parameter) in members:
                    state[EVALUATED + name] = parameter.detach().clone()
            return state

    @property
    def switched(self) -> Optimizer | None:
        """The optimizer whose weights for evaluation an evaluation uses."""
        if self.task.switches_modes:
            return self.groups.optimizer
        return None

    def end_training(self) -> None:
        """Leave the model with its weights for evaluation. Collective under zero.

        A training script with such an optimizer ends so too.
        """
        if not self.task.framework:
            switch(self.groups.optimizer, training=False)

    def all_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of `tensors()` and those of the adapters' base."""
        return self.engine.state_dict() | self.own_tensors

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """The task's own tensors, as `task/KEY`, and the caller's, as `kept.NAME/KEY`."""
        tensors = task_tensors(self.task)
        for name in self.user_objects:
            tensors |= self.object_tensors(name)
        return tensors

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors that `tensors()` returned and a checkpoint filled."""
        owners = {"task": self.task} | {f"kept.{name}": value for name, value in self.user_objects.items()}
        engine = {}
        object_states = dict[str, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            group, _, key = name.partition("/")
            # Weights for evaluation follow from the others.
            if name.startswith(EVALUATED):
                continue
            if group in owners:
                object_states.setdefault(group, {})[key] = tensor
            else:
                engine[name] = tensor
        if engine:
            # The tensors of the adapters' base are loaded already.
            if self.setup.base_names:
                engine |= {
                    name: tensor for name, tensor in self.engine.state_dict().items() if name in self.setup.base_names
                }
            self.engine.load_state_dict(engine)
        for group, state in object_states.items():
            owners[group].load_state_dict(state)

    @property
    def loaders(self) -> list[Any]:
        """Datasets and loaders that count retries and skips (guards/samples.py); the training set's is first."""
        evaluation = [batches.loader for batches in self.evaluation.values()]
        return [self.setup.training.retry_dataset, self.batches.loader, *evaluation]

    @property
    def arguments(self) -> dict[str, Any]:
        """The configuration by dotted name, as logs and files show it."""
        return cli.flatten(self.config, own_task=self.setup.own_task)

    @property
    def lr(self) -> float:
        """Base learning rate of the optimizer's first group."""
        return self.groups.settings.base_rates[0]

    @property
    def rate(self) -> float:
        """Learning rate of the optimizer's first group in the last step."""
        return self.groups.settings.rate

    @property
    def hook_state(self) -> dict[str, Any]:
        """The hooks' own part of the run's state, made if missing."""
        if self.state.hooks is None:
            self.state.hooks = {}
        return self.state.hooks

    def store_groups(self) -> None:
        """Store the changed settings of the optimizer's groups in the run's state."""
        sets_rates = self.task.live_rates is not None or self.task.own_steps is not None
        changes = self.groups.settings.changes(rates=sets_rates)
        self.state.groups = changes if any(changes) else None

    def restore_groups(self) -> None:
        """Set learning rates and groups from the run's state, after the tensors are loaded."""
        if live := self.task.live_rates:
            live.replay((self.state.hooks or {}).get("watched", []), self.start)
        self.groups.settings.load(self.state.groups)

    def check_rates(self) -> None:
        """Try what sets rates and groups, in the first and the last step.

        Raises:
            ConfigError, DataError: it failed, or gave something else than a rate.
        """
        last_step = self.run_plan.step_plan.steps - 1
        if live := self.task.live_rates:
            live.check(last_step + 1)
        for step in (0, last_step):
            self.lr_factor(step)
            if has_own(self.task, "set_groups") and self.groups.optimizer is not None:
                copies = [dict(group) for group in self.groups.optimizer.param_groups]
                set_groups(self.task, copies, step, last_step + 1)

    @property
    def start(self) -> int:
        """Number of steps trained before this start."""
        return self.state.global_step

    def place(self, done: int) -> Position:
        """Return the run's position after `done` steps."""
        return self.batches.place(self.run_plan.place(done))

    @property
    def epochs(self) -> Callable[[int], float]:
        """Number of steps -> passes over the training data.

        The part of the current pass is included if it is known.
        """
        step_plan = self.run_plan.step_plan
        samples = self.run_plan.samples

        def of_stream(done: int) -> float:
            position = self.place(done)
            return (position.epoch or 0) + (position.epoch_progress or 0.0)

        return (lambda done: step_plan.start(done) / samples) if samples else of_stream

    @property
    def last_step(self) -> int:
        """Number of steps after which this start of the run ends."""
        steps = self.run_plan.step_plan.steps
        return min(steps, self.config.stop_at or steps)

    @property
    def is_over(self) -> bool:
        """Whether the run has no steps left to train, and no evaluation missing."""
        ends = self.start >= self.last_step or out_of_patience(self.config, self.state.selection)
        return ends and not self.state.evaluation_due

    @property
    def lr_factor(self) -> Callable[[int], float | None]:
        """The schedule: step -> factor of the base learning rate.

        None: lockstep does not set the groups' learning rates.
        """
        if self.task.live_rates is not None:
            return lambda step: None
        optim = self.config.optim
        steps = self.run_plan.step_plan.steps
        horizon = (optim.schedule == "cosine-periodic" and optim.period) or steps
        # A lambda, because another branch replaces the function.
        configured: Callable[[int], float | None] = lambda step: factor(  # noqa: E731
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
        if optim.schedule == NONE:
            # The optimizer's groups keep their learning rates.
            configured = lambda step: None  # noqa: E731
        if not has_own(self.task, "schedule"):
            return configured
        return lambda step: schedule_factor(self.task, step, steps, configured)

    @property
    def momentum(self) -> Callable[[int], float | None]:
        """The momentum's schedule: step -> momentum of every group; None leaves it unchanged.

        Only a one-cycle schedule changes it.
        """
        optim = self.config.optim
        steps = self.run_plan.step_plan.steps
        if optim.schedule != "one-cycle" or self.task.live_rates is not None:
            return lambda step: None
        # A lambda, as in `lr_factor`.
        configured = lambda step: cycled_momentum(step, steps, optim.warmup_steps)  # noqa: E731
        if not has_own(self.task, "schedule"):
            return configured
        return lambda step: schedule_momentum(self.task, step, steps, configured)


def task_tensors(task: Task) -> dict[str, Tensor]:
    """Return the tensors of the task's `state_dict()` as `task/KEY`."""
    return {f"task/{name}": tensor for name, tensor in task.state_dict().items()}


def notify(world: World) -> Callable[[str], None]:
    """Return a function that prints a line to stderr on rank 0.

    It can be pickled, so that a task may use it in another process.
    """
    return partial(_print_line, world.is_main and not world.quiet)


def _print_line(is_main: bool, line: str) -> None:
    if is_main:
        print(name_settings(line), file=sys.stderr, flush=True)
