"""What is done to a model before an engine takes it: each a function Module -> Module, applied in one visible order.

model = prepare(model, precision="bf16", compiled=True, device=world.device)
"""

import torch
from torch import nn

__all__ = ["autocast", "compiled", "parameters_in", "prepare"]

_PARAMETERS = {"float32": torch.float32, "bf16": torch.float32, "bf16-true": torch.bfloat16, "float64": torch.float64}


def prepare(model: nn.Module, *, precision: str, compile_model: bool, device: torch.device) -> nn.Module:
    """The model on its device, in its precision, compiled if asked: in this order."""
    model = parameters_in(model, _PARAMETERS[precision]).to(device)
    if precision == "bf16":
        model = autocast(model, torch.bfloat16, device.type)
    return compiled(model) if compile_model else model


def parameters_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Floating-point parameters and buffers in `dtype`."""
    return model.to(dtype)


def autocast(model: nn.Module, dtype: torch.dtype, device_type: str) -> nn.Module:
    """`forward` under autocast; parameters stay as they are. Matrix products run in `dtype`, sums in float32."""
    model.forward = torch.autocast(device_type, dtype)(model.forward)
    return model


def compiled(model: nn.Module) -> nn.Module:
    """The model compiled in place, so that parameter names stay the plain ones."""
    model.compile()
    return model
