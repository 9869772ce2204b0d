"""The model of a run, before an engine takes it: made, given adapters where these are asked for, frozen, transformed.

model = model_of(config, task, world, state, say)
"""

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.config.config import Config
from lockstep.distributed.world import World, on_all_ranks
from lockstep.engines.base import NOTHING
from lockstep.engines.make import check_copies, model_init, name_of
from lockstep.engines.shared.blocks import find_blocks
from lockstep.errors import ConfigError
from lockstep.models.gpt import GPT
from lockstep.optim.groups import freeze
from lockstep.optim.optimizers import rules_of
from lockstep.run.adapters import adapt, injected
from lockstep.run.ready_made import align, watch_new_modules
from lockstep.seeds import derive
from lockstep.task import Task
from lockstep.transforms import Chosen, prepare

__all__ = ["model_of"]

Say = Callable[[str], None]


def model_of(
    config: Config, task: Task, world: World, state: dict[str, Any], say: Say, planned: bool = False
) -> nn.Module:
    """The model, its weights drawn under a seed of their own, and so the same on every rank of any world. Collective.

    Those of a model that was made before the run are rank 0's.

    Args:
        state: of the checkpoint whose weights it is to take; of adapters it says for which base, see `adapt`. What
            the coming ones are to say of the model is put in.
        say: takes a line for the person.
        planned: its weights are of no account, see `lockstep.diagnose.plan`: none is read.
    """
    if config.weight_copies == "step":
        _check_copies(config, task, world)
    torch.manual_seed(derive(config.seed, "model"))
    where, moves = model_init(config.engine, world, config.engine_options)

    def make() -> nn.Module:
        with where:
            made: nn.Module = task.model()
        if where is NOTHING and not planned:
            check_valued(made)
        return made

    with watch_new_modules() as new:
        model = on_all_ranks(world, make)
    check_initialised(model)
    differed = 0 if planned else align(model, new, world)  # collective
    if differed and "global_step" not in state:
        more = f"{differed} tensors differ" if differed > 1 else "a tensor differs"
        say(f"the model was made before the run and {more} between the ranks: all begin with rank 0's values")
    if isinstance(model, GPT):
        state["gpt"] = dataclasses.asdict(model.config)  # the shapes of its tensors do not say how many heads it has
    _check_residual(config, model)
    _fuse(config, model, world.device, planned)
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
            weight_copies=config.weight_copies,
            grad_dtype=config.grad_dtype,
        ),
        blocks=find_blocks(model).modules if named is None else list(named),
        named=named is not None,
        as_made=base,
        say=say,
    )


def check_initialised(model: nn.Module) -> None:
    """Raises ConfigError for a lazy module whose shapes no forward has settled yet."""
    lazy = next((name for name, p in [*model.named_parameters(), *model.named_buffers()] if is_lazy(p)), None)
    if lazy is not None:
        raise ConfigError(
            f"the task's `model` returned a lazy module, whose {lazy} has no shape yet: make one forward in `model()`, "
            "such as made(torch.zeros(1, 8)), and return it then"
        )


def check_valued(model: nn.Module) -> None:
    """Refuse a parameter or buffer on the meta device, which has a shape and no values.

    Raises:
        ConfigError: names the first one.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    name = next((name for name, tensor in named if tensor.is_meta), None)
    if name is not None:
        raise ConfigError(
            f"the task's `model` returned '{name}' on the meta device, without values: make it on a real device, or "
            "call model.to_empty(device='cpu') and draw or load every value in `model()`"
        )


def _check_copies(config: Config, task: Task, world: World) -> None:
    """Raises ConfigError where --weight-copies step does not go with the precision, the engine or the task."""
    if config.precision != "bf16":
        raise ConfigError(f"--weight-copies step needs --precision bf16, and it is {config.precision}: leave it out")
    check_copies(
        name_of(config.engine, world),
        narrow=config.grad_dtype == "bf16",
        exact=config.exact,
        hooked=task.hooks is not None,
        own_steps=task.own_steps is not None,
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


def _fuse(config: Config, model: nn.Module, device: torch.device, planned: bool) -> None:
    """Replace layers of the built-in GPT as --fused-kernels says.

    Args:
        planned: the model is only traced, on any device.

    Raises:
        ConfigError: another model, adapters, or a device without Triton.
    """
    wanted = f"--fused-kernels {config.fused_kernels}"
    if config.fused_kernels == "none":
        return
    if not isinstance(model, GPT):
        raise ConfigError(f"{wanted} is of the built-in GPT, and this is {type(model).__name__}; leave it out")
    if config.lora.rank:
        raise ConfigError(f"{wanted} does not go with --lora.rank, whose adapters wrap the same layers; drop one")
    if not planned and device.type != "cpu" and (device.type != "cuda" or not find_spec("triton")):
        missing = "has no such kernels" if device.type != "cuda" else "needs the package triton (pip install triton)"
        raise ConfigError(f"{wanted}: {device.type} {missing}; leave it out")
    model.fuse(epilogue=config.fused_kernels == "all")
