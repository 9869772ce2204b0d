"""Take the 2-norms of a step's gradient by layer or parameter group: `--log-gradients`.

norms = GradientNorms("layers", 10)     # every tenth step
norms.begin(step)                       # the engine's `OptimizerStep` takes them if they are due
norms.found                             # by name
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engines.blocks import repeated_layers

__all__ = [
    "NO_NORMS",
    "GradientNorms",
]


_OTHER = "other"  # parameters of the optimizer that are neither in the model nor in a group


class GradientNorms:
    """2-norms of a step's gradient by layer or parameter group, when logging is due.

    Args:
        by: "layers", "groups" or "off".
        every: steps between two records.

    Attributes:
        due: whether the current step takes them.
        found: norms of the current step by name, 0-dim; {} if not due.
    """

    def __init__(self, by: str, every: int) -> None:
        self.by = by
        self._every = every
        self.due = False
        self.found: dict[str, Tensor] = {}
        self._names: Callable[[], dict[Tensor, str]] = dict

    def look_at(self, model: nn.Module, blocks: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """Set the source of names, read in each step that is due.

        Groups and shards may change between steps.

        Args:
            model: the plain module, with the parameters that the engine steps.
            blocks: its repeated blocks; if empty, they are searched for.
            optimizer: as its maker created it.
        """
        if self.by == "layers":
            self._names = lambda: _by_layer(model, blocks or repeated_layers(model))
        elif self.by == "groups":
            self._names = lambda: _by_group(optimizer)

    def begin(self, step: int) -> None:
        """Begin a step; decide whether its norms are due."""
        self.due = self.by != "off" and (step + 1) % self._every == 0
        self.found = {}

    def take(self, parameters: Iterable[Tensor], norms: list[Tensor], scale: float | Tensor) -> None:
        """Combine the norms of the parameters' gradients by name. Does not wait for the device.

        Args:
            parameters: those with a gradient.
            norms: of each of these gradients, over all ranks.
            scale: the factor that the gradients were multiplied by.
        """
        names = self._names()
        norms_by_name: dict[str, list[Tensor]] = {name: [] for name in names.values()}
        for parameter, norm in zip(parameters, norms, strict=True):
            norms_by_name.setdefault(names.get(parameter, _OTHER), []).append(norm)
        zero = norms[0].new_zeros(()) if norms else torch.zeros(())
        self.found = {
            name: (torch.linalg.vector_norm(torch.stack(values)) / scale if values else zero)
            for name, values in norms_by_name.items()
        }


NO_NORMS = GradientNorms("off", 1)


def _by_layer(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Map each trained parameter to the path of its block, else of its top-level module."""
    inside = set(blocks)
    paths = sorted((path for path, module in model.named_modules() if module in inside), key=len, reverse=True)
    layers: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            block = ""
            for path in paths:
                if name.startswith(f"{path}."):
                    block = path
                    break
            layers[parameter] = block or name.partition(".")[0]
    return layers


def _by_group(optimizer: Optimizer) -> dict[Tensor, str]:
    """Map each parameter to its group's name, else the group's number."""
    return {
        parameter: str(group.get("name", number))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
