"""Prepare a model for an engine, one technique after another.

model = prepare(model, precision="bf16", compile_model=True, device=world.device, blocks=task.blocks(model))

Each technique is a function Module -> Module; `prepare` shows their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.transforms.attention import attention, describe, facts_of, order_of
from lockstep.transforms.batchnorm import recorders, recording, synchronise
from lockstep.transforms.determinism import check_graphs, list_autotuning, pin_compiler
from lockstep.transforms.precision import (
    AUTOCAST,
    PARAMETERS,
    autocast,
    check_policy,
    checkpoint_blocks,
    compile_blocks,
    parameters_in,
)
from lockstep.transforms.weight_copies import WeightCopies

__all__ = [
    "Transforms",
    "attention",
    "autocast",
    "checkpoint_blocks",
    "compile_blocks",
    "describe",
    "parameters_in",
    "prepare",
    "recorders",
    "recording",
    "synchronise",
]


@dataclass(frozen=True, slots=True)
class Transforms:
    """The techniques to apply, by the names of their flags; see `lockstep train --help-all`."""

    batchnorm: str = "replay"
    attention: str = "auto"
    activation_checkpointing: str = "none"
    compile_scope: str = "auto"
    exact: bool = False
    # Attention gets a mask; None: unknown.
    masked: bool | None = None
    weight_copies: str = "forward"
    grad_dtype: str = "float32"


# PLR0913: one argument for each decision of the caller.
def prepare(  # noqa: PLR0913
    model: nn.Module,
    *,
    precision: str,
    compile_model: bool,
    device: torch.device,
    move: bool = True,
    chosen: Transforms | None = None,
    blocks: Sequence[nn.Module] = (),
    from_task: bool = True,
    float32_outputs: bool = False,
    keep_dtype: Sequence[Tensor] = (),
    say: Callable[[str], None] = lambda line: None,
    note: Callable[[str], None] | None = None,
) -> nn.Module:
    """Transform the model in place, in the order below.

    Args:
        model: to be transformed.
        precision: a value of --precision.
        compile_model: whether to compile.
        device: that the model is for.
        move: move it to `device`; False leaves it where it is.
        chosen: the techniques; None: the defaults.
        blocks: the model's repeated blocks, in order; () if unknown.
        from_task: the task itself named the blocks. Blocks that were only detected are not compiled one by one.
        float32_outputs: under autocast, convert the model's outputs to float32.
        keep_dtype: tensors of the model that keep their dtype in any `precision`.
        say: reports a line to the user.
        note: takes the line on attention's kernel; None: `say`.

    Raises:
        ConfigError: this model or device does not support a technique.
    """
    chosen = chosen or Transforms()
    _check(chosen, blocks)
    if compile_model:
        check_graphs()
    if chosen.exact and compile_model:
        _check_compiler()
        pin_compiler()
    # Replace the layers first: autocast and compilation wrap the forwards.
    if chosen.batchnorm == "replay":
        model = recording(model, say)
    elif chosen.batchnorm == "sync":
        model = synchronise(model, say)
    dtype = PARAMETERS[precision]
    order = order_of(facts_of(device), masked=chosen.masked)
    line = describe(model, chosen.attention, AUTOCAST.get(precision, dtype), device, order, masked=chosen.masked)
    if line:
        (note or say)(line)
    model = attention(model, chosen.attention, blocks, order)
    model = checkpoint_blocks(model, chosen.activation_checkpointing, blocks)
    model = parameters_in(model, dtype, keep_dtype=keep_dtype, mixes=precision in AUTOCAST, say=say)
    if move:
        model = model.to(device)
    if chosen.weight_copies == "step":
        WeightCopies.of(model, AUTOCAST[precision], narrow=chosen.grad_dtype == "bf16", say=say)
    if precision in AUTOCAST:
        model = autocast(model, AUTOCAST[precision], device.type, float32_outputs=float32_outputs)
    if compile_model:
        model = compile_blocks(model, _to_compile(chosen.compile_scope, blocks, from_task))
    return model


def _check(chosen: Transforms, blocks: Sequence[nn.Module]) -> None:
    if chosen.exact and chosen.batchnorm != "replay":
        raise ConfigError(
            f"--exact cannot run with --batchnorm {chosen.batchnorm}, which depends on the world size; use replay"
        )
    if chosen.attention == "cudnn" and (chosen.exact or torch.are_deterministic_algorithms_enabled()):
        raise ConfigError(
            "--attention cudnn cannot run with --exact or --guards.audit: torch refuses cuDNN's attention in "
            "deterministic mode; use auto"
        )
    twice = check_policy(chosen.activation_checkpointing) and chosen.batchnorm == "local"
    # Private to torch: the base of all BatchNorm layers.
    norms = nn.modules.batchnorm._BatchNorm
    if twice and any(isinstance(module, norms) for block in blocks for module in block.modules()):
        raise ConfigError(
            "--activation-checkpointing with --batchnorm local would count each micro-batch twice in the running "
            "statistics; use --batchnorm auto"
        )


def _check_compiler() -> None:
    """Raise ConfigError if the compiler is set to choose kernels by speed.

    The choice varies from run to run.
    """
    variables = list_autotuning()
    if variables:
        raise ConfigError(
            f"--exact with --compile cannot run with {variables[0]}=1, which picks kernels by speed; unset it"
        )


def _to_compile(scope: str, blocks: Sequence[nn.Module], from_task: bool) -> Sequence[nn.Module]:
    """Return the blocks to compile one by one; () for the whole model."""
    if scope == "blocks" and not blocks:
        raise ConfigError(
            "--compile-scope blocks: the model's blocks are unknown; return them from the task's blocks(model), or "
            "use --compile-scope whole"
        )
    if scope == "whole" or (scope == "auto" and not from_task):
        return ()
    return blocks
