"""Two runs side by side: which step of one belongs to which of the other.

pair = paired(read(one), read(two))
pair.steps              # [(Spot, Spot), ...]
"""

import math
from dataclasses import dataclass, field

from lockstep.trace.coverage import every, matched
from lockstep.trace.reading import Part, Rank, Run, Whole, distance
from lockstep.trace.samples_used import Samples

__all__ = ["Pair", "Side", "Spot", "apart", "paired"]

_NEAR = 0.45  # share of a step's own way within which two weights are of the same step; half of it is between two
_BACK = 16  # updates in which each of several optimizers has had its turn


@dataclass(frozen=True)
class Spot:
    """A step of a run: the part it lies in, and its place there. `begins`: it is the first of a later part."""

    part: Part
    at: int
    begins: bool = False

    def tensors(self, kind: str) -> dict[str, Whole]:
        return self.part.tensors(self.at, kind)

    @property
    def hidden(self) -> bool:
        """Whether its engine keeps the gradients to itself and says their norm alone."""
        return bool(next(iter(self.part.records(self.at).values()))["kind"] == "DeepSpeedEngine")

    def left(self) -> dict[str, Whole]:
        """The weights of this step's optimizer as the updates before left them, else as the model began."""
        wanted, found = self.tensors("weights").keys(), dict[str, Whole]()
        for at in range(self.at, max(-1, self.at - _BACK), -1):
            earlier = self.part.tensors(at, "weights") if at != self.at else {}
            for known in (earlier, self.part.tensors(at, "initial")):
                found.update({name: known[name] for name in wanted - found.keys() if name in known})
            if not wanted - found.keys():
                break
        return found

    def before(self) -> dict[str, Whole]:
        """The weights that the update begins with."""
        return {**self.left(), **self.tensors("begin")}


@dataclass
class Side:
    """One run, in the order in which it counts: what a restart did again replaces what was done before.

    Attributes:
        tail: what came behind the last step, where it was recorded.
        window: only some of the steps were recorded, as `--steps` or `--max-mb` asks.
        stop: how it stopped before its end; "" where it came there by itself, or to the end of what was asked for.
        full: the recording ended at the limit of `--max-mb`.
    """

    name: str
    spots: list[Spot]
    tail: Spot | None
    window: bool = False
    stop: str = ""
    full: bool = False
    samples: dict[int, Samples] = field(default_factory=dict)

    @property
    def frameworks(self) -> list[str]:
        return list(self.spots[0].part.first.head["frameworks"])

    @property
    def world(self) -> int:
        return self.spots[0].part.world

    def used(self, spot: Spot) -> Samples:
        if id(spot.part) not in self.samples:
            self.samples[id(spot.part)] = Samples(spot.part)
        return self.samples[id(spot.part)]


@dataclass
class Pair:
    """`shift`: the step of the first run that the second one begins with; below 0 the other way round."""

    one: Side
    two: Side
    shift: int

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(place in one, place in two) of each step that both have."""
        first = max(0, self.shift)
        return [
            (place, place - self.shift)
            for place in range(first, min(len(self.one.spots), len(self.two.spots) + self.shift))
        ]


def paired(one: Run, two: Run) -> Pair:
    """The two runs, with their steps put side by side by the weights that they begin with."""
    first, second = _side(one), _side(two)
    begins = [int(side.spots[0].part.first.steps[0]["k"]) for side in (first, second)]
    if max(begins):
        return Pair(first, second, begins[1] - begins[0])
    shift = _begin(second.spots[0], first.spots)
    if shift is None:
        shift = -(_begin(first.spots[0], second.spots) or 0)
    return Pair(first, second, shift)


def _side(run: Run) -> Side:
    spots: list[Spot] = []
    for part in run.parts:
        fresh = [Spot(part, at) for at in range(part.count)]
        at = _begin(fresh[0], spots) if spots else 0
        first = Spot(part, 0, begins=at != 0)  # one that begins anew is no resume
        spots = [*spots[:at], first, *fresh[1:]]
    last = run.parts[-1]
    window = any(_windowed(rank) for part in run.parts for rank in part.ranks.values())
    full = any(rank.full for rank in last.ranks.values())
    ended = every(rank.end is not None and not rank.full for rank in last.ranks.values())
    tail = Spot(last, last.count) if ended and not window else None
    return Side(run.name, spots, tail, window or full, _stop(run, last), full)


def _stop(run: Run, last: Part) -> str:
    """How the last start of a run stopped before its end."""
    _, _, behind = str(run.info.get("steps") or "").partition(":")
    if behind and every(_made(rank) >= int(behind) for rank in last.ranks.values()):
        return ""  # all that was asked for is there
    for number, rank in last.ranks.items():
        if rank.failed:
            return f"could not be recorded further ({rank.failed})"
        if rank.end is not None and rank.end.get("error"):
            return f"ended by {rank.end['error']} on rank {number}"
        if rank.end is None and not rank.full:
            return f"was cut off on rank {number}"
    code = run.info.get("code") or 0
    return f"ended with exit code {code}" if code else ""


def _windowed(rank: Rank) -> bool:
    """Whether `--steps` left some out, at the begin or at the end."""
    made = rank.end["k"] if rank.end else 0
    return bool(rank.steps[0]["k"]) or made > _made(rank)


def _made(rank: Rank) -> int:
    """The step behind its last one that was recorded."""
    last = rank.steps[-1]
    return int(last["k"]) + 1 + int(last.get("again", 0))


def _begin(spot: Spot, steps: list[Spot]) -> int | None:
    """How many of `steps` were made when the weights were those that `spot` begins with; None where it is not seen."""
    mine, last = spot.tensors("initial"), steps[0].tensors("initial")
    if not mine or not last:
        return None
    if _equal(mine, last):
        return 0
    best, near, way = 0, apart(mine, last)[0], 0.0
    for count, step in enumerate(steps, 1):
        after = {**last, **step.tensors("weights")}
        if _equal(mine, after):
            return count
        far = apart(mine, after)[0]
        if far < near or count == 1:  # the first step's own way is also what nearness to the begin is held against
            way = apart(last, after)[0]
        if far < near:
            best, near = count, far
        last = after
    return best if near <= _NEAR * way else None


def _equal(one: dict[str, Whole], two: dict[str, Whole]) -> bool:
    common = matched(one, two).both
    return any(one[name].square for name in common) and every(one[name].digest == two[name].digest for name in common)


def apart(one: dict[str, Whole], two: dict[str, Whole]) -> tuple[float, float]:
    """(2-norm of the difference, larger 2-norm) of all tensors that both have."""
    common = one.keys() & two.keys()
    square = sum(distance(one[n].sketch, two[n].sketch) ** 2 for n in common if one[n].digest != two[n].digest)
    return math.sqrt(square), math.sqrt(max(sum(side[name].square for name in common) for side in (one, two)))
