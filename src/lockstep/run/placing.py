"""What of a run depends on the ranks that take part: the engine, the training stream.

groups = Groups()
made = engine_of(config, task, model, world, groups, say)
stream = stream_of(config, task, dataset, run_plan, world)

Both are made anew where the ranks change in mid-run, around the same model, optimizer and data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.config.config import Config
from lockstep.config.shares import counts_of
from lockstep.data.batches import Batches, Loading
from lockstep.data.order import Begun, Shuffled
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.make import engine
from lockstep.run.own_optimizer import optimizer_of
from lockstep.run.plan import RunPlan
from lockstep.run.sharing import shares_of
from lockstep.task import Task

__all__ = ["Groups", "engine_of", "stream_of"]


@dataclass
class Groups:
    """The optimizer that an engine was made with, and the base rates of its groups."""

    optimizer: Optimizer | None = None
    rates: list[float] = field(default_factory=list)

    def begun(self, optimizer: Optimizer) -> Optimizer:
        """Takes a new optimizer, whose rates are the base ones."""
        self.optimizer, self.rates = optimizer, [float(group["lr"]) for group in optimizer.param_groups]
        return optimizer

    def again(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer for another engine, which takes the rates that it finds as the base ones."""
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        return optimizer


def engine_of(
    config: Config, task: Task, model: nn.Module, world: World, groups: Groups, say: Callable[[str], None]
) -> Engine:
    """The engine around the model. Where `groups` has an optimizer already, that is kept, with its states."""

    def make(held: nn.Module) -> Optimizer:
        if groups.optimizer is not None:
            return groups.again(groups.optimizer)
        return groups.begun(optimizer_of(config, task, held))

    return engine(
        config.engine,
        model,
        make,
        world,
        clip=config.optim.clip,
        exact_micro_batches=config.micro_batches if config.exact else 0,
        shares=counts_of(config.shares),
        loss_scaling=config.precision == "fp16" and config.fp16,
        blocks=task.blocks(model) or (),
        options=config.engine_options,
        say=say,
        ema=config.optim.ema,
    )


def stream_of(config: Config, task: Task, dataset: Any, run_plan: RunPlan, world: World) -> Batches:
    """The training stream, as this rank sees it."""
    order = task.order(len(dataset), config.seed) or Shuffled(len(dataset), config.seed)
    if run_plan.samples < len(dataset):
        order = Begun(order, len(dataset), run_plan.samples)
    loading = Loading(config.data.workers, config.data.prefetch, config.guards.retries)
    shares = shares_of(config)
    return Batches(task, dataset, order, run_plan.step_plan, world, seed=config.seed, loading=loading, shares=shares)
