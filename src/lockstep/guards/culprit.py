"""Two ranks computed one micro-batch, and found other bits: which device is wrong?

    judged([["a", "b", "a"], ["b", "b"]])       # Verdict([0], BY_ITSELF): a healthy device does not contradict itself

Each rank then computes it several times. A device that finds other bits from time to time is wrong sometimes, and one
that finds other bits than most devices is wrong always. Of two that differ, and stay with what they found, nobody can
say.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["BY_ITSELF", "BY_OTHERS", "EVERYBODY", "ONE_OF_TWO", "Verdict", "judged"]

BY_ITSELF = "itself"  # it contradicts itself
BY_OTHERS = "others"  # most others contradict it
ONE_OF_TWO = "two"  # there is no third
EVERYBODY = "everybody"  # most contradict themselves, or all each other: no fault of a device


class Verdict(NamedTuple):
    """Which ranks are wrong, and what says so."""

    ranks: list[int]
    why: str


def judged(found: Sequence[Sequence[str]]) -> Verdict:
    """What the ranks' results say.

    Args:
        found: by rank, what it found each time; empty where it took no part.
    """
    took_part = [rank for rank, results in enumerate(found) if results]
    unsteady = [rank for rank in took_part if len(set(found[rank])) > 1]
    steady = {rank: found[rank][0] for rank in took_part if rank not in unsteady}
    if len(unsteady) > 1 and 2 * len(unsteady) >= len(took_part):
        return Verdict(unsteady, EVERYBODY)
    common, count = Counter(steady.values()).most_common(1)[0] if steady else ("", 0)
    if len(set(steady.values())) > 1:
        if 2 * count <= len(steady):
            return Verdict(took_part, ONE_OF_TWO if len(took_part) == 2 else EVERYBODY)
        odd = [rank for rank, result in steady.items() if result != common]
        return Verdict(sorted(unsteady + odd), BY_OTHERS)
    return Verdict(unsteady, BY_ITSELF)
