"""How far two gradients of the same mathematics may be apart, in the dtypes that they were computed in."""

from lockstep.trace.step import GROWTH, ROUNDOFF, Step

__all__ = ["coarsest", "gradient_limit"]

_SAFETY, _INNER, _CEILING = 32.0, 16.0, 0.25  # of docs/verify.md


def gradient_limit(step: Step) -> float:
    """Share of the whole gradient's norm by which a tensor of it may be off."""
    unit, inner = _unit(step), coarsest(step)
    count = 0
    for spot in (step.one, step.two):
        losses = sum(len(record["loss"]) for record in spot.part.records(spot.at).values())
        count = max(count, losses + spot.part.world)
    other = step.number > 0 or step.one.part.world != step.two.part.world
    rounding = _SAFETY * count * unit * (step.number + 1) + _INNER * inner * other
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
    return max((ROUNDOFF.get(kind, 0.0) for kind in kinds), default=2.0**-24)
