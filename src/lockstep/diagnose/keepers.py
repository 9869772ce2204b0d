"""What a rank does with the tensors of each step: the reference writes them down, every other rank compares."""

import math
from functools import partial
from typing import Any, final

from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.layout import Block
from lockstep.config import Config
from lockstep.diagnose.recorder import Named
from lockstep.diagnose.shelf import Shelf, Stored, digests
from lockstep.diagnose.tensors import Limit, compare, cut, square
from lockstep.diagnose.tolerance import EXACT, Allowance, Scales
from lockstep.errors import ConfigError

__all__ = ["Comparing", "Writing"]


@final
class Writing:
    """For the reference: tensors go to the shelf, digests and norms into the record."""

    def __init__(self, shelf: Shelf, steps: int) -> None:
        self._shelf, self._steps = shelf, steps

    def __call__(self, kind: str, step: int, tensors: Named) -> dict[str, Any]:
        if kind == "initial":
            self._check_room(sum(tensor.nbytes for _, tensor in tensors))
        self._shelf.put(kind, step, tensors)
        norms = {name: math.sqrt(square(t.cpu())) for name, t in tensors}  # waits for the device
        return {"digests": digests(dict(tensors)), "norms": norms, "square": math.fsum(n * n for n in norms.values())}

    def _check_room(self, size: int) -> None:
        """Raises ConfigError unless the gradients, weights and moments of all steps have room."""
        needed, free = size * (4 * self._steps + 4), self._shelf.free
        if free < needed:
            raise ConfigError(
                f"--scratch: the proof takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; choose another "
                "folder, or lower --steps"
            )

    def seal(self, model: dict[str, Tensor]) -> str:
        return checkpoint.fingerprint_of(model)


@final
class Comparing:
    """For all others: each rank compares its parts with the reference's.

    Args:
        shelf: the reference's.
        steps: the reference's records.
        allowance: what may differ.
        config: of the run; its optimizer's numbers are needed.
    """

    def __init__(self, shelf: Shelf, steps: list[dict[str, Any]], allowance: Allowance, config: Config) -> None:
        self._shelf, self._allowance = shelf, allowance
        self._scales = Scales.of(steps, config)

    def __call__(self, kind: str, step: int, tensors: Named) -> dict[str, Any]:
        second = self._shelf.open("optimizer", step) if kind == "weights" and not self._allowance.exact else None
        return compare(tensors, self._shelf.open(kind, step), partial(self._allowed, kind, step, second))

    def seal(self, model: dict[str, Tensor]) -> str:
        return ""  # every tensor is compared, and a split model's would have to be gathered

    def _allowed(self, kind: str, step: int, second: Stored | None, name: str, wanted: Tensor, block: Block) -> Limit:
        """The largest error of a part of one tensor; -1: none at all."""
        allowance = EXACT if kind == "initial" else self._allowance
        if allowance.exact or not wanted.is_floating_point() or name.endswith("/step"):
            return -1.0
        scales, relative = self._scales[step], allowance.relative(step)
        if kind == "weights":
            moment = f"optimizer/{name}/exp_avg_sq"
            there = second is not None and moment in second.names
            part = cut(second[moment], block) if second is not None and there else None
            return allowance.weights(step, wanted, part, scales)
        if name.endswith("/exp_avg_sq"):
            return 4.0 * relative * scales.norm**2
        if kind == "buffers":
            size = math.sqrt(square(wanted))
            return relative * (size + 1.0) + allowance.drift(step, scales) * math.sqrt(wanted.numel())
        return relative * scales.norm
