"""The state of torch's LBFGS as tensors of a fixed shape, for checkpoints: its lists grow with its steps.

tensors = packed(optimizer)             # name -> tensor
unpack(optimizer, tensors)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS

__all__ = ["packed", "unpack"]

_NUMBERS = ("func_evals", "n_iter", "t", "H_diag", "prev_loss")
_VECTORS = ("d", "prev_flat_grad")
_HISTORIES = ("old_dirs", "old_stps", "ro")


def packed(optimizer: LBFGS) -> dict[str, Tensor]:
    """Return the state by name; zeros where there is none. Of `history_size` rows of a history `pairs` count."""
    group = optimizer.param_groups[0]
    parameters: list[Tensor] = group["params"]
    state: dict[str, Any] = optimizer.state.get(parameters[0], {})
    length = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
    like = state.get("prev_flat_grad")
    like = parameters[0].new_zeros(0, dtype=_dtype(parameters)) if like is None else like
    found = {key: torch.tensor(float(state.get(key) or 0.0), dtype=torch.float64) for key in _NUMBERS}
    found["pairs"] = torch.tensor(float(len(state.get("ro") or ())), dtype=torch.float64)
    for key in _VECTORS:
        found[key] = like.new_zeros(length) if state.get(key) is None else state[key]
    for key in _HISTORIES:
        shape = (group["history_size"], *(() if key == "ro" else (length,)))
        found[key] = like.new_zeros(shape)
        for row, value in enumerate(state.get(key) or ()):
            found[key][row] = value
    return found


def unpack(optimizer: LBFGS, tensors: Mapping[str, Tensor]) -> None:
    """Take over what `packed` gave."""
    parameters = optimizer.param_groups[0]["params"]
    state = optimizer.state[parameters[0]]
    state.clear()
    state |= {key: int(tensors[key].item()) for key in ("func_evals", "n_iter")}
    if not state["n_iter"]:
        return
    state |= {key: tensors[key].item() for key in ("t", "H_diag", "prev_loss")}
    state |= {key: tensors[key].clone() for key in _VECTORS}
    pairs = int(tensors["pairs"].item())
    state |= {key: [row.clone() for row in tensors[key][:pairs].unbind()] for key in _HISTORIES}


def _dtype(parameters: list[Tensor]) -> torch.dtype:
    """Return the dtype of all gradients in one vector."""
    dtype = torch.zeros(0, dtype=parameters[0].dtype).abs().dtype
    for parameter in parameters[1:]:
        dtype = torch.promote_types(dtype, torch.zeros(0, dtype=parameter.dtype).abs().dtype)
    return dtype
