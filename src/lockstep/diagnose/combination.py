"""What is compared with the single process: engines, world sizes, compiled or not.

combinations = combine(["single", "ddp"], [1, 2], compiled=False)      single x1, ddp x1, ddp x2
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config import Config
from lockstep.engines import ENGINES
from lockstep.engines.exact import check_servable
from lockstep.errors import ConfigError

__all__ = ["ALONE", "REFERENCE", "Combination", "combine", "refusal"]

ALONE = ("single", "data-parallel")  # engines that are one process, whatever the world sizes asked for


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to compute the same steps."""

    engine: str
    world_size: int
    compiled: bool = False

    @property
    def key(self) -> str:
        """A name for files: `ddp-2-compiled`."""
        return f"{self.engine}-{self.world_size}{'-compiled' * self.compiled}"

    def __str__(self) -> str:
        return f"{self.engine} x{self.world_size}{' compiled' * self.compiled}"


REFERENCE = Combination("single", 1)


def combine(engines: Sequence[str], world_sizes: Sequence[int], compiled: bool) -> list[Combination]:
    """Every engine at every world size, world sizes ascending; first the single process itself, run again.

    An engine that is one process appears once.

    Raises:
        ConfigError: an unknown engine, or a world size below 1.
    """
    for name in engines:
        if name not in ENGINES:
            raise ConfigError(f"--engines has '{name}': choose from {', '.join(ENGINES)}")
    for size in world_sizes:
        if size < 1:
            raise ConfigError(f"--world-sizes has {size}: each must be at least 1")
    pairs = [(name, size) for size in sorted(set(world_sizes)) for name in engines if name not in ALONE]
    alone = [(name, 1) for name in ALONE if name in engines or name == REFERENCE.engine]
    found = [
        Combination(name, size, how)
        for how in ((False, True) if compiled else (False,))
        for name, size in sorted(dict.fromkeys(alone + pairs), key=lambda pair: pair[1])
    ]
    return sorted(found, key=lambda one: (one.world_size, one != REFERENCE, one.compiled))


def refusal(one: Combination, config: Config) -> str | None:
    """Why this combination cannot run, as far as that can be said without starting it; else None."""
    if config.exact:
        try:
            check_servable(config.micro_batches, one.world_size)
        except ConfigError as error:
            return str(error)
    return None
