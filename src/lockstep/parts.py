"""From a Config to the parts of a run, every rank alike.

    parts = assemble(config, task, world)

Nothing is written into the run's folder here.
"""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import checkpoint, options
from lockstep.config import Config
from lockstep.data.batches import Batches, Loading
from lockstep.data.fetch import check_dataset
from lockstep.data.order import Sequential
from lockstep.engines import Engine, birth, engine
from lockstep.engines.blocks import find_blocks
from lockstep.engines.deepspeed_config import check_batches
from lockstep.engines.exact import check_servable
from lockstep.errors import DataError, ResumeError
from lockstep.evaluate import one_step
from lockstep.folder import RunFolder
from lockstep.guards.loader import Guarded
from lockstep.guards.start import check_programs, check_weights
from lockstep.optim import adamw
from lockstep.plan import Horizon, differences, origin_of, plan_of
from lockstep.precision import check_precision, pin
from lockstep.schedule import factor
from lockstep.seeds import derive
from lockstep.sinks.remote import check
from lockstep.task import Task, adapted
from lockstep.task_check import check_task
from lockstep.tasks.named import named_task
from lockstep.transforms import Chosen, prepare
from lockstep.world import World, together

__all__ = ["Parts", "assemble", "say"]


@dataclass
class Parts:
    """What a run is made of.

    Attributes:
        horizon: the plan's steps.
        model: the plain module that `engine` holds.
        batches, evaluation: the training stream and the evaluation set (None where the task has none).
        plan: what a resume must find unchanged.
        source: the checkpoint to resume from, if there is one, and `state`, what it said besides tensors.
        loading: what counts retries and skips of the loading (see guards/loader.py).
    """

    config: Config
    world: World
    folder: RunFolder
    task: Task
    horizon: Horizon
    model: nn.Module
    engine: Engine
    batches: Batches
    evaluation: Batches | None
    plan: dict[str, Any]
    source: Path | None
    state: dict[str, Any]
    loading: list[Any]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the engine's state, and as `task/NAME` what the task's `state_dict()` names.

        The task's tensors are the same on every rank, and not copies: a resume fills them in place and then calls its
        `load_state_dict` with them.
        """
        return self.engine.state() | self.own

    @property
    def own(self) -> dict[str, Tensor]:
        """The task's own tensors, as `task/NAME`."""
        return _own(self.task)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what `tensors` gave and a checkpoint filled."""
        own = {name.removeprefix("task/"): tensor for name, tensor in tensors.items() if name.startswith("task/")}
        self.engine.restore({name: tensor for name, tensor in tensors.items() if not name.startswith("task/")})
        if own:
            self.task.load_state_dict(own)

    @property
    def start(self) -> int:
        """Steps that were taken before."""
        return int(self.state.get("global_step", 0))

    @property
    def last(self) -> int:
        """Steps after which this start of the run ends."""
        whole = self.horizon.cut.steps
        return min(whole, self.config.stop_at or whole)

    @property
    def rate(self) -> Callable[[int], float]:
        """step -> what the base learning rate is multiplied by."""
        optim = self.config.optim
        horizon = (optim.schedule == "cosine-periodic" and optim.period) or self.horizon.cut.steps
        return partial(factor, horizon=horizon, warmup=optim.warmup_steps, floor=optim.floor, shape=optim.schedule)


def assemble(config: Config, given: Any, world: World) -> Parts:
    """The parts of a run that trains the task `given`; None: the one that the config names.

    Raises:
        UsageError: what was asked for cannot be done; the same on every rank.
    """
    config = _agreed(config, world)
    pin(exact=config.exact, matmul=config.matmul_precision, device=world.device)
    if config.micro_batches < world.size:
        say(world)(_idle(config, world.size))
    check_precision(config.precision, world.device)
    if config.exact:
        check_servable(config.micro_batches, world.size)
    check_batches(
        config.engine_options.config,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        ranks=world.size,
    )
    together(world, lambda: check(config))
    folder = RunFolder(config.save_dir, config.experiment_name)
    task = together(world, lambda: named_task(config, say(world)) if given is None else adapted(given))
    world.check_same("source", dict(task.sources))
    training, evaluation = together(world, lambda: _datasets(task))
    training = _guarded(config, training, world)
    samples = together(world, lambda: _size(training))
    source, state = _found(folder, world)
    horizon = Horizon(samples, config, origin_of(state, config))
    state["origin"] = list(horizon.origin)
    model = _model(config, task, world)
    together(world, lambda: checkpoint.check_keepable(model.state_dict() | _own(task)))
    check_weights(world, model)
    plan = plan_of(config, horizon, task, model)
    world.check_same("plan", plan)
    together(world, lambda: _check_plan(folder, state.get("plan"), plan, config, world))
    stream = _training(config, task, training, horizon, world)
    check_programs(world, task, stream.samples(min(int(state.get("global_step", 0)), horizon.cut.steps - 1), 0))
    made = _engine(config, task, model, world)
    held_out = _evaluation(config, task, evaluation, world)
    if source is None:
        check_task(made.model, task, stream, held_out, world)  # collective
    return Parts(
        config,
        world,
        folder,
        task,
        horizon,
        model,
        made,
        stream,
        held_out,
        plan,
        source,
        state,
        [training, stream.loader],
    )


def _agreed(config: Config, world: World) -> Config:
    """The config with rank 0's experiment name (a name with the time in it differs by rank); the rest must be equal."""
    name = world.gather(config.experiment_name)[0]
    config = dataclasses.replace(config, experiment_name=name)
    world.check_same("configuration", options.flat(config))
    return config


