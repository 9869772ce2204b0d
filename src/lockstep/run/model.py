"""The model of a run, before an engine takes it: made, given adapters where these are asked for, frozen, transformed.

model = model_of(config, task, world, state, say)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.config.config import Config
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.make import model_init
from lockstep.engines.shared.blocks import find_blocks
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT
from lockstep.optim.groups import freeze
from lockstep.optim.optimizers import rules_of
from lockstep.run.adapters import adapt, injected
from lockstep.seeds import derive
from lockstep.task import Task
from lockstep.transforms import Chosen, prepare

__all__ = ["model_of"]

Say = Callable[[str], None]


def model_of(
    config: Config, task: Task, world: World, state: dict[str, Any], say: Say, planned: bool = False
) -> nn.Module:
    """The model, its weights drawn under a seed of their own, and so the same on every rank of any world.

    Args:
        state: of the checkpoint whose weights it is to take; of adapters it says for which base, see `adapt`. What
            the coming ones are to say of the model is put in.
        say: takes a line for the person.
        planned: its weights are of no account, see `lockstep.diagnose.plan`: none is read.
    """
    torch.manual_seed(derive(config.seed, "model"))
    where, moves = model_init(config.engine, world, config.engine_options)

    def make() -> nn.Module:
        with where:
            made: nn.Module = task.model()
        return made

    model = on_all_ranks(world, make)
    if isinstance(model, GPT):
        state["gpt"] = dataclasses.asdict(model.config)  # the shapes of its tensors do not say how many heads it has
    _check_residual(config, model)
    has_base = injected(config, task, model) if planned else adapt(config, task, model, world, state, say)
    base = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)] if has_base else []
    frozen = on_all_ranks(world, lambda: freeze(model, rules_of(config)))
    if frozen:
        more = f" and {len(frozen) - 1} more parameters" if len(frozen) > 1 else ""
        say(f"frozen by --optim.groups: {frozen[0]}{more}")
    named = task.blocks(model)
    return prepare(
        model,
        precision=config.precision,
        compile_model=config.compile,
        device=world.device,
        move=moves,
        chosen=Chosen(
            *(config.batchnorm, config.attention, config.activation_checkpointing, config.compile_scope, config.exact),
            masked=task.attention_mask,
        ),
        blocks=find_blocks(model).modules if named is None else list(named),
        named=named is not None,
        as_made=base,
        say=say,
    )


def _check_residual(config: Config, model: nn.Module) -> None:
    """Has the built-in GPT keep its residual stream as --residual-dtype says; ConfigError for any other model."""
    if config.residual_dtype == "float32":
        return
    if not isinstance(model, GPT) or config.precision != "bf16":
        raise ConfigError(
            f"--residual-dtype {config.residual_dtype} is of the built-in GPT with --precision bf16, and this is "
            f"{type(model).__name__} with {config.precision}; leave it out"
        )
    model.residual = torch.bfloat16
