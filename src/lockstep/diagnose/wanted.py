"""What is to be proved: `verify`'s arguments, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import Config
from lockstep.engines import ENGINES
from lockstep.errors import ConfigError

__all__ = ["DEFAULT_ENGINES", "Wanted"]

DEFAULT_ENGINES = tuple(name for name in ("single", "ddp", "fsdp", "zero") if name in ENGINES)


@dataclass(frozen=True)
class Wanted:
    """What is to be proved. The fields are `verify`'s arguments."""

    config: Config
    task: Any = None
    named: str = ""
    engines: Sequence[str] = DEFAULT_ENGINES
    world_sizes: Sequence[int] = (1, 2)
    steps: int = 8
    resume_at: int | None = None
    compile: bool = False
    plant: str = ""
    plant_at: int | None = None
    skip_unavailable: bool = False
    scratch: str = ""
    given: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}: it must be at least 1")
        if not 0 <= self.resume < self.steps:
            raise ConfigError(f"--resume-at is {self.resume}: it must be below --steps {self.steps}; 0 leaves it out")
        if not 0 <= self.fault_step < self.steps:
            raise ConfigError(f"--plant-at is {self.fault_step}: it must be below --steps {self.steps}")

    @property
    def resume(self) -> int:
        """The step before which every combination is saved, ended and resumed."""
        return self.steps // 2 if self.resume_at is None else self.resume_at

    @property
    def fault_step(self) -> int:
        if self.plant_at is not None:
            return self.plant_at
        usual = min(2, self.steps - 1)
        return max(0, usual - (usual == self.resume))  # not where a resume could be taken for it
