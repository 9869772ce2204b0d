"""How far two gradients of the same mathematics may be apart, in the dtypes that they were computed in."""

import math

from lockstep.trace.pairing import Spot
from lockstep.trace.reading import floats, words
from lockstep.trace.step import GROWTH, ROUNDOFF, Step

__all__ = ["coarsest", "gradient_limit", "outputs_of"]

_SAFETY, _CEILING = 32.0, 0.25  # of docs/verify.md
_FINE = ROUNDOFF["float32"]
_LEAST, _MOST = 4.0, 16.0  # roundings of the coarsest dtype, between which what was measured decides
_MEASURED = 8.0  # times how far the same samples' outputs are apart

Output = tuple[int, tuple[float, float]]  # rank; signed sum and square of the output


def gradient_limit(step: Step) -> float:
    """Share of the whole gradient's norm by which a tensor of it may be off.

    A gradient in float32 is held to what adding it up in another order makes of it. Where a coarser dtype is rounded
    to, four roundings are allowed; more only where the outputs of the same samples are further apart in the first step,
    and never more than 16.
    """
    unit, inner = _unit(step), coarsest(step)
    count = 0
    for spot in (step.one, step.two):
        losses = sum(len(record["loss"]) for record in spot.part.records(spot.at).values())
        count = max(count, losses + spot.part.world)
    fine = unit <= _FINE  # coarser sums are not bounded: each rounds either way, so the root of their number counts
    rounding = _SAFETY * count * unit * (step.number + 1) if fine else _LEAST * math.sqrt(count) * unit
    if step.number or step.one.part.world != step.two.part.world:
        moved = _moved(step)
        measured = _MEASURED * moved if moved <= _MOST * inner else 0.0  # further apart than rounding explains
        rounding += min(_MOST * inner, max(_LEAST * inner, measured))
    return min(_CEILING, rounding + GROWTH * step.off)


def coarsest(step: Step) -> float:
    """Unit roundoff of the coarsest dtype in which the modules compute, as the first steps note it."""
    kinds = {
        forward.get("ac", "")
        for spot in (step.one, step.two)
        for record in spot.part.records(0).values()
        for forward in record["fwd"]
    }
    return max([_unit(step), *(ROUNDOFF.get(kind, 0.0) for kind in kinds)])


def _unit(step: Step) -> float:
    """Unit roundoff of the gradients' dtype."""
    kinds = {whole.kind for spot in (step.one, step.two) for whole in spot.tensors("grad").values()}
    return max((ROUNDOFF.get(kind, 0.0) for kind in kinds), default=_FINE)


def _moved(step: Step) -> float:
    """How far the outputs of the same samples are apart in the first step, as a share of their length."""
    first = max(0, step.pair.shift)
    mine, theirs = outputs_of(step.pair.one.spots[first]), outputs_of(step.pair.two.spots[first - step.pair.shift])
    pairs = [(mine[key][1], theirs[key][1]) for key in mine.keys() & theirs.keys()]
    square = sum(one[1] for one, _ in pairs)
    apart = sum((one[0] - two[0]) ** 2 for one, two in pairs)  # of random signs: that of the outputs, in the mean
    return math.sqrt(apart / square) if square > 0 and math.isfinite(apart + square) else 0.0


def outputs_of(spot: Spot) -> dict[tuple[int, int, int, int], Output]:
    """(root, digest of the sample, elements, how many of it before) -> its output."""
    found: dict[tuple[int, int, int, int], Output] = {}
    for rank, record in spot.part.records(spot.at).items():
        for forward in record["fwd"]:
            values = floats(forward.get("out"))
            samples = words(forward.get("s"))
            if not forward["train"] or len(values) != 2 * len(samples):
                continue
            for place, sample in enumerate(samples):
                count = 0
                while (forward["m"], sample, forward["w"], count) in found:
                    count += 1
                found[forward["m"], sample, forward["w"], count] = rank, (values[2 * place], values[2 * place + 1])
    return found
