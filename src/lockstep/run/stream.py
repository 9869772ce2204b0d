"""The training stream of a run: which samples stand where, who computes them, and in how many processes they load.

batches, balancer = stream_of(config, task, TrainingSet(plain, loaded, order), run_plan, world, state)
"""

from typing import Any, NamedTuple

from lockstep.config.config import Config
from lockstep.config.shares import AUTO
from lockstep.data.batches import Batches, Loading
from lockstep.data.order import Begun
from lockstep.data.sampler import SizedOrder
from lockstep.data.works import Works
from lockstep.distributed.balance import Balancer
from lockstep.distributed.world import World, on_all_ranks
from lockstep.run.plan import RunPlan
from lockstep.run.sharing import balancer_of, sharing_of
from lockstep.task import Order, Task

__all__ = ["TrainingSet", "stream_of"]


class TrainingSet(NamedTuple):
    """The training set: as the task made it, as it is loaded, and its order."""

    plain: Any
    loaded: Any
    order: SizedOrder


def stream_of(
    config: Config, task: Task, training: TrainingSet, run_plan: RunPlan, world: World, state: dict[str, Any]
) -> tuple[Batches, Balancer | None]:
    """Make the training stream, and what balances it."""
    plain, dataset, whole = training
    order: Order = Begun(whole, whole.size, run_plan.samples) if run_plan.samples < whole.size else whole
    works = Works(task, plain, order, run_plan.step_plan)
    told = config.shares == AUTO and on_all_ranks(world, works.known)  # collective
    balancer = balancer_of(config, world, works if told else None, state)
    loading = Loading(config.data.workers, config.data.prefetch, config.guards.retries)
    sharing = sharing_of(config, balancer)
    made = Batches(task, dataset, order, run_plan.step_plan, world, seed=config.seed, loading=loading, sharing=sharing)
    return made, balancer
