"""What a planted fault is: a wrapper around one part of a run, which the comparison must find.

Nothing in the product knows of them: a run that is verified hands each of its parts to the fault, which gives back
another. The faults themselves are in faults_data.py and faults_engine.py, and faults.py has them by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.config.config import Config
from lockstep.data.batches import Batches, StepLoader
from lockstep.distributed.world import World
from lockstep.engines.base import Engine
from lockstep.task import Task

__all__ = ["Fault", "FaultContext", "Seed"]

Seed = Callable[[int, int], None]


@dataclass
class FaultContext:
    """Where a fault is planted.

    Attributes:
        step: at which step, for one that has a moment.
        begin: the first step since the run was started or resumed.
        model: the plain module that the engine holds; feed: this rank's batches. There once the parts are made.
    """

    world: World
    config: Config
    step: int
    begin: int
    model: nn.Module | None = None
    step_loader: StepLoader | None = None

    @property
    def resumed(self) -> bool:
        """Whether the run has just been resumed."""
        return self.begin > 0

    def parameters(self) -> list[nn.Parameter]:
        """Those of the model, in its order."""
        assert self.model is not None
        return list(self.model.parameters())

    @property
    def is_target_rank(self) -> bool:
        """Whether this is the one rank that goes wrong: the last."""
        return self.world.rank == self.world.size - 1


class Fault:
    """No fault: every part is given back as it is. Each subclass changes one.

    Attributes:
        name: for `--plant`.
        text: one line.
        stage: the cause that the comparison has to name.
        moment: "start", "step", "resume" or "end": when it shows.
        everywhere: the single process has it too, where it does no harm.
    """

    name, text, stage, moment = "", "", "", "start"
    everywhere = False

    def check(self, config: Config, steps: int, resume: int) -> None:
        """Raises ConfigError where the fault could not show."""

    def task(self, task: Task, context: FaultContext) -> Task:
        return task

    def inside(self, engine: Engine, context: FaultContext) -> Engine:
        """The engine below the recorder: a fault of the engine or of the machine."""
        return engine

    def outside(self, engine: Engine, context: FaultContext) -> Engine:
        """The engine above the recorder: a fault of the loop."""
        return engine

    def seed(self, seed: Seed, context: FaultContext) -> Seed:
        return seed

    def evaluation(self, batches: Batches, context: FaultContext) -> Any:
        return batches

    def close(self) -> None:
        """Takes back whatever was hung up in this process."""
