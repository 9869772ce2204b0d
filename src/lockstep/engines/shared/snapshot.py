"""An optimizer and its parameters as they are at one moment, to be put back.

kept = Snapshot(optimizer, parameters)
...                                     # steps, or the half of one
kept.put_back()
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.engines.shared.state_dict import optimizers_in
from lockstep.tensors import local_of

__all__ = ["Snapshot"]


@final
class Snapshot:
    """Copies of parameters, and of all that their optimizer keeps: states, groups, numbers of its own.

    Tensors keep their identity, so whoever holds one finds its old values in it. Gradients are not kept.

    Args:
        optimizer: with those that it holds as attributes.
        parameters: as this rank has them.
        on_host: copies lie in host memory, which waits for the device.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._parameters = [(p, local_of(p), self._copy(local_of(p))) for p in parameters]
        inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer has the optimizer inside
        outer = [optimizer] if isinstance(inner, Optimizer) else []
        self._held = [self._of(each) for each in (*outer, *(o for _, o in optimizers_in(inner or optimizer)))]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything as it was."""
        for parameter, local, values in self._parameters:
            if local_of(parameter).data_ptr() != local.data_ptr():  # an optimizer gave it other memory, by `.data =`
                parameter.data = local
            local.copy_(values)
        for optimizer, own, groups, states in self._held:
            for name in vars(optimizer).keys() - own.keys() - {"state", "param_groups"}:
                delattr(optimizer, name)
            for name, kept in own.items():
                optimizer.__dict__[name] = self._thawed(kept)
            for group, settings in groups:
                for key in group.keys() - settings.keys() - {"params"}:
                    del group[key]
                group.update({key: self._thawed(kept) for key, kept in settings.items()})
            optimizer.state.clear()
            for parameter, values in states.items():
                optimizer.state[parameter] = self._thawed(values)

    def _of(self, optimizer: Optimizer) -> tuple[Optimizer, dict[str, Any], list[Any], dict[Any, Any]]:
        own = {k: self._frozen(v) for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
        groups = [
            (group, {key: self._frozen(value) for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]
        return optimizer, own, groups, {p: self._frozen(values) for p, values in optimizer.state.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to("cpu", copy=True) if self._on_host and tensor.is_cuda else tensor.clone()  # may wait

    def _frozen(self, value: Any) -> Any:
        """The value with copies of what may change in it: (value, copy)."""
        if isinstance(value, Tensor):
            return value, self._copy(local_of(value))
        if isinstance(value, list):
            return value, [self._frozen(each) for each in value]
        if isinstance(value, dict):
            return value, {key: self._frozen(each) for key, each in value.items()}
        return value, None

    def _thawed(self, frozen: Any) -> Any:
        value, copy = frozen
        if isinstance(value, Tensor):
            local_of(value).copy_(copy)
        elif isinstance(value, list):
            value[:] = [self._thawed(each) for each in copy]
        elif isinstance(value, dict):
            kept = {key: self._thawed(each) for key, each in copy.items()}
            value.clear()
            value.update(kept)
        return value
