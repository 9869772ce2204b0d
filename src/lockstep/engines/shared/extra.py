"""What a module adds to its state by `get_extra_state`, where that is a tensor.

set_extra(model, state)     each such module gets its tensor of the restored state
"""

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["set_extra"]


def set_extra(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Hands each module with an extra state the tensor `model/NAME._extra_state` of `state`.

    To copy into what `get_extra_state` returned is not enough: that may have been made for the call.
    """
    for name, module in model.named_modules():
        found = state.get(f"model/{name}._extra_state" if name else "model/_extra_state")
        if found is not None:
            module.set_extra_state(found)
