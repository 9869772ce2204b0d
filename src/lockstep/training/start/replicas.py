"""Form the replicas of a run, and divide its model over the ranks of this one: --parallel.tensor, --parallel.pipeline.

form_replicas(config, world)            # collective; world.replica, world.data_parallel
divide_model(config, task, model, world)            # each layer, before the model is on its device
pipeline = cut_pipeline(config, task, model, world, batches)    # into stages, afterwards; None: not divided so
"""

import dataclasses

from torch import nn

from lockstep.config.schema import Config
from lockstep.data.batches import Batches
from lockstep.distributed import replicas
from lockstep.distributed.world import World
from lockstep.engines.blocks import repeated_layers
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT
from lockstep.models.hf_plan import tensor_plan
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.stages import StageIndex, check_pipeline, cut_stage
from lockstep.parallel.tensor import Plan, cut
from lockstep.passes import split_loss
from lockstep.task import Task, has_own, user_task
from lockstep.training.start.defaults import batchnorm_names
from lockstep.training.trial.loss_check import call_method, load_first

__all__ = [
    "cut_pipeline",
    "divide_model",
    "form_replicas",
    "plan_of",
]


def form_replicas(config: Config, world: World) -> None:
    """Divide the ranks into replicas by the configuration, once for each world. Collective.

    Raises:
        ConfigError: the ranks cannot be divided so, or were divided otherwise.
    """
    parallel = config.parallel
    if _degrees(world) == (parallel.tensor, parallel.pipeline):
        return
    flags = _flags(config)
    if world.size % parallel.replica:
        ranks = f"{world.size} rank{'s' * (world.size > 1)}"
        raise ConfigError(f"{flags}: the run has {ranks}; start it on a multiple of {parallel.replica}")
    if world.replica.size > 1:
        raise ConfigError(f"{flags}: this world has replicas of {world.replica.size} ranks; use the same degrees")
    replicas.form_replicas(world, tensor=parallel.tensor, pipeline=parallel.pipeline)  # collective


def _degrees(world: World) -> tuple[int, int]:
    return world.part("tp").size, world.part("pp").size


def _flags(config: Config) -> str:
    """Return the flags of the degrees of 2 or more, for messages."""
    degrees = dataclasses.asdict(config.parallel)
    return ", ".join(f"--parallel.{name} {degrees[name]}" for name in ("tensor", "pipeline") if degrees[name] > 1)


def divide_model(config: Config, task: Task, model: nn.Module, world: World) -> None:
    """Keep this rank's part of a model that is the same on every rank. Changes the model.

    Raises:
        ConfigError: the task has no plan for it, or something that does not work with a divided model.
    """
    degree = config.parallel.tensor
    if degree == 1:
        return
    tensor = world.part("tp")
    if tensor.size != degree:
        raise ConfigError(f"--parallel.tensor {degree}: this command does not divide models yet; leave the flag out")
    _check_task(task, degree)
    mesh = tensor.mesh
    assert mesh is not None
    cut(model, mesh, plan_of(config, task, model), exact=config.exact)


def cut_pipeline(config: Config, task: Task, model: nn.Module, world: World, batches: Batches) -> Pipeline | None:
    """Keep this rank's stage of a model that is the same on every rank. Changes the model.

    Args:
        model: on its device, in training mode; its optimizer is made afterwards.
        batches: one of their micro-batches shows how the task's loss calls the blocks.

    Returns:
        None without --parallel.pipeline.

    Raises:
        ConfigError: the task or its model cannot be cut so.
    """
    degree = config.parallel.pipeline
    if degree == 1:
        return None
    stages = world.part("pp")
    micro_batches = batches.step_plan.micro_batches // world.data_parallel.size
    check_pipeline(degree, micro_batches, task, hooks=task.hooks is not None)
    if names := batchnorm_names(model):
        raise ConfigError(
            f"{_flags(config)}: {names[0]} is a BatchNorm, whose running statistics each stage would keep for itself; "
            "use another norm"
        )
    task_blocks = task.blocks(model)
    blocks = repeated_layers(model) if task_blocks is None else list(task_blocks)
    loss = lambda held, data: split_loss(task.loss(held, data))[0]  # noqa: E731
    index = StageIndex(stages.rank, stages.size)
    batch = load_first(batches).data
    stage = call_method("loss", lambda data: cut_stage(model, blocks, loss, data, index), batch)
    return Pipeline(stage, stages)


def plan_of(config: Config, task: Task, model: nn.Module) -> Plan:
    """Return how the model's layers are divided: by the task, else as its architecture says."""
    degree = config.parallel.tensor
    plan = task.parallelize(model)
    if plan is not None:
        return plan
    if isinstance(model, GPT):
        return model.tensor_plan(degree, vocabulary=config.parallel.vocabulary)
    # The mark of a model of transformers, which need not be installed.
    if hasattr(getattr(model, "config", None), "base_model_tp_plan"):
        return tensor_plan(model, degree, vocabulary=config.parallel.vocabulary)
    raise ConfigError(
        f"--parallel.tensor {degree}: the task {type(user_task(task)).__name__} does not say how its model is divided; "
        "define parallelize(model) (docs/parallel.md), or leave the flag out"
    )


def _check_task(task: Task, degree: int) -> None:
    """Refuse methods of a task that would see a part of the parameters."""
    for method, is_used in (("penalty", has_own(task, "penalty")), ("own_steps", task.own_steps is not None)):
        # Their results are computed from parameters of which each rank has a part.
        if is_used:
            raise ConfigError(
                f"--parallel.tensor {degree}: the task's `{method}` does not work with it yet; leave one out"
            )
