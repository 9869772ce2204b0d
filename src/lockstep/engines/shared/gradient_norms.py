"""Norms of the gradient by block, before clipping: `--log-gradients`.

norms = GradientNorms("layers", every=10)
norms.look_at(model, blocks, optimizer)     # when the engine is made
norms.begin(step)                           # before the engine's step, which calls `take` where it is due
norms.found                                 # name -> 0-dim tensor, unread
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engines.shared.blocks import repeated_layers

__all__ = ["NO_NORMS", "GradientNorms"]

_OTHER = "other"  # what the optimizer has, and neither the model nor a group


class GradientNorms:
    """2-norms of a step's gradient by layer or parameter group, in the steps whose record is due.

    Args:
        by: "layers", "groups" or "off".
        every: steps between two records.

    Attributes:
        due: whether the present step takes them.
        found: of the present step, by name; {} where it is not due.
    """

    def __init__(self, by: str, every: int) -> None:
        self.by, self._every = by, every
        self.due = False
        self.found: dict[str, Tensor] = {}
        self._names: Callable[[], dict[Tensor, str]] = dict

    def look_at(self, model: nn.Module, blocks: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """Take the names from these. They are read in each step that is due, since groups and shards may change.

        Args:
            model: the plain module, with the parameters that the engine steps.
            blocks: its repeated blocks; none: they are looked for.
            optimizer: as its maker has it.
        """
        if self.by == "layers":
            self._names = lambda: _by_layer(model, blocks or repeated_layers(model))
        elif self.by == "groups":
            self._names = lambda: _by_group(optimizer)

    def begin(self, step: int) -> None:
        """Say which step comes."""
        self.due, self.found = self.by != "off" and (step + 1) % self._every == 0, {}

    def take(self, parameters: Iterable[Tensor], norms: list[Tensor], scale: float | Tensor) -> None:
        """Combine the norms of the parameters' gradients by name; waits for no device.

        Args:
            parameters: those that have a gradient; `norms`: of each, over all ranks.
            scale: what the gradients were multiplied by.
        """
        names = self._names()
        parts: dict[str, list[Tensor]] = {name: [] for name in names.values()}
        for parameter, norm in zip(parameters, norms, strict=True):
            parts.setdefault(names.get(parameter, _OTHER), []).append(norm)
        zero = norms[0].new_zeros(()) if norms else torch.zeros(())
        self.found = {
            name: (torch.linalg.vector_norm(torch.stack(found)) / scale if found else zero)
            for name, found in parts.items()
        }


NO_NORMS = GradientNorms("off", 1)


def _by_layer(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Each trained parameter's block by its path, or else the top-level module that it lies in."""
    inside = set(blocks)
    paths = sorted((path for path, module in model.named_modules() if module in inside), key=len, reverse=True)
    found: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            block = next((path for path in paths if name.startswith(f"{path}.")), "")
            found[parameter] = block or name.partition(".")[0]
    return found


def _by_group(optimizer: Optimizer) -> dict[Tensor, str]:
    """Each parameter's group, by the group's own name or else by its number."""
    return {
        parameter: str(group.get("name", number))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
