"""Make the training batches of a run, which follow the number of its ranks.

batches, balancer = build_batches(config, task, training, run_plan, world, state)
"""

from typing import Any

from lockstep.config.fields import AUTO
from lockstep.config.schema import Config
from lockstep.data.batches import Batches, EpochStarts, Loading, MicroBatchCosts
from lockstep.data.groups import FirstGroups, GroupBatches, GroupOrder
from lockstep.data.loader import blame, generators_kept, seed_everything
from lockstep.data.shard_order import place_order
from lockstep.data.stream_batches import StreamBatches
from lockstep.data.streams import lanes_of
from lockstep.distributed.agreement import on_all_ranks
from lockstep.distributed.balance import Balancer
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.run_state import RunState
from lockstep.seeds import derive
from lockstep.task import Task, has_own
from lockstep.training.start.sharing import balancer_of, sharing_of
from lockstep.training.state.parts import TrainingSet
from lockstep.training.state.plan import RunPlan

__all__ = [
    "build_batches",
]


def build_batches(
    config: Config, task: Task, training: TrainingSet, run_plan: RunPlan, world: World, state: RunState
) -> tuple[Batches, Balancer | None]:
    """Make the training batches, and the balancer of `--shares auto`. Collective."""
    dataset, retry_dataset, full_order = training
    loading = Loading(config.data.workers, config.data.prefetch, config.guards.retries)
    if isinstance(full_order, GroupOrder):
        balancer = balancer_of(config, world, None, state)
        groups = FirstGroups(full_order, run_plan.samples)
        options: dict[str, Any] = {"seed": config.seed, "loading": loading, "sharing": sharing_of(config, balancer)}
        grouped = GroupBatches(task, retry_dataset, groups, run_plan.step_plan, world, **options)
        grouped.epoch_starts = _epoch_starts(config, task, dataset, run_plan)
        return grouped, balancer
    if full_order is None:
        if has_own(task, "start_epoch") and not task.framework:
            raise ConfigError(
                "the task has `start_epoch`, but its training set is a stream: give that a method set_epoch(epoch)"
            )
        balancer = balancer_of(config, world, None, state)
        step_plan = run_plan.step_plan
        sizes = (run_plan.step_plan.micro_batches, run_plan.step_plan.micro_size)
        lanes = lanes_of(retry_dataset.source, *sizes, config.seed, run_plan.min_samples)
        position = (state.global_step, state.stream) if state.stream else None
        options = {"loading": loading, "sharing": sharing_of(config, balancer), "place": position}
        return StreamBatches(task, retry_dataset, lanes, step_plan, world, **options), balancer
    order = place_order(full_order, run_plan.geometry, run_plan.samples)
    costs = MicroBatchCosts(task, dataset, order, run_plan.step_plan)
    costs_known = config.shares == AUTO and on_all_ranks(world, costs.is_estimated)  # collective
    balancer = balancer_of(config, world, costs if costs_known else None, state)
    sharing = sharing_of(config, balancer)
    batches = Batches(
        task, retry_dataset, order, run_plan.step_plan, world, seed=config.seed, loading=loading, sharing=sharing
    )
    batches.epoch_starts = _epoch_starts(config, task, dataset, run_plan)
    return batches, balancer


def _epoch_starts(config: Config, task: Task, dataset: Any, run_plan: RunPlan) -> EpochStarts | None:
    """Return how epochs of a training set with an index begin; None without `start_epoch`."""
    if not has_own(task, "start_epoch"):
        return None
    length = len(dataset)

    def call(epoch: int) -> None:
        with generators_kept():
            seed_everything(derive(config.seed, "epoch", epoch))
            try:
                task.start_epoch(dataset, epoch)
            except Exception as error:
                # A framework's hook is the user's own code: its error stays as it is.
                if task.framework or isinstance(error, LockstepError):
                    raise
                raise blame("start_epoch", error, f"epoch {epoch + 1}") from error
        if len(dataset) != length:
            raise DataError(
                f"the training set has {len(dataset):,} samples since the start of epoch {epoch + 1}, and had "
                f"{length:,} before: keep its length"
            )

    return EpochStarts(call, run_plan.samples)
