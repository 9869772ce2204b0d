"""Which kernel computes `scaled_dot_product_attention`, and why not another.

model = attention(model, "flash", model.blocks)
line = described(model, "auto", torch.bfloat16, device)
# "attention: flash (12 heads of 64, bfloat16, causal, no mask); not cudnn: ..."
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.errors import ConfigError

__all__ = ["attention", "described"]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {int(backend.value): name for name, backend in _BACKENDS.items()}


def attention(model: nn.Module, choice: str, blocks: Sequence[nn.Module] = ()) -> nn.Module:
    """The model whose attention is computed by one kernel alone, changed in place; "auto" leaves it to torch.

    Args:
        blocks: those that may be computed again in the backward, outside the model's own forward.
    """
    if choice == "auto":
        return model
    for module in dict.fromkeys((*blocks, model)):
        module.forward = _within(module.forward, _BACKENDS[choice])
    return model


def _within(forward: Callable[..., Any], backend: SDPBackend) -> Callable[..., Any]:
    def chosen(*inputs: Any, **named: Any) -> Any:
        with sdpa_kernel(backend):
            return forward(*inputs, **named)

    return chosen


class Shape(NamedTuple):
    """Attention heads of a layer, the size of one, and the dropout of the weights."""

    heads: int
    size: int
    dropout: float


def described(
    model: nn.Module, choice: str, dtype: torch.dtype, device: torch.device, *, masked: bool = False
) -> str | None:
    """One line: the kernel that will run and, for each other, why it does not. None for a model without heads.

    It is asked for causal attention, as language models in training have it.

    Args:
        choice: "auto" or the name of a kernel.
        dtype: in which attention is computed.
        masked: attention stays inside documents that are packed, which is said by a mask.

    Raises:
        ConfigError: the kernel that was chosen cannot run this.
    """
    shape = heads_of(model)
    if shape is None:
        return None
    query = torch.zeros(1, shape.heads, 16, shape.size, dtype=dtype, device=device, requires_grad=True)
    mask = torch.ones(16, 16, dtype=torch.bool, device=device).tril().expand(1, 1, 16, 16) if masked else None
    reasons = {name: _refusal(name, query, mask, shape.dropout) for name in _BACKENDS if name != "math"}
    if reasons.get(choice):
        fits = ", ".join(name for name in (*reasons, "math") if not reasons.get(name))
        raise ConfigError(f"--attention {choice} cannot run here: {reasons[choice]}; use auto, or one of {fits}")
    with nullcontext() if choice == "auto" else sdpa_kernel(_BACKENDS[choice]):
        runs = _NAMES.get(torch._fused_sdp_choice(query, query, query, mask, shape.dropout, not masked), "math")
    what = f"{shape.heads} heads of {shape.size}, {str(dtype).removeprefix('torch.')}, causal, "
    what += "a mask for each document" if masked else "no mask"
    others = [
        f"not {name}: {reasons.get(name) or ('another is faster' if choice == 'auto' else f'--attention {choice}')}"
        for name in _BACKENDS
        if name != runs
    ]
    return f"attention: {runs} ({what}); {'; '.join(others)}"


def heads_of(model: nn.Module) -> Shape | None:
    """The heads of the model's attention, from its configuration or its layers; None where neither tells."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            return Shape(module.num_heads, module.head_dim, module.dropout)
        config = getattr(module, "config", None)
        heads = _number(config, "heads", "num_attention_heads")
        width = _number(config, "width", "hidden_size")
        size = _number(config, "head_dim") or width // (heads or 1)
        if heads and size:
            return Shape(int(heads), int(size), _number(config, "dropout", "attention_dropout", "attn_pdrop"))
    return None


def _number(config: Any, *names: str) -> float:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int | float) and not isinstance(value, bool)), 0)


def _refusal(name: str, query: Tensor, mask: Tensor | None, dropout: float) -> str:
    """Why the kernel cannot compute attention over `query`; "" where it can."""
    if query.device.type == "cpu":
        if name != "flash":
            return "it has no CPU kernel"
        return "its CPU kernel has no dropout" if dropout else ""
    can = getattr(torch.backends.cuda, f"can_use_{name}_attention")
    params = torch.backends.cuda.SDPAParams(query, query, query, mask, dropout, mask is None, False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if can(params, debug=True):
            return ""
    told = " ".join(str(said[-1].message).split()) if said else "this GPU's architecture or torch's build has it not"
    return told.split(" (Triggered")[0].rstrip(".")
