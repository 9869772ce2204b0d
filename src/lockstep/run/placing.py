"""The engine of a run, which is made anew where the ranks change: around the same model and optimizer.

groups = Groups()
made = engine_of(config, task, model, world, groups, stream, say, state)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.config.config import Config
from lockstep.data.batches import Batches
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.engines.make import engine
from lockstep.engines.shared.gradient_norms import NO_NORMS, GradientNorms
from lockstep.engines.shared.remade import Changes, TrainedSet
from lockstep.errors import ConfigError
from lockstep.run.adapters import left_out
from lockstep.run.own_optimizer import optimizer_of
from lockstep.run.trained import known_set
from lockstep.task import Task, has_own

__all__ = ["Groups", "engine_of"]

_OF_THE_BASE = (
    "it is of the adapters' base, which their checkpoints leave out; name it with --lora.modules-to-save from the "
    "start, or train on from the merged model (lockstep export --format hf --merge)"
)


@dataclass
class Groups:
    """The optimizer that an engine was made with, the base rates of its groups, and what takes norms of gradients."""

    optimizer: Optimizer | None = None
    rates: list[float] = field(default_factory=list)
    gradients: GradientNorms = NO_NORMS

    def begun(self, optimizer: Optimizer) -> Optimizer:
        """Takes a new optimizer, whose rates are the base ones."""
        self.optimizer, self.rates = optimizer, [float(group["lr"]) for group in optimizer.param_groups]
        return optimizer

    def again(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer for another engine, which takes the rates that it finds as the base ones."""
        self.rates += [float(group["lr"]) for group in optimizer.param_groups[len(self.rates) :]]
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        return optimizer

    def renewed(self, optimizer: Optimizer) -> None:
        """Takes another optimizer over the same model, with the states of the one before."""
        before = self.optimizer
        self.begun(optimizer)
        if before is not None:
            optimizer.state.update(before.state)


def check_own_steps(config: Config) -> None:
    """Raises ConfigError for what cannot be where a task takes its optimizers' steps itself: they are taken already
    when the whole step is known, and each has gradients of its own."""
    for asked, flag, out in (
        (config.optim.clip, "--optim.clip", "clip in the task's own steps, as by clip_gradients, and set it to 0"),
        (config.optim.ema, "--optim.ema", "average the weights in the loop of lockstep.Run"),
        (config.guards.nonfinite == "skip", "--guards.nonfinite skip", "use stop or rollback"),
        (config.guards.spike == "skip", "--guards.spike skip", "use warn or rollback"),
    ):
        if asked:
            raise ConfigError(f"{flag} does not go with a task that takes its optimizers' steps itself: {out}")


def engine_of(
    config: Config,
    task: Task,
    model: nn.Module,
    world: World,
    groups: Groups,
    stream: Batches,
    say: Callable[[str], None],
    state: dict[str, Any],
) -> Engine:
    """The engine around the model. Where `groups` has an optimizer already, that is kept, with its states.

    Args:
        state: the run's; what is trained is noted there where it changes.
    """

    if task.own_steps:
        check_own_steps(config)

    def make(held: nn.Module) -> Optimizer:
        if groups.optimizer is not None:
            return groups.again(groups.optimizer)
        return groups.begun(optimizer_of(config, task, held))

    def again(held: nn.Module, before: Optimizer) -> Optimizer:
        trained = {id(p) for p in held.parameters() if p.requires_grad}
        if has_own(task, "optimizer") and trained <= {id(p) for group in before.param_groups for p in group["params"]}:
            groups.rates += [float(group["lr"]) for group in before.param_groups[len(groups.rates) :]]
            return before
        return groups.begun(optimizer_of(config, task, held))

    def changed(trained: TrainedSet) -> None:
        state["trained"] = trained._asdict()

    fixed = {name.removeprefix("model/"): _OF_THE_BASE for name in left_out(model, state)}
    return engine(
        config.engine,
        model,
        make,
        world,
        clip=config.optim.clip,
        exact_micro_batches=config.micro_batches if config.exact else 0,
        shares=stream.sharing if config.shares != "equal" and world.size > 1 else None,
        loss_scaling=config.precision == "fp16" and config.fp16,
        blocks=task.blocks(model) or (),
        options=config.engine_options,
        say=say,
        ema=config.optim.ema,
        hooks=task.hooks,
        own_steps=task.own_steps,
        gradients=groups.gradients,
        penalty=task.penalty if has_own(task, "penalty") else None,
        own=task.state_dict if has_own(task, "state_dict") else None,
        changes=Changes(again, fixed, known_set(state), int(state.get("global_step", 0)), changed),
    )
