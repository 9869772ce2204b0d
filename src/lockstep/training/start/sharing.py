"""Divide a step's micro-batches among the ranks, by `--shares`.

check_division(config, world, say)
balancer = balancer_of(config, world, costs, state)     # of --shares auto; else None
sharing = sharing_of(config, balancer)                  # None: equal shares
"""

from collections.abc import Callable, Sequence

from lockstep.config.engine_options import ENGINES
from lockstep.config.fields import AUTO, parse_shares
from lockstep.config.schema import Config
from lockstep.distributed.balance import Balancer, ShareSchedule, shares_of_counts
from lockstep.distributed.world import World
from lockstep.engines.deepspeed.config import check_batches
from lockstep.engines.exact import check_servable
from lockstep.engines.registry import check_shares, check_sharing, name_of
from lockstep.errors import ConfigError
from lockstep.run_state import RunState
from lockstep.training.start.defaults import describe_idle_ranks

__all__ = [
    "balancer_of",
    "check_division",
    "shares_for",
    "sharing_of",
]


def balancer_of(
    config: Config, world: World, costs: Callable[[int], Sequence[float]] | None, state: RunState
) -> Balancer | None:
    """Make the balancer of `--shares auto`; None if there is nothing to balance.

    Args:
        costs: step -> the costs of its micro-batches; None if the task does not know it.
        state: of the run; a resume starts with the speeds in it.
    """
    count = config.micro_batches
    ranks = world.data_parallel.size
    if config.shares != AUTO or not 1 < ranks < count:
        return None
    # The memory of exact sums grows with a rank's share: until the free memory is known, a share is limited to about
    # twice an equal one.
    if config.exact:
        limits = [min(count, 2 * -(-count // ranks))] * ranks
    else:
        limits = []
    return Balancer(count, ranks, state.global_step, costs, state.shares, limits)


def sharing_of(config: Config, balancer: Balancer | None) -> ShareSchedule | None:
    """Return the division by `--shares`; None: equal shares."""
    if balancer:
        return ShareSchedule(balancer.at, balancer.guess)
    counts = parse_shares(config.shares)
    if not counts:
        return None
    shares = shares_of_counts(counts)
    return ShareSchedule(lambda step: shares)


def shares_for(engine: str, ranks: int, shares: str) -> str:
    """Return `shares` if this engine and number of ranks support it, otherwise "equal"."""
    fits = shares == AUTO or len(parse_shares(shares)) == ranks
    if ENGINES[engine].shares and fits:
        return shares
    return "equal"


def check_division(config: Config, world: World, say: Callable[[str], None]) -> None:
    """Refuse micro-batches and shares that do not fit the world, the engine or its file.

    Args:
        say: called with a line for the user.

    Raises:
        ConfigError: they do not fit.
    """
    counts = parse_shares(config.shares)
    name = name_of(config.engine, world)
    # All ranks of a replica compute the same micro-batches.
    ranks = world.data_parallel.size
    if world.replica.size > 1:
        _check_replicas(config, world.replica.size)
    if counts:
        check_shares(name, counts, config.micro_batches, ranks, config.engine_options)
    if config.shares == AUTO:
        check_sharing(name, AUTO, config.engine_options)
    if config.micro_batches < ranks:
        say(describe_idle_ranks(config, ranks))
    if config.exact:
        check_servable(config.micro_batches, ranks)
    check_batches(
        config.engine_options.config,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        ranks=ranks,
    )


def _check_replicas(config: Config, size: int) -> None:
    """Refuse settings that do not know replicas of several ranks.

    Raises:
        ConfigError: names the flag and the way out.
    """
    for is_set, flag, advice in (
        (config.shares == AUTO, "--shares auto", "leave it out"),
        (config.guards.audit, "--guards.audit", "set it to 0"),
    ):
        if is_set:
            raise ConfigError(f"{flag} does not work with replicas of {size} ranks (form_replicas): {advice}")
