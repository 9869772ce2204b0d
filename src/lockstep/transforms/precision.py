"""In which dtype parameters lie and products are computed, and what is compiled."""

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["AUTOCAST", "PARAMETERS", "autocast", "compiled", "parameters_in"]

# --precision -> dtype of the parameters; dtype of autocast
PARAMETERS = {
    "float32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
    "bf16-true": torch.bfloat16,
    "float64": torch.float64,
}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parameters_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Floating-point parameters and buffers in `dtype`."""
    return model.to(dtype)


def autocast(model: nn.Module, dtype: torch.dtype, device_type: str) -> nn.Module:
    """`forward` under autocast; parameters stay as they are. Matrix products run in `dtype`, sums in float32."""
    model.forward = torch.autocast(device_type, dtype)(model.forward)
    return model


def compiled(model: nn.Module, blocks: Sequence[nn.Module] = ()) -> nn.Module:
    """Each of the `blocks` compiled, or the whole model where there are none; in place, so that names stay plain.

    Blocks of one class share their compiled code, so that a deep model starts as fast as a shallow one.
    """
    for module in blocks or [model]:
        module.compile()
    return model
