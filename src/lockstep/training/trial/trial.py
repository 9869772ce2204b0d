"""Try a task's methods on its engine without side effects.

trial = Trial(engine, model, task, world, config, say)
with trial.sandbox():
    ...
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import nn

from lockstep.config.schema import Config
from lockstep.distributed.world import World
from lockstep.engines.base import Engine, at_rest
from lockstep.engines.fsdp.forwards import is_split
from lockstep.engines.registry import undo_step
from lockstep.loop import seeder
from lockstep.task import Task
from lockstep.training.trial.trial_state import preserve_state
from lockstep.transforms.precision import AUTOCAST, eager, without_autocast

__all__ = [
    "Trial",
]


@final
class Trial:
    """A task and its engine, to try the task's methods without side effects.

    Args:
        plain: the model before the engine wraps it, with the user's layer names.
        say: called with a line for the user, on every rank.
    """

    def __init__(
        self,
        engine: Engine,
        plain: nn.Module,
        task: Task,
        world: World,
        config: Config,
        say: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.plain = plain
        self.task = task
        self.world = world
        self.config = config
        self.say = say
        # The error of a proof that had too little memory.
        self.memory_error: torch.OutOfMemoryError | None = None
        self.training_modes = {module: module.training for module in engine.model.modules()}
        self._reseed = seeder(0, "check", world.device)
        # Fewer than four bytes: less precise than float32.
        narrow = any(p.is_floating_point() and p.itemsize < 4 for p in engine.model.parameters())
        self.is_low_precision = narrow or config.engine_options.param_dtype not in ("same", "float32")
        # Manual optimization computes gradients by itself; a static graph must be recorded in a real step.
        self._has_graph = task.own_steps is None and not config.engine_options.static_graph

    @property
    def model(self) -> nn.Module:
        """The engine's model; its forward may have collectives."""
        return self.engine.model

    @property
    def limit(self) -> float:
        """Relative difference up to which two numbers count as equal."""
        if self.is_low_precision:
            return 0.05
        return 0.01

    def preserve(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for one call of the loss that undoes its changes."""
        return preserve_state(self.model, self.task, self.world.device, training=True)

    def sandbox(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that runs eagerly, and undoes side effects at its end."""
        stack = contextlib.ExitStack()
        stack.enter_context(preserve_state(self.model, self.task, self.world.device))
        stack.enter_context(eager())
        return stack

    @contextlib.contextmanager
    def with_graph(self) -> Iterator[None]:
        """Return a context for a forward as in step 1, without a backward."""
        if not self._has_graph:
            with torch.no_grad():
                yield
            return
        try:
            with torch.enable_grad(), self.engine.accumulate(False, False):
                yield
        finally:
            undo_step(self.engine)
            at_rest(self.model)

    @property
    def is_sharded(self) -> bool:
        """Whether a rank has a part of the parameters, so that its forwards are collective."""
        return is_split(self.model) or self.world.part("pp").size > 1

    def alone(self) -> "Trial":
        """Return the same trial for this rank without the others."""
        trial = copy.copy(self)
        trial.world = World(device=self.world.device)
        return trial

    def raise_memory_error(self) -> None:
        """Raise the error of a proof that ran out of memory on this rank.

        Smaller micro-batches may fit.
        """
        if self.memory_error is not None:
            raise self.memory_error

    def seed(self, number: int = 0) -> None:
        """Seed the random numbers of a loss; another `number` is another seed."""
        self._reseed(number, 0)

    def attempt(self, action: Callable[[], list[Any]]) -> tuple[list[list[Any]], bool] | None:
        """Run `action` on every rank; None if it fails on one. Collective.

        It runs in the parameters' dtype, unless the model relies on autocast.

        Args:
            action: returns a JSON value.

        Returns:
            The results by rank, and whether it needs a graph.
        """
        # Try without autocast and gradients first; the task's code may need either.
        for narrow in (False, True) if self.config.precision in AUTOCAST else (False,):
            for gradients in (False, True):
                result = None
                dtypes = contextlib.nullcontext() if narrow else without_autocast()
                with contextlib.suppress(Exception), torch.set_grad_enabled(gradients), dtypes:
                    result = action()
                # A failure on one rank counts for all, because the next attempt may be collective.
                results: list[Any] = self.world.gather(result)
                if all(numbers is not None for numbers in results):
                    self.is_low_precision = self.is_low_precision or narrow
                    return results, gradients
        return None
