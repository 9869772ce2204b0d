"""Form the replicas of a run, and divide its model and its sequences over the ranks of this one.

form_replicas(config, world)            # collective; world.replica, world.data_parallel
divide_model(config, task, model, world)            # --parallel.tensor, before the model is on its device
task = divide_sequences(config, task, model, world)             # --parallel.context
pipeline = cut_pipeline(config, task, model, world, batches)    # --parallel.pipeline; None without
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config.schema import Config
from lockstep.data.batches import Batches
from lockstep.distributed import replicas
from lockstep.distributed.world import World
from lockstep.engines.blocks import repeated_layers
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT
from lockstep.models.hf_context import attend_over_ranks
from lockstep.models.hf_plan import tensor_plan
from lockstep.parallel.context import ContextGroup, divide_dropout
from lockstep.parallel.context_task import divide_task, whole_task
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.stages import StageIndex, check_pipeline, cut_stage
from lockstep.parallel.tensor import Plan, cut
from lockstep.passes import split_loss
from lockstep.task import Task, has_own, has_step_loss, inner_task, user_task
from lockstep.tasks.language_model import LanguageModel
from lockstep.training.start.defaults import batchnorm_names
from lockstep.training.trial.loss_check import call_method, load_first

__all__ = [
    "cut_pipeline",
    "divide_model",
    "divide_sequences",
    "form_replicas",
    "make_pipeline",
    "plan_of",
]


def form_replicas(config: Config, world: World) -> None:
    """Divide the ranks into replicas by the configuration, once for each world. Collective.

    Raises:
        ConfigError: the ranks cannot be divided so, or were divided otherwise.
    """
    parallel = config.parallel
    size = parallel.size
    formed = (world.part("tp").size, world.part("cp").size, world.part("pp").size)
    if formed == (parallel.tensor, parallel.context, parallel.pipeline):
        return
    if world.size % size:
        ranks = f"{world.size} rank{'s' * (world.size > 1)}"
        raise ConfigError(f"{parallel.flags}: the run has {ranks}; start it on a multiple of {size}")
    if world.replica.size > 1:
        raise ConfigError(f"{parallel.flags}: this world has replicas of {world.replica.size} ranks; use that degree")
    replicas.form_replicas(world, **parallel.degrees)  # collective


def divide_model(config: Config, task: Task, model: nn.Module, world: World) -> None:
    """Keep this rank's part of a model that is the same on every rank. Changes the model.

    Raises:
        ConfigError: the task has no plan for it, or something that does not work with a divided model.
    """
    parallel = config.parallel
    if parallel.size == 1:
        return
    if world.replica.size != parallel.size:
        raise ConfigError(f"{parallel.flags}: this command does not divide models yet; leave the flag out")
    _check_task(task, parallel.flags)
    # The stages of a pipeline are found in whole layers.
    if parallel.pipeline == 1:
        _divide_layers(config, task, model, world)


def _divide_layers(config: Config, task: Task, model: nn.Module, world: World) -> None:
    """Keep this rank's part of each layer; all of it without --parallel.tensor. Changes the model."""
    if config.parallel.tensor > 1:
        mesh = world.part("tp").mesh
        assert mesh is not None
        cut(model, mesh, plan_of(config, task, model), exact=config.exact)


def divide_sequences(config: Config, task: Task, model: nn.Module, world: World) -> Task:
    """Return the task with its batches divided over the context ranks of this replica. Changes the model.

    Raises:
        ConfigError: the task does not say how, or has something that does not work with a part of a sequence.
    """
    degree = config.parallel.context
    if degree == 1:
        return task
    flag = f"--parallel.context {degree}"
    if not has_own(task, "sequence"):
        raise ConfigError(
            f"{flag}: the task {type(user_task(task)).__name__} does not say what its sequences are; define "
            "sequence(batch) (docs/parallel.md), or leave the flag out"
        )
    if has_step_loss(task) or task.reduction != "sum":
        raise ConfigError(
            f'{flag}: the task\'s loss must be a sum over positions, which its ranks add up; set `reduction = "sum"`'
        )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ConfigError(f"{flag}: {name} is a BatchNorm, which would see a part of each sequence; use LayerNorm")
    if config.parallel.tensor > 1 and (name := _find_dropout(model)):
        # Each of the two draws for the whole of what it divides, and not for that of the other.
        raise ConfigError(
            f"{config.parallel.flags}: '{name}' has dropout, which works with one of them alone yet; set it to 0, or "
            "leave one out"
        )
    language_model: Any = inner_task(task)
    if isinstance(language_model, LanguageModel):
        language_model.fit_chunks(2 * degree, flag)
    divide_dropout(model)
    # The mark of a model of transformers, which need not be installed.
    if hasattr(getattr(model, "config", None), "get_text_config"):
        attend_over_ranks(model, degree)
    mesh = world.part("cp").mesh
    assert mesh is not None
    return divide_task(task, ContextGroup(mesh, exact=True))


def _find_dropout(model: nn.Module) -> str:
    """Return the name of a module that drops something in training; "" for none."""
    for name, module in model.named_modules():
        for attribute in ("p", "dropout", "attention_dropout"):
            value = getattr(module, attribute, 0.0)
            if isinstance(value, float) and value > 0.0:
                return name or type(module).__name__
    return ""


def cut_pipeline(config: Config, task: Task, model: nn.Module, world: World, batches: Batches) -> Pipeline | None:
    """Keep this rank's stage of a model that is the same on every rank. Changes the model.

    With --parallel.tensor, this rank's part of each layer of the stage.

    Args:
        model: on its device, in training mode; its optimizer is made afterwards.
        batches: one of their micro-batches shows how the task's loss calls the blocks.

    Returns:
        None without --parallel.pipeline.

    Raises:
        ConfigError: the task or its model cannot be cut so.
    """
    if config.parallel.pipeline == 1:
        return None
    micro_batches = batches.step_plan.micro_batches // world.data_parallel.size
    return make_pipeline(config, task, model, world, micro_batches, lambda: load_first(batches).data)


def make_pipeline(
    config: Config, task: Task, model: nn.Module, world: World, micro_batches: int, load: Callable[[], Any]
) -> Pipeline:
    """Cut a model as `cut_pipeline` does, without the batches of a run.

    Args:
        micro_batches: of a step, in one replica.
        load: returns one of them.

    Raises:
        ConfigError: as `cut_pipeline`.
    """
    degree = config.parallel.pipeline
    stages = world.part("pp")
    check_pipeline(degree, micro_batches, task, hooks=task.hooks is not None)
    if names := batchnorm_names(model):
        raise ConfigError(
            f"--parallel.pipeline {degree}: {names[0]} is a BatchNorm, whose running statistics each stage would keep "
            "for itself; use another norm"
        )
    task_blocks = task.blocks(model)
    blocks = repeated_layers(model) if task_blocks is None else list(task_blocks)
    whole = whole_task(task)
    loss = lambda held, data: split_loss(whole.loss(held, data))[0]  # noqa: E731
    divide = lambda: _divide_layers(config, whole, model, world)  # noqa: E731
    index = StageIndex(stages.rank, stages.size)
    stage = call_method("loss", lambda data: cut_stage(model, blocks, loss, data, index, divide=divide), load())
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


def _check_task(task: Task, flags: str) -> None:
    """Refuse methods of a task that would see a part of the parameters."""
    for method, is_used in (("penalty", has_own(task, "penalty")), ("own_steps", task.own_steps is not None)):
        # Their results are computed from parameters of which each rank has a part.
        if is_used:
            raise ConfigError(f"{flags}: the task's `{method}` does not work with it yet; leave one out")
