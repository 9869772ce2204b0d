"""Whether a labelled item counts alike on all ranks, and as much in one run as in the other.

The gradient that reaches a sample's output is the loss's own, times what the loss was multiplied and divided by. So the
quotient of two runs' gradients at the same sample is a quotient of these factors: of whole numbers, whatever the dtype,
and another one on each rank where each rank divides by the items of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from lockstep.trace.coverage import every
from lockstep.trace.limits import coarsest
from lockstep.trace.pairing import Spot
from lockstep.trace.reading import floats
from lockstep.trace.samples_used import Use, computed
from lockstep.trace.step import GROWTH, Step
from lockstep.trace.verdict import Finding

__all__ = ["items_unequal", "normalisation_difference", "same_effect"]

_LEAST = 1e-4  # share by which factors may differ that are one factor
_ROUNDINGS = 2.0  # of the coarsest dtype, which they may be off by
_SURE = 6.0  # standard errors of a mean factor
_FREEDOM = 4  # samples beyond one a forward, from which on the error of a mean is known
_RATIO = 1e-3  # share by which a ratio may miss a whole number

Counts = dict[int, list[int]]  # rank -> items of each of its losses
Forward = tuple[int, int]  # rank, number of its forward in the step


@dataclass(frozen=True)
class _Factor:
    """How much more the samples that one forward of each run has in common count in the second.

    Attributes:
        mean: as a logarithm; error: its standard error; apart: how far one sample is from it at most.
    """

    one: Forward
    two: Forward
    mean: float
    error: float
    samples: int
    apart: float


def items_unequal(step: Step) -> Finding | None:
    """Items that count more on one rank than on another, in one run alone."""
    factors = _factors(step)
    common = _mean([each.mean for each in factors])
    least = _tolerance(step)
    if not factors or every(abs(each.mean - common) <= max(least, _SURE * each.error) for each in factors):
        return None
    low, high = (pick(factors, key=lambda each: each.mean) for pick in (min, max))
    times = math.exp(high.mean - low.mean)
    for name, which in _keys(step):
        counts = [_counts(step, side, name, which) for side in (0, 1)]
        for ways in product(("all", "rank", "forward"), repeat=2):
            if _explained(factors, counts, ways, least):
                return _named(step, times, counts, ways)
    if sum(each.samples - 1 for each in factors) < _FREEDOM:
        return None  # too few samples to know how far such lengths are off by themselves
    text = (
        f"an item of rank {high.two[0]} counts {times:.6g} times as much as one of rank {low.two[0]}, against the first"
    )
    return step.finding("normalisation", "loss", f"in the second run {text}", "items", high.two[0])


def same_effect(step: Step) -> bool:
    """Whether each sample moves the loss as much in both runs, but for what its forward's loss is divided by."""
    factors = _factors(step)
    return any(each.samples > 1 for each in factors) and every(each.apart <= _tolerance(step) for each in factors)


def _named(step: Step, times: float, counts: list[Counts], ways: tuple[str, ...]) -> Finding:
    name, side, way = next(
        each
        for each in zip(("the second run", "the first run"), counts[::-1], ways[::-1], strict=True)
        if each[2] != "all"
    )
    found = _by_rank(side) if way == "rank" else [count for each in side.values() for count in each]
    items = " and ".join(map(str, found))
    own = "rank's" if way == "rank" else "micro-batch's"
    text = (
        f"in {name} each loss is divided by the {own} own items ({items}), so that one counts {times:.6g} times as much"
    )
    return step.finding("normalisation", "rank-average", f"{text} as another", f"items {items}")


def _tolerance(step: Step) -> float:
    """What factors that are one may be off by."""
    return min(0.25, max(_LEAST, _ROUNDINGS * coarsest(step)) + GROWTH * step.off)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _factors(step: Step) -> list[_Factor]:
    """Of each two forwards that have samples in common."""
    groups: dict[tuple[Forward, Forward], list[tuple[float, float]]] = {}
    sides = _lengths(step)
    for key, (forward, mine) in sides[0].items():
        if key in sides[1] and mine > 0:
            other, theirs = sides[1][key]
            if theirs > 0 and math.isfinite(mine * theirs):
                groups.setdefault((forward, other), []).append((math.log(theirs / mine), mine * mine))
    means = {key: _weighted_mean(each) for key, each in groups.items()}
    count, total = sum(map(len, groups.values())), sum(w for each in groups.values() for _, w in each)
    off = sum(w * (value - means[key]) ** 2 for key, each in groups.items() for value, w in each)
    spread = math.sqrt(off / total * count / (count - len(groups))) if count > len(groups) else 0.0
    return [
        _Factor(
            *key,
            means[key],
            spread * math.sqrt(sum(w * w for _, w in each)) / sum(w for _, w in each),
            len(each),
            max(abs(value - means[key]) for value, _ in each),
        )
        for key, each in groups.items()
    ]


