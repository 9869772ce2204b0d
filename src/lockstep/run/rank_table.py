"""Which rank computes where: host and device of each, for the log of rank 0.

log_ranks(world)        # collective; "rank 3: node-a, cuda:3", or "ranks 0 to 7: node-a, cuda:0 to cuda:7"
"""

import logging
import platform
from collections.abc import Iterator, Sequence
from itertools import groupby

from lockstep.distributed.rank_label import rank_label
from lockstep.distributed.world import World

__all__ = ["lines_of", "log_ranks"]

_FEW = 16  # ranks that have a line each
_LOG = logging.getLogger("lockstep")


def log_ranks(world: World) -> None:
    """Log host and device of every rank, into rank 0's file. Collective."""
    found = world.gather([platform.node(), str(world.device)])  # collective
    for line in lines_of(found) if world.is_main else ():
        _LOG.info(line, extra={"only_file": True})


def lines_of(places: Sequence[Sequence[str]]) -> Iterator[str]:
    """Describe a line a rank, or one a host where there are many.

    Args:
        places: by rank, its host and its device.
    """
    if len(places) <= _FEW:
        yield from (f"{rank_label(rank)}: {host}, {device}" for rank, (host, device) in enumerate(places))
        return
    for host, group in groupby(enumerate(places), key=lambda item: item[1][0]):
        ranks, devices = zip(*((rank, device) for rank, (_, device) in group), strict=True)
        yield f"{_span('rank', ranks)}: {host}, {_joined(devices)}"


def _span(word: str, numbers: Sequence[int]) -> str:
    return f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {numbers[0]} to {numbers[-1]}"


def _joined(devices: Sequence[str]) -> str:
    """Shorten to `cpu` where all are alike, and to `cuda:0 to cuda:7` where they are numbered in turn."""
    if len(set(devices)) == 1:
        return devices[0]
    kind, _, first = devices[0].partition(":")
    if list(devices) == [f"{kind}:{int(first or 0) + place}" for place in range(len(devices))]:
        return f"{devices[0]} to {devices[-1]}"
    return ", ".join(devices)
