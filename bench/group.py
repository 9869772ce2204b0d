"""A group of processes for a benchmark: `together(2, function, *arguments)` runs function(world, *arguments) on each.

What rank 0 returned is returned.
"""

from lockstep.distributed.spawn import start

__all__ = ["together"]


def together(size, function, *arguments):
    """What function(world, *arguments) returned on rank 0. Ends with an error if a process does."""
    return start(_plain, size, (function, arguments), device="auto", patience=600.0)[0]


def _plain(world, say, function, arguments):
    return function(world, *arguments)
