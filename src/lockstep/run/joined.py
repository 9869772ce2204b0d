"""Joining the other ranks for as long as something takes, and leaving them in order.

with joined(config) as world: ...
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.config.config import Config
from lockstep.distributed.launcher_watch import end_with_launcher
from lockstep.distributed.world import World

__all__ = ["joined"]


@contextmanager
def joined(config: Config, world: World | None = None) -> Iterator[World]:
    """The world, joined here and left at the end unless it is given. After an error nobody is waited for."""
    end_with_launcher()
    made = world or World.join(config.device, config.timeout)
    try:
        yield made
    except BaseException:
        if world is None:
            made.abandon()  # the others may have met no error
        raise
    if world is None:
        made.leave()
