"""What the ranks tell each other beside the exchange: where each stands, by its own word, without a collective.

told = Told(store, keys, world.size)
told.tell(rank, place)
told.passed(7)                      # ranks that are beyond step 7
all_do(told, rank, "stop", 7, lambda: 5.0)      # whether all ranks come to say so
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import TCPStore

__all__ = ["Told", "all_do", "read_alone", "waited_for"]

_STEP = re.compile(r"step (\d+) ")
_LOOK = 0.005  # seconds between two looks for the others
_PLACES = 0.5  # seconds between two looks at where they stand


class Told:
    """The ranks' words in their meeting point, under names that begin with `keys`."""

    def __init__(self, store: TCPStore, keys: str, size: int) -> None:
        self.store, self.keys, self.size = store, keys, size

    def tell(self, rank: int, place: str) -> None:
        """Says where `rank` stands. Raises RuntimeError where the meeting point is gone."""
        self.store.set(f"{self.keys}/at/{rank}", place)

    def place_of(self, rank: int) -> str:
        """What `rank` said last; "" for nothing."""
        return self.value(f"at/{rank}")

    def value(self, key: str) -> str:
        """What stands under `key`; "" for nothing."""
        full = f"{self.keys}/{key}"
        return self.store.get(full).decode() if self.store.check([full]) else ""

    def passed(self, step: int) -> list[int]:
        """The ranks that said they are in a step after `step`, or at the end."""
        found = {rank: _STEP.match(self.place_of(rank)) for rank in range(self.size)}
        return [rank for rank, place in found.items() if place and int(place[1]) > step]


def all_do(told: Told | None, rank: int, what: str, step: int, patience: Callable[[], float]) -> bool:
    """Whether every rank comes to say `what` in the body of its loop after `step`, or goes on without.

    No collective: a rank that does not say it is somewhere else in the step after, waiting for this one. It is found
    out by the place that it tells every second.

    Args:
        told: None in a world of one.
        patience: seconds to wait for ranks that say nothing, asked again and again.

    Returns:
        True where all have said it; False where one is beyond the step, or after `patience`.
    """
    if told is None:
        return True
    mine = f"{what}-{step}"
    began = looked = time.monotonic()
    keys = [f"{told.keys}/{mine}/{other}" for other in range(told.size)]
    with suppress(RuntimeError):  # the meeting point is gone, and the others with it
        told.store.set(keys[rank], "1")
        while not told.store.check(keys):
            now = time.monotonic()
            if now - looked > _PLACES:
                looked = now
                if told.passed(step) and not told.store.check(keys):
                    return False
            if now - began > patience():
                return False
            time.sleep(_LOOK)
        return True
    return False


def waited_for(told: Told, step: int, patience: float = 2.5) -> list[int]:
    """The ranks that turn out to be beyond `step` within `patience` seconds; [] for none."""
    end = time.monotonic() + patience
    with suppress(RuntimeError):  # the meeting point is gone
        while time.monotonic() < end:
            if others := told.passed(step):
                return others
            time.sleep(_PLACES / 5)
    return []


def read_alone(rank: int, global_step: int, others: list[int]) -> str:
    """The one line about a loss that `rank` read while `others` went on."""
    shown = " and ".join(f"rank {other}" for other in others[:8])
    return (
        f"rank {rank}: the loss was read after step {global_step}, and not on {shown}: read it on every rank, and "
        "print it on one alone"
    )