def _weighted_mean(values: list[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def _lengths(step: Step) -> list[dict[tuple[int, int], tuple[Forward, float]]]:
    """Of each side: (a sample, how many of it before) -> its forward, length of its output's gradient."""
    uses = _uses(step)
    found: list[dict[tuple[int, int], tuple[Forward, float]]] = []
    for use, contents in zip(uses, computed(*uses), strict=True):
        here: dict[tuple[int, int], tuple[Forward, float]] = {}
        seen: dict[int, int] = {}
        for rank, forwards in contents.items():
            for number, (each, samples) in enumerate(zip(use[rank].forwards, forwards, strict=False)):
                values = floats(each.get("og"))
                if each.get("backwards") != 1 or len(values) != len(samples):
                    continue
                for sample, value in zip(samples, values, strict=True):
                    place = seen[sample] = seen.get(sample, -1) + 1
                    here[sample, place] = (rank, number), value
        found.append(here)
    return found


def _explained(factors: list[_Factor], counts: list[Counts], ways: tuple[str, ...], least: float) -> bool:
    """Whether these divisors, whole numbers, make the factors what they are; `ways`: what each run divides by."""
    rest: list[float] = []
    for each in factors:
        below = [_divisor(side, way, *at) for side, way, at in zip(counts, ways, (each.one, each.two), strict=True)]
        if not every(map(bool, below)):
            return False
        rest.append(each.mean - math.log(below[0] / below[1]))
    common = _mean(rest)
    return every(
        abs(value - common) <= max(least, _SURE * each.error) for value, each in zip(rest, factors, strict=True)
    )


def _divisor(counts: Counts, way: str, rank: int, number: int) -> float:
    each = counts.get(rank, [])
    if way == "all":
        return 1.0
    return float(sum(each)) if way == "rank" else float(each[number]) if number < len(each) else 0.0


def normalisation_difference(step: Step) -> Finding | None:
    """What the losses are divided by, where the outputs agree."""
    found = items_unequal(step)
    if found is not None or not step.flagged:
        return found
    losses = [_losses(spot) for spot in (step.one, step.two)]
    if not every(map(bool, losses)) or not every(any(each.values()) for each in losses):
        return None
    mine, theirs = _total(losses[0]), _total(losses[1])
    least = max(1e-5, step.limit)
    if not math.isfinite(mine * theirs) or abs(mine - theirs) <= least * max(abs(mine), abs(theirs)):
        return None
    text = f"the loss of the step is {theirs:.6g} instead of {mine:.6g}"
    for name, which in _keys(step):
        counts = [_counts(step, side, name, which) for side in (0, 1)]
        weighted = [_weighted(each, count) for each, count in zip(losses, counts, strict=True)]
        if None in weighted or weighted[0] is None or weighted[1] is None:
            continue
        if (
            abs(weighted[0] - weighted[1]) <= least * abs(weighted[0])
            and len({*_by_rank(counts[1]), *_by_rank(counts[0])}) > 1
        ):
            side = counts[1] if len(counts[1]) > 1 or len(counts[0]) == 1 else counts[0]
            items = " and ".join(str(count) for count in _by_rank(side))
            where = f"items {items}"
            text += f"; weighted by the items ({items}) they agree"
            return step.finding("normalisation", "rank-average", text, where)
    ratio = theirs / mine if mine else math.inf
    worlds = step.pair.two.world / step.pair.one.world
    micro = [max(len(each) for each in side.values()) for side in losses]
    near = max(_RATIO, _tolerance(step))
    for factor in (
        worlds,
        1 / worlds,
        micro[1] / micro[0],
        micro[0] / micro[1],
        *range(2, 9),
        *(1 / n for n in range(2, 9)),
    ):
        if factor != 1 and abs(ratio - factor) <= near * factor:
            return step.finding("normalisation", "scaled-loss", f"{text}, {ratio:.6g} times as much", "loss")
    return step.finding("normalisation", "loss", text, "loss")


def _losses(spot: Spot) -> dict[int, list[float]]:
    records = spot.part.records(spot.at)
    return {rank: [entry["v"][0] for entry in record["loss"] if entry["v"]] for rank, record in records.items()}


def _total(losses: dict[int, list[float]]) -> float:
    """What DDP's mean over the ranks makes of their losses."""
    return sum(sum(each) for each in losses.values()) / max(1, len(losses))


def _by_rank(counts: Counts) -> list[int]:
    return [sum(each) for each in counts.values()]


def _weighted(losses: dict[int, list[float]], counts: Counts) -> float | None:
    """The mean over all items, of losses that are means over the items of a micro-batch and divided by their number."""
    total = items = 0.0
    for rank, each in losses.items():
        mine = counts.get(rank, [])
        if len(mine) != len(each):
            return None
        total += sum(value * len(each) * count for value, count in zip(each, mine, strict=True))
        items += sum(mine)
    return total / items if items else None


def _uses(step: Step) -> list[dict[int, Use]]:
    sides = ((step.pair.one, step.one), (step.pair.two, step.two))
    return [run.used(spot).at(spot.at, 0) for run, spot in sides]


def _keys(step: Step) -> Iterator[tuple[str, int]]:
    """What the items may be: of an integer tensor what is not ignored, all or behind each first; "": samples."""
    keys: list[tuple[str, int]] = [("", 0)]
    for use in _uses(step)[1].values():
        for batch in [*use.loads, *use.forwards]:
            keys += [(name, which) for name in batch.get("cn", ()) for which in (0, 1)]
    yield from dict.fromkeys(keys)


def _counts(step: Step, side: int, name: str, which: int) -> Counts:
    found: Counts = {}
    for rank, use in _uses(step)[side].items():
        batches: list[dict[str, Any]] = (
            use.loads if use.matched and len(use.loads) == len(use.forwards) else use.forwards
        )
        if name and not any(name in batch.get("cn", ()) for batch in batches):
            batches = use.forwards
        found[rank] = []
        for batch in batches:
            if not name:
                found[rank].append(batch["n"])
            elif name in batch.get("cn", ()):
                found[rank].append(batch["c"][2 * batch["cn"].index(name) + which])
    return found
