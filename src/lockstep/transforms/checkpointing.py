"""Activation checkpointing: a block's inner results are computed again in the backward instead of being kept.

    model = checkpointed(model, "every:2", model.blocks)

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. Random numbers are those of the first
pass, so results have the same bits as without.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lockstep.errors import ConfigError

__all__ = ["check_policy", "checkpointed"]

_ATEN = torch.ops.aten
# Outputs that `selective` keeps: products, which cost most to compute again for the memory that they take.
_KEPT = [
    operator.default
    for operator in (
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_cudnn_attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
    )
]


def check_policy(policy: str) -> int:
    """N: each N-th block is computed again; 0 for "none". Raises ConfigError for what is no policy."""
    plain = {"none": 0, "full": 1, "selective": 1}
    if policy in plain:
        return plain[policy]
    kind, _, number = policy.partition(":")
    if kind != "every" or not number.isascii() or not number.isdigit() or not int(number):
        raise ConfigError(
            f"--activation-checkpointing is '{policy}': choose one of none, full, selective, or every:N as in every:2"
        )
    return int(number)


def checkpointed(model: nn.Module, policy: str, blocks: Sequence[nn.Module]) -> nn.Module:
    """The model whose `blocks` are computed again in the backward, changed in place; names stay as they are.

    Args:
        policy: "none"; "full": each block; "every:N": the N-th, 2N-th, ...; "selective": each, but the outputs of
            matrix products and attention are kept.
        blocks: the repeated blocks, in order.

    Raises:
        ConfigError: no such policy, or no blocks to apply it to.
    """
    every = check_policy(policy)
    if not every:
        return model
    if len(blocks) < every:
        raise ConfigError(
            f"--activation-checkpointing {policy}: the model has {len(blocks)} known blocks, so nothing would be "
            "computed again; return its repeated blocks from the task's blocks(model), or leave it out"
        )
    again = _again_but_products if policy == "selective" else _again
    for block in blocks[every - 1 :: every]:
        block.forward = again(block.forward)
    return model


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True, **named)

    return recomputed


def _again_but_products(forward: Callable[..., Any]) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, _KEPT)

    def recomputed(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True, context_fn=contexts, **named)

    return recomputed
