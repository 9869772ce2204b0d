"""DistributedDataParallel: every rank holds the whole model; gradients are exchanged once a step."""

from contextlib import AbstractContextManager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.engines.base import NOTHING, MakeOptimizer, StepResult, Update, named_state, restore_state
from lockstep.engines.exact import Tree
from lockstep.errors import ConfigError
from lockstep.world import World

__all__ = ["DDP"]


@final
class DDP:
    """The engine `ddp`.

    In exact mode DDP's reducer, whose order depends on its buckets and on the backend, is left out: the fixed tree
    does the one exchange of the step.
    """

    def __init__(
        self, model: nn.Module, optimizer: MakeOptimizer, world: World, *, clip: float = 0.0, fold: int = 0
    ) -> None:
        if world.control is None:
            raise ConfigError(
                "--engine ddp needs a launcher: torchrun --standalone --nproc-per-node 2 -m lockstep train"
            )
        self._module = model
        self._size = float(world.size)
        self._scales: dict[torch.dtype, Tensor] = {}
        self._tree: Tree | None = None
        self._ddp: DistributedDataParallel | None = None
        if fold:
            _same_start(model)
            self.model: nn.Module = model
        else:
            devices = [world.device] if world.device.type == "cuda" else None
            self._ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
            self.model = self._ddp
        self._update = Update(optimizer(model), clip)
        if fold:
            self._tree = Tree(self._update.parameters, fold, world)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return NOTHING if last or self._ddp is None else self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        if self._tree:
            loss.backward()  # type: ignore[no-untyped-call]
            self._tree.push()
            return
        # DDP divides the exchanged sum by the world size; starting from that size undoes it at no cost.
        loss.backward(self._scale(loss))  # type: ignore[no-untyped-call]

    def step(self, factor: float) -> StepResult:
        if self._tree:
            self._tree.finish()
        return self._update(factor)

    def state(self) -> dict[str, Tensor]:
        return named_state(self._module, self._update.optimizer)

    def restore(self, state: dict[str, Tensor]) -> None:
        restore_state(self._module, self._update.optimizer, state)

    def _scale(self, loss: Tensor) -> Tensor:
        found = self._scales.get(loss.dtype)
        if found is None:
            found = self._scales[loss.dtype] = torch.full_like(loss, self._size, requires_grad=False).detach()
        return found


def _same_start(model: nn.Module) -> None:
    """Rank 0's parameters and buffers on every rank, as DDP's constructor would have it."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)  # collective