def _idle(config: Config, ranks: int) -> str:
    """Said where a step has fewer micro-batches than ranks: most often a batch per device was meant."""
    batch, micro, held = config.batch_size, config.micro_batch_size, config.micro_batches
    return (
        f"--batch-size {batch} is the whole step's, over all ranks: {held} micro-batch{'es' * (held > 1)} of {micro} "
        f"for {ranks} ranks leave{'s' * (held == 1)} {ranks - held} of them without work; for {batch} on each device: "
        f"--batch-size {batch * ranks} --micro-batch-size {batch}"
    )


def _size(dataset: Any) -> int:
    if not len(dataset):
        raise DataError("the training set is empty: the task's dataset('train') has no samples")
    return len(dataset)


def _found(folder: RunFolder, world: World) -> tuple[Path | None, dict[str, Any]]:
    """The newest whole checkpoint and its state; (None, the state of a new run) without one. Collective."""
    return checkpoint.find_resume(folder.path, world, say(world)) or (None, {"running_loss": 0.0, "best": None})


def _own(task: Task) -> dict[str, Tensor]:
    """What the task's `state_dict()` names, as `task/NAME`."""
    return {f"task/{name}": tensor for name, tensor in task.state_dict().items()}


def _check_plan(
    folder: RunFolder, before: dict[str, Any] | None, now: dict[str, Any], config: Config, world: World
) -> None:
    changes = differences(before, now) if before else []
    if changes and not config.resume_anyway:
        raise ResumeError(
            f"{folder.path} was started with another plan: {', '.join(changes)}; use another --experiment-name, or "
            "--resume-anyway to go on with the change"
        )
    for change in changes:
        say(world)(f"resuming although the plan differs: {change}")


def _model(config: Config, task: Task, world: World) -> nn.Module:
    """The model, its weights drawn under a seed of their own, and so the same on every rank of any world."""
    torch.manual_seed(derive(config.seed, "model"))
    where, moves = birth(config.engine, world, config.engine_options)

    def make() -> nn.Module:
        with where:
            made: nn.Module = task.model()
        return made

    model = together(world, make)
    named = task.blocks(model)
    return prepare(
        model,
        precision=config.precision,
        compile_model=config.compile,
        device=world.device,
        move=moves,
        chosen=Chosen(
            config.batchnorm, config.attention, config.activation_checkpointing, config.compile_scope, config.exact
        ),
        blocks=find_blocks(model).modules if named is None else list(named),
        named=named is not None,
        say=say(world),
    )


def _datasets(task: Task) -> tuple[Any, Any]:
    """The training set, and the evaluation set or None."""
    training, evaluation = task.dataset("train"), task.dataset("evaluation")
    check_dataset(training, "train")
    if evaluation is not None:
        check_dataset(evaluation, "evaluation")
    return training, evaluation


def _guarded(config: Config, dataset: Any, world: World) -> Any:
    guards = config.guards
    return Guarded(dataset, retries=guards.retries, skips=guards.bad_samples, rank=world.rank)


def _engine(config: Config, task: Task, model: nn.Module, world: World) -> Engine:
    optim = config.optim
    make = partial(
        adamw,
        lr=config.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        decay_embeddings=optim.decay_embeddings,
        fused=False if config.exact else None,
    )
    exact = config.micro_batches if config.exact else 0
    return engine(
        config.engine,
        model,
        make,
        world,
        clip=optim.clip,
        exact_micro_batches=exact,
        loss_scaling=config.precision == "fp16",
        blocks=task.blocks(model) or (),
        options=config.engine_options,
        say=say(world),
    )


def _training(config: Config, task: Task, dataset: Any, horizon: Horizon, world: World) -> Batches:
    order = task.order(len(dataset), config.seed)
    loading = Loading(config.data.workers, config.data.prefetch, config.guards.retries)
    return Batches(task, dataset, order, horizon.cut, world, seed=config.seed, loading=loading)


def _evaluation(config: Config, task: Task, dataset: Any, world: World) -> Batches | None:
    if dataset is None or not len(dataset):
        return None
    cut = one_step(len(dataset), config.micro_batch_size)
    return Batches(task, dataset, Sequential(len(dataset)), cut, world, seed=config.seed)


def say(world: World) -> Callable[[str], None]:
    """Rank 0's word to the person, before the log is open."""
    return lambda line: print(line, file=sys.stderr, flush=True) if world.is_main else None
