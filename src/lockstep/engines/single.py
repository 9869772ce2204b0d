"""One process, one device: the plain model."""

from contextlib import AbstractContextManager
from typing import final

from torch import Tensor, nn

from lockstep.engines.base import NOTHING, MakeOptimizer, StepResult, Update, named_state, restore_state
from lockstep.engines.exact import Tree
from lockstep.errors import ConfigError
from lockstep.world import World

__all__ = ["Single"]


@final
class Single:
    """The engine of a world of one. Raises ConfigError where there are more ranks."""

    def __init__(
        self, model: nn.Module, optimizer: MakeOptimizer, world: World, *, clip: float = 0.0, fold: int = 0
    ) -> None:
        if world.size > 1:
            raise ConfigError(f"--engine single with {world.size} processes: use --engine ddp, or start one process")
        self.model = model
        self._update = Update(optimizer(model), clip)
        self._tree = Tree(self._update.parameters, fold, world) if fold else None

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return NOTHING

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if self._tree:
            self._tree.push()

    def step(self, factor: float) -> StepResult:
        if self._tree:
            self._tree.finish()
        return self._update(factor)

    def state(self) -> dict[str, Tensor]:
        return named_state(self.model, self._update.optimizer)

    def restore(self, state: dict[str, Tensor]) -> None:
        restore_state(self.model, self._update.optimizer, state)
