"""Attention of models of `transformers` whose sequences are divided over ranks.

attend_over_ranks(model, 2)         # before its first forward
"""

from typing import Any

from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.models.hf import is_full, transformers_for
from lockstep.parallel.context import attention, is_divided

__all__ = ["attend_over_ranks"]


_NAME = "lockstep_context"
# What an architecture may pass to its attention that changes the weights.
_CHANGES = ("softcap", "s_aux", "sliding_window", "position_bias")


def attend_over_ranks(model: Any, degree: int) -> None:
    """Let a causal language model attend by `parallel.context.attention`. Changes the model.

    Raises:
        ConfigError: its attention cannot be replaced, or some layers attend to a part of the tokens before.
    """
    flag = f"--parallel.context {degree}: {type(model).__name__}"
    transformers = transformers_for("--parallel.context", str(degree))
    # The registry of functions, by name, that the architectures look theirs up in.
    transformers.AttentionInterface.register(_NAME, _attend)
    text = model.config.get_text_config()
    if not is_full(text):
        raise ConfigError(f"{flag} has layers that do not attend to all tokens before; use --engine fsdp")
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{flag} has attention of its own that lockstep cannot replace; use --engine fsdp")
    model.set_attn_implementation(_NAME)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as `transformers` calls it: [batch, heads, time, size] -> [batch, time, heads, size]."""
    if not is_divided():
        whole = transformers_for("--parallel.context", "").AttentionInterface()["sdpa"]
        mixed, _ = whole(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
        return mixed, None
    changes = [name for name in _CHANGES if options.get(name) is not None]
    if attention_mask is not None or changes or not getattr(module, "is_causal", True):
        reason = ", ".join(changes) or "a mask"
        raise ConfigError(f"--parallel.context: {type(module).__name__} attends with {reason}, which is not supported")
    mixed = attention(query, key, value, dropout=dropout, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None
