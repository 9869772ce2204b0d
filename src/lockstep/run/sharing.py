"""How a step is shared out over the ranks, as the configuration has it.

check_cut(config, world, say)       # raises where the micro-batches do not go with the world
shares = shares_of(config)          # None: as many on each rank
"""

from collections.abc import Callable

from lockstep.config.config import Config
from lockstep.config.shares import counts_of
from lockstep.distributed.shares import Shares, given_shares
from lockstep.distributed.world import World
from lockstep.engines.deepspeed.config import check_batches
from lockstep.engines.make import SHARING, check_shares, name_of
from lockstep.engines.shared.exact import check_servable
from lockstep.run.defaults import idle

__all__ = ["check_cut", "shares_for", "shares_of"]


def shares_of(config: Config) -> Shares | None:
    """What `--shares` says; None: as many micro-batches on each rank."""
    counts = counts_of(config.shares)
    return given_shares(counts) if counts else None


def shares_for(engine: str, ranks: int, shares: str) -> str:
    """`--shares` as it is where this engine and so many ranks can have it; else "equal"."""
    return shares if engine in SHARING and len(counts_of(shares)) == ranks else "equal"


def check_cut(config: Config, world: World, say: Callable[[str], None]) -> None:
    """Refuses micro-batches and shares that this world, or the engine's own file, does not go with.

    Raises:
        ConfigError: they do not.
    """
    counts = counts_of(config.shares)
    if counts:
        check_shares(name_of(config.engine, world), counts, config.micro_batches, world.size, config.engine_options)
    if config.micro_batches < world.size:
        say(idle(config, world.size))
    if config.exact:
        check_servable(config.micro_batches, world.size)
    check_batches(
        config.engine_options.config,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        ranks=world.size,
    )
