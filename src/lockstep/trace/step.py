"""One step of two runs, as the stages judge it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.trace.causes import said
from lockstep.trace.coverage import every
from lockstep.trace.pairing import Pair, Spot
from lockstep.trace.reading import Whole
from lockstep.trace.verdict import Finding

__all__ = [
    "FIRST",
    "GROWTH",
    "ROUNDOFF",
    "SECOND",
    "Step",
    "apart_from_each_other",
    "finite",
    "finite_in_some",
    "share",
    "unlike",
]

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
FIRST, SECOND = "the first run", "the second run"
GROWTH = 50.0  # how much more a gradient may be off than the weights it was taken at
_ALIKE = 1e-5  # share by which what ranks should have alike may differ


@dataclass
class Step:
    """One step of both runs.

    Attributes:
        number: how many were compared before it.
        off: share by which the weights differed when it began.
        limit: share of the whole gradient's norm by which a gradient may differ.
    """

    pair: Pair
    one: Spot
    two: Spot
    at: tuple[int, int]
    number: int
    off: float
    limit: float = 0.0
    flagged: list[str] = field(default_factory=list)

    def finding(self, stage: str, cause: str, text: str, where: str = "", rank: int = -1) -> Finding:
        if cause in ("rank-weights", "unreduced", "overlapping") and any(
            apart_from_each_other(spot) for _, spot in self.sides()
        ):
            cause = "alone"
        names = dict.fromkeys([*self.pair.two.frameworks, *self.pair.one.frameworks])
        return Finding(*self.at, stage, where, rank, cause, text, said(cause, names))

    def sides(self) -> Iterator[tuple[str, Spot]]:
        """What each run is called, the second first: it is the one that is asked about, where both could be."""
        yield SECOND, self.two
        yield FIRST, self.one


def apart_from_each_other(spot: Spot) -> bool:
    """Whether several processes were started, and none made a process group until its first step."""
    ranks = spot.part.ranks.values()
    return spot.part.world > 1 and not any(rank.head["initialized"] for rank in ranks)


def finite(whole: Whole) -> bool:
    """Return whether all elements of a tensor are finite."""
    return math.isfinite(whole.square) and every(map(math.isfinite, whole.sketch))


def finite_in_some(one: Whole, two: Whole) -> bool:
    """Return whether at least one of two tensors is finite: else there is nothing to compare."""
    return finite(one) or finite(two)


def unlike(whole: Whole) -> bool:
    """Whether ranks that should have it alike have not."""
    return whole.other is not None and not whole.other[1] <= _ALIKE * whole.norm


def share(error: float, norm: float) -> str:
    """An error, as a share of what it is an error of."""
    if error <= 1e-7 * norm:
        return "its last bits alone"
    return f"{error / norm:.2g} of itself" if norm and math.isfinite(error) else f"{error:.3g}"
