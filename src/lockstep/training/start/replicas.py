"""Form the replicas of a run, and divide its model over the ranks of this one: --parallel.tensor.

form_replicas(config, world)            # collective; world.replica, world.data_parallel
divide_model(config, task, model, world)
"""

from torch import nn

from lockstep.config.schema import Config
from lockstep.distributed import replicas
from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT
from lockstep.models.hf_plan import tensor_plan
from lockstep.parallel.tensor import Plan, cut
from lockstep.task import Task, has_own, user_task

__all__ = [
    "divide_model",
    "form_replicas",
    "plan_of",
]


def form_replicas(config: Config, world: World) -> None:
    """Divide the ranks into replicas by the configuration, once for each world. Collective.

    Raises:
        ConfigError: the ranks cannot be divided so, or were divided otherwise.
    """
    degree = config.parallel.tensor
    if world.replica.size == degree:
        return
    if world.size % degree:
        ranks = f"{world.size} rank{'s' * (world.size > 1)}"
        raise ConfigError(f"--parallel.tensor {degree}: the run has {ranks}; start it on a multiple of {degree}")
    if world.replica.size > 1:
        raise ConfigError(
            f"--parallel.tensor {degree}: this world has replicas of {world.replica.size} ranks; use that degree"
        )
    replicas.form_replicas(world, tensor=degree)  # collective


def divide_model(config: Config, task: Task, model: nn.Module, world: World) -> None:
    """Keep this rank's part of a model that is the same on every rank. Changes the model.

    Raises:
        ConfigError: the task has no plan for it, or something that does not work with a divided model.
    """
    degree = config.parallel.tensor
    if degree == 1:
        return
    if world.replica.size != degree:
        raise ConfigError(f"--parallel.tensor {degree}: this command does not divide models yet; leave the flag out")
    _check_task(task, degree)
    mesh = world.replica.mesh
    assert mesh is not None
    cut(model, mesh, plan_of(config, task, model), exact=config.exact)


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
