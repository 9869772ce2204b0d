"""Whether two runs begin with the same weights, and whether the updates alone change them."""

import math

from lockstep.trace.pairing import Spot
from lockstep.trace.reading import distance
from lockstep.trace.step import FIRST, GROWTH, ROUNDOFF, SECOND, Step, finite_in_some, share
from lockstep.trace.verdict import Finding

__all__ = ["changed_weights", "initial_difference"]

_LAST_PLACES = 8.0  # units in the last place by which weights may be off that come back: w + e - e
_ALIKE = 0.1  # share by which changes of both runs may differ that are one change


def initial_difference(step: Step) -> Finding | None:
    """Judge the weights before the first step: alike on all ranks, and in both runs."""
    if step.number:
        return None
    for name, spot in step.sides():
        for tensor, whole in spot.tensors("initial").items():
            if whole.other and not whole.other[1] <= 1e-30:
                rank, error = whole.other
                text = f"in {name} it differs from rank 0's by {share(error, whole.norm)}"
                return step.finding("initial weights", "rank-weights", text, tensor, rank)
    if step.pair.shift:
        return None
    mine, theirs = step.one.tensors("initial"), step.two.tensors("initial")
    for name in [name for name in mine if name in theirs]:
        error = distance(mine[name].sketch, theirs[name].sketch)
        near = error <= 1e-6 * (mine[name].norm + theirs[name].norm) or not finite_in_some(mine[name], theirs[name])
        if mine[name].digest != theirs[name].digest and not near:
            text = f"it differs by {share(error, mine[name].norm)}"
            return step.finding("initial weights", "other-weights", text, name)
    return None


def changed_weights(step: Step) -> Finding | None:
    """Judge what changed weights besides the updates, on a rank or in a run alone."""
    for name, spot in step.sides():
        if spot.begins:
            continue
        left = spot.left()
        for tensor, whole in spot.tensors("begin").items():
            if whole.other and tensor in left and left[tensor].other is None:
                rank, error = whole.other
                text = f"in {name} its bits changed {_since(spot)}, by {share(error, whole.norm)}"
                return step.finding("weights", "changed-weights", text, tensor, rank)
    if step.one.begins or step.two.begins:
        return None
    return _moved_alone(step)


def _moved_alone(step: Step) -> Finding | None:
    """What one run moved and the other did not, or not as far.

    A perturbation that is taken back leaves a few units in the last place of the weights' length. Where nothing moved
    in the other run there was none, and each bit counts.
    """
    mine, theirs = step.one.tensors("begin"), step.two.tensors("begin")
    if not mine or not theirs:
        return None  # of large models they are recorded now and then
    moved, others = _moved(step.one), _moved(step.two)
    norm = math.sqrt(max(sum(whole.square for whole in side.values()) for side in (mine, theirs)))
    unit = max((ROUNDOFF.get(whole.kind, 2.0**-24) for whole in theirs.values()), default=0.0)
    back = _LAST_PLACES * unit * norm if moved and others else 0.0
    for tensor in sorted((moved.keys() | others.keys()) & mine.keys() & theirs.keys()):
        zero = (0.0,) * len(mine[tensor].sketch)
        one, two = moved.get(tensor, zero), others.get(tensor, zero)
        far, near = distance(two, zero), distance(one, zero)
        if tensor in moved and tensor in others and not math.isfinite(far + near):
            continue  # both are not finite
        alone = (tensor in moved) != (tensor in others)
        error = distance(one, two)
        if (alone and not back) or not error <= back + (_ALIKE + GROWTH * step.off) * max(far, near):
            name, spot, way = (SECOND, step.two, far) if not far < near else (FIRST, step.one, near)
            text = f"in {name} its bits changed {_since(spot)}, by {share(way, mine[tensor].norm)}"
            return step.finding("weights", "changed-weights", text, tensor)
    return None


def _since(spot: Spot) -> str:
    return f"since step {spot.at - 1} ended" if spot.at else "between the first forward and the update"


def _moved(spot: Spot) -> dict[str, tuple[float, ...]]:
    """How far each tensor moved since the update before, of those that did."""
    left = spot.left()
    return {
        name: tuple(a - b for a, b in zip(whole.sketch, left[name].sketch, strict=True))
        for name, whole in spot.tensors("begin").items()
        if name in left and left[name].digest != whole.digest
    }
